"""The fastest plan for calls in a row that fits a memory budget.

A call is kept in one of several *ways*: whole, lean, or dropped and run again. Calls in a row may
also form a *group*. A group holds its first input alone. Backward, it runs forward once more, and
its parts then follow a plan of their own.

Legend: ``F(i, k, m)`` is the least additional time to backpropagate calls i … k−1 with m bytes,
once they ran forward. The input of call i has ``x_i`` bytes. A way w holds h_w bytes besides
its input and its output. It may keep either; what two calls keep is held once. Without that::

    F(i, k, m) = min over ways w:        t_w + F(i+1, k, m − x_i − h_w)               if m ≥ need_w
               , min over i+1 < j < k:   u(i, j) + F(i, j, m − x_i) + F(j, k, m − x_i)

Where no group runs again, u is 0, since the calls ran in the forward pass. A group that ends at k
would gain nothing, since nothing is held after it. The least peak ``P(i, k)`` has the same form,
with maxima.

Complexity: O(n² (ways + n) · levels) additions in a compiled loop. Known limit: bytes are counted
in levels, so a plan may leave some of the budget unused. Its peak is found exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CallSizes", "Part", "Way", "fastest", "kept_whole", "least", "peak_of", "seconds_of"]

_CELLS = 2 * 10**7  # of the table: there are fewer levels for many calls
_MOST_LEVELS = 1000
_BEYOND = 16  # one level in so many lies beyond the budget: its plan may still be within


@dataclass(frozen=True)
class Way:
    """A way to keep a call for its backward pass.

    Attributes:
        held_bytes: what it holds until then, without its input and its output.
        first_bytes: its peak in the forward pass, with what it holds and its output.
        backward_bytes: its peak in the backward pass, with what it held.
        seconds: its time beyond that of the first way.
        again_seconds: the same if the call is kept so when a group runs again.
        keeps_input: whether it holds its input.
        keeps_output: whether it holds its output, the next call's input.
        dropped: whether it holds nothing, and runs again.
    """

    held_bytes: int
    first_bytes: int
    backward_bytes: int
    seconds: float = 0.0
    again_seconds: float = 0.0
    keeps_input: bool = True
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
        left_bytes: what it leaves in attributes.
        turns: whether it hands on a gradient whose memory is not in order: where the given one's
            is, and where it is not.
        turned_bytes: what the backward pass takes more in the second case.
        hands_on: whether its result shares memory with what it is given.
        handed_bytes: of that, what the call before made.
        backward_seconds: the time of its backward pass, and what recording it takes longer.
        gradient_bytes: of the gradient of its output, which is held while a group runs again.
        apart_bytes: of the memory of a gradient that it hands on, beyond the gradient's own.
    """

    input_bytes: int
    output_bytes: int
    forward_bytes: int
    forward_seconds: float
    ways: tuple[Way, ...]
    noted_bytes: int = 0
    left_bytes: int = 0
    turns: tuple[bool, ...] = (False, False)
    turned_bytes: int = 0
    hands_on: bool = False
    handed_bytes: int = 0
    backward_seconds: float = 0.0
    gradient_bytes: int = 0
    apart_bytes: int = 0

    def held_back(self, waits: int, copied: int = 0) -> "CallSizes":
        """Return the sizes if the given gradient takes more bytes, or has to be copied."""
        ways = (replace(w, backward_bytes=w.backward_bytes + waits + copied) for w in self.ways)
        return replace(self, ways=tuple(ways), gradient_bytes=self.gradient_bytes + waits)


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
    """Return the peak bytes of a plan, without the first input and the last output, which are the
    caller's."""
    return _left(calls) + _peak(calls, parts, grouped=False)


def _left(calls: Sequence[CallSizes]) -> int:
    return sum(call.left_bytes for call in calls)


