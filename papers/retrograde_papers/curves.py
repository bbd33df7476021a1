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
    """Lengths from 1 on, evenly spread on a logarithmic axis; those of ``always`` are among them.

    Example:
        >>> length_grid(10_000, always=[1000])[[0, 1, 2, -1]].tolist()
        [1, 2, 3, 10000]
    """
    spread = np.geomspace(1, longest, _SPREAD).round().astype(np.int64)
    return np.union1d(spread, [t for t in always if t <= longest]).astype(np.int64)


def draw_curves(
    axes: Axes, lengths: ArrayLike, curves: Mapping[str, tuple[str, ArrayLike]], legend: str
) -> None:
    """Draw curves, name to (colour, heights), over a logarithmic axis, with a titled legend."""
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
    """Draw a grey line across, named at its left or right end, above or below.

    Example:
        >>> from matplotlib.figure import Figure
        >>> draw_level(Figure().add_subplot(), 1.0, "ordinary BPTT")
    """
    axes.axhline(height, color=GREY, linewidth=1.8, zorder=1)
    axes.annotate(
        text, (0 if left else 1, height), xycoords=("axes fraction", "data"),
        xytext=(3 if left else -3, -3 if below else 3), textcoords="offset points",
        ha="left" if left else "right", va="top" if below else "bottom", fontsize=9, color=INK,
        alpha=0.75,
    )  # fmt: skip
