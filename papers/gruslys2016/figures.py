"""The figures of Gruslys et al., *Memory-Efficient Backpropagation Through Time* (2016).

Those that are curves of a cost are here; schedules (figures 3 and 8) are in ``composed``, the
measured seconds of figure 2(b) in ``timed``, the bounds in ``bounds``. The
paper's text gives no axis ranges; these show what its captions speak of.

Every cost comes from :func:`retrograde.cost`, in whole forward steps, the first sweep included; the
tables hold these exact integers, the pictures divide them by the length.
"""

from collections.abc import Callable, Mapping
from math import isqrt
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from gruslys2016.bounds import bounds_linear, bounds_power
from gruslys2016.composed import figure_3, figure_8
from gruslys2016.timed import figure_2b
from retrograde.figures.style import tidy
from retrograde.plan import cost
from retrograde_papers.curves import (
    BLUE,
    CYAN,
    GREEN,
    RED,
    VIOLET,
    draw_curves,
    draw_level,
    length_grid,
)
from retrograde_papers.plates import Column, Plate, captioned

__all__ = ["GRUSLYS", "figure_2a", "figure_5", "figure_6", "figure_7"]

Integers = NDArray[np.int64]

_MEMORIES = (10, 50, 100, 500, 1000)
_COLOURS = (RED, GREEN, BLUE, VIOLET, CYAN)
_ALPHA = 5  # the paper's, in figures 5 and 6
_BETAS = (2, 5, 10)  # and in figure 7
_LONGEST = 10_000
_LENGTH = "sequence length t (steps)"
_COST = "cost (forward steps per step)"


def figure_2a(longest: int = _LONGEST) -> Plate:
    """Figure 2(a): what a step costs when hidden states are kept.

    Example:
        >>> plate = figure_2a(longest=1000)
        >>> list(plate.table)[:2], plate.table["HSM, 50 hidden states (forward steps)"][-1]
        (['length', 'HSM, 10 hidden states (forward steps)'], 2948)
    """
    lengths = _grid(longest)
    costs = {m: _costs(lengths, m, "hsm") for m in _MEMORIES}
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    _draw_memories(axes, lengths, costs, "hidden states in memory")
    tidy(axes, title="HSM: what a step costs when hidden states are kept", x=_LENGTH, y=_COST)
    note = (
        "Forward steps run in all, the first sweep included, divided by the length. The initial "
        "state counts as one of the hidden states in memory; the working core is beside them."
    )
    table = {"length": lengths} | {
        f"HSM, {m} hidden states (forward steps)": column for m, column in costs.items()
    }
    return captioned("figure_2a", "cost of HSM against the length", _listed(table), figure, note)


def figure_5(longest: int = _LONGEST) -> Plate:
    """Figure 5: ISM beside MSM in the same memory, an internal state being five hidden ones.

    Example:
        >>> plate = figure_5(longest=100)
        >>> [plate.table[name][-1] for name in list(plate.table)[:3]]
        [100, 225, 150]
    """
    lengths = _grid(longest)
    internal = {m: _costs(lengths, m, "ism") for m in _MEMORIES}
    mixed = {m: _costs(lengths, _ALPHA * m, "msm", alpha=_ALPHA) for m in _MEMORIES}
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_memories(left, lengths, internal, "internal states in memory")
    _draw_memories(right, lengths, mixed, "memory, in internal states")
    tidy(left, title="(a) ISM: internal states only", x=_LENGTH, y=_COST)
    tidy(right, title="(b) MSM: hidden and internal states mixed, α = 5", x=_LENGTH, y=_COST)
    note = (
        "An internal state is α = 5 times as large as a hidden state, or β = 4 times where its "
        "input is in memory. On the left, m internal states, the working core being one of them; "
        "on the right, 5·m units of a hidden state each, the initial state being one of them."
    )
    table = {"length": lengths}
    table |= {f"ISM, {m} internal states (forward steps)": c for m, c in internal.items()}
    table |= {f"MSM, {_ALPHA * m} units (forward steps)": c for m, c in mixed.items()}
    return captioned("figure_5", "cost of ISM, and of MSM likewise", _listed(table), figure, note)


def figure_6(longest: int = _LONGEST) -> Plate:
    """Figure 6: the three policies in the same memory.

    Example:
        >>> plate = figure_6(longest=500)
        >>> [column[-1] for column in plate.table.values()][1:4]
        [1448, 1640, 1160]
    """
    lengths = _grid(longest)
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    table = {"length": lengths}
    table |= _draw_policies(left, lengths, 10)
    table |= _draw_policies(right, lengths, 20)
    tidy(left, title="(a) room for 50 hidden or 10 internal states", x=_LENGTH, y=_COST)
    tidy(right, title="(b) room for 100 hidden or 20 internal states", x=_LENGTH, y=_COST)
    note = (
        "α = 5, β = 4: an internal state takes the room of five hidden states, or of four where "
        "its input is in memory. HSM and MSM count the initial state, ISM the working core."
    )
    return captioned(
        "figure_6", "HSM, ISM and MSM in the same memory", _listed(table), figure, note
    )


