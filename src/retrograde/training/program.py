"""The program of ``retrograde train``: from its options to its report, with its progress.

A terminal shows a live bar; a file or a pipe gets a plain line now and then.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from retrograde.console import new_table
from retrograde.errors import UnitError
from retrograde.machine import is_out_of_memory
from retrograde.plan.fit import Fit
from retrograde.training.comparison import Comparison, compare
from retrograde.training.folder import hold
from retrograde.training.options import TrainingError, TrainingOptions
from retrograde.training.report import Report
from retrograde.training.run import Run
from retrograde.training.task import embedded_text, read_text
from retrograde.units import format_bytes

__all__ = ["conclude", "resume", "run_program"]

_LINES = 20
_PATIENCE_SECONDS = 15.0


def run_program(folder: Path, given: dict[str, Any], goes_on: bool, console: Console) -> None:
    """Train, and write everything to a report folder. ``given`` has the options that were named;
    ``goes_on`` resumes the folder's run. Raises RetrogradeError if the options cannot be met or
    training cannot continue."""
    report = Report(folder)
    try:
        with hold(folder) as alone:
            if not alone:
                told = f"{folder} is on a file system without locks: let no other run write there"
                _tell(console, told)
            run, comparison = (resume if goes_on else _start)(report, given, console)
            _train(report, run, comparison, console)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            "the machine has too little memory for this model: only the LSTM's working memory is "
            "bounded by --memory; name a smaller --batch, --hidden or --length"
        ) from error


def resume(report: Report, given: dict[str, Any], console: Console) -> tuple[Run, Comparison]:
    """Return the run of a checkpoint, and the comparison that was made at its start. Raises
    TrainingError if the checkpoint is not complete, the text differs, or an option other than
    ``iterations`` does."""
    snapshot, comparison = report.load()
    before = snapshot["options"]
    for name, value in given.items():
        if name not in ("iterations", "text") and value != before[name]:
            option = "--" + name.replace("_", "-")
            raise TrainingError(
                f"{option} is {value}, and the run in {report.folder} began with "
                f"{before[name]}: leave {option} out to continue that run, or start a new run in "
                "another --report folder"
            )
    try:
        run = Run.resumed(snapshot, given.get("iterations"), given.get("text"))
    except (TrainingError, UnitError) as error:
        raise TrainingError(f"cannot resume from {report.checkpoint}: {error}") from error
    _introduce(console, run)
    total = run.options.iterations
    if run.done >= total:
        console.print(f"all {run.done} iterations are done; raise --iterations to continue")
    else:
        console.print(f"[bold]resumed[/] after iteration {run.done} of {total}")
    return run, comparison


def _start(report: Report, given: dict[str, Any], console: Console) -> tuple[Run, Comparison]:
    """Return a new run, and its LSTM beside ordinary BPTT; an earlier checkpoint is renamed."""
    path = given.get("text")
    text = embedded_text() if path is None else read_text(Path(path))
    place = None if path is None else os.path.abspath(path)
    threads = {"threads": torch.get_num_threads()}
    run = Run(TrainingOptions(**threads | given | {"text": place}), text)
    _introduce(console, run)
    with console.status("measuring one iteration of the LSTM, within the budget and without"):
        comparison = compare(run.model, *run.sequences())
    aside = report.set_aside()
    if aside is not None:
        _tell(console, f"the checkpoint of an earlier run is kept as {aside}")
    return run, comparison


def _train(report: Report, run: Run, comparison: Comparison, console: Console) -> None:
    """Train to the end, with a checkpoint after every iteration, and write the report."""
    report.draw_plan(_fit(run), comparison)
    with _progress(console, run, comparison) as show:
        while run.done < run.options.iterations:
            run.step()
            report.save(run, comparison)
            show()
    report.finish(run, comparison)
    conclude(console, run, comparison)
    _tell(console, f"report in {report.folder}")


def _fit(run: Run) -> Fit:
    """Return the LSTM's plan for this run's batches."""
    codes, _ = run.sequences()
    found = run.model.lstm.fit(run.model.embedding(codes).detach().requires_grad_())
    assert isinstance(found, Fit)
    return found


def _tell(console: Console, text: str) -> None:
    """Print a sentence that names a file, without markup and on one line."""
    console.print(text, markup=False, soft_wrap=True)


def _introduce(console: Console, run: Run) -> None:
    """Print the text, the model and the budget."""
    options, text, fit = run.options, run.text, _fit(run)
    length, steps = options.length, fit.forward_steps
    share = fit.budget_bytes / fit.ordinary_bytes
    console.print(
        f"[bold]text[/]    {escape(text.source)}: {len(text.characters):,} characters, "
        f"{len(text.vocabulary)} different ones",
        soft_wrap=True,
    )
    console.print(
        f"[bold]model[/]   embedding {options.hidden} → LSTM {options.hidden} → linear "
        f"{len(text.vocabulary)}; sequences of {length:,}, batch {options.batch}",
        soft_wrap=True,
    )
    console.print(
        f"[bold]budget[/]  {format_bytes(fit.budget_bytes)} for the LSTM, {share:.1%} of the "
        f"{format_bytes(fit.ordinary_bytes)} that ordinary BPTT holds; "
        f"{steps / length:.2f} forward steps for each step",
        soft_wrap=True,
    )


@contextmanager
def _progress(console: Console, run: Run, comparison: Comparison) -> Iterator[Callable[[], object]]:
    """Show the progress of a run; call the yielded function after each iteration."""
    memory = (
        f"LSTM {format_bytes(comparison.budgeted.working_bytes)} "
        f"of {format_bytes(comparison.budget_bytes)}"
    )
    if not console.is_terminal:
        yield _lines(console, run, memory)
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TextColumn("[bold]{task.description}[/]"),
        TextColumn(f"[dim]{memory}[/]"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=run.options.iterations, completed=run.done)

        def show() -> None:
            bars.update(task, completed=run.done, description=_state(run))

        if run.done:
            show()
        yield show


def conclude(console: Console, run: Run, comparison: Comparison) -> None:
    """Print the results of a finished run: the comparison with ordinary BPTT, and the loss."""
    console.print(_table(comparison))
    console.print(
        "[dim]The LSTM alone, forward and backward, same weights and batch, measured in one "
        "process. The budget bounds its working memory; inputs, outputs and their gradients, the "
        "embedding and the linear layer are beside it. The difference is relative to the "
        "gradient's largest element.[/]"
    )
    console.print(f"{run.losses[-1]:.3f} bits per character after {run.done} iterations")


def _table(comparison: Comparison) -> Table:
    ours, theirs = comparison.budgeted, comparison.ordinary
    columns = ("", "ordinary BPTT", "within the budget", "ratio")
    table = new_table("One iteration of the LSTM", columns, left=("",))
    budget, peak = format_bytes(comparison.budget_bytes), format_bytes(ours.working_bytes)
    if theirs is None:
        table.add_row("peak working memory", comparison.failure, peak, "—")
        table.add_row("budget", "—", budget, "—")
        table.add_row("seconds per iteration", "—", f"{ours.seconds:.3g}", "—")
        return table
    whole = theirs.working_bytes
    share = f"{ours.working_bytes / whole:.1%}"
    table.add_row("peak working memory", format_bytes(whole), peak, share)
    table.add_row("budget", "—", budget, f"{comparison.budget_bytes / whole:.1%}")
    table.add_row(
        "seconds per iteration",
        f"{theirs.seconds:.3g}",
        f"{ours.seconds:.3g}",
        f"{ours.seconds / theirs.seconds:.2f}×",
    )
    difference = f"{comparison.gradient_difference:.1e}"
    table.add_row("largest gradient difference", "—", difference, "—")
    return table


def _state(run: Run) -> str:
    return f"{run.losses[-1]:.3f} bits/char  {run.seconds[-1]:.2f} s/it"


def _lines(console: Console, run: Run, memory: str) -> Callable[[], object]:
    """Return a printer that prints only some of its calls."""
    total = run.options.iterations
    every = -(-total // _LINES)
    said = time.monotonic()

    def show() -> None:
        nonlocal said
        late = time.monotonic() - said > _PATIENCE_SECONDS
        if run.done in (1, total) or run.done % every == 0 or late:
            said = time.monotonic()
            console.print(f"{run.done}/{total}  {_state(run)}  {memory}", soft_wrap=True)

    return show