def _peak(calls: Sequence[CallSizes], parts: Sequence[Part], *, grouped: bool) -> int:
    peak = held = 0
    waits = calls[parts[-1].stop - 1].gradient_bytes if grouped else 0
    is_held = True  # whether the input of a part is held already
    bases: list[int] = []
    for part in parts:
        call = calls[part.start]
        given = 0 if is_held else call.input_bytes
        if part.parts:
            noted = sum(calls[k].noted_bytes for k in range(part.start, part.stop))
            held += given + (0 if grouped else noted)
            bases.append(held)
            peak = max(peak, held + waits + _runs(calls, part.start, part.stop))
            is_held = False
            continue
        way = call.ways[part.way]
        if part is not parts[-1] or not grouped or not way.dropped:
            peak = max(peak, held + waits + given + way.first_bytes)
        held += given if way.keeps_input else 0
        bases.append(held)
        held += _after(call, way)
        is_held = way.keeps_output
    for part, base in zip(parts, bases, strict=True):
        if part.parts:
            peak = max(peak, base + _peak(calls, part.parts, grouped=True))
        else:
            peak = max(peak, base + calls[part.start].ways[part.way].backward_bytes)
    return peak


def _runs(calls: Sequence[CallSizes], start: int, stop: int) -> int:
    """Return the peak of running calls one after the other without a graph."""
    return max(
        calls[k].forward_bytes + (calls[k].input_bytes if k > start else 0)
        for k in range(start, stop)
    )


def seconds_of(calls: Sequence[CallSizes], parts: Sequence[Part]) -> float:
    """Return the time of a plan beyond ordinary backpropagation's."""
    return _seconds(calls, parts, grouped=False)


def _seconds(calls: Sequence[CallSizes], parts: Sequence[Part], *, grouped: bool) -> float:
    total = 0.0
    for part in parts:
        way = calls[part.start].ways[part.way]
        if grouped and (part.parts or way.dropped) and part is not parts[-1]:
            total += sum(calls[k].forward_seconds for k in range(part.start, part.stop))
        if part.parts:
            total += _seconds(calls, part.parts, grouped=True)
        else:
            total += way.seconds if way.dropped or not grouped else way.again_seconds
    return total


class _Sums:
    """What both recurrences read of the calls."""

    def __init__(self, calls: Sequence[CallSizes]) -> None:
        n = len(calls)
        self.seconds = [0.0, *accumulate(call.forward_seconds for call in calls)]
        self.noted = [0, *accumulate(call.noted_bytes for call in calls)]
        self.runs = np.zeros((n + 1, n + 1), np.int64)
        for i in range(n):
            for j in range(i + 1, n + 1):
                more = calls[j - 1].input_bytes if j - 1 > i else 0
                self.runs[i, j] = max(self.runs[i, j - 1], calls[j - 1].forward_bytes + more)


def least(calls: Sequence[CallSizes]) -> tuple[int, tuple[Part, ...]]:
    """Return the least peak of any plan, and a plan that has it.

    Example:
        >>> ways = Way(8, 9, 12), Way(0, 2, 12, 1.0, dropped=True)
        >>> least([CallSizes(1, 1, 2, 1.0, ways)] * 4)[0]
        13
    """
    sums, n = _Sums(calls), len(calls)
    # By whether the input is held already; a group or a way that does not keep its input needs it.
    best = np.full((2, n + 1, n + 1), np.inf)
    choice = np.zeros((2, n + 1, n + 1), np.int64)
    best[:, range(n + 1), range(n + 1)] = 0
    noted = np.array(sums.noted)
    for k in range(1, n + 1):
        outer = k == n
        waits = 0 if outer else calls[k - 1].gradient_bytes
        for i in range(k - 1, -1, -1):
            call, js = calls[i], np.arange(i + 2, k)
            own = (noted[js] - noted[i]) * outer
            inner = np.maximum(waits + sums.runs[i, js], best[1, i, js])
            groups = own + np.maximum(inner, best[0, js, k])
            for is_held in (0, 1):
                given = 0 if is_held else call.input_bytes
                found = []
                for way in call.ways:
                    runs = i + 1 < k or outer or not way.dropped
                    first = waits + given + way.first_bytes if runs else 0
                    base = given if way.keeps_input else 0
                    after = _after(call, way)
                    behind = best[int(way.keeps_output), i + 1, k] if i + 1 < k else -after
                    found.append(max(first, base + way.backward_bytes, base + after + behind))
                at = int(np.argmin(found))
                best[is_held, i, k], choice[is_held, i, k] = found[at], -at
                if len(js) and given + groups.min() < best[is_held, i, k]:
                    best[is_held, i, k] = given + groups.min()
                    choice[is_held, i, k] = js[groups.argmin()]

    def walk(i: int, k: int) -> tuple[Part, ...]:
        parts, is_held = [], 1
        while i < k:
            at = int(choice[is_held, i, k])
            if at <= 0:
                parts.append(Part(i, i + 1, -at))
                is_held = int(calls[i].ways[-at].keeps_output)
                i += 1
            else:
                parts.append(Part(i, at, 0, walk(i, at)))
                i, is_held = at, 0
        return tuple(parts)

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
    found = _search(calls, budget)
    return parts if found is None else found


