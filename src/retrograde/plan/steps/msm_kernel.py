"""The dynamic program of :mod:`retrograde.plan.steps.msm`, compiled when this is first imported.

It is a module of its own so that importing the planner loads no compiler. Hulls, offsets and links
are those of :mod:`retrograde.plan.steps.hull_kernel`. A part is a row and its number of steps t. A
*window* is the interval of its splits that can be best.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrograde.plan.steps.hull_kernel import spread

__all__ = ["fill", "mark_candidates"]

_Ints = NDArray[np.int64]
_Reals = NDArray[np.float64]
_Marks = NDArray[np.uint8]

_NEVER = np.int64(2**61)  # more than any cost; the sum of two still fits 64 bits
_SLACK = 1e-12  # relative to a real bound: hundreds of times its rounding error


@njit(cache=True)  # type: ignore[untyped-decorator]
def _window(
    t: int, last: int, left: _Reals, right: _Reals, limit: float, state: _Ints
) -> tuple[int, int]:
    """Return the splits y ≤ last with left[y] + right[t−y] ≤ limit, both convex; (1, 0) if none.
    ``state``, updated, tells the next call, with a smaller t, where to look. It has the least y of
    the smallest sum, and the two answers."""
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
    """Write the lower bounds of a row and of the rows it leads to, for 0 … size − 1 steps. The rows
    of ``ceilings`` (4, ≥ size) and ``reals`` (6, ≥ size) are: own, state, β and α less. The last
    two of ``reals`` add y steps to the bound of a left part of y, or of y − 1, steps."""
    state, beta, alpha = links[row]
    others = np.array([row, state, beta, alpha if wide else -1])
    for i in range(4):
        if others[i] >= 0:
            spread(offsets, hull, others[i], ceilings[i], reals[i], size)
    for y in range(1, size):
        reals[4, y] = y + reals[0, y]
        reals[5, y] = y + reals[0, y - 1]


@njit(cache=True)  # type: ignore[untyped-decorator]
def mark_candidates(
    links: _Ints, wide: bool, offsets: _Ints, hull: tuple[_Ints, _Ints], excess: int, marks: _Marks
) -> tuple[_Ints, _Ints, int]:
    """Mark in ``marks`` (rows, length + 1) every part that a schedule of a marked part may need.
    The parts of such a schedule cost at most ``excess`` more than their bounds. Returns the least
    and the greatest number of marked steps of each row (1 and 0 for none), and the number of
    candidate splits."""
    rows, size = marks.shape
    ceilings, reals = np.empty((4, size), np.int64), np.empty((6, size))
    own = np.zeros(size + 1, np.int64)
    others = np.zeros((2, size + 1), np.int64)  # after a hidden state, after an internal state
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
        inside = 0  # windows of this row that cover t
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
            slack = limit * (1.0 + _SLACK)
            if t + ceilings[0, t - 1] <= limit:
                marks[row, t - 1] = 1
            if beta >= 0 and 1 + ceilings[2, t - 1] <= limit:
                marks[beta, t - 1] = 1
            if state >= 0:
                a, b = _window(t, t - 2, reals[4], reals[1], slack, store)
                if a <= b:
                    splits += b - a + 1
                    own[b] += 1
                    own[a - 1] -= 1
                    others[0, t - a] += 1
                    others[0, t - b - 1] -= 1
            if wide and alpha >= 0:
                later_low, b = _window(t, t - 1, reals[5], reals[3], slack, later)
                a = max(later_low, 2)
                if a <= b:
                    splits += b - a + 1
                    own[b - 1] += 1
                    own[a - 2] -= 1
                    others[1, t - a] += 1
                    others[1, t - b - 1] -= 1
        own[0] = 0
        for i, other in ((0, state), (1, alpha)):
            inside = 0
            for t in range(top, 0, -1):
                inside += others[i, t]
                if inside:
                    marks[other, t] = 1
            others[i, : top + 1] = 0
    return low, high, splits


@njit(cache=True)  # type: ignore[untyped-decorator]
def _least_sum(left: _Ints, right: _Ints) -> np.int64:
    """Return the least of left[i] + right[i]; contiguous, so that it is vectorised."""
    least = np.int64(_NEVER)
    for i in range(left.size):
        least = min(least, left[i] + right[i])
    return least


@njit(cache=True)  # type: ignore[untyped-decorator]
def _windows_of_row(
    span: tuple[int, int], marks: _Marks, excess: int, ceilings: _Ints, reals: _Reals,
    may_store: bool, may_record: bool, windows: _Ints,
) -> None:  # fmt: skip
    """Write the ``windows`` (4, size) of all marked parts of one row. They are the first and last
    split that stores, and the first and last that records. ``span`` is the least and the greatest
    number of marked steps."""
    low, high = span
    store, later = np.full(3, high), np.full(3, high)
    for t in range(high, low - 1, -1):
        windows[:, t] = 1, 0, 2, 0
        if not marks[t]:
            continue
        limit = (ceilings[0, t] + excess) * (1.0 + _SLACK)
        if may_store:
            # A last part of one step belongs in the working core: y ≤ t − 2.
            windows[0, t], windows[1, t] = _window(t, t - 2, reals[4], reals[1], limit, store)
        if may_record:
            a, b = _window(t, t - 1, reals[5], reals[3], limit, later)
            windows[2, t], windows[3, t] = max(a, 2), b


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill(
    links: _Ints, wide: bool, offsets: _Ints, hull: tuple[_Ints, _Ints], excess: int,
    marks: _Marks, low: _Ints, high: _Ints, places: _Ints, scale: int, table: _Ints,
) -> None:  # fmt: skip
    """Fill the marked parts by the recurrence, each over its windows only. ``excess`` to ``high``
    are those of :func:`mark_candidates`. ``places``, ``scale`` and the cells of ``table``, which
    are written, are those of :class:`retrograde.plan.steps.msm._Table`."""
    rows, size = marks.shape
    ceilings, reals = np.empty((4, size), np.int64), np.empty((6, size))
    left = np.empty(size, np.int64)  # y steps, Advance and Load, plus the left part
    stored = np.empty(size, np.int64)  # the right part after a Store, reversed
    recorded = np.empty(size, np.int64)  # the right part after a Record, reversed
    windows = np.empty((4, size), np.int64)
    for row in range(rows):
        top = high[row]
        if not top:
            continue
        state, beta, alpha = links[row]
        may_record = wide and alpha >= 0
        _bounds_of_row(row, top + 1, links, wide, offsets, hull, ceilings, reals)
        _windows_of_row(
            (low[row], top), marks[row], excess, ceilings, reals, state >= 0, may_record, windows
        )
        if state >= 0:
            for t in range(low[state], min(high[state], top) + 1):
                stored[top - t] = (table[places[state] + t] >> 1) + 2
        if may_record:
            for t in range(low[alpha], min(high[alpha], top) + 1):
                recorded[top - t] = (table[places[alpha] + t] + 1) >> 1
        for t in range(low[row], top + 1):
            if not marks[row, t]:
                continue
            shift, limit = top - t, ceilings[0, t] + excess
            other, first = _NEVER, _NEVER if t > 1 else np.int64(scale + 2)
            if t > 1 and t + ceilings[0, t - 1] <= limit:
                # Start again from the base, with the last step in the working core: no memory.
                other = left[t - 1] + scale + 2
            if t > 1 and beta >= 0 and 1 + ceilings[2, t - 1] <= limit:
                first = scale + ((table[places[beta] + t - 1] + 1) >> 1)
            a, b = windows[0, t], windows[1, t]
            other = min(other, _least_sum(left[a : b + 1], stored[shift + a : shift + b + 1]))
            a, b = windows[2, t], windows[3, t]
            found = _least_sum(left[a - 1 : b], recorded[shift + a : shift + b + 1])
            other = min(other, found + scale)
            value = min(2 * other + 1, 2 * first, _NEVER)
            table[places[row] + t] = value
            left[t] = (value >> 1) + scale * t + 2
