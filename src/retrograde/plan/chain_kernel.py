"""The table of :mod:`retrograde.plan.chain`, filled by code compiled when this is first imported.

Kept apart so that importing the planner loads no compiler. Level m of the table stands for
``unit · m + rest`` bytes; what is kept is counted in levels too, after ``more`` bytes are added and
the rest of the division dropped, so that ``more`` says which way sizes are rounded. What is needed
for a while is compared in bytes, and never rounded.

*Order.* Levels ascend in chunks of :data:`LANES`, which lie side by side and are worked on at once.
Within a chunk x descends in blocks of :data:`BLOCK`, and e ascends within a block: the right parts
that end at e, which are many, are read from memory once for all x of a block.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrograde.plan.layers import Layers

__all__ = ["BLOCK", "LANES", "Grid", "Kinds", "fill", "row_of"]

LANES = 16
BLOCK = 8

_SATURATED = 1 + 1e-13  # times the least seconds: nothing is run twice, but for rounding

_Ints = NDArray[np.int64]
_Reals = NDArray[np.float64]


class Grid(NamedTuple):
    """How bytes are counted in levels: see the module's text."""

    unit: int
    rest: int
    more: int


class Kinds(NamedTuple):
    """Which schedules there are to choose from.

    Args:
        stores: whether hidden states may be stored.
        records: whether internal states may be kept while later layers are worked on.
    """

    stores: bool
    records: bool


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def row_of(size: int, x: int, e: int) -> int:
    """Where the segment of layers x … e − 1 is in the table of ``size`` layers."""
    return x * size - x * (x - 1) // 2 + e - x - 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _lower(
    out: _Reals, row: _Reals, start: int, paid: int, need: int, seconds: float, grid: Grid
) -> None:
    """A way that keeps ``paid`` bytes, needs ``need``, and leads to a segment.

    Args:
        out: the least seconds for levels from ``start`` on, shape (LANES,), lowered.
        row: the segment's seconds for each level.
        start: a level.
        paid: bytes.
        need: bytes.
        seconds: spent before.
        grid: levels.
    """
    shift = start - (paid + grid.more) // grid.unit
    first = max(-shift, -((grid.rest - need) // grid.unit) - start, 0)
    for lane in range(first, LANES):
        value = seconds + row[shift + lane]
        out[lane] = value if value < out[lane] else out[lane]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _end(out: _Reals, start: int, need: int, seconds: float, grid: Grid) -> None:
    """A way that leads to no segment: as :func:`_lower`."""
    first = max(-((grid.rest - need) // grid.unit) - start, 0)
    for lane in range(first, LANES):
        out[lane] = min(out[lane], seconds)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _from_current(
    out: _Reals, start: int, x: int, e: int, paid: int, need: int, seconds: float,
    layers: Layers, kinds: Kinds, grid: Grid, table: _Reals,
) -> None:  # fmt: skip
    """W: from state x, which is current and which nothing holds; ``paid`` bytes are held beside."""
    size = len(layers.tape)
    while True:
        if kinds.stores:
            kept = paid + layers.state[x]
            _lower(out, table[row_of(size, x, e)], start, kept, need, seconds, grid)
            if layers.keeps_input[x]:
                return  # recording first holds state x all the same
        if not kinds.records and e > x + 1:
            return
        need = max(need, paid + layers.state[x] + layers.record[x] + layers.gradient[e])
        if layers.keeps_input[x]:
            paid += layers.state[x]
        need = max(need, paid + layers.back[x])
        paid += layers.tape[x]
        x += 1
        seconds += layers.before[x] - layers.before[x - 1]
        if x == e:
            _end(out, start, need, seconds, grid)
            return
        if layers.keeps_output[x - 1]:
            kept = paid + layers.state[x]
            _lower(out, table[row_of(size, x, e)], start, kept, need, seconds, grid)
            return


@njit(cache=True)  # type: ignore[untyped-decorator]
def _recorded(
    out: _Reals, start: int, x: int, e: int,
    layers: Layers, kinds: Kinds, grid: Grid, table: _Reals,
) -> None:  # fmt: skip
    """Q3: from state x, which is kept by whoever called, record layer x."""
    if not kinds.records and e > x + 1:
        return
    need = max(layers.record[x] + layers.gradient[e], layers.back[x])
    paid = layers.tape[x]
    seconds = layers.before[x + 1] - layers.before[x]
    if e == x + 1:
        _end(out, start, need, seconds, grid)
    elif layers.keeps_output[x]:
        row = table[row_of(len(layers.tape), x + 1, e)]
        _lower(out, row, start, paid + layers.state[x + 1], need, seconds, grid)
    else:
        _from_current(out, start, x + 1, e, paid, need, seconds, layers, kinds, grid, table)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _best_split(out: _Reals, left: _Reals, right: _Reals, first: int, last: int) -> None:
    """Q1: the least of left[j] + right[j] for first ≤ j < last, in every lane."""
    j = first
    while j + 4 <= last:
        a, b, c, d = left[j], left[j + 1], left[j + 2], left[j + 3]
        e, f, g, h = right[j], right[j + 1], right[j + 2], right[j + 3]
        for lane in range(LANES):
            one, two = a[lane] + e[lane], b[lane] + f[lane]
            three, four = c[lane] + g[lane], d[lane] + h[lane]
            one = two if two < one else one
            three = four if four < three else three
            one = three if three < one else one
            out[lane] = one if one < out[lane] else out[lane]
        j += 4
    while j < last:
        a, e = left[j], right[j]
        for lane in range(LANES):
            one = a[lane] + e[lane]
            out[lane] = one if one < out[lane] else out[lane]
        j += 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _split(
    out: _Reals, start: int, x: int, e: int, reach: _Ints, left: _Reals, right: _Reals,
    layers: Layers, grid: Grid,
) -> None:  # fmt: skip
    """Q1 for all j that can be reached; ``reach`` is what running layers x … j − 1 needs."""
    gradient = layers.gradient[e]
    lowest, highest = grid.unit * start + grid.rest, grid.unit * (start + LANES - 1) + grid.rest
    last = e
    while last > x + 1 and reach[last - 1] + gradient > lowest:
        last -= 1
    _best_split(out, left, right, x + 1, last)
    while last < e and reach[last] + gradient <= highest:
        first = -((grid.rest - reach[last] - gradient) // grid.unit) - start
        for lane in range(first, LANES):
            out[lane] = min(out[lane], left[last, lane] + right[last, lane])
        last += 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill(layers: Layers, kinds: Kinds, grid: Grid, least: _Ints, table: _Reals) -> None:
    """Fill the table of all segments, for all levels.

    Args:
        layers: what moves need.
        kinds: the class of schedules.
        grid: levels.
        least: bytes that a segment needs at least, shape (T, T + 1).
        table: least forward seconds of segments, ∞ where memory is short, shape (T·(T+1)/2,
            levels), a multiple of :data:`LANES`; written.
    """
    size = len(layers.tape)
    left = np.empty((BLOCK, size + 1, LANES))
    right = np.empty((size + 1, size, LANES))
    reach = np.empty((BLOCK, size + 1), np.int64)
    out = np.empty(LANES)
    for start in range(0, table.shape[1], LANES):
        highest = grid.unit * (start + LANES - 1) + grid.rest
        for top in range(size - 1, -1, -BLOCK):
            bottom = max(top - BLOCK + 1, 0)
            for x in range(bottom, top + 1):
                reach[x - bottom, x + 1] = layers.enter[x]
                for j in range(x + 2, size + 1):
                    reach[x - bottom, j] = max(reach[x - bottom, j - 1], layers.through[j - 1])
            for e in range(bottom + 1, size + 1):
                for x in range(min(top, e - 1), bottom - 1, -1):
                    row = table[row_of(size, x, e)]
                    run = layers.before[e] - layers.before[x]
                    if start and row[start - 1] <= run * _SATURATED:
                        out[:] = row[start - 1]
                    else:
                        out[:] = np.inf
                        if least[x, e] <= highest:
                            _recorded(out, start, x, e, layers, kinds, grid, table)
                            _split(
                                out, start, x, e, reach[x - bottom], left[x - bottom], right[e],
                                layers, grid,
                            )  # fmt: skip
                    row[start : start + LANES] = out
                    for lane in range(LANES):
                        left[x - bottom, e, lane] = run + out[lane]
                    out[:] = np.inf
                    _from_current(out, start, x, e, 0, 0, 0.0, layers, kinds, grid, table)
                    right[e, x] = out
