"""The trade-off curve: the cost for each memory, for one length and one policy."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from retrograde.figures.style import BLUE, INK, draw_level, figure_of, new_axes, tidy
from retrograde.plan import TradeOff

__all__ = ["draw_trade_off"]

_UNITS = {
    "hsm": "memory (hidden states, the initial one included)",
    "ism": "memory (internal states, the working core included)",
    "msm": "memory (hidden states; α = {alpha}, β = {beta})",
    "best": "memory (hidden states; α = {alpha}, β = {beta})",
}


def draw_trade_off(curve: TradeOff, ax: Axes | None = None) -> Figure:
    """Draw the cost of a step over memory, from the least feasible memory to plenty.

    Args:
        curve: the result of :func:`retrograde.trade_off`.
        ax: where to draw; by default a figure of its own.

    Returns:
        The figure.

    Example:
        >>> from retrograde.plan import trade_off
        >>> figure = draw_trade_off(trade_off(100, "ism"))
    """
    ax = new_axes(7.2, 4.4) if ax is None else ax
    per_step = curve.cost / curve.length
    ax.step(curve.memory, per_step, where="post", color=BLUE, linewidth=1.8, zorder=3)
    ends = [0, -1] if len(curve) > 1 else [0]
    ax.plot(curve.memory[ends], per_step[ends], "o", color=BLUE, markersize=5, zorder=4)
    draw_level(ax, 1, "ordinary BPTT", left=True, below=True)
    for scale, axis in ((ax.set_xscale, ax.xaxis), (ax.set_yscale, ax.yaxis)):
        scale("log")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if per_step[0] / per_step[-1] < 10:
        ax.set_yscale("linear")
        ax.set_ylim(0, 1.12 * float(per_step[0]))
    else:
        ax.set_ylim(0.6, 2 * float(per_step[0]))
    _name_ends(ax, curve)
    tidy(
        ax,
        grid="both",
        title=f"{curve.policy.upper()}, {curve.length:,} steps: {len(curve):,} memories at which "
        "the cost drops",
        x=_UNITS[curve.policy].format(alpha=curve.alpha, beta=curve.beta),
        y="cost (forward steps per step)",
    )
    return figure_of(ax)


def _name_ends(ax: Axes, curve: TradeOff) -> None:
    """Label the cost of the least memory, and the memory above which nothing is cheaper."""
    least, most = (int(curve.memory[i]) for i in (0, -1))
    first, last = (float(np.round(curve.cost[i] / curve.length, 3)) for i in (0, -1))
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": INK}
    if least < most:
        ax.annotate(f"memory {least:,}: cost {first:,g}", (least, first), xytext=(6, 6), **style)
    ax.annotate(
        f"memory {most:,} or more: cost {last:,g}", (most, last), xytext=(0, -8), ha="right",
        va="top", **style,
    )  # fmt: skip
