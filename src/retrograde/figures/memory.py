"""The memory that one iteration holds, moment by moment, against its budget.

A run has two panels: one compares it with ordinary BPTT, on one scale, and one shows the run alone,
apart from its budget line. A chain has two panels as well: as planned, and as measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.figures.style import BLUE, GREEN, ORANGE, figure_of, new_axes, tidy
from retrograde.schedule import Action, Advance, Backward, Chain, Record, Schedule, simulate
from retrograde.units import format_bytes

__all__ = ["Curve", "draw_memory", "draw_planned", "planned_memory"]

_POINTS = 1000
_LONG = 3  # entries of a legend that do not fit in one row


@dataclass(frozen=True)
class Curve:
    """Bytes held over time, as :func:`retrograde.measure` returns them.

    Attributes:
        seconds: since the start, increasing, one for each change.
        held_bytes: in use from that moment to the next.

    Example:
        >>> Curve((0.0, 0.5), (4096, 0)).thinned(1000).held_bytes
        (4096, 0)
    """

    seconds: Sequence[float]
    held_bytes: Sequence[int]

    def thinned(self, points: int) -> "Curve":
        """Return about ``points`` points: the lowest and the highest of each stretch."""
        size = len(self.seconds)
        if size <= points:
            return self
        held = np.asarray(self.held_bytes)
        edges = np.unique(np.linspace(0, size, max(points // 2, 1) + 1).astype(np.int64))
        kept = {0, size - 1}
        for start, stop in pairwise(edges):
            kept |= {int(start + held[start:stop].argmin()), int(start + held[start:stop].argmax())}
        order = sorted(kept)
        return Curve(
            tuple(float(self.seconds[i]) for i in order), tuple(int(held[i]) for i in order)
        )


def draw_memory(
    budgeted: Curve, budget_bytes: int, ordinary: Curve | None = None, ax: Axes | None = None
) -> Figure:
    """Draw the working memory of one iteration against its budget.

    Args:
        budgeted: the run within the budget.
        budget_bytes: the budget.
        ordinary: ordinary BPTT of the same iteration, if it could run; it adds a panel.
        ax: where to draw the run alone; by default a figure of its own, with both panels.

    Returns:
        The figure.

    Example:
        >>> curve = Curve((0.0, 0.1, 0.2), (2**20, 3 * 2**20, 0))
        >>> figure = draw_memory(curve, 4 * 2**20)
    """
    labels = "ordinary BPTT", "this run"
    if ax is None and ordinary is None:
        ax = new_axes(6.4, 3.6)
    elif ax is None:
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        left, ax = figure.subplots(1, 2, sharex=True)
        title = "Beside ordinary BPTT"
        _draw(left, budgeted, budget_bytes, ordinary, labels, title)
    _draw(ax, budgeted, budget_bytes, None, labels, "Within the budget")
    return figure_of(ax)


def draw_planned(
    planned: Curve, measured: Curve, budget_bytes: int, ordinary: tuple[Curve, Curve] | None = None
) -> Figure:
    """Draw the planned and the measured memory of one iteration of a chain.

    Args:
        planned: the curve of :func:`planned_memory`.
        measured: the same iteration, as it ran.
        budget_bytes: the budget.
        ordinary: ordinary backpropagation, planned and measured.

    Returns:
        The figure, of two panels on one scale.

    Example:
        >>> curve = Curve((0.0, 0.1, 0.2), (2**20, 3 * 2**20, 0))
        >>> len(draw_planned(curve, curve, 4 * 2**20).axes)
        2
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    curves = (planned, measured)
    others: tuple[Curve | None, Curve | None] = ordinary or (None, None)
    highest = max(map(_peak, filter(None, (*curves, *others))))
    titles = ("Planned", "Measured")
    for ax, title, curve, other in zip(panels, titles, curves, others, strict=True):
        labels = "ordinary backpropagation", "within the budget"
        _draw(ax, curve, budget_bytes, other, labels, title, highest)
    panels[1].set_ylabel("")
    return figure


