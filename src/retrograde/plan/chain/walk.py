"""The least bytes of each segment, and the best next move from exact bytes.

It is compiled as :mod:`retrograde.plan.chain.fill` is.

*The minimum* is the same recurrence with the largest need instead of the sum of seconds: in
bytes, without a table of levels.

*The walk.* At each segment it considers the moves that leave every segment its minimum. It takes
the move whose segments are fastest by the table, with the bytes that are really left. So it always
ends and never needs more than it was given. Where levels are exact it attains the table's seconds.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrograde.plan.chain.columns import Layers
from retrograde.plan.chain.fill import Kinds, Table
from retrograde.plan.chain.segments import Cells

__all__ = ["minima", "walk"]

_FAR = np.int64(2**62)

_Ints = NDArray[np.int64]
_Part = tuple[Any, ...]  # first state, end, bytes, 1 where that state is kept
_Known = dict[_Part, int]


@njit(cache=True)  # type: ignore[untyped-decorator]
def minima(layers: Layers, kinds: Kinds, cells: Cells) -> tuple[_Ints, _Ints]:
    """Return the least bytes of each segment, shape (T, T + 1). The first array is for a first
    state that is kept and paid for, the second for one that is only current."""
    size = len(layers.tape)
    kept, current = np.full((size, size + 1), _FAR), np.full((size, size + 1), _FAR)
    reach = np.empty(size + 1, np.int64)
    for x in range(size - 1, -1, -1):
        state = layers.state[x]
        held = state if layers.keeps_input[x] else 0
        reach[x + 1] = layers.enter[x]
        for j in range(x + 2, size + 1):
            reach[j] = max(reach[j - 1], layers.through[j - 1])
        for e in range(x + 1, size + 1):
            if x < cells.first[e]:
                continue
            best = first = _FAR
            gradient = layers.gradient[e]
            if kinds.records or e == x + 1:
                need = layers.tape[x]
                if e == x + 1:
                    need = layers.back[x]
                elif layers.keeps_output[x]:
                    need += layers.state[x + 1] + kept[x + 1, e]
                else:
                    need += current[x + 1, e]
                need = max(need, layers.back[x])
                record = layers.record[x] + gradient
                best, first = max(need, record), max(held + need, state + record)
            for j in range(x + 1, min(e, cells.stop[x])):
                best = min(best, max(reach[j] + gradient, current[j, e], kept[x, j]))
            if cells.stop[x] < e:
                for j in cells.ends[np.searchsorted(cells.ends, cells.stop[x]) : -1]:
                    if j < e:
                        best = min(best, max(reach[j] + gradient, current[j, e], kept[x, j]))
            kept[x, e] = best
            current[x, e] = min(first, state + best) if kinds.stores else first
    return kept, current


@njit(cache=True)  # type: ignore[untyped-decorator]
def _estimate(x: int, e: int, room: int, table: Table) -> float:
    """Return the table's seconds of a segment with so many bytes; ∞ where they are too few."""
    layers, grid, cells, seconds = table.layers, table.grid, table.cells, table.seconds
    if room < table.kept[x, e]:
        return np.inf
    level = min((room - grid.rest) // grid.unit, len(seconds) * seconds.shape[2] - 1)
    if level >= 0 and x >= cells.first[e]:
        lanes, row = seconds.shape[2], cells.row[e] + x
        value: float = seconds[level // lanes, row, level % lanes]
        above = level + 1
        if grid.between and above < len(seconds) * lanes:
            high: float = seconds[above // lanes, row, above % lanes]
            part = (room - grid.rest) % grid.unit / grid.unit
            value = value + part * (high - value) if value < np.inf else high
        if value < np.inf:
            return value
    run: float = layers.before[e] - layers.before[x]
    return (e - x) * run  # recompute everything for every layer


@njit(cache=True)  # type: ignore[untyped-decorator]
def _after_current(x: int, e: int, room: int, table: Table) -> tuple[float, bool]:
    """Return the best seconds from state x, which is current, not held, and included in ``room``.
    The second result is whether to store the state first rather than to record layer x."""
    layers, kinds = table.layers, table.kinds
    best, stores, seconds, begin = np.inf, False, 0.0, x
    while True:
        if kinds.stores:
            value = seconds + _estimate(x, e, room - layers.state[x], table)
            if value < best:
                best, stores = value, x == begin
            if layers.keeps_input[x]:
                return best, stores
        need = layers.state[x] + layers.record[x] + layers.gradient[e]
        if layers.keeps_input[x]:
            room -= layers.state[x]
            need -= layers.state[x]
        if room < max(need, layers.back[x]) or not (kinds.records or e == x + 1):
            return best, stores
        room -= layers.tape[x]
        x += 1
        seconds += layers.before[x] - layers.before[x - 1]
        if x == e or layers.keeps_output[x - 1]:
            if x < e:
                seconds += _estimate(x, e, room - layers.state[x], table)
            return (seconds, False) if seconds <= best else (best, stores)
        if room < table.current[x, e]:
            return best, stores


@njit(cache=True)  # type: ignore[untyped-decorator]
def _best_move(x: int, e: int, room: int, table: Table) -> int:
    """Return the best move from the kept state x: the state to advance to, or x to record."""
    layers, kinds = table.layers, table.kinds
    best, move = np.inf, x
    need = max(layers.record[x] + layers.gradient[e], layers.back[x])
    if room >= need and (kinds.records or e == x + 1):
        best = layers.before[x + 1] - layers.before[x]
        rest = room - layers.tape[x]
        if e > x + 1 and layers.keeps_output[x]:
            rest -= layers.state[x + 1]
            best += _estimate(x + 1, e, rest, table)
        elif e > x + 1:
            if rest < table.current[x + 1, e]:
                best = np.inf
            else:
                best += _after_current(x + 1, e, rest, table)[0]
    reach = layers.enter[x]
    for j in range(x + 1, e):
        if reach + layers.gradient[e] > room:
            break
        reach = max(reach, layers.through[j])
        value = layers.before[j] - layers.before[x]
        value += _estimate(x, j, room, table)
        if value < best and room >= table.current[j, e]:
            value += _after_current(j, e, room, table)[0]
            if value < best:
                best, move = value, j
    return move


@njit(cache=True)  # type: ignore[untyped-decorator]
def _number(known: _Known, parts: list[_Part], moves: list[int], part: _Part, move: int) -> int:
    """Return the number of a part, which is entered if it is new."""
    if part not in known:
        known[part] = len(parts)
        parts.append(part)
        moves.append(move)
    return known[part]


@njit(cache=True)  # type: ignore[untyped-decorator]
def walk(room: int, table: Table) -> _Ints:
    """Return all distinct parts of the schedule for ``room`` bytes, one row each, shape (parts, 6).
    The whole is first. A row has the first state x, the state j to advance to, and the end of the
    layers recorded from j. The end is j where state j is stored. Then it has the numbers of the
    right and the left part, −1 for none, and a rank above those of both parts."""
    layers = table.layers
    one: Any = np.int64(1)  # gives all numbers of a part one type
    root = (one - 1, one * len(layers.tape), one * room, one)  # first, end, bytes, is it kept
    known, parts, moves = {root: 0}, [root], [-1]  # moves: −1 where not searched yet
    rows = [(0, 0, 0, 0, 0, 0) for _ in range(0)]
    while len(rows) < len(parts):
        x, e, rest, kept = parts[len(rows)]
        j, left, right, stop = x, -1, -1, -1
        if kept:
            j = moves[len(rows)]
            if j < 0:
                j = _best_move(x, e, rest, table)
        if j > x:
            left = _number(known, parts, moves, (x, j, rest, 1), -1)
        if j > x or not kept:  # nothing holds state j yet
            after = rest - layers.state[j]
            if _after_current(j, e, rest, table)[1]:
                move = _best_move(j, e, after, table)
                if move != j:
                    stop = j
                    right = _number(known, parts, moves, (j, e, after, 1), move)
            rest = after if layers.keeps_input[j] else rest
        if stop < 0:
            stop, rest = j + 1, rest - layers.tape[j]
            if e > stop and layers.keeps_output[j]:
                part = (stop, e, rest - layers.state[stop], 1)
                right = _number(known, parts, moves, part, -1)
            elif e > stop:
                right = _number(known, parts, moves, (stop, e, rest, 0), -1)
        rows.append((x, j, stop, right, left, 2 * (e - x) + 1 - kept))
    found = np.empty((len(rows), 6), np.int64)
    for k in range(len(rows)):
        for column in range(6):
            found[k, column] = rows[k][column]
    return found
