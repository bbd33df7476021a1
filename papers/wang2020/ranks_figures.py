"""A backward pass across ranks: what more of them would take than are at hand.

All curves are computed, from what :mod:`wang2020.ranks_results` has of a few ranks;
beside them are the general terms of Wang, *BPPSA* (2020), section 3.6.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from retrograde.figures.style import BLUE, INK, ORANGE, figure_of, new_axes, tidy
from retrograde.units import format_bytes
from retrograde_papers.plates import Column, Plate, captioned, describe_machine
from wang2020.ranks_model import pipeline_space, scan_space, scan_steps, scan_work
from wang2020.ranks_results import Ranks

__all__ = ["RANKS", "format_seconds", "ranks_memory", "ranks_seconds"]

_MOST = 10**6  # ranks
_ELEMENTS = 10**4  # of the general terms
_POINTS = 300  # of a curve
_PER_INCH = 15.2  # characters of a caption
_WAYS = {
    "linear": (ORANGE, "-", "linear: handed from rank to rank"),
    "tree": (BLUE, "-", "tree: ⌈log₂ p⌉ rounds up, and down"),
}


def ranks_seconds(found: Ranks | None = None) -> Plate:
    """Seconds against ranks, and beside them the steps of W20, eqs. 3.3 and 3.4.

    Example:
        >>> ranks_seconds().name
        'ranks_seconds'
    """
    found = Ranks.shipped() if found is None else found
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    ranks = _grid()
    seconds = {way: found.model.seconds(way, ranks) for way in _WAYS}
    _draw_seconds(left, ranks, seconds, found)
    steps, work = scan_steps(_ELEMENTS, ranks), float(scan_work(_ELEMENTS))
    _draw_steps(right, ranks, steps, work)
    note = (
        f"Curves: computed, not measured. Left: each rank has {found.settings['steps']:,} "
        f"steps of its own, so that the sequence grows with the ranks; measured seconds are "
        f"less those of adding up the parameters' gradients. {_measured(found)} Right: W20, eqs. "
        "3.3 and 3.4, with 1 for every constant."
    )
    table: dict[str, Column] = {"ranks": ranks.tolist()}
    table |= {f"{way}, computed (s)": each.tolist() for way, each in seconds.items()}
    table |= {"W20 eq. 3.3, scan (steps)": steps.tolist()}
    table |= {"linear scan; W20 eq. 3.4, work of either (steps)": [work] * len(ranks)}
    title = "a backward pass on 2 to 10⁶ ranks, computed"
    return captioned("ranks_seconds", title, table, figure, note, _PER_INCH)


def ranks_memory(found: Ranks | None = None) -> Plate:
    """Space of a rank against ranks: W20, section 3.6, against pipeline parallelism.

    Example:
        >>> ranks_memory().name
        'ranks_memory'
    """
    found = Ranks.shipped() if found is None else found
    model, ranks = found.model, _grid()
    ax = new_axes(8.0, 5.2)
    curves = {
        "scan": scan_space(_ELEMENTS, ranks, model.matrix_bytes),
        "pipeline": pipeline_space(_ELEMENTS, ranks, model.vector_bytes),
    }
    ax.plot(ranks, curves["scan"], color=BLUE, linewidth=2.2, label="BPPSA: max(n/p, 1) Jacobians")
    ax.plot(
        ranks, curves["pipeline"], color=ORANGE, linewidth=2.2, linestyle="--",
        label="pipeline parallelism: n/p + p activations",
    )  # fmt: skip
    _finish(ax, 20.0)
    ax.set_ylim(bottom=curves["scan"].min() / 8)
    ax.axhline(model.matrix_bytes, color=INK, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1)
    ax.annotate(
        f"one Jacobian, {format_bytes(model.matrix_bytes)}: all that a rank needs, however many "
        "there are",
        (2, model.matrix_bytes), xytext=(4, -5), textcoords="offset points", va="top",
        fontsize=9, color=INK,
    )  # fmt: skip
    ax.legend(loc="upper left", frameon=False, fontsize=9)
    tidy(ax, title="Space that a rank needs, computed", x="ranks p", y="bytes of a rank")
    note = (
        "Computed, not measured: W20, section 3.6, for n = 10⁴ elements, with 1 for every "
        f"constant. A Jacobian has {format_bytes(model.matrix_bytes)}, an activation "
        f"{format_bytes(model.vector_bytes)}: those of a GRU of {found.settings['hidden']} units, "
        f"batch {found.settings['batch']}. In rg.TimeSharded's tree a rank keeps up to ⌈log₂ p⌉ "
        "products besides, so that none is sent twice."
    )
    table: dict[str, Column] = {
        "ranks": ranks.tolist(),
        "BPPSA (bytes)": curves["scan"].tolist(),
        "pipeline parallelism (bytes)": curves["pipeline"].tolist(),
    }
    title = "space of a rank on 2 to 10⁶ of them, computed"
    return captioned("ranks_memory", title, table, figure_of(ax), note, _PER_INCH)


def _grid() -> NDArray[np.int64]:
    """Numbers of ranks: all powers of two, and some between them."""
    spread = np.geomspace(2, _MOST, _POINTS).round().astype(np.int64)
    return np.union1d(spread, 2 ** np.arange(1, 20)).astype(np.int64)


def _draw_seconds(
    ax: Axes, ranks: NDArray[np.int64], seconds: Mapping[str, NDArray[np.float64]], found: Ranks
) -> None:
    for way, (colour, style, label) in _WAYS.items():
        ax.plot(ranks, seconds[way], color=colour, linestyle=style, linewidth=2.0, label=label)
    _finish(ax, 30.0)
    at_hand, sizes = int(found.settings["ranks"]), (7, 5)  # so that two in one place are seen
    point: Any = {"linestyle": "", "marker": "o", "markeredgecolor": INK, "markeredgewidth": 0.8}
    for each, size in zip(found.crossings, sizes, strict=False):
        colour, height = _WAYS[each.way][0], each.seconds - found.sum_seconds
        ax.plot(at_hand, height, color=colour, markersize=size, zorder=4, **point)
    if found.crossings:
        ax.plot([], [], color="white", markersize=7, label="measured, in these colours", **point)
    _mark_first(ax, found)
    ax.legend(loc="upper left", frameon=False, fontsize=9)
    tidy(ax, title="Backward pass across ranks, computed", x="ranks p", y="seconds")


def _mark_first(ax: Axes, found: Ranks) -> None:
    """From where on the tree is faster than the linear hand-over."""
    first = found.model.first_ranks_where("tree", beats="linear")
    if first is None:
        return
    there = float(found.model.seconds("tree", first))
    low = min(ax.get_ylim()[0], there / 12)  # so that what is written has room below the curves
    ax.vlines(first, low, there, color=INK, linewidth=0.8, linestyle=(0, (5, 3)), zorder=1)
    ax.set_ylim(bottom=low)
    ax.annotate(
        f"tree faster than linear:\nfirst at p = {first:,}", (first, 0.02),
        xycoords=("data", "axes fraction"), xytext=(5, 0), textcoords="offset points",
        va="bottom", fontsize=9, color=INK,
    )  # fmt: skip


def _draw_steps(
    ax: Axes, ranks: NDArray[np.int64], steps: NDArray[np.float64], work: float
) -> None:
    ax.plot(
        ranks, np.full(len(ranks), work), color=ORANGE, linewidth=2.0,
        label="linear scan, and work of either: n (3.4)",
    )  # fmt: skip
    ax.plot(
        ranks, steps, color=BLUE, linewidth=2.0, label="Blelloch scan: n/p + log₂ p; log₂ n (3.3)"
    )
    _finish(ax, 30.0)
    ax.legend(loc="upper right", frameon=False, fontsize=9)
    tidy(ax, title="W20: a scan of n = 10⁴ elements, computed", x="workers p", y="steps")


def _finish(ax: Axes, room: float) -> None:
    """Two logarithmic axes, a grid, and room for a legend above."""
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(2, _MOST)
    ax.set_ylim(top=room * ax.get_ylim()[1])
    ax.grid(color=INK, alpha=0.12, linewidth=0.8)


def _measured(found: Ranks) -> str:
    model, settings = found.model, found.settings
    note = f" ({settings['note']})" if settings.get("note") else ""
    speed = (
        f"{format_bytes(int(model.bytes_per_second))} a second"
        if np.isfinite(model.bytes_per_second)
        else "bytes without delay"
    )
    return (
        f"From what was measured on {settings['ranks']} processes over {settings['backend']}, "
        f"{describe_machine(found.machine)} each{note}: latency "
        f"{format_seconds(model.latency_seconds)}, {speed}; of a GRU of {settings['hidden']} "
        f"units, batch {settings['batch']}, a sweep {format_seconds(model.sweep_seconds)}, a "
        f"Jacobian {format_seconds(model.jacobian_seconds)} ({format_bytes(model.matrix_bytes)}, "
        f"a vector {format_bytes(model.vector_bytes)}), a product "
        f"{format_seconds(model.product_seconds)}, with a vector "
        f"{format_seconds(model.apply_seconds)}."
    )


def format_seconds(seconds: float) -> str:
    """Seconds in a unit that suits them.

    Args:
        seconds: at least 0.

    Returns:
        Three digits, and the unit.

    Example:
        >>> format_seconds(0.0123456), format_seconds(4.5e-5), format_seconds(2.0)
        ('12.3 ms', '45 µs', '2 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{1e6 * seconds:.3g} µs"


RANKS: Mapping[str, Callable[[], Plate]] = MappingProxyType(
    {"ranks_seconds": ranks_seconds, "ranks_memory": ranks_memory}
)
