"""The whole of ``retrograde train``, from its options to its report."""

import os
from typing import Any

from rich.console import Console

from retrograde.errors import UnitError
from retrograde.plan.fit import Fit
from retrograde.training.comparison import Comparison, compare
from retrograde.training.corpus import embedded_text, read_text
from retrograde.training.display import conclude, introduce, progress
from retrograde.training.options import TrainingError, TrainingOptions
from retrograde.training.report import Report
from retrograde.training.run import Run

__all__ = ["resume", "start", "train"]


def start(report: Report, given: dict[str, Any], console: Console) -> tuple[Run, Comparison]:
    """Begin a run, and measure its LSTM against ordinary BPTT.

    Args:
        report: a checkpoint that is there already is kept under another name.
        given: options by name, as in :class:`TrainingOptions`; those left out have its defaults.
        console: to write to.

    Returns:
        The run, and the comparison.

    Raises:
        RetrogradeError: the options make no sense, or cannot be met.
    """
    path = given.get("text")
    text = embedded_text() if path is None else read_text(path)
    place = None if path is None else os.path.abspath(path)
    run = Run(TrainingOptions(**given | {"text": place}), text)
    introduce(console, run, _fit(run))
    with console.status("measuring one iteration of the LSTM, within the budget and without"):
        comparison = compare(run.model, *run.sequences())
    aside = report.set_aside()
    if aside is not None:
        console.print(
            f"the checkpoint of an earlier run is kept as {aside}", markup=False, soft_wrap=True
        )
    return run, comparison


def resume(report: Report, given: dict[str, Any], console: Console) -> tuple[Run, Comparison]:
    """Take up a run from its checkpoint.

    Args:
        report: the folder of the run.
        given: options that were named anew; all but ``iterations`` and ``text`` must be as before.
        console: to write to.

    Returns:
        The run, and the comparison that was made at its start.

    Raises:
        TrainingError: there is no whole checkpoint that fits together, or the options or the text
            are not those of the run.
    """
    snapshot, comparison = report.load()
    before = snapshot["options"]
    for name, value in given.items():
        if name not in ("iterations", "text") and value != before[name]:
            option = "--" + name.replace("_", "-")
            raise TrainingError(
                f"{option} is {value}, and the run in {report.folder} was begun with "
                f"{before[name]}: leave {option} out to go on with that run, or start anew in "
                "another --report folder"
            )
    try:
        run = Run.resumed(snapshot, given.get("iterations"), given.get("text"))
    except (TrainingError, UnitError) as error:
        raise TrainingError(f"cannot go on from {report.checkpoint}: {error}") from error
    introduce(console, run, _fit(run))
    total = run.options.iterations
    if run.done >= total:
        console.print(f"all {run.done} iterations are done; name more --iterations to go on")
    else:
        console.print(f"[bold]resumed[/] after iteration {run.done} of {total}")
    return run, comparison


def train(report: Report, run: Run, comparison: Comparison, console: Console) -> None:
    """Train to the end, with a checkpoint after every iteration, and write the report.

    Args:
        report: where everything is written.
        run: just begun or taken up again.
        comparison: shown at the end.
        console: to write to.

    Raises:
        RetrogradeError: training cannot go on; the last checkpoint stands.
    """
    report.draw_plan(_fit(run).schedule, comparison)
    with progress(console, run, comparison) as show:
        while run.done < run.options.iterations:
            run.step()
            report.save(run, comparison)
            show()
    report.finish(run, comparison)
    conclude(console, run, comparison)
    console.print(f"report in {report.folder}", markup=False, soft_wrap=True)


def _fit(run: Run) -> Fit:
    """How the LSTM's budget is spent on this run's batches."""
    codes, _ = run.sequences()
    found = run.model.lstm.fit(run.model.embedding(codes).detach().requires_grad_())
    assert isinstance(found, Fit)
    return found
