"""Curves over the sequence length, in the colours that captions of Gruslys et al. (2016) name.

The hues are the paper's; their lightness differs from one to the next, so that they stay apart in
print and to most eyes, and every curve is named in a legend.
"""

from collections.abc import Collection, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from numpy.typing import ArrayLike, NDArray

from retrograde.figures.style import GREY, INK

__all__ = ["BLUE", "CYAN", "GREEN", "RED", "VIOLET", "draw_curves", "draw_level", "length_grid"]

RED = "#C4302B"
GREEN = "#3C9A4A"
BLUE = "#2456A6"
VIOLET = "#8E5BB5"
CYAN = "#27B4C6"

_SPREAD = 500  # lengths on a grid, about


def length_grid(longest: int, always: Collection[int] = ()) -> NDArray[np.int64]:
    """Sequence lengths, evenly spread on a logarithmic axis.

    Args:
        longest: the last of them; the first is 1.
        always: lengths to be among them, where they are no longer than ``longest``.

    Returns:
        Integers in increasing order: every one of the first few dozen, then some 500 more.

    Example:
        >>> length_grid(10_000, always=[1000])[[0, 1, 2, -1]].tolist()
        [1, 2, 3, 10000]
    """
    spread = np.geomspace(1, longest, _SPREAD).round().astype(np.int64)
    return np.union1d(spread, [t for t in always if t <= longest]).astype(np.int64)


def draw_curves(
    axes: Axes, lengths: ArrayLike, curves: Mapping[str, tuple[str, ArrayLike]], legend: str
) -> None:
    """Draw one curve a name over a logarithmic axis of lengths, with a legend above the data.

    Args:
        axes: where.
        lengths: the common horizontal positions.
        curves: name to (colour, heights).
        legend: the legend's title.

    Example:
        >>> from retrograde.figures.style import new_axes
        >>> draw_curves(new_axes(4, 3), [1, 10, 100], {"m = 1": (RED, [1, 5, 50])}, "memory")
    """
    for name, (colour, heights) in curves.items():
        axes.plot(lengths, heights, color=colour, linewidth=1.8, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(1, float(np.max(lengths)))
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    axes.legend(title=legend, loc="upper left", frameon=False, fontsize=9, alignment="left")


def draw_level(
    axes: Axes, height: float, text: str, *, left: bool = False, below: bool = False
) -> None:
    """Draw what the curves are to be compared with: a grey line across, named at one end.

    Args:
        axes: where.
        height: of the line.
        text: what it is.
        left: name it at the left end; otherwise at the right.
        below: name it below the line; otherwise above.

    Example:
        >>> from retrograde.figures.style import new_axes
        >>> draw_level(new_axes(4, 3), 1, "ordinary BPTT")
    """
    axes.axhline(height, color=GREY, linewidth=1.8, zorder=1)
    axes.annotate(
        text, (0 if left else 1, height), xycoords=("axes fraction", "data"),
        xytext=(3 if left else -3, -3 if below else 3), textcoords="offset points",
        ha="left" if left else "right", va="top" if below else "bottom", fontsize=9, color=INK,
        alpha=0.75,
    )  # fmt: skip
