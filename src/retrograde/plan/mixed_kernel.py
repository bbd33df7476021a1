"""The inner loops of :mod:`retrograde.plan.mixed`, compiled by numba when this is first imported.

Kept apart so that importing the planner loads no compiler. The machine code is cached beside this
file, so only the first import on a machine takes seconds.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["fill"]

_Table = NDArray[np.int64]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _least_sum(left: _Table, right: _Table) -> np.int64:
    """The least of left[i] + right[i]; contiguous, so that it runs in vector registers."""
    least = np.int64(2**62)
    for i in range(left.size):
        least = min(least, left[i] + right[i])
    return least


@njit(cache=True)  # type: ignore[untyped-decorator]
def fill(best: _Table, after_record: _Table, links: _Table, scale: int, wide: bool) -> None:
    """Fill both tables, row by row, by the recurrence of :mod:`retrograde.plan.mixed`.

    Args:
        best: C(t, m) packed with actions, shape (rows, length + 1), written.
        after_record: the same where a recorded step comes directly before, written.
        links: for each row those with a state, with β and with α less, or −1; shape (rows, 3).
        scale: one forward step; one action is 1.
        wide: look for internal states after the first step too (eq. 10 at y > 1).
    """
    rows, size = best.shape
    left = np.empty(size, np.int64)  # y steps, Advance and Load, then the left part
    stored = np.empty(size, np.int64)  # the right part after a Store, reversed
    recorded = np.empty(size, np.int64)  # the right part after a Record, reversed
    for row in range(rows):
        state, beta, alpha = links[row]
        if state >= 0:
            for t in range(1, size):
                stored[size - 1 - t] = best[state, t] + 2
        if wide and alpha >= 0:
            for t in range(1, size):
                recorded[size - 1 - t] = after_record[alpha, t]
        best[row, 0], best[row, 1] = 0, scale + 2
        after_record[row, 0], after_record[row, 1] = 0, scale + 2
        left[1] = 2 * scale + 4
        for t in range(2, size):
            # Redo from the base, the last step in the working core: no room needed.
            other = left[t - 1] + scale + 2
            shift = size - 1 - t
            if state >= 0 and t > 2:
                other = min(other, _least_sum(left[1 : t - 1], stored[shift + 1 : shift + t - 1]))
            if wide and alpha >= 0 and t > 2:
                # y runs from 2 to t−1; its left part has y−1 steps.
                found = _least_sum(left[1 : t - 1], recorded[shift + 2 : shift + t])
                other = min(other, found + scale)
            first = scale + after_record[beta, t - 1] if beta >= 0 else np.int64(2**62)
            best[row, t] = min(other, first)
            after_record[row, t] = min(other + 1, first)
            left[t] = best[row, t] + scale * t + 2