def planned_memory(schedule: Schedule) -> Curve:
    """Return the memory that a chain's schedule holds, layer by layer, as predicted.

    Returns:
        For each layer, the most that it holds while it runs, and what is held after it.

    Raises:
        ScheduleError: the schedule is of a recurrence, whose steps have no seconds; or not legal.

    Example:
        >>> from retrograde.plan.chain.search import record_everything
        >>> curve = planned_memory(record_everything(Chain([1, 2], [1, 2], [10, 20])))
        >>> curve.seconds, curve.held_bytes
        ((0.0, 1.0, 3.0, 5.0, 6.0), (10, 10, 40, 20, 0))
    """
    if not isinstance(schedule.units, Chain):
        raise ScheduleError("the schedule's steps have no seconds: expected one of a chain")
    single, length = list(_single(schedule)), schedule.length
    replay = simulate(Schedule.from_actions(single, length=length, units=schedule.units))
    points: dict[float, int] = {0.0: 0}
    before = 0.0
    for high, kept, after in zip(replay.high, replay.kept, replay.clock, strict=True):
        points[before] = max(points[before], int(high))
        points[float(after)] = int(kept)
        before = float(after)
    return Curve(tuple(points), tuple(points.values()))


def _single(schedule: Schedule) -> Iterator[Action]:
    """Iterate over the same actions, a layer at a time."""
    for action in schedule:
        match action:
            case Advance(start, stop) | Record(start, stop):
                yield from (type(action)(k, k + 1) for k in range(start, stop))
            case Backward(start, stop):
                yield from (Backward(k, k + 1) for k in reversed(range(start, stop)))
            case _:
                yield action


def _draw(
    ax: Axes, budgeted: Curve, budget_bytes: int, ordinary: Curve | None,
    labels: tuple[str, str], title: str, highest: int = 0,
) -> None:  # fmt: skip
    """Draw one panel: ordinary backpropagation if given, and over it the run within the budget."""
    sides = ((ordinary, ORANGE, labels[0]), (budgeted, BLUE, labels[1]))
    highest = max(highest, budget_bytes, *(_peak(curve) for curve, _, _ in sides if curve))
    power = min(max(highest.bit_length() - 1, 0) // 10, 4)
    unit, factor = ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024**power
    for curve, colour, label in sides:
        if curve is not None:
            _fill(ax, curve, factor, colour, f"{label}, peak {format_bytes(_peak(curve))}")
    ax.axhline(
        budget_bytes / factor, color=GREEN, linewidth=1.4, linestyle=(0, (5, 3)),
        label=f"budget, {format_bytes(budget_bytes)}",
    )  # fmt: skip
    _finish(ax, title, unit, highest / factor)


def _peak(curve: Curve) -> int:
    return max(curve.held_bytes, default=0)


def _fill(ax: Axes, curve: Curve, factor: float, colour: str, label: str) -> None:
    thin = curve.thinned(_POINTS)
    seconds: NDArray[np.float64] = np.concatenate([[0.0], np.asarray(thin.seconds, np.float64)])
    held: NDArray[np.float64] = np.concatenate([[0.0], np.asarray(thin.held_bytes) / factor])
    ax.fill_between(seconds, held, step="post", color=colour, alpha=0.22, linewidth=0)
    ax.step(seconds, held, where="post", color=colour, linewidth=1.1, label=label)


def _finish(ax: Axes, title: str, unit: str, highest: float) -> None:
    entries = len(ax.get_legend_handles_labels()[0])
    columns = 2 if entries < _LONG else 1
    # Leave room for the legend, which must not hide a peak.
    ax.set_ylim(0, (1.3 if entries < _LONG else 1.42) * highest)
    ax.set_xlim(left=0, auto=True)  # a panel that shares the axis may still be drawn
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.legend(loc="upper left", frameon=False, fontsize=9, ncols=columns, borderaxespad=0.2)
    x, y = "time since the start of forward (s)", f"working memory ({unit})"
    tidy(ax, title=title, x=x, y=y, grid="y")
