"""The report folder of a training run: pictures, metrics, weights, and the checkpoint.

``loss``, ``memory`` and ``schedule`` as PNG and SVG, ``metrics.json``, ``weights.pt`` (the model's
``state_dict`` beside its vocabulary and options) and ``checkpoint.pt``.
"""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from retrograde import figures
from retrograde.machine import processor_name
from retrograde.schedule import Schedule
from retrograde.training.checkpoint import load_checkpoint, save_checkpoint, write_whole
from retrograde.training.comparison import Comparison, Side
from retrograde.training.options import TrainingError
from retrograde.training.run import Run

__all__ = ["Report"]


class Report:
    """A folder that can be written, which is tried before any work is done.

    Args:
        folder: made if it is not there.

    Attributes:
        folder: where everything is written.
        checkpoint: path of the checkpoint.

    Raises:
        TrainingError: the folder cannot be made or written.

    Example:
        >>> import tempfile
        >>> Report(tempfile.mkdtemp()).checkpoint.name
        'checkpoint.pt'
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.checkpoint = self.folder / "checkpoint.pt"
        probe = self.folder / ".probe"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(probe, lambda file: file.write(b"retrograde"))
            probe.unlink()
        except OSError as error:
            raise TrainingError(
                f"cannot write the report folder {self.folder}: {error.strerror or error}; name "
                "one that can be written with --report"
            ) from error

    def set_aside(self) -> Path | None:
        """Keep the checkpoint of an earlier run under another name.

        Returns:
            Its new path, or None where there was none.
        """
        if not self.checkpoint.exists():
            return None
        aside = self.checkpoint.with_name("checkpoint.previous.pt")
        os.replace(self.checkpoint, aside)
        return aside

    def save(self, run: Run, comparison: Comparison) -> None:
        """Write the checkpoint, whole or not at all.

        Args:
            run: its state is written.
            comparison: kept beside it, so that a run taken up again need not repeat it.

        Raises:
            TrainingError: the disk is full, or the folder has gone.
        """
        state = {"run": run.snapshot(), "comparison": comparison.as_dict()}
        try:
            save_checkpoint(self.checkpoint, state)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter on a full disk
            raise TrainingError(
                f"cannot write the checkpoint {self.checkpoint}: {error}; the one before it "
                "stands, so make room and go on with --resume"
            ) from error

    def load(self) -> tuple[dict[str, Any], Comparison]:
        """Read the checkpoint.

        Returns:
            A run's snapshot, and its comparison.

        Raises:
            TrainingError: there is none, or it is damaged.
        """
        state = load_checkpoint(self.checkpoint)
        return state["run"], Comparison.from_dict(state["comparison"])

    def draw_plan(self, schedule: Schedule, comparison: Comparison) -> None:
        """Write the pictures that are known before training.

        Args:
            schedule: of the LSTM.
            comparison: gives the memory over time.
        """
        figures.save(figures.draw_schedule(schedule), self.folder, "schedule")
        ordinary = comparison.ordinary
        figure = figures.draw_memory(
            comparison.budgeted.curve,
            comparison.budget_bytes,
            None if ordinary is None else ordinary.curve,
        )
        figures.save(figure, self.folder, "memory")

    def finish(self, run: Run, comparison: Comparison) -> None:
        """Write the loss curve, the metrics and the weights of the run as it is now.

        Args:
            run: finished or not.
            comparison: goes into the metrics.
        """
        figure = figures.draw_losses(run.losses, run.text.entropy_bits)
        figures.save(figure, self.folder, "loss")
        metrics = json.dumps(_metrics(run, comparison), indent=1).encode()
        write_whole(self.folder / "metrics.json", lambda file: file.write(metrics))
        weights = {
            "options": run.options.as_dict(),
            "vocabulary": run.text.vocabulary,
            "model": dict(run.model.state_dict()),
        }
        write_whole(self.folder / "weights.pt", lambda file: torch.save(weights, file))


def _metrics(run: Run, comparison: Comparison) -> dict[str, Any]:
    ordinary = comparison.ordinary
    return {
        "options": run.options.as_dict(),
        "text": {
            "source": run.text.source,
            "sha256": run.text.digest,
            "characters": len(run.text.characters),
            "vocabulary": len(run.text.vocabulary),
            "entropy_bits_per_character": run.text.entropy_bits,
        },
        "machine": {
            "processor": processor_name(),
            "processors": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": run.options.threads,
        },
        "comparison": {
            "what": "the LSTM alone, forward and backward, on the first batch, in one process",
            "budget_bytes": comparison.budget_bytes,
            "budgeted": _side_metrics(comparison.budgeted),
            "ordinary": comparison.failure if ordinary is None else _side_metrics(ordinary),
            "largest_gradient_difference": comparison.gradient_difference,
        },
        "loss_bits_per_character": run.losses,
        "seconds_per_iteration": run.seconds,
    }


def _side_metrics(side: Side) -> dict[str, float]:
    return {"working_bytes": side.working_bytes, "seconds": side.seconds}
