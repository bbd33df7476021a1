"""The convex bound of MSM, compiled by numba when this is first imported.

A *hull* is its vertices (steps, cost). The vertices of all rows are in one array, and ``offsets``
has where each row begins. ``links``, shape (rows, 3), has for each row the rows with a state, with
β and with α less memory, or −1. A row of enough memory has itself instead of β. The machine
code is cached beside this file, so only the first import on a machine takes seconds.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["hulls", "nearest", "proven", "spread"]

_Ints = NDArray[np.int64]
_Reals = NDArray[np.float64]

_NEVER = np.int64(2**61)  # more than any cost
_NEAR = 64  # splits to try on either side of the best real-valued one
_CORE, _RECORD, _STORE, _WIDE = 0, 1, 2, 3  # the branches of the recurrence


@njit(cache=True)  # type: ignore[untyped-decorator]
def _room(values: _Ints, size: int) -> _Ints:
    """Return the values in an array with room for more than ``size`` of them."""
    if size < values.size:
        return values
    longer = np.empty(2 * values.size, np.int64)
    longer[: values.size] = values
    return longer


@njit(cache=True)  # type: ignore[untyped-decorator]
def _follow(
    chain: _Ints, ends: _Ints, steepest: int, length: int, hull: tuple[_Ints, _Ints],
    points: tuple[_Ints, _Ints], size: int,
) -> tuple[tuple[_Ints, _Ints], int]:  # fmt: skip
    """Add the vertices of one branch's sum of two hulls to ``points``, up to the slope
    ``steepest``. ``chain``, updated, is the position of the branch: steps, cost, and its next
    edges. One edge is of the row's own hull, whose slopes count one more, the other of another
    row's. ``ends`` is the end of each of the two hulls."""
    steps, costs = hull
    while True:
        points = _room(points[0], size), _room(points[1], size)
        points[0][size], points[1][size] = chain[0], chain[1]
        size += 1
        if chain[0] >= length:
            break
        own, other = False, False
        t, c, more_t, more_c = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        if chain[2] + 1 < ends[0]:
            t = steps[chain[2] + 1] - steps[chain[2]]
            c = costs[chain[2] + 1] - costs[chain[2]] + t
            own = c <= steepest * t
        if chain[3] + 1 < ends[1]:
            more_t = steps[chain[3] + 1] - steps[chain[3]]
            more_c = costs[chain[3] + 1] - costs[chain[3]]
            other = more_c <= steepest * more_t
        if own and not (other and more_c * t < c * more_t):
            chain[0], chain[1], chain[2] = chain[0] + t, chain[1] + c, chain[2] + 1
        elif other:
            chain[0], chain[1], chain[3] = chain[0] + more_t, chain[1] + more_c, chain[3] + 1
        else:
            break
    return points, size


@njit(cache=True)  # type: ignore[untyped-decorator]
def _wrap(
    hull: tuple[_Ints, _Ints], size: int, points: tuple[_Ints, _Ints], steepest: int
) -> tuple[tuple[_Ints, _Ints], int]:
    """Extend a hull by points, while its edges are no steeper than ``steepest``."""
    steps, costs = hull
    fixed = size - 1
    for i in np.argsort(points[0]):
        t, c = points[0][i], points[1][i]
        if t <= steps[fixed] or (t == steps[size - 1] and c >= costs[size - 1]):
            continue
        if t == steps[size - 1]:
            size -= 1
        while size - 1 > fixed:
            last_t, last_c = steps[size - 1] - steps[size - 2], costs[size - 1] - costs[size - 2]
            if last_c * (t - steps[size - 2]) < (c - costs[size - 2]) * last_t:
                break
            size -= 1
        steps, costs = _room(steps, size), _room(costs, size)
        steps[size], costs[size] = t, c
        size += 1
    while size - 1 > fixed and (
        costs[size - 1] - costs[size - 2] > steepest * (steps[size - 1] - steps[size - 2])
    ):
        size -= 1
    return (steps, costs), size


