"""The report folder of a training run: pictures, metrics, weights, and the checkpoint.

``loss``, ``memory`` and ``schedule`` as PNG and SVG, ``metrics.json``, ``weights.pt`` (the model's
``state_dict`` beside its vocabulary and options) and ``checkpoint.pt``.
"""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from retrograde import figures
from retrograde.errors import UnitError
from retrograde.files import try_folder
from retrograde.machine import processor_name
from retrograde.plan.fit import Fit
from retrograde.schedule import Action, Advance, Backward, Free, Load, Record, Schedule, Store
from retrograde.training.checkpoint import check_snapshot, load_checkpoint, save_checkpoint
from retrograde.training.comparison import Comparison, Side
from retrograde.training.folder import write_figure, write_whole
from retrograde.training.options import TrainingError
from retrograde.training.run import Run

__all__ = ["Report"]


class Report:
    """A report folder, made if it is missing, and tested for writing before any work is done.
    Raises TrainingError if the folder or a file cannot be written, here and in every method that
    writes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.checkpoint = self.folder / "checkpoint.pt"
        self.previous = self.folder / "checkpoint.previous.pt"
        try:
            try_folder(self.folder)
        except OSError as error:
            raise TrainingError(
                f"cannot write the report folder {self.folder}: {error.strerror or error}; make "
                "room there, or name one that can be written with --report"
            ) from error

    def set_aside(self) -> Path | None:
        """Rename an earlier run's checkpoint; return its new path, or None if there was none."""
        if not self.checkpoint.exists():
            return None
        os.replace(self.checkpoint, self.previous)
        return self.previous

    def save(self, run: Run, comparison: Comparison) -> None:
        """Write the checkpoint of a run, with its comparison, for a resumed run."""
        state = {"run": run.snapshot(), "comparison": comparison.as_dict()}
        with self._writing():
            save_checkpoint(self.checkpoint, state)

    def load(self) -> tuple[dict[str, Any], Comparison]:
        """Return a run's snapshot and comparison; TrainingError if they are not complete."""
        state = load_checkpoint(self.checkpoint)
        try:
            check_snapshot(state.get("run"))
            return state["run"], Comparison.from_dict(state.get("comparison"))
        except (TrainingError, UnitError) as error:
            raise TrainingError(f"cannot resume from {self.checkpoint}: {error}") from error

    def draw_plan(self, fit: Fit, comparison: Comparison) -> None:
        """Write the pictures known before training: the schedule, and memory over time."""
        ordinary = comparison.ordinary
        figure = figures.draw_memory(
            comparison.budgeted.curve,
            comparison.budget_bytes,
            None if ordinary is None else ordinary.curve,
        )
        with self._writing():
            write_figure(figures.draw_schedule(_steps_of(fit)), self.folder, "schedule")
            write_figure(figure, self.folder, "memory")

    def finish(self, run: Run, comparison: Comparison) -> None:
        """Write the loss curve, the metrics and the weights of the run as it is now."""
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
        """Say of a file that cannot be written what is saved nevertheless, and how to continue."""
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


def _steps_of(fit: Fit) -> Schedule:
    """Return the schedule to draw. Gates that a range recomputes are recomputed piece by piece."""
    length = fit.schedule.length
    edge = fit.forward_steps - fit.schedule.cost  # gates are kept from here on
    if not edge:
        return fit.schedule
    bounds = [*range(0, edge, fit.block), edge]
    actions: list[Action] = []
    for start, stop in pairwise(bounds):
        actions += [Store(start), Advance(start, stop)]
    if edge < length:
        actions += [Record(edge, length), Backward(edge, length)]
    for start, stop in reversed([*pairwise(bounds)]):
        actions += [Load(start), Record(start, stop), Backward(start, stop), Free(start)]
    return Schedule.from_actions(actions, length=length, policy="recompute-gates")


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