def _search(calls: Sequence[CallSizes], budget: int) -> tuple[Part, ...] | None:
    """Return a plan by the first recurrence, or None if rounding leaves none."""
    from retrograde.plan.call_tables import cell, fill

    sums, n = _Sums(calls), len(calls)
    room = budget - _left(calls)
    size = max(1, -(-room // min(_MOST_LEVELS, max(50, _CELLS // (n * n)))))
    levels = room // size + 1
    levels += levels // _BEYOND if size > 1 else 0

    def up(nbytes: Any) -> Any:
        return -(-nbytes // size)

    def column(of: Callable[[CallSizes, Way], Any]) -> NDArray[Any]:
        return np.array([[of(call, way) for way in call.ways] for call in calls])

    given = np.array([call.input_bytes for call in calls])
    # By whether the input is held already: what comes on top of a way's own bytes.
    on_top = np.stack([np.repeat(given[:, None], len(calls[0].ways), 1), column(lambda *_: 0)])
    kept = on_top * column(lambda _, way: way.keeps_input)
    after = kept + column(_after)
    # Rounded so that sums over calls are right within a level: then nothing is lost for many calls.
    after = np.diff(np.cumsum(after, 1) // size, axis=1, prepend=0)
    steps = np.cumsum(given) // size
    table = (
        after,
        up(on_top + column(lambda _, way: way.first_bytes)),
        up(kept + column(lambda _, way: way.backward_bytes)),
        np.stack([column(_seconds_at[place]) for place in ("outside", "inside", "last")]),
        column(lambda _, way: int(way.keeps_output)),
        column(lambda _, way: int(way.dropped)),
        np.array(sums.seconds),
        np.diff(steps, prepend=0),
        up(sums.runs[:n]),
        np.array(sums.noted) // size,
        up(np.array([call.gradient_bytes for call in calls])),
    )
    best = np.empty((2, cell(n, n), levels), np.float32)
    choice = np.empty(best.shape, np.int16)
    fill(*table, best, choice)
    steps, noted = table[7], table[9]

    def walk(i: int, k: int, room: int) -> tuple[Part, ...]:
        parts, is_held = [], 1
        while i < k:
            at = int(choice[is_held, cell(i, k), room])
            if at <= 0:
                parts.append(Part(i, i + 1, -at))
                room -= int(after[is_held, i, -at])
                i, is_held = i + 1, int(calls[i].ways[-at].keeps_output)
            else:
                room -= 0 if is_held else int(steps[i])
                room -= int(noted[at] - noted[i]) if k == n else 0
                parts.append(Part(i, at, 0, walk(i, at, room)))
                i, is_held = at, 0
        return tuple(parts)

    for level in range(levels - 1, -1, -1):
        if not np.isfinite(best[1, cell(0, n), level]):
            return None
        parts = walk(0, n, level)
        if peak_of(calls, parts) <= budget:
            return parts
    return None


_seconds_at: dict[str, Callable[[CallSizes, Way], float]] = {  # of a way outside groups, and in one
    "outside": lambda _, way: way.seconds,
    "inside": lambda call, way: (
        call.forward_seconds + way.seconds if way.dropped else way.again_seconds
    ),
    "last": lambda _, way: way.seconds if way.dropped else way.again_seconds,
}


def _after(call: CallSizes, way: Way) -> int:
    """Return what a call holds after its forward pass, besides its input."""
    return way.held_bytes + (call.output_bytes if way.keeps_output else 0)
