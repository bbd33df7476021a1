"""The fastest plan for calls in a row that fits a memory budget.

A call is kept in one of several *ways*: whole, lean, or dropped and run again. Calls in a row may
also form a *group*. A group holds its first input alone. Backward, it runs forward once more, and
its parts then follow a plan of their own.

Legend: ``F(i, k, m)`` is the least additional time to backpropagate calls i … k−1 with m bytes
beyond the input of call i, once they ran forward. ``x_j`` are the bytes of the input of call j::

    F(i, k, m) = min over ways w:        t_w + F(i+1, k, m − h_w − x_{i+1})       if need_w ≤ m
               , min over i+1 < j < k:   u(i, j) + F(i, j, m) + F(j, k, m − x_j)  if runs(i, j) ≤ m

A group that ends at k would gain nothing, since nothing is held after it. The least peak ``P(i,
k)`` has the same form, with maxima.

Complexity: O(n² (ways + n) · levels) additions, in NumPy. Known limit: bytes are rounded up to
levels, so a plan may leave some of the budget unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

__all__ = ["CallSizes", "Part", "Way", "fastest", "kept_whole", "least", "peak_of", "seconds_of"]

_CELLS = 4 * 10**7  # of the table: there are fewer levels for many calls
_MOST_LEVELS = 1000


@dataclass(frozen=True)
class Way:
    """A way to keep a call for its backward pass.

    Attributes:
        held_bytes: what it holds until then, without its input and its output.
        first_bytes: its peak in the forward pass, with what it holds and its output.
        backward_bytes: its peak in the backward pass, with what it held.
        seconds: its time beyond that of the first way.
        keeps_output: whether it holds its output too, the next call's input.
        dropped: whether it holds nothing, and runs again.
    """

    held_bytes: int
    first_bytes: int
    backward_bytes: int
    seconds: float = 0.0
    keeps_output: bool = False
    dropped: bool = False


@dataclass(frozen=True)
class CallSizes:
    """Bytes and seconds of one call. The first way is ordinary backpropagation's.

    Attributes:
        input_bytes: of its input.
        output_bytes: of its output.
        forward_bytes: its peak without a graph, with its output.
        forward_seconds: the time of its forward pass.
        ways: in which it may be kept.
        noted_bytes: what it notes to run again, such as random states.
    """

    input_bytes: int
    output_bytes: int
    forward_bytes: int
    forward_seconds: float
    ways: tuple[Way, ...]
    noted_bytes: int = 0


@dataclass(frozen=True)
class Part:
    """A call that is kept in a way, or a group of calls with parts of its own."""

    start: int
    stop: int
    way: int = 0
    parts: tuple["Part", ...] = ()


def kept_whole(calls: Sequence[CallSizes]) -> tuple[Part, ...]:
    """Return ordinary backpropagation's plan."""
    return tuple(Part(i, i + 1) for i in range(len(calls)))


def peak_of(calls: Sequence[CallSizes], parts: Sequence[Part]) -> int:
    """Return the peak bytes of a plan beyond the first input; the last output is not counted
    after the forward pass, since the caller gets it."""
    return _peak(calls, parts, grouped=False)


def _peak(calls: Sequence[CallSizes], parts: Sequence[Part], *, grouped: bool) -> int:
    peak = held = 0
    before: list[int] = []
    for part in parts:
        last = part is parts[-1]
        if part.parts and not grouped:
            held += sum(calls[k].noted_bytes for k in range(part.start, part.stop))
        before.append(held)
        if part.parts:
            peak = max(peak, held + _runs(calls, part.start, part.stop))
        else:
            way = calls[part.start].ways[part.way]
            peak = max(peak, held + (0 if last and grouped else way.first_bytes))
            held += way.held_bytes
        held += _next_bytes(calls, part, last)
    for part, base in zip(parts, before, strict=True):
        if part.parts:
            peak = max(peak, base + _peak(calls, part.parts, grouped=True))
        else:
            peak = max(peak, base + calls[part.start].ways[part.way].backward_bytes)
    return peak


