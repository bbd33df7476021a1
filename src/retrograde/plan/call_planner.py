"""The fastest plan for calls in a row that fits a memory budget.

Legend: ``F(i, k, m)`` is the least additional time to backpropagate calls i … k−1 with m bytes,
once they ran forward. The input of call i has ``x_i`` bytes. A way w holds h_w bytes besides
its input and its output. It may keep either; what two calls keep is held once. Without that::

    F(i, k, m) = min over ways w:        t_w + F(i+1, k, m − x_i − h_w)               if m ≥ need_w
               , min over i+1 < j < k:   u(i, j) + F(i, j, m − x_i) + F(j, k, m − x_i)

Where x_i is held as bits, F(i, j, ·) begins without it. Where no group runs again, u is 0, since
the calls ran in the forward pass. A group that ends at k would gain nothing, since nothing is held
after it. The least peak ``P(i, k)`` has the same form, with maxima.

Bytes of F are counted in levels, and those of P are exact. A plan is read from both: of the moves
that leave enough by P, it takes the fastest by F. So levels never break a budget, and never miss
one that is enough. A plan may be slower than the fastest where levels are many bytes.

No group passes the start of a row. So n calls in rows of r each need r n / 2 ranges within rows,
and n that end with the last call.

Complexity: O(ranges · (ways + r) · levels) additions in a compiled loop.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrograde.plan.calls import CallSizes, Part, Way, after, kept_whole, left_bytes, peak_of

_Ints = NDArray[np.int64]

_CELLS = 4 * 10**7  # of the table: there are fewer levels for many calls
_MOST_LEVELS = 1000
_ROUNDING = 1 - 1e-4  # sums of 32-bit numbers may be above what they stand for


@dataclass(frozen=True)
class MayKeep:
    """What a plan may keep while it works on later calls. ``inputs``: the inputs of calls.
    ``tapes``: what a call holds that is not ``dropped``. Tensors held anyway may always be used."""

    inputs: bool = True
    tapes: bool = True


_ALL = MayKeep()


class _Moves:
    """What each first move of a plan for calls i … k − 1 takes, and the least peak of any plan.

    ``least`` is P(i, k), by whether the input of call i is held already, and by range. Ranges that
    end at k begin at ``start[k]`` or later; groups that begin at i end at ``until[i]`` or before.
    """

    def __init__(self, calls: tuple[CallSizes, ...], kinds: MayKeep) -> None:
        self.calls, self.kinds, n = calls, kinds, len(calls)
        self.seconds = np.array([0.0, *accumulate(call.forward_seconds for call in calls)])
        self.noted = np.array([0, *accumulate(call.noted_bytes for call in calls)])
        bounds = [*pairwise([0, *(k for k in range(1, n) if calls[k].starts_row), n])]
        self.until = np.array([end for begin, end in bounds for _ in range(begin, end)])
        self.start = np.array([0, *(begin for begin, end in bounds for _ in range(begin, end))])
        self.start[n] = 0
        ends = np.cumsum(np.arange(n + 1) - self.start)  # of ranges by their end, side by side
        self.offset = ends - np.arange(n + 1)
        self.runs = np.zeros(ends[n], np.int64)  # peaks of running calls in turn
        self.least = np.full((2, ends[n]), np.inf)
        for k in range(1, n + 1):
            last = calls[k - 1]
            for i in range(k - 1, self.start[k] - 1, -1):
                at = self.cell(i, k)
                if k <= self.until[i]:
                    before = self.runs[self.cell(i, k - 1)] if i < k - 1 else 0
                    input_bytes = last.input_bytes if i < k - 1 else 0
                    self.runs[at] = max(before, last.forward_bytes + input_bytes)
                for is_held in (0, 1):
                    ways = (peak for *_, peak in self.ways(i, k, is_held))
                    groups = self.groups(i, k, is_held)[3]
                    self.least[is_held, at] = min(*ways, groups.min(initial=np.inf), np.inf)

    @property
    def smallest(self) -> int:
        """The least peak of all calls."""
        return int(self.least[1, self.cell(0, len(self.calls))])

    def cell(self, i: Any, k: Any) -> Any:
        """Return the number of a range of calls i … k − 1."""
        return self.offset[k] + i

    def ways(self, i: int, k: int, is_held: int) -> Iterator[tuple[int, int, float]]:
        """Iterate over the ways of call i: a way, what it holds, and the least peak with it."""
        call, outer = self.calls[i], k == len(self.calls)
        waits = 0 if outer else self.calls[k - 1].gradient_bytes
        new_bytes = 0 if is_held else call.input_bytes
        for at, way in enumerate(call.ways):
            if not (self.kinds.inputs or is_held if way.dropped else
                    self.kinds.tapes or i + 1 == k):  # fmt: skip
                continue
            base = new_bytes if way.keeps_input else 0
            taken = base + after(call, way)
            runs = i + 1 < k or outer or not way.dropped
            first_peak = waits + new_bytes + way.first_bytes if runs else 0
            behind = -taken  # of the last call
            if i + 1 < k:
                behind = self.least[int(way.keeps_output), self.cell(i + 1, k)]
            yield at, taken, max(first_peak, base + way.backward_bytes, taken + behind)

    def groups(self, i: int, k: int, is_held: int) -> tuple[_Ints, _Ints, int, NDArray[np.float64]]:
        """Return the ends of groups that begin with call i, what they hold, what an input of bits
        takes more, and least peaks."""
        outer, last = k == len(self.calls), min(k, self.until[i] + 1)
        js = np.arange(i + 2, last if self.kinds.inputs or is_held else 0)
        waits = 0 if outer else self.calls[k - 1].gradient_bytes
        base, more = self.calls[i].group_bytes(is_held)
        taken = base + (self.noted[js] - self.noted[i]) * outer
        cells = self.cell(i, js)
        inside = np.maximum(waits + more + self.runs[cells], self.least[int(not more), cells])
        return js, taken, more, taken + np.maximum(inside, self.least[0, self.cell(js, k)])


_moves = lru_cache(4)(_Moves)  # the least is asked for before the fastest plan


class _Fastest:
    """F(i, k, m) for each level of m, by whether the input of call i is held already. Bytes are
    rounded to the next level, or down if it is a bound."""

    def __init__(self, moves: _Moves, room: int, *, is_bound: bool = False) -> None:
        from retrograde.plan.call_tables import fill

        self.calls, self.moves = moves.calls, moves
        ranges = moves.least.shape[1]
        self.size = level_bytes(ranges, room)

        def column(of: Callable[[CallSizes, Way], Any]) -> NDArray[Any]:
            return np.array([[of(call, way) for way in call.ways] for call in self.calls])

        def levels(nbytes: Any) -> Any:
            return (nbytes + (0 if is_bound else self.size // 2)) // self.size

        def parts(nbytes: NDArray[Any]) -> Any:
            return np.floor(nbytes / self.size) if is_bound else nbytes / self.size

        input_bytes = column(lambda call, _: call.input_bytes)
        on_top = np.stack([input_bytes, 0 * input_bytes])  # by whether the input is held already
        kept = on_top * column(lambda _, way: way.keeps_input)
        dropped, seconds = column(lambda _, way: way.dropped), column(lambda _, way: way.seconds)
        last = np.where(dropped, seconds, column(lambda _, way: way.again_seconds))
        inside = last + dropped * column(lambda call, _: call.forward_seconds)
        self.more = np.stack([seconds, inside, last])  # outside groups, in one, and at its end
        self.best = np.empty((2, ranges, -(-room // self.size) + 1), np.float32)
        fill(
            parts(kept + column(after)),
            levels(on_top + column(lambda _, way: way.first_bytes)),
            levels(kept + column(lambda _, way: way.backward_bytes)),
            self.more,
            column(lambda _, way: int(way.keeps_output)),
            dropped.astype(int),
            moves.seconds,
            parts(np.array([[c.group_bytes(held)[0] for c in self.calls] for held in (0, 1)])),
            levels(np.array([call.group_bytes(0)[1] for call in self.calls])),
            levels(moves.runs),
            moves.until,
            moves.start,
            moves.offset,
            moves.noted // self.size,
            levels(np.array([call.gradient_bytes for call in self.calls])),
            moves.kinds.inputs,
            moves.kinds.tapes,
            self.best,
        )

    def seconds(self, i: Any, k: Any, is_held: bool, room: Any) -> Any:
        """Return F between two levels, for some ranges at once. What has none, by rounding, is
        taken as slow."""
        row, top, run = self.moves.cell(i, k), self.best.shape[2] - 1, self.moves.seconds
        level = np.minimum(room // self.size, top)
        low, high = (self.best[int(is_held), row, at] for at in (level, np.minimum(level + 1, top)))
        high = np.where(np.isfinite(high), high, (k - i) * (run[k] - run[i]))
        low = np.where(np.isfinite(low), low, high)
        return low + (room / self.size - level) * (high - low)

    def plan(self, i: int, k: int, room: int, is_held: int = 1) -> tuple[Part, ...]:
        """Return a plan for calls i … k − 1 within ``room`` bytes. The input of call i is among
        them, unless it is held already."""
        parts, outer = [], k == len(self.calls)
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
            js, group_bytes, extra, peaks = self.moves.groups(i, k, is_held)
            js, group_bytes = js[peaks <= room], group_bytes[peaks <= room]
            if len(js):
                totals = self.seconds(i, js, not extra, room - group_bytes)
                totals += self.seconds(js, k, False, room - group_bytes)
                totals += 0 if outer else run[js] - run[i]
                best = totals.argmin()
                options.append((totals[best], int(js[best]), -1, int(group_bytes[best])))
            _, stop, way, taken = min(options)
            room -= taken
            inside = self.plan(i, stop, room, int(not extra)) if way < 0 else ()
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
    return left_bytes(calls) + _moves((*calls,), kinds).smallest


def fastest(calls: Sequence[CallSizes], budget: int, kinds: MayKeep = _ALL) -> tuple[Part, ...]:
    """Return the fastest plan whose peak is within a budget; ValueError if no plan's is."""
    whole = kept_whole(calls)
    if kinds.tapes and peak_of(calls, whole) <= budget:
        return whole
    moves, room = _moves((*calls,), kinds), budget - left_bytes(calls)
    smallest = moves.smallest + budget - room
    if smallest > budget:
        raise ValueError(f"{smallest} bytes are the least peak, not {budget}")
    return _Fastest(moves, room).plan(0, len(calls), room)


def level_bytes(ranges: int, room: int) -> int:
    """Return the bytes of a level. If it is 1, :func:`fastest` is exact."""
    return max(1, -(-room // min(_MOST_LEVELS, max(50, _CELLS // (2 * ranges)))))


def least_seconds(calls: Sequence[CallSizes], budget: int, kinds: MayKeep = _ALL) -> float:
    """Return a lower bound of what a plan within a budget takes beyond ordinary backpropagation."""
    table = _Fastest(_moves((*calls,), kinds), budget - left_bytes(calls), is_bound=True)
    return float(table.best[1, table.moves.cell(0, len(calls)), -1]) * _ROUNDING
