"""The memory that one iteration holds, moment by moment, against its budget.

Two panels: this run beside ordinary BPTT on one scale, so that the gap is seen for what it is; and
this run alone, so that its budget line can be told from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from retrograde.figures.style import BLUE, GREEN, INK, ORANGE, figure_of, new_axes, tidy
from retrograde.units import format_bytes

__all__ = ["Curve", "draw_memory"]

_POINTS = 1000


@dataclass(frozen=True)
class Curve:
    """Bytes held over time, as :func:`retrograde.measure` gives them.

    Attributes:
        seconds: since the start, growing, one for each change.
        held_bytes: in use from that moment to the next.

    Example:
        >>> Curve((0.0, 0.5), (4096, 0)).thinned(1000).held_bytes
        (4096, 0)
    """

    seconds: Sequence[float]
    held_bytes: Sequence[int]

    def thinned(self, points: int) -> "Curve":
        """The same outline in about ``points`` points: of each stretch, its lowest and highest.

        Args:
            points: how many are enough; no peak is lost.

        Returns:
            A curve; this one's values where it is short enough already.
        """
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
    budgeted: Curve,
    budget_bytes: int,
    ordinary: Curve | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the working memory of one iteration against its budget.

    Args:
        budgeted: the run within the budget.
        budget_bytes: the budget.
        ordinary: ordinary BPTT of the same iteration, where it could be run: a panel more.
        ax: where to draw the run alone; by default a figure of its own, with both panels.

    Returns:
        The figure.

    Example:
        >>> curve = Curve((0.0, 0.1, 0.2), (2**20, 3 * 2**20, 0))
        >>> figure = draw_memory(curve, 4 * 2**20)
    """
    if ax is not None or ordinary is None:
        ax = new_axes(6.4, 3.6) if ax is None else ax
        _draw_alone(ax, budgeted, budget_bytes)
        return figure_of(ax)
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_both(left, budgeted, budget_bytes, ordinary)
    _draw_alone(right, budgeted, budget_bytes)
    return figure


def _draw_both(ax: Axes, budgeted: Curve, budget_bytes: int, ordinary: Curve) -> None:
    peaks = [max(curve.held_bytes, default=0) for curve in (ordinary, budgeted)]
    unit, factor = _unit(max(*peaks, budget_bytes))
    _fill(ax, ordinary, factor, ORANGE, f"ordinary BPTT, peak {format_bytes(peaks[0])}")
    _fill(ax, budgeted, factor, BLUE, f"this run, peak {format_bytes(peaks[1])}")
    ax.axhline(budget_bytes / factor, color=GREEN, linewidth=1.2, linestyle=(0, (5, 3)))
    _finish(ax, "Beside ordinary BPTT", unit, max(*peaks, budget_bytes) / factor)


def _draw_alone(ax: Axes, budgeted: Curve, budget_bytes: int) -> None:
    peak = max(budgeted.held_bytes, default=0)
    unit, factor = _unit(max(peak, budget_bytes))
    _fill(ax, budgeted, factor, BLUE, f"this run, peak {format_bytes(peak)}")
    ax.axhline(
        budget_bytes / factor, color=GREEN, linewidth=1.4, linestyle=(0, (5, 3)),
        label=f"budget, {format_bytes(budget_bytes)}",
    )  # fmt: skip
    _finish(ax, "Within the budget", unit, max(peak, budget_bytes) / factor)


def _fill(ax: Axes, curve: Curve, factor: float, colour: str, label: str) -> None:
    thin = curve.thinned(_POINTS)
    seconds: NDArray[np.float64] = np.concatenate([[0.0], np.asarray(thin.seconds, np.float64)])
    held: NDArray[np.float64] = np.concatenate([[0.0], np.asarray(thin.held_bytes) / factor])
    ax.fill_between(seconds, held, step="post", color=colour, alpha=0.22, linewidth=0)
    ax.step(seconds, held, where="post", color=colour, linewidth=1.1, label=label)


def _finish(ax: Axes, title: str, unit: str, highest: float) -> None:
    ax.set_ylim(0, 1.3 * highest)  # room for the legend, which must not hide a peak
    ax.set_xlim(left=0)
    ax.legend(loc="upper left", frameon=False, fontsize=9, ncols=2, borderaxespad=0.2)
    ax.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    tidy(ax, title=title, x="time since the start of forward (s)", y=f"working memory ({unit})")


def _unit(size: int) -> tuple[str, int]:
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024**power
