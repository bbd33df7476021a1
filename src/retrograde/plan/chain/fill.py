"""The table of a chain's plans, filled by kernels that compile when this is first imported.

It is a module of its own so that importing the planner loads no compiler. Level m of the table
stands for ``unit · m + rest`` bytes. Transient bytes are compared exactly, and never rounded. Kept
bytes lead from one level to a point between two others. The seconds are then interpolated
(``between``), so that small sizes count too, or taken from the higher level as a lower bound. Where
the bytes are enough but the lower level is not, it counts as twice as slow. Otherwise a fraction of
a level would be free there, however often it is used.

*Rows.* The rows of all segments that end at one e are adjacent, ordered by their first layer. Some
segments have no row: see :mod:`retrograde.plan.chain.segments`.

*Order.* Levels ascend in chunks of :data:`LANES`, which are adjacent and processed together. Within
a chunk, x descends in blocks of :data:`BLOCK`, and e ascends within a block. So the many right
parts that end at e are read from memory once for all x of a block. For every :data:`RUN`
neighbouring j, the least of each side is kept too. Where the sum of those two is no better than the
best found, in all lanes, those j are skipped. This loses nothing.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrograde.plan.chain.columns import Layers
from retrograde.plan.chain.segments import RUN, Cells

__all__ = ["LANES", "Grid", "Kinds", "Table", "fill"]

LANES = 32
BLOCK = 8

_SATURATED = 1 + 1e-13  # times the least seconds: within rounding of running nothing twice

_Ints = NDArray[np.int64]
_Reals = NDArray[np.float64]
_Side = tuple[_Reals, _Reals]


class Grid(NamedTuple):
    """How bytes are counted in levels: see the module's docstring."""

    unit: int
    rest: int
    between: bool


class Kinds(NamedTuple):
    """The class of schedules to choose from. ``stores``: hidden states may be stored. ``records``:
    internal states may be kept while later layers are worked on."""

    stores: bool
    records: bool


class Table(NamedTuple):
    """The least forward ``seconds`` of segments, shape (chunks of levels, rows, LANES). ∞ means
    that memory is short. ``kept`` and ``current`` (T, T + 1) are the bytes that a segment needs at
    least, from a kept and from a current first state. The inner loops of :func:`fill` take the
    parts one by one: passing the whole counts references and is nearly twice as slow."""

    layers: Layers
    kinds: Kinds
    grid: Grid
    cells: Cells
    kept: _Ints
    current: _Ints
    seconds: _Reals


