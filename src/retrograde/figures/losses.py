"""The loss of a training run, in bits per character."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrograde.figures.style import BLUE, GREEN, figure_of, new_axes, tidy

__all__ = ["draw_losses"]

_MANY = 100


def draw_losses(
    losses: Sequence[float], baseline: float | None = None, ax: Axes | None = None
) -> Figure:
    """Draw the loss at each iteration.

    Args:
        losses: bits per character, one for each iteration from 1 on.
        baseline: bits per character of the frequencies of single characters alone; drawn as a
            line.
        ax: where to draw; by default a figure of its own.

    Returns:
        The figure.

    Example:
        >>> figure = draw_losses([6.5, 5.1, 4.2], baseline=4.6)
    """
    ax = new_axes(6.4, 3.8) if ax is None else ax
    iterations = np.arange(1, len(losses) + 1)
    marker = "o" if len(losses) <= _MANY else ""
    ax.plot(iterations, losses, color=BLUE, linewidth=1.6, marker=marker, markersize=3.5)
    if baseline is not None:
        ax.axhline(baseline, color=GREEN, linewidth=1.2, linestyle=(0, (5, 3)))
        below = bool(losses) and losses[-1] > baseline  # the label goes to the empty side
        ax.annotate(
            f"character frequencies alone: {baseline:.2f}",
            (1, baseline), xycoords=("axes fraction", "data"), xytext=(-2, -4 if below else 4),
            textcoords="offset points", ha="right", va="top" if below else "bottom", fontsize=9,
            color=GREEN,
        )  # fmt: skip
    if losses:
        ax.annotate(
            f"{losses[-1]:.2f}", (float(iterations[-1]), losses[-1]), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=10, fontweight="bold", color=BLUE,
        )  # fmt: skip
        ax.set_xlim(1 - 0.03 * len(losses), 1.09 * len(losses))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)
    tidy(ax, grid="y", title="Training loss", x="iteration", y="bits per character")
    return figure_of(ax)
