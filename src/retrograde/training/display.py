"""What a training run shows: lines before it, a live bar during it, a table after it.

On a terminal the bar lives; anywhere else (a file, a pipe) a plain line comes now and then.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from retrograde.plan.fit import Fit
from retrograde.training.comparison import Comparison
from retrograde.training.run import Run
from retrograde.units import format_bytes

__all__ = ["conclude", "introduce", "progress"]

_LINES = 20
_PATIENCE_SECONDS = 15.0


def introduce(console: Console, run: Run, fit: Fit) -> None:
    """Say what is about to be trained, and within what.

    Args:
        console: to write to.
        run: about to start.
        fit: of its LSTM to its budget.
    """
    options, text = run.options, run.text
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
def progress(console: Console, run: Run, comparison: Comparison) -> Iterator[Callable[[], object]]:
    """Show a run as it goes.

    Args:
        console: to write to; a live bar if it is a terminal.
        run: told about each time the yielded function is called.
        comparison: gives the measured bytes.

    Yields:
        A function to call after each iteration.
    """
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
    """Say what came of it: ordinary BPTT beside the run, and the loss.

    Args:
        console: to write to.
        run: finished.
        comparison: measured before it.
    """
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
    table = Table(title="One iteration of the LSTM", title_justify="left")
    table.add_column("")
    for name in ("ordinary BPTT", "within the budget", "ratio"):
        table.add_column(name, justify="right")
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
    """A printer that keeps quiet most of the time."""
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
