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

Bytes of F are counted in levels, and those of P are exact. A plan is read from both: of the moves
that leave enough by P, it takes the fastest by F. So levels never break a budget, and never miss
one that is enough. A plan may be slower than the fastest where levels are many bytes.

Complexity: O(n² (ways + n) · levels) additions in a compiled loop.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[np.int64]

_CELLS = 4 * 10**7  # of the table: there are fewer levels for many calls
_MOST_LEVELS = 1000
_ROUNDING = 1 - 1e-4  # sums of 32-bit numbers may be above what they stand for


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
        gradient_bytes: of the gradient of its output, and what its backward pass makes of it before
            it reads anything saved, which is held while a group runs again.
        apart_bytes: of the memory of a gradient that it hands on, beyond the gradient's own.
        begins: whether its input is the caller's, not the output of the call before. No group
            passes it.
    """

    input_bytes: int
    output_bytes: int
    forward_bytes: int
    forward_seconds: float
    ways: tuple[Way, ...]
    noted_bytes: int = 0
    left_bytes: int = 0
    reorders_gradient: tuple[bool, ...] = (False, False)
    reorder_bytes: int = 0
    aliases_input: bool = False
    handed_bytes: int = 0
    backward_seconds: float = 0.0
    gradient_bytes: int = 0
    gradient_slack_bytes: int = 0
    starts_row: bool = False

    def beside(self, more: int) -> "CallSizes":
        """Return the sizes if others keep some bytes from its forward pass until it goes back."""
        ways = (
            replace(w, held_bytes=w.held_bytes + more, backward_bytes=w.backward_bytes + more)
            for w in self.ways
        )
        return replace(self, ways=tuple(ways), noted_bytes=self.noted_bytes + more)

    def first_beside(self, more: int) -> "CallSizes":
        """Return the sizes if others keep some bytes while it first runs."""
        ways = (replace(way, first_bytes=way.first_bytes + more) for way in self.ways)
        return replace(self, ways=tuple(ways), forward_bytes=self.forward_bytes + more)

    def held_back(self, waits: int, copied: int = 0) -> "CallSizes":
        """Return the sizes if the given gradient takes more bytes, or has to be copied."""
        ways = (replace(w, backward_bytes=w.backward_bytes + waits + copied) for w in self.ways)
        return replace(self, ways=tuple(ways), gradient_bytes=self.gradient_bytes + waits)


class OutputLifetime(NamedTuple):
    """When a row's output is freed and when its gradient arrives, as indices of later rows. The
    gradient's memory may be ``slack`` times as large as the gradient."""

    first_run_after: int
    gradient_ready_before: int
    slack: float = 1.0

    def among(self, rows: Sequence[int]) -> "OutputLifetime":
        """Return the same where only some rows run."""
        return OutputLifetime(bisect_left(rows, self[0]), bisect_left(rows, self[1]), self.slack)


def one_after_the_other(
    rows: Sequence[Sequence[CallSizes]], waits: Sequence[OutputLifetime]
) -> list[CallSizes]:
    """Return the calls of several rows, which run in turn, and go back in the opposite order.

    The first input of all and the last output are the caller's.
    """
    calls: list[CallSizes] = []
    for number, row in enumerate(rows):
        outputs = [(rows[r][-1].gradient_bytes, waits[r]) for r in range(number)]
        ahead = sum(size for size, one in outputs if number < one.first_run_after)
        back = sum(int(size * one.slack) for size, one in outputs if number < one[1])
        own = [call.first_beside(ahead).held_back(back) for call in row]
        calls += [replace(own[0], starts_row=bool(calls)), *own[1:]]
        last = calls[-1].held_back(int(row[-1].gradient_bytes * (waits[number].slack - 1)))
        ways = (replace(w, held_bytes=_after(last, w), keeps_output=False) for w in last.ways)
        calls[-1] = replace(last, output_bytes=0, ways=tuple(ways))
    return calls


@dataclass(frozen=True)
class MayKeep:
    """What a plan may keep while it works on later calls. ``inputs``: the inputs of calls.
    ``tapes``: what a call holds that is not ``dropped``. Tensors held anyway may always be used."""

    inputs: bool = True
    tapes: bool = True


_ALL = MayKeep()


@dataclass(frozen=True)
class Part:
    """A call that is kept in a way, or a group of calls with parts of its own."""

    start: int
    stop: int
    way: int = 0
    parts: tuple["Part", ...] = ()

    def moved(self, by: int) -> "Part":
        """Return the same part of calls that have other numbers."""
        inside = tuple(part.moved(by) for part in self.parts)
        return Part(self.start + by, self.stop + by, self.way, inside)


def kept_whole(calls: Sequence[CallSizes]) -> tuple[Part, ...]:
    """Return ordinary backpropagation's plan."""
    return tuple(Part(i, i + 1) for i in range(len(calls)))


def peak_of(calls: Sequence[CallSizes], parts: Sequence[Part]) -> int:
    """Return the peak bytes of a plan, without the first input and the last output, which are the
    caller's."""
    return _left(calls) + _peak(calls, parts, grouped=False)


