"""The inner loops of :mod:`retrograde.plan.mixed`, compiled by numba when this is first imported.

Kept apart so that importing the planner loads no compiler. The machine code is cached beside this
file, so only the first import on a machine takes seconds. What the loops compute, and why that is
exact, is said in :mod:`retrograde.plan.mixed`.

A *hull* is given by its vertices (steps, cost), those of all rows after one another; ``offsets``
says where each row begins. ``links`` has for each row those with a state, with β and with α less
memory, or −1, and for enough memory itself in the place of β; shape (rows, 3).
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["fill", "hulls", "nearest", "proven", "reach"]

_Ints = NDArray[np.int64]
_Reals = NDArray[np.float64]
_Marks = NDArray[np.uint8]

_NEVER = np.int64(2**61)  # dearer than anything; two of them still fit 64 bits
_SLACK = 0.01  # more than any rounding of a real bound, less than a step
_NEAR = 64  # splits to try on either side of the best real one
_CORE, _RECORD, _STORE, _WIDE = 0, 1, 2, 3  # the branches of the recurrence


@njit(cache=True)  # type: ignore[untyped-decorator]
def _room(values: _Ints, size: int) -> _Ints:
    """The same values with room for one more than ``size``."""
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
    """Go along one branch's sum of two hulls, up to a slope, and add its vertices to ``points``.

    Args:
        chain: steps and cost where it stands, its next edge of the row's own hull (each of its
            slopes one more) and of another row's; updated.
        ends: where those two hulls end.
        steepest: the slope to stop at.
        length: no more steps than this are of interest.
        hull: steps and costs of all vertices.
        points: where to write.
        size: how many there are already.
    """
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
    """Extend a hull by points, as far as its edges are no steeper than ``steepest``."""
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
    """End a hull at its first vertex from ``length`` on, and that near it, on the same line."""
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
    """A convex lower bound of C(·, m) for every row, as vertices.

    Args:
        length: the largest number of steps.
        links: as in the module's text, rows in the order of their memory.
        wide: whether internal states after the first step are recorded too (eq. 10 at y > 1).
        most: vertices at most; no more rows are begun beyond.

    Returns:
        Offsets (rows + 1), steps and costs of the vertices. Where there are more than ``most``, the
        last offset is −1.
    """
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
        if beta == row:  # enough for all
            hull[0][size], hull[1][size] = length, length
            offsets[row + 1], size = size + 1, size + 1
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
def _draw(steps: _Ints, costs: _Ints, t: int, ceiling: _Ints, real: _Reals, size: int) -> None:
    """Write the values of one edge after ``t``, rounded up and not, below ``size``.

    Args:
        steps: its two ends.
        costs: its two ends.
        t: where it begins in the arrays; its steps follow.
        ceiling: written.
        real: written.
        size: of the arrays that is of interest.
    """
    run, rise = steps[1] - steps[0], costs[1] - costs[0]
    whole, part = rise // run, rise % run
    value, over = costs[0], np.int64(0)  # over: of 1/run, how much the rounded value is too much
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
def _spread(
    offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, ceiling: _Ints, real: _Reals, size: int
) -> None:
    """The bound of one row at 0 … size − 1 steps, rounded up and not."""
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
    """The bound of a branch that splits between two rows, rounded up, from ``start`` steps on."""
    a, b = offsets[row], offsets[other]
    t, c = start, start
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
        _spread(offsets, hull, row, mine, real, size)
        open_at = mine[1:] != mine[:-1] + np.arange(1, size)  # the last step in the working core
        if beta >= 0:
            _spread(offsets, hull, beta, other, real, size)
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
def _window(
    t: int, last: int, left: _Reals, right: _Reals, limit: float, state: _Ints
) -> tuple[int, int]:
    """The splits y ≤ last with left[y] + right[t−y] ≤ limit, a convex function; (1, 0) if none.

    Args:
        t: steps; from call to call it falls.
        last: the largest split.
        left: convex.
        right: convex.
        limit: for the sum.
        state: the least y of the last call where the sum was smallest, and its two answers; where
            to look next. Updated.
    """
    if last < 1:
        return 1, 0
    best, low, high = min(state[0], last), state[1], state[2]
    value = left[best] + right[t - best]
    while best > 1 and left[best - 1] + right[t - best + 1] <= value:
        best -= 1
        value = left[best] + right[t - best]
    state[0] = best
    if value > limit:
        return 1, 0
    low = min(low, best)
    while low > 1 and left[low - 1] + right[t - low + 1] <= limit:
        low -= 1
    while left[low] + right[t - low] > limit:
        low += 1
    high = max(min(high, last), best)
    while high < last and left[high + 1] + right[t - high - 1] <= limit:
        high += 1
    while left[high] + right[t - high] > limit:
        high -= 1
    state[1], state[2] = low, high
    return low, high


@njit(cache=True)  # type: ignore[untyped-decorator]
def _bounds_of_row(
    row: int, size: int, links: _Ints, wide: bool, offsets: _Ints, hull: tuple[_Ints, _Ints],
    ceilings: _Ints, reals: _Reals,
) -> None:  # fmt: skip
    """What a row and those it leads to cost at least: own, state, β, α less; and the left parts.

    Args:
        row: which.
        size: lengths 0 … size − 1.
        links: as in the module's text.
        wide: as in :func:`hulls`.
        offsets: of the hulls.
        hull: their vertices.
        ceilings: shape (4, ≥ size), written.
        reals: shape (6, ≥ size), written; the last two rows are y steps and then a left part of y,
            or of y − 1, steps.
    """
    state, beta, alpha = links[row]
    others = np.array([row, state, beta, alpha if wide else -1])
    for i in range(4):
        if others[i] >= 0:
            _spread(offsets, hull, others[i], ceilings[i], reals[i], size)
    for y in range(1, size):
        reals[4, y] = y + reals[0, y]
        reals[5, y] = y + reals[0, y - 1]


@njit(cache=True)  # type: ignore[untyped-decorator]
def reach(
    links: _Ints, wide: bool, offsets: _Ints, hull: tuple[_Ints, _Ints], excess: int, marks: _Marks
) -> tuple[_Ints, _Ints, int]:
    """Mark every part that may belong to a schedule within ``excess`` steps of the bound.

    Args:
        links: as in the module's text.
        wide: as in :func:`hulls`.
        offsets: of the hulls.
        hull: their vertices.
        excess: what each part may cost more than its bound.
        marks: shape (rows, length + 1), 1 where asked for; updated.

    Returns:
        The least and the greatest number of steps that is marked in each row (1 and 0 where none
        is), and how many splits there are to look at.
    """
    rows, size = marks.shape
    ceilings, reals = np.empty((4, size), np.int64), np.empty((6, size))
    own, others = np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
    low, high = np.ones(rows, np.int64), np.zeros(rows, np.int64)
    splits = 0
    store, later = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for row in range(rows - 1, -1, -1):
        top = size - 1
        while top > 0 and not marks[row, top]:
            top -= 1
        if not top:
            continue
        high[row] = top
        state, beta, alpha = links[row]
        _bounds_of_row(row, top + 1, links, wide, offsets, hull, ceilings, reals)
        store[:], later[:] = top, top
        inside = 0  # windows that reach over t, in this row
        for t in range(top, 0, -1):
            inside += own[t]
            own[t] = 0
            if inside:
                marks[row, t] = 1
            if not marks[row, t]:
                continue
            low[row] = t
            if t == 1:
                continue
            limit = ceilings[0, t] + excess
            if t + ceilings[0, t - 1] <= limit:
                marks[row, t - 1] = 1
            if beta >= 0 and 1 + ceilings[2, t - 1] <= limit:
                marks[beta, t - 1] = 1
            if state >= 0:
                a, b = _window(t, t - 2, reals[4], reals[1], limit + _SLACK, store)
                if a <= b:
                    splits += b - a + 1
                    own[b] += 1
                    own[a - 1] -= 1
                    others[t - a] += 1
                    others[t - b - 1] -= 1
            if wide and alpha >= 0:
                later_low, b = _window(t, t - 1, reals[5], reals[3], limit + _SLACK, later)
                a = max(later_low, 2)
                if a <= b:
                    splits += b - a + 1
                    own[b - 1] += 1
                    own[a - 2] -= 1
                    for z in range(t - b, t - a + 1):
                        marks[alpha, z] = 1
        own[0] = 0
        inside = 0
        for t in range(top, 0, -1):
            inside += others[t]
            others[t] = 0
            if inside:
                marks[state, t] = 1
        others[0] = 0
    return low, high, splits


@njit(cache=True)  # type: ignore[untyped-decorator]
def _least_sum(left: _Ints, right: _Ints) -> np.int64:
    """The least of left[i] + right[i]; contiguous, so that it runs in vector registers."""
    least = np.int64(_NEVER)
    for i in range(left.size):
        least = min(least, left[i] + right[i])
    return least


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill(
    links: _Ints, wide: bool, offsets: _Ints, hull: tuple[_Ints, _Ints], excess: int,
    marks: _Marks, low: _Ints, high: _Ints, places: _Ints, scale: int, table: _Ints,
) -> None:  # fmt: skip
    """Fill the marked cells by the recurrence, each over the splits that can be best only.

    Args:
        links: as in the module's text.
        wide: as in :func:`hulls`.
        offsets: of the hulls.
        hull: their vertices.
        excess: as :func:`reach` was given it.
        marks: what it marked.
        low: what it returned.
        high: likewise.
        places: row and t have their cell at ``places[row] + t``.
        scale: one forward step; one action is 1.
        table: written; twice the packed cost and actions, and 1 more where no cheapest schedule
            begins with a ``Record``.
    """
    rows, size = marks.shape
    ceilings, reals = np.empty((4, size), np.int64), np.empty((6, size))
    left = np.empty(size, np.int64)  # y steps, Advance and Load, then the left part
    stored = np.empty(size, np.int64)  # the right part after a Store, reversed
    recorded = np.empty(size, np.int64)  # the right part after a Record, reversed
    windows = np.empty((4, size), np.int64)
    store, later = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for row in range(rows):
        top = high[row]
        if not top:
            continue
        state, beta, alpha = links[row]
        _bounds_of_row(row, top + 1, links, wide, offsets, hull, ceilings, reals)
        store[:], later[:] = top, top
        for t in range(top, low[row] - 1, -1):
            if marks[row, t]:
                limit = ceilings[0, t] + excess + _SLACK
                if state >= 0:
                    windows[0, t], windows[1, t] = _window(
                        t, t - 2, reals[4], reals[1], limit, store
                    )
                if wide and alpha >= 0:
                    windows[2, t], windows[3, t] = _window(
                        t, t - 1, reals[5], reals[3], limit, later
                    )
        if state >= 0:
            for t in range(low[state], min(high[state], top) + 1):
                if marks[state, t]:
                    stored[top - t] = (table[places[state] + t] >> 1) + 2
        if wide and alpha >= 0:
            for t in range(low[alpha], min(high[alpha], top) + 1):
                if marks[alpha, t]:
                    recorded[top - t] = (table[places[alpha] + t] + 1) >> 1
        for t in range(low[row], top + 1):
            if not marks[row, t]:
                continue
            other, first = np.int64(_NEVER), np.int64(_NEVER)
            limit_steps = ceilings[0, t] + excess
            if t == 1:
                first = np.int64(scale + 2)
            else:
                if t + ceilings[0, t - 1] <= limit_steps:
                    # Redo from the base, the last step in the working core: no room needed.
                    other = left[t - 1] + scale + 2
                if beta >= 0 and 1 + ceilings[2, t - 1] <= limit_steps:
                    first = scale + ((table[places[beta] + t - 1] + 1) >> 1)
                if state >= 0:
                    a, b = windows[0, t], windows[1, t]
                    if a <= b:
                        shift = top - t
                        found = _least_sum(left[a : b + 1], stored[shift + a : shift + b + 1])
                        other = min(other, found)
                if wide and alpha >= 0:
                    a, b = max(windows[2, t], 2), windows[3, t]
                    if a <= b:
                        shift = top - t
                        found = _least_sum(left[a - 1 : b], recorded[shift + a : shift + b + 1])
                        other = min(other, found + scale)
            value = min(2 * other + 1, 2 * first, _NEVER)
            table[places[row] + t] = value
            left[t] = (value >> 1) + scale * t + 2


@njit(cache=True)  # type: ignore[untyped-decorator]
def _edge(offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, t: int) -> int:
    """The vertex before t steps."""
    low, high = offsets[row], offsets[row + 1] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if hull[0][middle] <= t:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True)  # type: ignore[untyped-decorator]
def _at_least(offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, t: int) -> int:
    """The bound of a row at t steps, rounded up."""
    i = _edge(offsets, hull, row, t)
    run, rise = hull[0][i + 1] - hull[0][i], hull[1][i + 1] - hull[1][i]
    return hull[1][i] - (-rise * (t - hull[0][i]) // run)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _best_split(
    offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, other: int, t: int, taken: int
) -> tuple[int, int]:
    """The cheapest of the splits near the best real one, by the rounded-up bounds: (cost, y).

    ``taken`` is 1 where the split takes a step of its own, which is recorded.
    """
    low, high = 1 + taken, t - 1
    while low < high:
        y = (low + high) // 2
        i, j = _edge(offsets, hull, row, y - taken), _edge(offsets, hull, other, t - y - 1)
        own = 1 + (hull[1][i + 1] - hull[1][i]) / (hull[0][i + 1] - hull[0][i])
        if own < (hull[1][j + 1] - hull[1][j]) / (hull[0][j + 1] - hull[0][j]):
            low = y + 1
        else:
            high = y
    best, at = np.int64(_NEVER), low
    for y in range(max(1 + taken, low - _NEAR), min(t - 1, low + _NEAR) + 1):
        cost = y + _at_least(offsets, hull, row, y - taken) + _at_least(offsets, hull, other, t - y)
        if cost <= best:
            best, at = cost, y
    return best, at


@njit(cache=True)  # type: ignore[untyped-decorator]
def nearest(
    links: _Ints, wide: bool, offsets: _Ints, hull: tuple[_Ints, _Ints], row: int, t: int
) -> tuple[int, int]:
    """The branch, and its split, whose parts have the least rounded-up bounds.

    Args:
        links: as in the module's text.
        wide: as in :func:`hulls`.
        offsets: of the hulls.
        hull: their vertices.
        row: of the part.
        t: its steps, at least 2.

    Returns:
        0 for the last step in the working core, 1 for the first step recorded, 2 for a hidden state
        stored, 3 for a later step recorded; and y.
    """
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