def figure_7(longest: int = _LONGEST) -> Plate:
    """Figure 7: MSM against Chen's √t algorithm, at its cost and in its memory.

    Example:
        >>> plate = figure_7(longest=100)
        >>> [column[-1] for column in plate.table.values()][:3]
        [100, 19, 30]
    """
    lengths = length_grid(longest, always=[1000])
    table, memories, costs = {"length": lengths}, {}, {}
    for beta, colour in zip(_BETAS, (RED, GREEN, BLUE), strict=True):
        room, least, spent = _against_chen(lengths, beta)
        table[f"least memory at cost 2 per step, β = {beta} (hidden states)"] = least
        table[f"memory √t·(1+β) rounded down, β = {beta} (hidden states)"] = room
        table[f"cost in that memory, β = {beta} (forward steps)"] = spent
        memories[f"β = {beta}"] = colour, least / (np.sqrt(lengths) * (1 + beta))
        costs[f"β = {beta}"] = colour, spent / lengths
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_curves(left, lengths, memories, "size of an internal state")
    draw_curves(right, lengths, costs, "size of an internal state")
    draw_level(left, 1, "Chen's √t")
    draw_level(right, 2, "Chen's √t")
    left.set_ylim(0, 1.5)
    right.set_ylim(0.9, 2.6)
    tidy(left, title="Memory of MSM at a cost of 2", x=_LENGTH, y="memory / (√t·(1+β))")
    tidy(right, title="Cost of MSM in a memory of √t·(1+β)", x=_LENGTH, y=_COST)
    note = (
        "β: size of an internal state in hidden states where its input is in memory; α = β + 1 "
        "where it is not. Memory counts the initial state; the working core is beside it."
    )
    return captioned("figure_7", "MSM against Chen's √t algorithm", _listed(table), figure, note)


GRUSLYS: Mapping[str, Callable[[], Plate]] = MappingProxyType(
    {
        "figure_2a": figure_2a,
        "figure_2b": figure_2b,
        "figure_3": figure_3,
        "figure_5": figure_5,
        "figure_6": figure_6,
        "figure_7": figure_7,
        "figure_8": figure_8,
        "bounds_power": bounds_power,
        "bounds_linear": bounds_linear,
    }
)


def _grid(longest: int) -> Integers:
    """A grid with the lengths at which a memory stops being plentiful, and the paper's 1000."""
    return length_grid(longest, always=[t for m in _MEMORIES for t in (m, m + 1, m + 2)])


def _costs(lengths: Integers, memory: int, policy: str, alpha: int | None = None) -> Integers:
    return np.asarray(cost(lengths, memory, policy, alpha=alpha))


def _draw_memories(
    axes: Axes, lengths: Integers, costs: Mapping[int, Integers], legend: str
) -> None:
    """One curve a memory, per step, in the paper's five colours, over ordinary BPTT in grey."""
    curves: dict[str, tuple[str, ArrayLike]] = {
        f"{m:,}": (colour, column / lengths)
        for (m, column), colour in zip(costs.items(), _COLOURS, strict=True)
    }
    draw_curves(axes, lengths, curves, legend)
    draw_level(axes, 1, "ordinary BPTT", below=True)
    axes.set_ylim(bottom=0)


def _draw_policies(axes: Axes, lengths: Integers, slots: int) -> dict[str, Integers]:
    """Draw the three policies in the room of some internal states; their costs, as columns."""
    room = _ALPHA * slots
    hsm, ism = _costs(lengths, room, "hsm"), _costs(lengths, slots, "ism")
    msm = _costs(lengths, room, "msm", alpha=_ALPHA)
    curves = {"HSM": (RED, hsm), "ISM": (GREEN, ism), "MSM": (BLUE, msm)}
    per_step = {name: (colour, costs / lengths) for name, (colour, costs) in curves.items()}
    draw_curves(axes, lengths, per_step, "policy")
    draw_level(axes, 1, "ordinary BPTT", below=True)
    _mark_crossing(axes, int(lengths[-1]), room, slots)
    axes.set_ylim(0, 6.2)
    return {
        f"HSM, {room} hidden states (forward steps)": hsm,
        f"ISM, {slots} internal states (forward steps)": ism,
        f"MSM, {room} units (forward steps)": msm,
    }


def _against_chen(lengths: Integers, beta: int) -> tuple[Integers, Integers, Integers]:
    """For each length √t·(1+β) rounded down, the least memory at cost 2, the cost in the first.

    All at once, over every memory that may be needed.
    """
    room = np.array([isqrt(t * (1 + beta) ** 2) for t in lengths.tolist()])
    memories = np.arange(1, room.max() + 1)[:, np.newaxis]
    costs = np.asarray(cost(lengths, memories, "msm", alpha=beta + 1, beta=beta))
    spent = costs[room - 1, np.arange(lengths.size)]
    assert np.all(spent <= 2 * lengths)  # so the least memory is among those looked at
    return room, 1 + np.argmax(costs <= 2 * lengths, axis=0), spent


def _mark_crossing(axes: Axes, longest: int, room: int, slots: int) -> None:
    """Point at where HSM becomes the cheaper of the two for good, where that is within reach."""
    lengths = np.arange(1, longest + 1)
    hsm, ism = _costs(lengths, room, "hsm"), _costs(lengths, slots, "ism")
    dearer = np.flatnonzero(hsm >= ism)
    if dearer[-1] + 1 == longest:
        return
    first = int(dearer[-1]) + 2
    at = first, hsm[first - 1] / first
    axes.plot(*at, "o", color=RED, markersize=5)
    axes.annotate(
        f"HSM is cheaper than ISM\nfrom t = {first:,}", at, xytext=(-8, 10),
        textcoords="offset points", ha="right", fontsize=9, color=RED,
    )  # fmt: skip


def _listed(table: Mapping[str, Integers]) -> dict[str, Column]:
    return {name: column.tolist() for name, column in table.items()}
