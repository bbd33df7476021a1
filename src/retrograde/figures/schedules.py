"""A schedule as a picture, in the style of figure 3 of Gruslys et al., 2016.

The sequence runs from left to right, execution from top to bottom. A row is one sweep: the steps
that run forward from a state until some are backpropagated. Grey bars are hidden states, from the
row that stores them to the row that drops them. Orange fields are internal states, likewise.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETLEFT, CARETRIGHT, MarkerStyle
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from retrograde.figures.style import BLUE, GREEN, GREY, INK, ORANGE, figure_of, new_axes, tidy
from retrograde.schedule import Advance, Backward, Chain, Free, Load, Record, Schedule, Store
from retrograde.units import format_bytes

__all__ = ["draw_schedule"]

_FORWARD, _BACKWARD = 0.32, 0.68  # the heights of runs within their row
_ARROWS = 40  # the most rows with arrow heads and dots
_LEAST_ROWS = 3  # room for the legend, in the lower right
_POINTS_PER_INCH = 72

Run = tuple[int, int, int]  # row, from, to
Field = tuple[int, int, int, int]  # from, to, first row, last row


@dataclass
class _Layout:
    """The positions of everything, in rows and hidden states. The lower right is always free."""

    rows: int = 1
    advances: list[Run] = field(default_factory=list)
    records: list[Run] = field(default_factory=list)
    backwards: list[Run] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    kept: list[Run] = field(default_factory=list)  # hidden state, first row, last row
    internal: list[Field] = field(default_factory=list)


def draw_schedule(schedule: Schedule, ax: Axes | None = None) -> Figure:
    """Draw what a schedule keeps, runs forward and backpropagates, over time.

    Args:
        schedule: of any policy and length; with many rows there are no arrow heads.
        ax: where to draw; by default a figure of its own.

    Returns:
        The figure.

    Example:
        >>> from retrograde.plan import plan
        >>> figure = draw_schedule(plan(10, 4, policy="hsm"))
    """
    layout = _lay_out(schedule)
    if ax is None:
        ax = new_axes(8.0, min(max(2.2 + 0.3 * layout.rows, 3.0), 8.0))
    ax.set_xlim(-0.012 * schedule.length - 0.2, 1.012 * schedule.length + 0.2)
    top = -0.006 * layout.rows if layout.rows > _ARROWS else 0  # the first row's line is whole
    ax.set_ylim(max(layout.rows, _LEAST_ROWS), top)
    row_points, step_points = _scales(ax, schedule.length, layout.rows)
    _draw_internal(ax, layout)
    _draw_kept(ax, layout, min(max(0.35 * step_points * _gap(layout), 0.5), 6.0))
    width = min(max(0.22 * row_points, 0.8), 3.0)
    for runs, offset, colour in (
        (layout.advances, _FORWARD, BLUE),
        (layout.records, _FORWARD, ORANGE),
        (layout.backwards, _BACKWARD, GREEN),
    ):
        _draw_runs(ax, runs, offset, colour, width)
    if layout.rows <= _ARROWS:
        _draw_marks(ax, layout, width)
    _finish(ax, schedule, layout)
    return figure_of(ax)


def _lay_out(schedule: Schedule) -> _Layout:
    layout = _Layout()
    row, ran, turned = 0, False, False
    stored: dict[int, int] = {}
    recorded: dict[int, int] = {}
    for action in schedule:
        match action:
            case Free() | Backward():
                pass
            case _ if turned or (ran and isinstance(action, Load)):
                row, ran, turned = row + 1, False, False
        match action:
            case Store(at):
                stored[at] = row
            case Free(at):
                layout.kept.append((at, stored.pop(at), row))
            case Load(at):
                layout.loads.append((row, at))
            case Advance(start, stop):
                _extend(layout.advances, row, start, stop)
                ran = True
            case Record(start, stop):
                layout.records.append((row, start, stop))
                recorded |= dict.fromkeys(range(start, stop), row)
                ran = True
            case Backward(start, stop):
                layout.backwards.append((row, stop, start))
                layout.internal += _fields(recorded, start, stop, row)
                turned = True
    layout.kept += [(at, first, row) for at, first in stored.items()]
    layout.rows = row + 1
    return layout


def _extend(runs: list[Run], row: int, start: int, stop: int) -> None:
    """Add a run, joined to the last one if that ends where it begins."""
    if runs and runs[-1][0] == row and runs[-1][2] == start:
        start = runs.pop()[1]
    runs.append((row, start, stop))


def _fields(recorded: dict[int, int], start: int, stop: int, row: int) -> list[Field]:
    """Return the fields of internal states start … stop−1, joined where one row recorded them."""
    fields: list[Field] = []
    for step in range(start, stop):
        first = recorded.pop(step)
        if fields and fields[-1][1:3] == (step, first):
            fields[-1] = (fields[-1][0], step + 1, first, row)
        else:
            fields.append((step, step + 1, first, row))
    return fields


def _scales(ax: Axes, length: int, rows: int) -> tuple[float, float]:
    """Return points for each row and points for each step."""
    box = ax.get_position()
    width, height = figure_of(ax).get_size_inches()
    return (
        _POINTS_PER_INCH * height * box.height / rows,
        _POINTS_PER_INCH * width * box.width / length,
    )


def _gap(layout: _Layout) -> float:
    """Return the median steps between neighbouring hidden states that are ever kept."""
    places = sorted({at for at, _, _ in layout.kept})
    return median(b - a for a, b in pairwise(places)) if len(places) > 1 else 1.0


def _draw_internal(ax: Axes, layout: _Layout) -> None:
    boxes = [
        Rectangle((start, first + _FORWARD), stop - start, last - first + _BACKWARD - _FORWARD)
        for start, stop, first, last in layout.internal
    ]
    ax.add_collection(
        PatchCollection(boxes, facecolor=ORANGE, edgecolor="none", alpha=0.16, zorder=1)
    )


def _draw_kept(ax: Axes, layout: _Layout, width: float) -> None:
    bars = [
        [(at, first + _FORWARD), (at, last + _FORWARD if last > first else last + _BACKWARD)]
        for at, first, last in layout.kept
    ]
    ax.add_collection(
        LineCollection(bars, colors=GREY, linewidths=width, capstyle="round", zorder=2)
    )


def _draw_runs(ax: Axes, runs: list[Run], offset: float, colour: str, width: float) -> None:
    lines = [[(start, row + offset), (stop, row + offset)] for row, start, stop in runs]
    ax.add_collection(
        LineCollection(lines, colors=colour, linewidths=width, capstyle="butt", zorder=3)
    )


def _draw_marks(ax: Axes, layout: _Layout, width: float) -> None:
    size = (2.2 * width) ** 2
    for runs, offset, colour, marker in (
        (layout.advances, _FORWARD, BLUE, CARETRIGHT),
        (layout.records, _FORWARD, ORANGE, CARETRIGHT),
        (layout.backwards, _BACKWARD, GREEN, CARETLEFT),
    ):
        if runs:
            rows, _, stops = zip(*runs, strict=True)
            heights = [row + offset for row in rows]
            ax.scatter(
                stops, heights, s=size, c=colour, marker=MarkerStyle(marker), linewidths=0, zorder=4
            )
    stored = [at for at, _, _ in layout.kept]
    heights = [first + _FORWARD for _, first, _ in layout.kept]
    ax.scatter(stored, heights, s=0.8 * size, c=INK, linewidths=0, zorder=5)
    loaded = [at for _, at in layout.loads]
    heights = [row + _FORWARD for row, _ in layout.loads]
    ax.scatter(loaded, heights, s=0.8 * size, c="white", edgecolors=INK, linewidths=1.1, zorder=5)


def _finish(ax: Axes, schedule: Schedule, layout: _Layout) -> None:
    policy = schedule.policy.upper() if len(schedule.policy) == 3 else schedule.policy
    is_chain = isinstance(schedule.units, Chain)
    step, forward = ("layer", "layers run forward") if is_chain else ("step", "forward steps")
    room = "" if schedule.memory is None else f", memory of {_room(schedule, schedule.memory)}"
    tidy(
        ax,
        title=f"{policy}: {schedule.length:,} {step}s{room}, {schedule.cost:,} {forward}",
        x=f"hidden state (k is the one before {step} k)",
        y="execution (one row a sweep)",
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
    handles: list[Line2D | Patch] = []
    if layout.advances:
        handles.append(_line(BLUE, "run forward"))
    if layout.records:
        handles.append(_line(ORANGE, "run forward, recorded"))
    handles.append(_line(GREEN, "backpropagated"))
    if layout.kept:
        handles.append(_line(GREY, "hidden state kept", linewidth=5))
    if layout.internal:
        handles.append(Patch(facecolor=ORANGE, alpha=0.16, label="internal states kept"))
    if layout.rows <= _ARROWS and layout.kept:
        handles.append(_dot(INK, "stored"))
    if layout.rows <= _ARROWS and layout.loads:
        handles.append(_dot("white", "loaded"))
    ax.legend(handles=handles, loc="lower right", fontsize=9, frameon=False)


def _room(schedule: Schedule, memory: float) -> str:
    """A memory in the units of the schedule."""
    units = schedule.units
    if isinstance(units, Chain):
        return format_bytes(memory)
    kind = "internal" if units.core else "hidden"
    sizes = f" (α = {units.alpha}, β = {units.beta})" if schedule.policy in ("msm", "best") else ""
    return f"{memory:,} {kind} state{'' if memory == 1 else 's'}{sizes}"


def _line(colour: str, label: str, linewidth: float = 2.5) -> Line2D:
    return Line2D([], [], color=colour, linewidth=linewidth, label=label)


def _dot(fill: str, label: str) -> Line2D:
    return Line2D(
        [], [], linestyle="", marker="o", markersize=5, color=INK, markerfacecolor=fill, label=label
    )
