"""The report folder of a training run: pictures, metrics, weights, and the checkpoint.

``loss``, ``memory`` and ``schedule`` as PNG and SVG, ``metrics.json``, ``weights.pt`` (the model's
``state_dict`` beside its vocabulary and options) and ``checkpoint.pt``.
"""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from retrograde import figures
from retrograde.errors import UnitError
from retrograde.machine import processor_name
from retrograde.schedule import Schedule
from retrograde.training.atomic_files import write_figure, write_whole
from retrograde.training.checkpoint import load_checkpoint, save_checkpoint
from retrograde.training.comparison import Comparison, Side
from retrograde.training.options import TrainingError
from retrograde.training.run import Run
from retrograde.training.snapshot import check_snapshot

__all__ = ["Report"]

_PROBE_BYTES = 4096  # a full disk may take an empty file


class Report:
    """A folder that can be written, which is tried before any work is done.

    Args:
        folder: made if it is not there.

    Attributes:
        folder: where everything is written.
        checkpoint: path of the checkpoint.
        previous: where that of an earlier run is kept.

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
        self.previous = self.folder / "checkpoint.previous.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(prefix=".probe-", dir=self.folder) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
        except OSError as error:
            raise TrainingError(
                f"cannot write the report folder {self.folder}: {error.strerror or error}; make "
                "room there, or name one that can be written with --report"
            ) from error

    def set_aside(self) -> Path | None:
        """Keep the checkpoint of an earlier run under another name.

        Returns:
            Its new path, or None where there was none.
        """
        if not self.checkpoint.exists():
            return None
        os.replace(self.checkpoint, self.previous)
        return self.previous

    def save(self, run: Run, comparison: Comparison) -> None:
        """Write the checkpoint, whole or not at all.

        Args:
            run: its state is written.
            comparison: kept beside it, so that a run taken up again need not repeat it.

        Raises:
            TrainingError: the disk is full, or the folder has gone.
        """
        state = {"run": run.snapshot(), "comparison": comparison.as_dict()}
        with self._writing():
            save_checkpoint(self.checkpoint, state)

    def load(self) -> tuple[dict[str, Any], Comparison]:
        """Read the checkpoint.

        Returns:
            A run's snapshot, and its comparison.

        Raises:
            TrainingError: there is none, or it is damaged, or does not fit together.
        """
        state = load_checkpoint(self.checkpoint)
        try:
            check_snapshot(state.get("run"))
            return state["run"], Comparison.from_dict(state.get("comparison"))
        except (TrainingError, UnitError) as error:
            raise TrainingError(f"cannot go on from {self.checkpoint}: {error}") from error

    def draw_plan(self, schedule: Schedule, comparison: Comparison) -> None:
        """Write the pictures that are known before training.

        Args:
            schedule: of the LSTM.
            comparison: gives the memory over time.

        Raises:
            TrainingError: the disk is full, or the folder has gone.
        """
        ordinary = comparison.ordinary
        figure = figures.draw_memory(
            comparison.budgeted.curve,
            comparison.budget_bytes,
            None if ordinary is None else ordinary.curve,
        )
        with self._writing():
            write_figure(figures.draw_schedule(schedule), self.folder, "schedule")
            write_figure(figure, self.folder, "memory")

    def finish(self, run: Run, comparison: Comparison) -> None:
        """Write the loss curve, the metrics and the weights of the run as it is now.

        Args:
            run: finished or not.
            comparison: goes into the metrics.

        Raises:
            TrainingError: the disk is full, or the folder has gone.
        """
        figure = figures.draw_losses(run.losses, run.text.entropy_bits)
        metrics = json.dumps(_metrics(run, comparison), indent=1).encode()
        weights = {
            "options": run.options.as_dict(),
            "vocabulary": run.text.vocabulary,
            "model": dict(run.model.state_dict()),
        }
        with self._writing():
            write_figure(figure, self.folder, "loss")
            write_whole(self.folder / "metrics.json", lambda file: file.write(metrics))
            write_whole(self.folder / "weights.pt", lambda file: torch.save(weights, file))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Tell of a file that cannot be written what is saved nevertheless, and how to go on."""
        try:
            yield
        except OSError as error:
            saved = "nothing of this run is saved yet"
            remedy = "and start the run again"
            if self.checkpoint.exists():
                saved, remedy = "the last checkpoint stands", "and go on with --resume"
            elif self.previous.exists():
                saved += f", and the checkpoint of an earlier run is kept as {self.previous}"
            raise TrainingError(
                f"cannot write {error.filename}: {error.strerror}; {saved}: make room there, or "
                f"make it a folder that can be written, {remedy}"
            ) from error


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