def _next_bytes(calls: Sequence[CallSizes], part: Part, last: bool) -> int:
    """Return the bytes of the state after a part, as far as it is held."""
    call = calls[part.stop - 1]
    if last:
        keeps = not part.parts and call.ways[part.way].keeps_output
        return call.output_bytes if keeps else 0
    return call.output_bytes


def _runs(calls: Sequence[CallSizes], start: int, stop: int) -> int:
    """Return the peak of running calls one after the other without a graph."""
    return max(
        calls[k].forward_bytes + (calls[k].input_bytes if k > start else 0)
        for k in range(start, stop)
    )


def seconds_of(calls: Sequence[CallSizes], parts: Sequence[Part]) -> float:
    """Return the time of a plan beyond ordinary backpropagation's."""
    total = 0.0
    for part in parts:
        if not part.parts:
            total += calls[part.start].ways[part.way].seconds
            continue
        total += seconds_of(calls, part.parts)
        total += sum(calls[k].forward_seconds for k in range(part.start, part.stop - 1))
        if part.parts[-1].stop - part.parts[-1].start == 1:
            call = calls[part.stop - 1]
            if not call.ways[part.parts[-1].way].dropped:
                total += call.forward_seconds
    return total


class _Rows:
    """What both recurrences read of the calls."""

    def __init__(self, calls: Sequence[CallSizes]) -> None:
        self.calls, n = calls, len(calls)
        self.after = [call.output_bytes for call in calls]  # x_{i+1}
        self.noted = [0, *accumulate(call.noted_bytes for call in calls)]
        seconds = [0.0, *accumulate(call.forward_seconds for call in calls)]
        self.seconds = np.array(seconds)
        self.runs = np.zeros((n + 1, n + 1), np.int64)
        for i in range(n):
            peak = 0
            for j in range(i + 1, n + 1):
                call = calls[j - 1]
                peak = max(peak, call.forward_bytes + (call.input_bytes if j - 1 > i else 0))
                self.runs[i, j] = peak

    def group_seconds(self, i: int, j: int) -> float:
        """The forward pass of a group, when its backward pass begins."""
        return float(self.seconds[j] - self.seconds[i])

    def last(self, call: CallSizes, way: Way) -> float:
        """What the last call of a group saves: dropped, it runs once, not twice."""
        return call.forward_seconds if way.dropped else 0.0


def least(calls: Sequence[CallSizes]) -> tuple[int, tuple[Part, ...]]:
    """Return the least peak of any plan, and a plan that has it.

    Example:
        >>> way = Way(8, 9, 12), Way(0, 2, 12, 1.0, dropped=True)
        >>> least([CallSizes(1, 1, 2, 1.0, way)] * 4)[0]
        14
    """
    rows, n = _Rows(calls), len(calls)
    best = np.full((n + 1, n + 1), np.inf)
    choice = np.zeros((n + 1, n + 1), np.int64)
    best[range(n + 1), range(n + 1)] = 0
    x = np.array([0, *rows.after], float)  # x[j]: the input of call j
    for k in range(1, n + 1):
        for i in range(k - 1, -1, -1):
            for number, way in enumerate(calls[i].ways):
                after = rows.after[i] if i + 1 < k or way.keeps_output else 0
                first = way.first_bytes if i + 1 < k or k == n else 0
                behind = way.held_bytes + after + best[i + 1, k] if i + 1 < k else 0
                peak = max(first, way.backward_bytes, behind)
                if peak < best[i, k]:
                    best[i, k], choice[i, k] = peak, -number
            js = np.arange(i + 2, k)
            if len(js):
                noted = np.array(rows.noted)[js] - rows.noted[i] if k == n else 0
                inner = np.maximum(best[i, js], rows.runs[i, js]) + noted
                peaks = np.maximum(inner, x[js] + noted + best[js, k])
                at = int(peaks.argmin())
                if peaks[at] < best[i, k]:
                    best[i, k], choice[i, k] = peaks[at], js[at]

    def walk(i: int, k: int) -> tuple[Part, ...]:
        found = []
        while i < k:
            at = int(choice[i, k])
            if at <= 0:
                found.append(Part(i, i + 1, -at))
                i += 1
            else:
                found.append(Part(i, at, 0, walk(i, at)))
                i = at
        return tuple(found)

    parts = walk(0, n)
    return peak_of(calls, parts), parts