def held_of(calls: Sequence[CallSizes], parts: Sequence[Part]) -> int:
    """Return what the calls of a row hold after its forward pass, its first input aside."""
    held, is_held = 0, True
    for part in parts:
        call, way = calls[part.start], calls[part.start].ways[part.way]
        if part.parts:
            noted = sum(calls[k].noted_bytes for k in range(part.start, part.stop))
            held += noted + (0 if is_held else call.input_bytes)
            is_held = False
            continue
        held += _after(call, way) + (call.input_bytes if way.keeps_input and not is_held else 0)
        is_held = way.keeps_output
    return held


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


class _Moves:
    """What each first move of a plan for calls i … k − 1 takes, and the least peak of any plan.

    ``least`` (2, n + 1, n + 1) is P(i, k), by whether the input of call i is held already.
    """

    def __init__(self, calls: Sequence[CallSizes], kinds: MayKeep) -> None:
        self.calls, self.kinds, n = calls, kinds, len(calls)
        self.seconds = np.array([0.0, *accumulate(call.forward_seconds for call in calls)])
        self.noted = np.array([0, *accumulate(call.noted_bytes for call in calls)])
        self.runs = np.zeros((n, n + 1), np.int64)  # peaks of running calls in turn
        begin = [k for k in range(1, n) if calls[k].starts_row] + [n]
        self.until = np.array([next(k for k in begin if k > i) for i in range(n)])  # of a group
        for i in range(n):
            for j in range(i + 1, n + 1):
                more = calls[j - 1].input_bytes if j - 1 > i else 0
                self.runs[i, j] = max(self.runs[i, j - 1], calls[j - 1].forward_bytes + more)
        self.least = np.full((2, n + 1, n + 1), np.inf)
        for k in range(1, n + 1):
            for i in range(k - 1, -1, -1):
                for is_held in (0, 1):
                    ways = (peak for *_, peak in self.ways(i, k, is_held))
                    groups = self.groups(i, k, is_held)[2]
                    self.least[is_held, i, k] = min(*ways, groups.min(initial=np.inf), np.inf)

    def ways(self, i: int, k: int, is_held: int) -> Iterator[tuple[int, int, float]]:
        """Iterate over the ways of call i: a way, what it holds, and the least peak with it."""
        call, outer = self.calls[i], k == len(self.calls)
        waits = 0 if outer else self.calls[k - 1].gradient_bytes
        given = 0 if is_held else call.input_bytes
        for at, way in enumerate(call.ways):
            if not (self.kinds.inputs or is_held if way.dropped else
                    self.kinds.tapes or i + 1 == k):  # fmt: skip
                continue
            base = given if way.keeps_input else 0
            taken = base + _after(call, way)
            runs = i + 1 < k or outer or not way.dropped
            first = waits + given + way.first_bytes if runs else 0
            behind = taken + self.least[int(way.keeps_output), i + 1, k] if i + 1 < k else 0
            yield at, taken, max(first, base + way.backward_bytes, behind)

    def groups(self, i: int, k: int, is_held: int) -> tuple[_Ints, _Ints, NDArray[np.float64]]:
        """Return the ends of groups that begin with call i, what they hold, and least peaks."""
        outer, last = k == len(self.calls), min(k, self.until[i] + 1)
        js = np.arange(i + 2, last if self.kinds.inputs or is_held else 0)
        waits = 0 if outer else self.calls[k - 1].gradient_bytes
        taken = (0 if is_held else self.calls[i].input_bytes) + (
            self.noted[js] - self.noted[i]
        ) * outer
        inside = np.maximum(waits + self.runs[i, js], self.least[1, i, js])
        return js, taken, taken + np.maximum(inside, self.least[0, js, k])