@njit(cache=True)  # type: ignore[untyped-decorator]
def _lower(
    out: _Reals, start: int, row: int, paid: int, need: int, seconds: float, grid: Grid,
    table: _Reals,
) -> None:  # fmt: skip
    """Lower ``out`` by a way that keeps ``paid`` bytes, needs ``need``, and leads to a row's
    segment. ``out`` has the least seconds of LANES levels from ``start`` on, followed by scratch
    room for LANES + 1 numbers."""
    below = start - paid // grid.unit  # the level that the first lane leads to
    first = max(-below, -((grid.rest - need) // grid.unit) - start, 0)
    if first >= LANES:
        return
    cells = out[LANES:]  # begins one level lower
    chunk, offset = (below - 1) // LANES, (below - 1) % LANES
    if chunk >= 0:
        cells[: LANES - offset] = table[chunk, row, offset:]
    else:
        cells[: LANES - offset] = np.inf
    if chunk + 1 >= 0:
        cells[LANES - offset :] = table[chunk + 1, row, : offset + 1]
    part = (paid % grid.unit) / grid.unit if grid.between else 0.0
    if part == 0:
        for lane in range(first, LANES):
            value = seconds + cells[lane + 1]
            out[lane] = value if value < out[lane] else out[lane]
        return
    for lane in range(first, LANES):
        low, high = cells[lane], cells[lane + 1]
        value = seconds + high + part * (low - high if low < np.inf else high)
        out[lane] = value if value < out[lane] else out[lane]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _end(out: _Reals, start: int, need: int, seconds: float, grid: Grid) -> None:
    """As :func:`_lower`, for a way that leads to no segment."""
    first = max(-((grid.rest - need) // grid.unit) - start, 0)
    for lane in range(first, LANES):
        out[lane] = min(out[lane], seconds)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _from_current(
    out: _Reals, start: int, x: int, e: int, paid: int, need: int, seconds: float,
    layers: Layers, kinds: Kinds, grid: Grid, cells: Cells, least: _Ints,
    table: _Reals,
) -> None:  # fmt: skip
    """W: continue from state x, which is current and not held; ``paid`` other bytes are held."""
    while True:
        if kinds.stores:
            kept = paid + layers.state[x]
            needed = max(need, kept + least[x, e])
            _lower(out, start, cells.row[e] + x, kept, needed, seconds, grid, table)
            if layers.keeps_input[x]:
                return  # recording first holds state x too
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
            needed = max(need, kept + least[x, e])
            _lower(out, start, cells.row[e] + x, kept, needed, seconds, grid, table)
            return


@njit(cache=True)  # type: ignore[untyped-decorator]
def _recorded(
    out: _Reals, start: int, x: int, e: int,
    layers: Layers, kinds: Kinds, grid: Grid, cells: Cells, least: _Ints,
    table: _Reals,
) -> None:  # fmt: skip
    """Q3: from state x, which the caller keeps, record layer x."""
    if not kinds.records and e > x + 1:
        return
    need = max(layers.record[x] + layers.gradient[e], layers.back[x])
    paid = layers.tape[x]
    seconds = layers.before[x + 1] - layers.before[x]
    if e == x + 1:
        _end(out, start, need, seconds, grid)
    elif layers.keeps_output[x]:
        row = cells.row[e] + x + 1
        paid += layers.state[x + 1]
        need = max(need, paid + least[x + 1, e])
        _lower(out, start, row, paid, need, seconds, grid, table)
    else:
        _from_current(
            out, start, x + 1, e, paid, need, seconds, layers, kinds, grid, cells, least, table
        )


@njit(cache=True)  # type: ignore[untyped-decorator]
def _run_lower(out: _Reals, left: _Reals, right: _Reals, first: int, last: int) -> None:
    """Lower ``out`` to the least of left[j] + right[j] for first ≤ j < last, in every lane."""
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
def _may_lower(out: _Reals, left: _Reals, right: _Reals) -> bool:
    """Return whether left + right is below ``out`` in any lane."""
    count = 0
    for lane in range(LANES):
        count += left[lane] + right[lane] < out[lane]
    return count > 0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _best_split(out: _Reals, left: _Side, right: _Side, first: int, last: int, guess: int) -> int:
    """Q1: lower ``out`` to the least of left[j] + right[j] for first ≤ j < last, in every lane. It
    tries the run ``guess`` first and returns the run that lowered ``out`` last."""
    if last <= first:
        return guess
    low, high = first // RUN, (last - 1) // RUN
    guess = min(max(guess, low), high)
    begin = guess
    _run_lower(out, left[0], right[0], max(begin * RUN, first), min(begin * RUN + RUN, last))
    for run in range(low, high + 1):
        if run != begin and _may_lower(out, left[1][run], right[1][run]):
            _run_lower(out, left[0], right[0], max(run * RUN, first), min(run * RUN + RUN, last))
            guess = run
    return guess


@njit(cache=True)  # type: ignore[untyped-decorator]
def _split(
    out: _Reals, start: int, x: int, e: int, needed: _Ints, left: _Side, right: _Side, guess: int,
    layers: Layers, grid: Grid, cells: Cells,
) -> int:  # fmt: skip
    """Q1 for all j that can be reached; ``needed`` is the bytes for running layers x … j − 1.

    The sides begin at the first x of column e.
    """
    gradient, base = layers.gradient[e], cells.first[e]
    lowest = grid.unit * start + grid.rest - gradient
    near = min(e, cells.stop[x])
    last = near
    while last > x + 1 and needed[last - 1] > lowest:
        last -= 1
    guess = _best_split(out, left, right, x + 1 - base, last - base, guess)
    highest = lowest + grid.unit * (LANES - 1)
    far = np.searchsorted(cells.ends, near) if near < e else len(cells.ends)
    while True:  # the j whose need lies within these levels, and those outside the band
        if last < near:
            j = last
            last += 1
        elif far < len(cells.ends) and cells.ends[far] < e:
            j = cells.ends[far]
            far += 1
        else:
            return guess
        if needed[j] > highest:
            return guess
        first = max(-((lowest - needed[j]) // grid.unit), 0)
        for lane in range(first, LANES):
            out[lane] = min(out[lane], left[0][j - base, lane] + right[0][j - base, lane])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _note(side: _Side, at: int, values: _Reals, more: float) -> None:
    """Enter one part into a side, and into the minimum of its run."""
    whole, runs = side[0][at], side[1][at // RUN]
    for lane in range(LANES):
        value = more + values[lane]
        whole[lane] = value
        runs[lane] = value if value < runs[lane] else runs[lane]


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill(filled: Table) -> None:
    """Fill ``filled.seconds`` for all its segments and levels."""
    layers, kinds, grid, cells, least, _, table = filled
    size, first = len(layers.tape), cells.first
    runs = size // RUN + 1
    lefts, least_lefts = np.empty((BLOCK, size + 1, LANES)), np.empty((BLOCK, runs, LANES))
    rights, least_rights = np.empty(table.shape[1:]), np.empty((cells.run[size] + runs, LANES))
    needed, guesses = np.empty((BLOCK, size + 1), np.int64), np.zeros(BLOCK, np.int64)
    space = np.empty(2 * LANES + 1)
    out = space[:LANES]
    for chunk in range(len(table)):
        start = chunk * LANES
        highest = grid.unit * (start + LANES - 1) + grid.rest
        least_rights[:] = np.inf
        for top in range(size - 1, -1, -BLOCK):
            bottom = max(top - BLOCK + 1, 0)
            least_lefts[:] = np.inf
            for x in range(bottom, top + 1):
                _running_bytes(x, layers, needed[x - bottom])
            for e in range(bottom + 1, size + 1):
                if first[e] > top:
                    continue
                base, begin = first[e], first[e] // RUN
                right = rights[cells.row[e] + base :], least_rights[cells.run[e] + begin :]
                for x in range(min(top, e - 1), max(bottom, base) - 1, -1):
                    block = x - bottom
                    row, seconds = cells.row[e] + x, layers.before[e] - layers.before[x]
                    if chunk and table[chunk - 1, row, LANES - 1] <= seconds * _SATURATED:
                        out[:] = table[chunk - 1, row, LANES - 1]
                    else:
                        out[:] = np.inf
                        if least[x, e] <= highest:
                            _recorded(space, start, x, e, layers, kinds, grid, cells, least, table)
                            left = lefts[block, base:], least_lefts[block, begin:]
                            guesses[block] = _split(
                                out, start, x, e, needed[block], left, right, guesses[block],
                                layers, grid, cells,
                            )  # fmt: skip
                    table[chunk, row] = out
                    _note((lefts[block], least_lefts[block]), e, out, seconds)
                    out[:] = np.inf
                    _from_current(
                        space, start, x, e, 0, 0, 0.0, layers, kinds, grid, cells, least, table
                    )
                    _note(right, x - base, out, 0.0)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _running_bytes(x: int, layers: Layers, needed: _Ints) -> None:
    """Write the bytes that running the layers x … j − 1 needs, for all j."""
    needed[x + 1] = layers.enter[x]
    for j in range(x + 2, len(needed)):
        needed[j] = max(needed[j - 1], layers.through[j - 1])
