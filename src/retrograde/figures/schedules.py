"""A schedule as a picture, in the style of figure 3 of Gruslys et al., 2016.

The sequence runs from left to right, execution from top to bottom. A row is one sweep: the steps
that run forward from a state until some are backpropagated. Grey bars are hidden states, from the
row that stores them to the row that drops them. Orange fields are internal states, likewise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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

_FORWARD, _BACKWARD = 0.32, 0.68  # the heights of runs within their row
_ARROWS = 40  # the most rows with arrow heads and dots
_LEAST_ROWS = 3  # room for the legend, in the lower right

Run = tuple[int, int, int]  # row, from, to
Field = tuple[int, int, int, int]  # from, to, first row, last row


@dataclass
class _Grid:
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
    inches = figure_of(ax).get_size_inches() * ax.get_position().size
    _draw(ax, layout, *(72 * inches))
    _describe(ax, schedule, layout)
    return figure_of(ax)


def _lay_out(schedule: Schedule) -> _Grid:
    layout = _Grid()
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
    layout.kept += [(at, first_row, row) for at, first_row in stored.items()]
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
        first_row = recorded.pop(step)
        if fields and fields[-1][1:3] == (step, first_row):
            fields[-1] = (fields[-1][0], step + 1, first_row, row)
        else:
            fields.append((step, step + 1, first_row, row))
    return fields


def _draw(ax: Axes, layout: _Grid, width: float, height: float) -> None:
    """Draw fields, bars and runs into axes of so many points."""
    boxes = [
        Rectangle((start, first + _FORWARD), stop - start, last - first + _BACKWARD - _FORWARD)
        for start, stop, first, last in layout.internal
    ]
    fields = PatchCollection(boxes, facecolor=ORANGE, edgecolor="none", alpha=0.16, zorder=1)
    ax.add_collection(fields)
    bars = [
        [(at, first + _FORWARD), (at, last + (_FORWARD if last > first else _BACKWARD))]
        for at, first, last in layout.kept
    ]
    places = len({at for at, _, _ in layout.kept})
    bar = min(max(0.35 * width / max(places, 1), 0.5), 6.0)
    ax.add_collection(LineCollection(bars, colors=GREY, linewidths=bar, capstyle="round", zorder=2))
    line = min(max(0.22 * height / layout.rows, 0.8), 3.0)
    size = (2.2 * line) ** 2  # of an arrow head
    for runs, offset, colour, head in (
        (layout.advances, _FORWARD, BLUE, CARETRIGHT),
        (layout.records, _FORWARD, ORANGE, CARETRIGHT),
        (layout.backwards, _BACKWARD, GREEN, CARETLEFT),
    ):
        lines = [[(start, row + offset), (stop, row + offset)] for row, start, stop in runs]
        ax.add_collection(
            LineCollection(lines, colors=colour, linewidths=line, capstyle="butt", zorder=3)
        )
        if layout.rows <= _ARROWS:
            _dots(ax, [end for _, end in lines], size, zorder=4, c=colour, marker=MarkerStyle(head))
    if layout.rows <= _ARROWS:
        _dots(ax, [start for start, _ in bars], 0.8 * size, zorder=5, c=INK)
        loads = [(at, row + _FORWARD) for row, at in layout.loads]
        _dots(ax, loads, 0.8 * size, zorder=5, c="white", edgecolors=INK, linewidths=1.1)


def _dots(ax: Axes, places: Sequence[tuple[float, float]], size: float, **style: Any) -> None:
    if places:
        x, y = zip(*places, strict=True)
        ax.scatter(x, y, s=size, **{"linewidths": 0} | style)


def _describe(ax: Axes, schedule: Schedule, layout: _Grid) -> None:
    """Set the title, the labels and the legend, which names exactly what is drawn."""
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
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 5, "color": INK}
    few = layout.rows <= _ARROWS
    handles = {
        "run forward": layout.advances and Line2D([], [], color=BLUE, linewidth=2.5),
        "run forward, recorded": layout.records and Line2D([], [], color=ORANGE, linewidth=2.5),
        "backpropagated": Line2D([], [], color=GREEN, linewidth=2.5),
        "hidden state kept": layout.kept and Line2D([], [], color=GREY, linewidth=5),
        "internal states kept": layout.internal and Patch(facecolor=ORANGE, alpha=0.16),
        "stored": few and layout.kept and Line2D([], [], **dot),
        "loaded": few and layout.loads and Line2D([], [], markerfacecolor="white", **dot),
    }
    shown: dict[str, Any] = {name: handle for name, handle in handles.items() if handle}
    ax.legend(shown.values(), shown.keys(), loc="lower right", fontsize=9, frameon=False)


def _room(schedule: Schedule, memory: float) -> str:
    """A memory in the units of the schedule."""
    units = schedule.units
    if isinstance(units, Chain):
        return format_bytes(memory)
    name = "internal" if units.core else "hidden"
    sizes = f" (α = {units.alpha}, β = {units.beta})" if schedule.policy in ("msm", "best") else ""
    return f"{memory:,} {name} state{'' if memory == 1 else 's'}{sizes}"
