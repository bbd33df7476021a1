"""The trade-off curve: the cost for each memory, for one length and one policy."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from retrograde.figures.style import BLUE, GREY, INK, figure_of, new_axes, tidy
from retrograde.plan import TradeOff

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
    ax.axhline(1, color=GREY, linewidth=1.8, zorder=1)
    for scale, axis in ((ax.set_xscale, ax.xaxis), (ax.set_yscale, ax.yaxis)):
        scale("log")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if per_step[0] / per_step[-1] < 10:
        ax.set_yscale("linear")
        ax.set_ylim(0, 1.12 * float(per_step[0]))
    else:
        ax.set_ylim(0.6, 2 * float(per_step[0]))
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": INK}
    corner = ("axes fraction", "data")
    ax.annotate("ordinary BPTT", (0, 1), xycoords=corner, xytext=(3, -3), va="top", **style)
    ends = {-1: (" or more", (0, -8), "right", "top"), 0: ("", (6, 6), "left", "bottom")}
    for i, (more, offset, across, up) in list(ends.items())[: len(curve)]:
        place = float(curve.memory[i]), float(per_step[i])
        ax.plot(*place, "o", color=BLUE, markersize=5, zorder=4)
        ax.annotate(
            f"memory {curve.memory[i]:,}{more}: cost {round(place[1], 3):,g}", place, xytext=offset,
            ha=across, va=up, **style,
        )  # fmt: skip
    number = f"{len(curve):,} memories at which the cost drops"
    tidy(
        ax,
        grid="both",
        title=f"{curve.policy.upper()}, {curve.length:,} steps: {number}",
        x=_UNITS[curve.policy].format(alpha=curve.alpha, beta=curve.beta),
        y="cost (forward steps per step)",
    )
    return figure_of(ax)