class _Fastest:
    """F(i, k, m) for each level of m, by whether the input of call i is held already. Bytes are
    rounded to the next level, or down if it is a bound."""

    def __init__(self, moves: _Moves, room: int, *, is_bound: bool = False) -> None:
        from retrograde.plan.call_tables import cell, fill

        self.calls, self.moves, self.cell = moves.calls, moves, cell
        n, self.size = len(self.calls), level_bytes(self.calls, room)

        def column(of: Callable[[CallSizes, Way], Any]) -> NDArray[Any]:
            return np.array([[of(call, way) for way in call.ways] for call in self.calls])

        def levels(nbytes: Any) -> Any:
            return (nbytes + (0 if is_bound else self.size // 2)) // self.size

        def parts(nbytes: NDArray[Any]) -> Any:
            return np.floor(nbytes / self.size) if is_bound else nbytes / self.size

        given = column(lambda call, _: call.input_bytes)
        on_top = np.stack([given, 0 * given])  # by whether the input is held already
        kept = on_top * column(lambda _, way: way.keeps_input)
        dropped, seconds = column(lambda _, way: way.dropped), column(lambda _, way: way.seconds)
        last = np.where(dropped, seconds, column(lambda _, way: way.again_seconds))
        inside = last + dropped * column(lambda call, _: call.forward_seconds)
        self.more = np.stack([seconds, inside, last])  # outside groups, in one, and at its end
        self.best = np.empty((2, n * (n + 1) // 2, -(-room // self.size) + 1), np.float32)
        fill(
            parts(kept + column(_after)),
            levels(on_top + column(lambda _, way: way.first_bytes)),
            levels(kept + column(lambda _, way: way.backward_bytes)),
            self.more,
            column(lambda _, way: int(way.keeps_output)),
            dropped.astype(int),
            moves.seconds,
            parts(given[:, 0]),
            levels(moves.runs),
            moves.until,
            moves.noted // self.size,
            levels(np.array([call.gradient_bytes for call in self.calls])),
            moves.kinds.inputs,
            moves.kinds.tapes,
            self.best,
        )

    def seconds(self, i: Any, k: Any, is_held: bool, room: Any) -> Any:
        """Return F between two levels, for some ranges at once. What has none, by rounding, is
        taken as slow."""
        row, top, run = self.cell(i, k), self.best.shape[2] - 1, self.moves.seconds
        level = np.minimum(room // self.size, top)
        low, high = (self.best[int(is_held), row, at] for at in (level, np.minimum(level + 1, top)))
        high = np.where(np.isfinite(high), high, (k - i) * (run[k] - run[i]))
        low = np.where(np.isfinite(low), low, high)
        return low + (room / self.size - level) * (high - low)

    def plan(self, i: int, k: int, room: int) -> tuple[Part, ...]:
        """Return a plan for calls i … k − 1 within ``room`` bytes, the input of call i aside."""
        parts, is_held, outer = [], 1, k == len(self.calls)
        run = self.moves.seconds
        while i < k:
            call = self.calls[i]
            more = self.more[0 if outer else 1 if i + 1 < k else 2, i]
            options: list[tuple[float, int, int, int]] = []  # seconds, end, way (−1: group), bytes
            for at, taken, peak in self.moves.ways(i, k, is_held):
                if peak <= room:
                    behind = 0.0
                    if i + 1 < k:
                        behind = self.seconds(i + 1, k, call.ways[at].keeps_output, room - taken)
                    options.append((more[at] + behind, i + 1, at, taken))
            js, held, peaks = self.moves.groups(i, k, is_held)
            js, held = js[peaks <= room], held[peaks <= room]
            if len(js):
                totals = self.seconds(i, js, True, room - held)
                totals += self.seconds(js, k, False, room - held)
                totals += 0 if outer else run[js] - run[i]
                best = totals.argmin()
                options.append((totals[best], int(js[best]), -1, int(held[best])))
            _, stop, way, taken = min(options)
            room -= taken
            inside = self.plan(i, stop, room) if way < 0 else ()
            parts.append(Part(i, stop, max(way, 0), inside))
            i, is_held = stop, int(way >= 0 and call.ways[way].keeps_output)
        return tuple(parts)


def least(calls: Sequence[CallSizes], kinds: MayKeep = _ALL) -> int:
    """Return the least peak of any plan.

    Example:
        >>> ways = Way(8, 9, 12), Way(0, 2, 12, 1.0, dropped=True)
        >>> least([CallSizes(1, 1, 2, 1.0, ways)] * 4)
        13
    """
    return _left(calls) + int(_Moves(calls, kinds).least[1, 0, -1])


def fastest(calls: Sequence[CallSizes], budget: int, kinds: MayKeep = _ALL) -> tuple[Part, ...]:
    """Return the fastest plan whose peak is within a budget.

    Raises:
        ValueError: the budget is less than the least peak.
    """
    whole = kept_whole(calls)
    if kinds.tapes and peak_of(calls, whole) <= budget:
        return whole
    moves, room = _Moves(calls, kinds), budget - _left(calls)
    smallest = int(moves.least[1, 0, -1]) + budget - room
    if smallest > budget:
        raise ValueError(f"{smallest} bytes are the least peak, not {budget}")
    return _Fastest(moves, room).plan(0, len(calls), room)


def level_bytes(calls: Sequence[CallSizes], room: int) -> int:
    """Return the bytes of a level. If it is 1, :func:`fastest` is exact."""
    return max(1, -(-room // min(_MOST_LEVELS, max(50, _CELLS // len(calls) ** 2))))


def least_seconds(calls: Sequence[CallSizes], budget: int, kinds: MayKeep = _ALL) -> float:
    """Return a lower bound of what a plan within a budget takes beyond ordinary backpropagation."""
    table = _Fastest(_Moves(calls, kinds), budget - _left(calls), is_bound=True)
    return float(table.best[1, table.cell(0, len(calls)), -1]) * _ROUNDING


def _after(call: CallSizes, way: Way) -> int:
    """Return what a call holds after its forward pass, besides its input."""
    return way.held_bytes + (call.output_bytes if way.keeps_output else 0)
