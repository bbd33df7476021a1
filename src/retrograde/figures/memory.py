"""The memory that one iteration holds, moment by moment, against its budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrograde.figures.style import BLUE, GREEN, ORANGE, figure_of, new_axes, tidy
from retrograde.units import format_bytes

_POINTS = 1000


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

    @property
    def peak_bytes(self) -> int:
        """The most that is held at any moment."""
        return int(max(self.held_bytes, default=0))

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
        ordinary: ordinary backpropagation of the same iteration, drawn behind; None leaves it out.
        ax: where to draw; by default a figure of its own.

    Returns:
        The figure.

    Example:
        >>> curve = Curve((0.0, 0.1, 0.2), (2**20, 3 * 2**20, 0))
        >>> figure = draw_memory(curve, 4 * 2**20)
    """
    ax = new_axes(6.4, 3.6) if ax is None else ax
    sides = [(budgeted, BLUE, "within the budget")]
    if ordinary is not None:
        sides.insert(0, (ordinary, ORANGE, "ordinary backpropagation"))
    highest = max(budget_bytes, *(curve.peak_bytes for curve, _, _ in sides))
    power = min(max(highest.bit_length() - 1, 0) // 10, 4)
    factor = 1024**power
    for curve, colour, name in sides:
        thin = curve.thinned(_POINTS)
        seconds = np.concatenate([[0.0], np.asarray(thin.seconds, np.float64)])
        memory = np.concatenate([[0.0], np.asarray(thin.held_bytes) / factor])
        label = f"{name}, peak {format_bytes(curve.peak_bytes)}"
        ax.fill_between(seconds, memory, step="post", color=colour, alpha=0.22, linewidth=0)
        ax.step(seconds, memory, where="post", color=colour, linewidth=1.1, label=label)
    label = f"budget, {format_bytes(budget_bytes)}"
    ax.axhline(budget_bytes / factor, color=GREEN, linewidth=1.4, linestyle="--", label=label)
    ax.set_ylim(0, (1.24 + 0.09 * len(sides)) * highest / factor)  # no peak is under the legend
    ax.set_xlim(left=0, auto=True)  # a panel that shares the axis may still be drawn
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.legend(loc="upper left", frameon=False, fontsize=9, borderaxespad=0.2)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    x, y = "time since the start of forward (s)", f"working memory ({unit})"
    tidy(ax, title="Memory of one iteration", x=x, y=y, grid="y")
    return figure_of(ax)
