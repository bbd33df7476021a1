"""The table of :func:`retrograde.plan.call_planner.fastest`, filled by a kernel that compiles when
this is first imported. Bytes are counted in levels, and what is held in parts of them.
"""

import numpy as np
from numpy.typing import NDArray

from retrograde.compiler import compiled

_Ints = NDArray[np.int64]
_Reals = NDArray[np.float64]
_Row = NDArray[np.float32]


@compiled
def _lower(row: _Row, behind: _Row, seconds: np.float32, need: int, shift: float) -> None:
    """Lower a row, from level ``need`` on, to that of what follows with ``shift`` levels less, plus
    some seconds. A part of a level is interpolated, where both sides have a plan."""
    by = int(shift)
    part = np.float32(shift - by)
    for m in range(max(need, by), len(row)):
        high = behind[m - by]
        if part > 0:
            low = behind[m - by - 1] if m > by else np.float32(np.inf)
            high = high + part * (low - high) if low < np.inf else low
        row[m] = min(row[m], seconds + high)


@compiled
def fill(
    after: _Reals, first: _Ints, back: _Ints, more: _Reals, keeps: _Ints, dropped: _Ints,
    forward: _Reals, base: _Reals, extra: _Ints, runs: _Ints, until: _Ints, start: _Ints,
    offset: _Ints, noted: _Ints, waits: _Ints, inputs: bool, tapes: bool, best: NDArray[np.float32],
) -> None:  # fmt: skip
    """Fill ``best``, of shape (2, rows, levels), by the recurrence.

    The first index says whether the input is held already. ``after``, ``first`` and ``back``, of
    shape (2, calls, ways), are what a way holds, and its peaks. ``more`` (3, calls, ways) are the
    seconds of a way outside groups, in one, and at its end. ``keeps`` and ``dropped`` are flags.
    ``base`` (2, calls) is what a group holds of its first input, and ``extra`` what that takes more
    where it is held as bits. ``forward`` and ``noted`` are sums over the calls before. ``runs``
    (ranges) are peaks of running calls in turn. ``until`` is the last end of a group, and ``start``
    the first call of the ranges with an end. Calls i … k − 1 are range ``offset[k] + i``. ``waits``
    is the gradient at each call's end. ``inputs`` and ``tapes`` are those of
    :class:`~retrograde.plan.call_planner.MayKeep`.
    """
    _, count, ways = more.shape
    levels = best.shape[2]
    group = np.empty(levels, np.float32)
    for k in range(1, count + 1):
        outer = k == count
        wait = 0 if outer else waits[k - 1]
        for i in range(k - 1, start[k] - 1, -1):
            here = offset[k] + i
            group[:] = np.inf
            for j in range(i + 2, min(k, until[i] + 1)):
                shift = noted[j] - noted[i] if outer else 0
                need = shift + extra[i] + runs[offset[j] + i] + wait
                seconds = np.float32(0.0 if outer else forward[j] - forward[i])
                left, right = best[int(extra[i] == 0), offset[j] + i], best[0, offset[k] + j]
                for m in range(max(0, need), levels):
                    group[m] = min(group[m], seconds + left[m - shift] + right[m - shift])
            for held in range(2):
                row = best[held, here]
                row[:] = np.inf
                for w in range(ways):
                    if not (inputs or held if dropped[i, w] else tapes or i + 1 == k):
                        continue
                    runs_first = i + 1 < k or outer or not dropped[i, w]
                    need = max(back[held, i, w], first[held, i, w] + wait if runs_first else 0)
                    if i + 1 < k:
                        taken = np.float32(more[0 if outer else 1, i, w])
                        behind = best[keeps[i, w], here + 1]
                        _lower(row, behind, taken, need, after[held, i, w])
                        continue
                    total = np.float32(more[0 if outer else 2, i, w])
                    for m in range(max(need, 0), levels):
                        row[m] = min(row[m], total)
                if not (inputs or held):
                    continue
                _lower(row, group, np.float32(0.0), 0, base[held, i])
