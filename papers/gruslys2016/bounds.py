"""The bounds of Gruslys et al. (2016), sections 3.5 and B, each held against the exact cost.

With C for the cost of HSM unless it says otherwise, t for the length and m for the memory:

- C ≤ m·t^(1+1/m) (proposition 1);
- C < 4·t^(1+1/m), and C − t < 3·t^(1+1/m) without the first sweep, for t < 10⁵ and m < 10³,
  which the paper verified by computation; the second fails, at m = 29 for instance;
- C ≤ (a+1)·t for t < mᵃ/a!, and C ≤ a·t for ISM for t ≤ mᵃ/a!, with the least such a ≤ m;
- T(a, m) ≥ m^(a−1)/(a−1)! (proposition 2), T(a, m) being the longest t with C ≤ a·t.

A sweep visits every cell, one row a memory: 10⁸ cells take some ten seconds and no table.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import factorial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from retrograde.figures.style import tidy
from retrograde.plan import cost
from retrograde_papers.curves import BLUE, GREEN, RED, VIOLET, draw_level
from retrograde_papers.plates import Column, Plate, captioned

__all__ = ["bounds_linear", "bounds_power", "sweep_linear", "sweep_power"]

_LENGTH, _MEMORIES = 10**5 - 1, range(1, 10**3)  # t < 10⁵, m < 10³
_EXCESS = "cells with C−t ≥ 3·t^(1+1/m)"
_POWER = "$t^{1+1/m}$"
_BELOW = {2: "m", 3: "(m²/2!)", 4: "(m³/3!)", 5: "(m⁴/4!)"}

Table = dict[str, list[int] | list[float]]


def bounds_power(length: int = _LENGTH, memories: Sequence[int] = _MEMORIES) -> Plate:
    """The bounds of the form t^(1+1/m), and how much room each leaves."""
    table = sweep_power(length, memories)
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_limits(left, table)
    ratios = np.array(table["largest C/t^(1+1/m)"]) / np.array(memories)
    _draw(right, table, {"": (BLUE, ratios.tolist())})
    right.set_yscale("log")
    draw_level(right, 1, "the bound")
    _finish(right, f"HSM: C ≤ m·{_POWER}", f"largest C / (m·{_POWER})")
    note = (
        "C: forward steps in all; C − t: without the first sweep. The largest ratio over every "
        f"length t up to {length:,} steps, for each memory m of hidden states."
    )
    return captioned(
        "bounds_power", "HSM's cost against t^(1+1/m), cell by cell", table, figure, note
    )


def longest(a: int, memory: int) -> int:
    """T(a, m): the longest sequence that HSM backpropagates at most a forward steps for each step.

    Example:
        >>> longest(2, 50), longest(3, 50)
        (52, 1378)
    """
    return bisect_left(range(1, 2**60), True, key=lambda t: cost(t, memory) > a * t)


def bounds_linear(length: int = _LENGTH, memories: Sequence[int] = _MEMORIES) -> Plate:
    """The bounds that are multiples of the length, and how much room each leaves.

    Example:
        >>> bounds_linear(length=1000, memories=[1, 10, 100]).table["T(2,m) / m"]
        [3.0, 1.2, 1.02]
    """
    table = sweep_linear(length, memories)
    exact = {
        f"T({a},m) / {below}": [longest(a, m) * factorial(a - 1) / m ** (a - 1) for m in memories]
        for a, below in _BELOW.items()
    }
    table |= exact
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, table, {
        "HSM: C / ((a+1)·t), t < mᵃ/a!": (RED, table["largest C/((a+1)·t), a ≥ 2"]),
        "ISM: C / (a·t), t ≤ mᵃ/a!": (GREEN, table["largest C of ISM/(a·t), a ≥ 2"]),
    })  # fmt: skip
    draw_level(left, 1, "the bounds", left=True)
    left.set_ylim(0, 1.2)
    left.legend(loc="lower right", frameon=False, fontsize=9)
    _finish(left, "HSM: C ≤ (a+1)·t. ISM: C ≤ a·t", "largest ratio where a ≥ 2")
    colours = (RED, GREEN, BLUE, VIOLET)
    _draw(right, table, dict(zip(exact, zip(colours, exact.values(), strict=True), strict=True)))
    right.set_yscale("log")
    right.legend(loc="upper right", frameon=False, fontsize=9)
    draw_level(right, 1, "the bound")
    _finish(right, "HSM: T(a,m) ≥ $m^{a−1}$/(a−1)!", "T(a,m) / its lower bound")
    note = (
        f"Left: the largest ratio over every length t up to {length:,} steps for which there is "
        "such an a, at each memory m; with a = 1, where memory is plentiful, ISM is at its bound. "
        "Right: the exact T(a,m), the longest sequence of a cost per step of at most a."
    )
    return captioned("bounds_linear", "costs as multiples of the length", table, figure, note)


def sweep_power(length: int, memories: Sequence[int]) -> Table:
    """Hold HSM's cost against t^(1+1/m) in every cell, and keep the extremes of each memory.

    A memory's row has the largest ratios, the lengths where they are reached, and how many lengths
    break the claim that C − t stays below three times the power.

    Example:
        >>> table = sweep_power(1000, [29])
        >>> round(table["largest C/t^(1+1/m)"][0], 3), table["cells with C−t ≥ 3·t^(1+1/m)"]
        (2.761, [0])
    """
    lengths = np.arange(1, length + 1)
    rows = []
    for m in memories:
        costs, powers = np.asarray(cost(lengths, m)), lengths ** (1 + 1 / m)
        later = (costs - lengths) / powers
        row: dict[str, int | float] = {"memory": m}
        row |= _largest("C/t^(1+1/m)", costs / powers) | _largest("(C−t)/t^(1+1/m)", later)
        rows.append(row | {_EXCESS: int(np.count_nonzero(later >= 3))})
    return _columns(rows)


def sweep_linear(length: int, memories: Sequence[int]) -> Table:
    """Hold the costs of HSM and ISM against multiples of the length, as :func:`sweep_power` does.

    Where a bound speaks of no length, its extreme is NaN and stands at length 0.

    Example:
        >>> table = sweep_linear(1000, [10])
        >>> [round(table[f"largest C/((a+1)·t){where}"][0], 4) for where in ("", ", a ≥ 2")]
        [0.9444, 0.9184]
    """
    lengths = np.arange(1, length + 1)
    rows = []
    for m in memories:
        row: dict[str, int | float] = {"memory": m}
        below, up_to = _multiples(lengths, m)
        for name, policy, least, more in (
            ("C/((a+1)·t)", "hsm", below, 1),
            ("C of ISM/(a·t)", "ism", up_to, 0),
        ):
            reached = lengths[: least.size]
            ratios = np.asarray(cost(reached, m, policy)) / ((least + more) * reached)
            scarce = np.where(least > 1, ratios, np.nan)
            row |= _largest(name, ratios) | _largest(f"{name}, a ≥ 2", scarce)
        rows.append(row)
    return _columns(rows)


def _largest(name: str, ratios: NDArray[np.float64]) -> dict[str, int | float]:
    at = int(np.nanargmax(ratios)) if np.isfinite(ratios).any() else -1
    value = float(ratios[at]) if at >= 0 else float("nan")
    return {f"largest {name}": value, f"at length, {name}": at + 1}


def _columns(rows: Sequence[Mapping[str, int | float]]) -> Table:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _multiples(lengths: NDArray[np.int64], m: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each length, the least a with t < mᵃ/a!, and with t ≤ mᵃ/a!; as far as there is one."""
    ends: list[tuple[int, int]] = []  # the last lengths below and up to mᵃ/a!
    for a in range(1, m + 1):
        power, product = m**a, factorial(a)
        ends.append(((power - 1) // product, power // product))
        if ends[-1][0] >= lengths[-1]:
            break
    below, up_to = np.minimum(ends, lengths[-1]).T
    return (
        1 + np.searchsorted(below, lengths[: below[-1]]),
        1 + np.searchsorted(up_to, lengths[: up_to[-1]]),
    )


def _draw_limits(axes: Axes, table: Table) -> None:
    """The two ratios whose limits the paper claims, with the largest of each."""
    for label, colour, name, points in (
        (f"C / {_POWER}", BLUE, "C", 16),
        (f"(C − t) / {_POWER}", RED, "(C−t)", -36),
    ):
        column = table[f"largest {name}/t^(1+1/m)"]
        _draw(axes, table, {label: (colour, column)})
        top = int(np.argmax(column))
        m = table["memory"][top]
        axes.annotate(
            f"{column[top]:.3f} at m = {m}", (m, column[top]),
            xytext=(0, points), textcoords="offset points", ha="center", fontsize=9,
            color=colour,
        )  # fmt: skip
    draw_level(axes, 4, "limit of C", left=True)
    draw_level(axes, 3, "limit of C − t", left=True)
    axes.set_ylim(0, 5.2)
    axes.legend(loc="upper left", frameon=False, fontsize=9, ncols=2)
    _finish(axes, f"C < 4·{_POWER} holds, C − t < 3·{_POWER} does not", "largest ratio")


def _draw(axes: Axes, table: Table, curves: Mapping[str, tuple[str, Column]]) -> None:
    for name, (colour, column) in curves.items():
        axes.plot(table["memory"], column, color=colour, linewidth=1.8, label=name)


def _finish(axes: Axes, title: str, y: str) -> None:
    axes.set_xscale("log")
    axes.set_xlim(left=1)  # both panels from the same memory
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    tidy(axes, grid="y", title=title, x="memory m (states kept)", y=y)