def fastest(calls: Sequence[CallSizes], budget: int) -> tuple[Part, ...]:
    """Return the fastest plan whose peak is within a budget.

    Raises:
        ValueError: the budget is less than the least peak.
    """
    whole = kept_whole(calls)
    if peak_of(calls, whole) <= budget:
        return whole
    smallest, parts = least(calls)
    if smallest > budget:
        raise ValueError(f"{smallest} bytes are the least peak, not {budget}")
    n = len(calls)
    levels = int(min(_MOST_LEVELS, max(50, 2 * _CELLS // (n * n + 1)), max(budget, 1)))
    found = _search(calls, budget, levels)
    return parts if found is None else found


def _search(calls: Sequence[CallSizes], budget: int, levels: int) -> tuple[Part, ...] | None:
    rows, n = _Rows(calls), len(calls)
    size = max(budget, 1) / levels

    def up(nbytes: float) -> int:
        return int(-(-nbytes // size))

    m = np.arange(levels + 1)
    best: dict[tuple[int, int], NDArray[np.float64]] = {}
    choice: dict[tuple[int, int], NDArray[np.int16]] = {}

    def shift(f: NDArray[np.float64], by: int) -> NDArray[np.float64]:
        if by > levels:
            return np.full(levels + 1, np.inf)
        return np.concatenate([np.full(by, np.inf), f[: levels + 1 - by]]) if by else f

    def solve(i: int, k: int) -> None:
        """Fill F(i, k, ·); calls that end at n are the outermost, and ran forward."""
        outer, call = k == n, calls[i]
        table, codes = [], []
        for number, way in enumerate(call.ways):
            t = way.seconds
            if i + 1 < k:
                held = up(way.held_bytes + rows.after[i])
                f = t + shift(best[i + 1, k], held)
                need = max(way.backward_bytes, way.first_bytes)
            else:
                f = np.full(levels + 1, t if outer else t - rows.last(call, way))
                need = max(way.backward_bytes, way.first_bytes if outer else 0)
            table.append(np.where(m >= up(need), f, np.inf))
            codes.append(-number)
        for j in range(i + 2, k):
            noted = up(rows.noted[j] - rows.noted[i]) if outer else 0
            inner = np.where(m >= up(rows.runs[i, j]), best[i, j], np.inf)
            rest = shift(best[j, k], up(rows.after[j - 1]))
            table.append(shift(rows.group_seconds(i, j) + inner + rest, noted))
            codes.append(j)
        stack = np.stack(table)
        at = stack.argmin(0)
        best[i, k] = stack.min(0)
        choice[i, k] = np.array(codes, np.int16)[at]

    for k in range(1, n + 1):
        for i in range(k - 1, -1, -1):
            solve(i, k)

    def walk(i: int, k: int, room: int) -> tuple[Part, ...]:
        found = []
        while i < k:
            at = int(choice[i, k][room])
            if at <= 0:
                found.append(Part(i, i + 1, -at))
                if i + 1 < k:
                    room -= up(calls[i].ways[-at].held_bytes + rows.after[i])
                i += 1
            else:
                room -= up(rows.noted[at] - rows.noted[i]) if k == n else 0
                found.append(Part(i, at, 0, walk(i, at, room)))
                room -= up(rows.after[at - 1])
                i = at
        return tuple(found)

    if not np.isfinite(best[0, n][levels]):
        return None
    return walk(0, n, levels)