@njit(cache=True)  # type: ignore[untyped-decorator]
def _clip(hull: tuple[_Ints, _Ints], first: int, size: int, length: int) -> int:
    """End a hull at its first vertex from ``length`` on, moved close to it on the same line."""
    steps, costs = hull
    while size - 2 >= first and steps[size - 2] >= length:
        size -= 1
    t, c = steps[size - 1] - steps[size - 2], costs[size - 1] - costs[size - 2]
    a, b = t, c
    while b:
        a, b = b, a % b
    times = -(-(length - steps[size - 2]) // (t // a))
    steps[size - 1] = steps[size - 2] + times * (t // a)
    costs[size - 1] = costs[size - 2] + times * (c // a)
    return size


@njit(cache=True)  # type: ignore[untyped-decorator]
def hulls(length: int, links: _Ints, wide: bool, most: int) -> tuple[_Ints, _Ints, _Ints]:
    """Return a convex lower bound of C(·, m) for every row, in the order of their memory. The
    result is offsets (rows + 1), and the steps and costs of the vertices. ``wide`` adds the branch
    of eq. 10 at y > 1. No row is begun beyond ``most`` vertices; the last offset is −1 then."""
    rows = links.shape[0]
    offsets = np.zeros(rows + 1, np.int64)
    hull = np.empty(1024, np.int64), np.empty(1024, np.int64)
    points = np.empty(1024, np.int64), np.empty(1024, np.int64)
    chains, ends = np.zeros((4, 4), np.int64), np.zeros((4, 2), np.int64)
    others = np.full(4, -1, np.int64)
    size = 0
    for row in range(rows):
        if size > most:
            offsets[rows] = -1
            break
        hull = _room(hull[0], size + 1), _room(hull[1], size + 1)
        first, size = size, size + 1
        hull[0][first], hull[1][first] = 0, 0
        state, beta, alpha = links[row]
        if beta == row:  # enough memory for ordinary backpropagation
            hull[0][size], hull[1][size] = length, length
            offsets[row + 1], size = size + 1, size + 1
            continue
        if state < 0 and beta < 0:  # only the base fits: t(t+1)/2
            for t in range(1, length + 1):
                hull = _room(hull[0], size), _room(hull[1], size)
                hull[0][size], hull[1][size] = t, hull[1][size - 1] + t
                size += 1
            offsets[row + 1] = size
            continue
        others[1], others[2], others[3] = beta, state, alpha if wide else -1
        for branch in range(4):
            other = others[branch]
            chains[branch, :2] = 0 if branch == _STORE else 1
            chains[branch, 2] = first
            chains[branch, 3] = offsets[other] if other >= 0 else 0
            ends[branch, 1] = offsets[other + 1] if other >= 0 else 0
        slope = 0
        while hull[0][size - 1] < length:
            slope += 1
            count = 0
            for branch in range(4):
                if branch == _CORE or others[branch] >= 0:
                    ends[branch, 0] = size if branch != _RECORD else 0
                    points, count = _follow(
                        chains[branch], ends[branch], slope, length, hull, points, count
                    )
            hull, size = _wrap(hull, size, (points[0][:count], points[1][:count]), slope)
        size = _clip(hull, first, size, length)
        offsets[row + 1] = size
    return offsets, hull[0][:size].copy(), hull[1][:size].copy()


@njit(cache=True)  # type: ignore[untyped-decorator]
def _draw(steps: _Ints, costs: _Ints, t: np.int64, ceiling: _Ints, real: _Reals, size: int) -> None:
    """Write the values of one edge after ``t``, rounded up and not, below ``size``. ``steps`` and
    ``costs`` have the two ends of the edge."""
    run, rise = steps[1] - steps[0], costs[1] - costs[0]
    whole, part = rise // run, rise % run
    value, over = costs[0], np.int64(0)  # over: the excess of the rounded value, in 1/run
    share = 1.0 / run
    for i in range(1, min(run, size - 1 - t) + 1):
        value += whole
        over -= part
        if over < 0:
            value += 1
            over += run
        ceiling[t + i] = value
        real[t + i] = value - over * share


@njit(cache=True)  # type: ignore[untyped-decorator]
def spread(
    offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, ceiling: _Ints, real: _Reals, size: int
) -> None:
    """Write the bound of one row at 0 … size − 1 steps, rounded up and not."""
    ceiling[0], real[0] = 0, 0.0
    for i in range(offsets[row], offsets[row + 1] - 1):
        if hull[0][i] >= size:
            break
        _draw(hull[0][i : i + 2], hull[1][i : i + 2], hull[0][i], ceiling, real, size)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _spread_sum(
    offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, other: int, start: int,
    ceiling: _Ints, real: _Reals, size: int,
) -> None:  # fmt: skip
    """Write the rounded-up bound of a branch between two rows, from ``start`` steps on."""
    a, b = offsets[row], offsets[other]
    t, c = np.int64(start), np.int64(start)
    edge_t, edge_c = np.empty(2, np.int64), np.empty(2, np.int64)
    ceiling[start] = start
    while t < size - 1:
        own = a + 1 < offsets[row + 1]
        more = b + 1 < offsets[other + 1]
        if not own and not more:
            break
        run, rise = np.int64(0), np.int64(0)
        if own:
            run = hull[0][a + 1] - hull[0][a]
            rise = hull[1][a + 1] - hull[1][a] + run
        if more:
            more_run, more_rise = hull[0][b + 1] - hull[0][b], hull[1][b + 1] - hull[1][b]
            own = own and rise * more_run <= more_rise * run
            if not own:
                run, rise = more_run, more_rise
        edge_t[0], edge_t[1], edge_c[0], edge_c[1] = t, t + run, c, c + rise
        _draw(edge_t, edge_c, t, ceiling, real, size)
        t, c = t + run, c + rise
        if own:
            a += 1
        else:
            b += 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def proven(
    length: int, links: _Ints, wide: bool, offsets: _Ints, hull: tuple[_Ints, _Ints]
) -> bool:
    """Whether the rounded-up bound is C(t, m) in every row and for every number of steps."""
    size = length + 1
    mine, other, split = (
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )
    real = np.empty(size)
    for row in range(links.shape[0]):
        state, beta, alpha = links[row]
        if beta == row:
            continue
        spread(offsets, hull, row, mine, real, size)
        open_at = mine[1:] != mine[:-1] + np.arange(1, size)  # the last step in the working core
        if beta >= 0:
            spread(offsets, hull, beta, other, real, size)
            open_at &= mine[1:] != other[:-1] + 1
        if state >= 0:
            _spread_sum(offsets, hull, row, state, 0, split, real, size)
            open_at &= mine[1:] != split[1:]
        if wide and alpha >= 0:
            _spread_sum(offsets, hull, row, alpha, 1, split, real, size)
            open_at &= mine[1:] != split[1:]
        if open_at.any():
            return False
    return True


@njit(cache=True)  # type: ignore[untyped-decorator]
def _edge(offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, t: int) -> int:
    """Return the last vertex at or before t steps."""
    low, high = offsets[row], offsets[row + 1] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if hull[0][middle] <= t:
            low = middle
        else:
            high = middle
    vertex: int = low
    return vertex


@njit(cache=True)  # type: ignore[untyped-decorator]
def _at_least(offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, t: int) -> int:
    """Return the bound of a row at t steps, rounded up."""
    i = _edge(offsets, hull, row, t)
    run, rise = hull[0][i + 1] - hull[0][i], hull[1][i + 1] - hull[1][i]
    bound: int = hull[1][i] - (-rise * (t - hull[0][i]) // run)
    return bound


@njit(cache=True)  # type: ignore[untyped-decorator]
def _best_split(
    offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, other: int, t: int, taken: int
) -> tuple[int, int]:
    """Return the cheapest (cost, y) of the splits near the best real-valued one. Costs are the
    rounded-up bounds. ``taken`` is 1 where the split records a step of its own."""
    low, high = 1 + taken, t - 1
    while low < high:
        y = (low + high) // 2
        i, j = _edge(offsets, hull, row, y - taken), _edge(offsets, hull, other, t - y - 1)
        own = 1 + (hull[1][i + 1] - hull[1][i]) / (hull[0][i + 1] - hull[0][i])
        if own < (hull[1][j + 1] - hull[1][j]) / (hull[0][j + 1] - hull[0][j]):
            low = y + 1
        else:
            high = y
    best, at = int(_NEVER), low
    for y in range(max(1 + taken, low - _NEAR), min(t - 1, low + _NEAR) + 1):
        cost = y + _at_least(offsets, hull, row, y - taken) + _at_least(offsets, hull, other, t - y)
        if cost <= best:
            best, at = cost, y
    return best, at


@njit(cache=True)  # type: ignore[untyped-decorator]
def nearest(
    links: _Ints, wide: bool, offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, t: int
) -> tuple[int, int]:
    """Return the branch whose parts have the least rounded-up bounds, and its split y. t is at
    least 2. Branch 0 has the last step in the working core. Branch 1 records the first step, 2
    stores a hidden state, and 3 records a later step."""
    state, beta, alpha = links[row]
    goal = _at_least(offsets, hull, row, t)
    if beta >= 0 and 1 + _at_least(offsets, hull, beta, t - 1) == goal:
        return _RECORD, 1
    branch, at, least = _CORE, t, t + _at_least(offsets, hull, row, t - 1)
    if beta >= 0 and 1 + _at_least(offsets, hull, beta, t - 1) < least:
        branch, at, least = _RECORD, 1, 1 + _at_least(offsets, hull, beta, t - 1)
    if wide and alpha >= 0 and least > goal and t > 2:
        cost, y = _best_split(offsets, hull, row, alpha, t, 1)
        if cost < least:
            branch, at, least = _WIDE, y, cost
    if state >= 0 and least > goal:
        cost, y = _best_split(offsets, hull, row, state, t, 0)
        if cost < least:
            branch, at, least = _STORE, y, cost
    return branch, at
