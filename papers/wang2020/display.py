"""What an experiment shows: a live bar while it runs, tables after it.

On a terminal the bar lives; anywhere else (a file, a pipe) a plain line comes now and then.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from retrograde_papers.console import new_table
from wang2020.results import Curves, Timings

__all__ = ["breakdown_table", "conclude", "progress", "speedup_table"]

_PATIENCE_SECONDS = 15.0

Update = Callable[[int, str], object]


@contextmanager
def progress(console: Console, name: str, total: int) -> Iterator[Update]:
    """Show work as it goes; the yielded function takes the pieces done, and a word on them."""
    if not console.is_terminal:
        yield _lines(console, name, total)
        return
    columns = (
        TextColumn(name),
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TextColumn("[bold]{task.description}[/]"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda done, text: bars.update(task, completed=done, description=text)


def conclude(console: Console, curves: Curves) -> None:
    """Print what a race has come to."""
    columns = ("way", "loss", "right", "forward", "backward", "all", "speed-up", "first")
    title = f"{_title(curves)}; milliseconds an iteration"
    table = new_table(title, columns, left=("way",), unbroken=("way",))
    whole = {way: curves.whole(way) for way in curves.ways}
    for way in curves.ways:
        table.add_row(
            way,
            f"{curves.losses[way][-1]:.4f}",
            f"{curves.accuracy[way]:.1%}",
            *(_milliseconds(part[way]) for part in (curves.forward, curves.backward, whole)),
            f"{whole['torch'] / whole[way]:.2f}×",
            _milliseconds(curves.first[way]),
        )
    console.print(table)
    differences = ", ".join(f"{way} {curves.difference[way]:.1g}" for way in curves.ways[1:])
    console.print(
        f"greatest difference from torch's loss in any of {curves.settings['iterations']:,} "
        f"iterations: {differences}",
        soft_wrap=True,
    )
    console.print(
        f"[dim]Loss: mean of the last {curves.every}. Right: held-out sequences; chance is "
        f"{1 / float(curves.settings['classes']):.0%}. Medians of times. First: a call that trains "
        "nothing, in which kernels are compiled.[/]"
    )


def speedup_table(timings: Timings) -> Table:
    """How much faster the ways are than torch, as in figure 5.2."""
    columns = ("T", "B", "torch", *timings.ways[1:])
    table = new_table("Speed-up: backward pass / whole iteration", columns)
    for point in timings.points:
        whole, backward = point.whole("torch"), point.backward["torch"]
        table.add_row(
            f"{point.length:,}",
            f"{point.batch:,}",
            f"{_milliseconds(backward)} ms",
            *(
                f"{backward / point.backward[way]:.2f}× / {whole / point.whole(way):.2f}×"
                for way in timings.ways[1:]
            ),
        )
    return table


def breakdown_table(timings: Timings) -> Table:
    """Where the time of an iteration goes, as in figure 5.4, torch's passes being 1."""
    columns = ("set", "T", "B", "way", "forward", "overhead", "backward", "in all")
    table = new_table("Shares of torch's forward and backward", columns, left=("set", "way"))
    for point in timings.points:
        unit = point.forward["torch"] + point.backward["torch"]
        for way in timings.ways:
            first = way == timings.ways[0]
            table.add_row(
                *(str(value) if first else "" for value in (point.name, point.length, point.batch)),
                way,
                f"{point.forward['torch'] / unit:.3f}",
                f"{point.overhead(way) / unit:.3f}" if way != "torch" else "",
                f"{point.backward[way] / unit:.3f}",
                f"{(point.forward[way] + point.backward[way]) / unit:.3f}",
                end_section=way == timings.ways[-1],
            )
    return table


def _title(curves: Curves) -> str:
    name = f"set {curves.settings['data']}, " if curves.settings["data"] else ""
    return (
        f"{str(curves.settings['cell']).upper()}, {name}T = {curves.settings['length']:,}, "
        f"B = {curves.settings['batch']}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _lines(console: Console, name: str, total: int) -> Update:
    """A printer that keeps quiet most of the time."""
    said = time.monotonic()

    def show(done: int, text: str) -> None:
        nonlocal said
        if done in (1, total) or time.monotonic() - said > _PATIENCE_SECONDS:
            said = time.monotonic()
            console.print(f"{name} {done:,}/{total:,}  {text}", soft_wrap=True)

    return show
