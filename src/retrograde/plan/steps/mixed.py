"""MSM in closed form: its cost, and a schedule, at any size and without a table.

A hidden state has size 1, an internal state α, or β where its input is in memory. Let C(t, m) be
that of Gruslys et al. 2016, eqs. 6 to 10. Where α ≥ β + 1 or α = β, it is the ceiling of a convex,
piecewise linear function of t (theorem A of ``docs/science.md``). Its slopes are integers n and
n + 1/w. With M = m − 1 and Q = ⌊M/β⌋, the steps at a marginal cost of at most n are

    T(n) = binom(n+M, M+1) + Σ_{q=1}^{Q} binom(M−qβ+n−1, n−1),     at a cost of
    V(n) = n·T(n) − binom(n+M, M+2).

From T(n) down, the edges of slope n + 1/w have w·b steps each. Here b is binom(M−qβ+n−2, n−2), and
w is qβ for q = 1 … Q, or q(β−1) − 1 where α = β. The edge of slope n is below them.

*Schedule.* A segment of t steps is divided by its slope x and its level M. Above level kβ, it
stores a state for the segment to its left, which has the slope x − 1. At level kβ it records, and k
depends on x alone. Each level's number of steps is between two bounds. *Ties* break towards the
left: each stored segment is as long as its bounds allow, from the first on.

*Complexity*: a cost takes O(Q log t) binomials; a schedule, O(M·x) additions and its actions.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from math import comb, isqrt

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.plan.steps.unfold import Segment, Segments

_ANY = 1 << 62  # more than any w
_MOST_CELLS = 2 * 10**7  # numbers of Python, some 36 bytes each


@dataclass(frozen=True, slots=True)
class Mixed:
    """MSM with ``levels`` = M units of memory beside the initial state, of size 1.

    ``beta`` is the size of an internal state whose input is in memory. ``wide`` says that α = β;
    else α ≥ β + 1.
    """

    levels: int
    beta: int
    wide: bool = False

    @property
    def records(self) -> int:
        """Return Q, the internal states that fit."""
        return self.levels // self.beta

    def cost(self, length: int) -> int:
        """Return C(t, M + 1), the fewest forward steps."""
        whole, more, w = self.hull(length)
        return whole - (-more // w)

    def hull(self, length: int) -> tuple[int, int, int]:
        """Return the convex function of t whose ceiling is the cost: a + b/w, as a, b, w."""
        if length <= 1 + self.records:
            return length, 0, 1
        if not self.wide and (beyond := self._twice() - length) >= 0:
            # q(q+1)/2 · β is T(2) less the steps of the corner below the edge w = q·β
            q = min(self.records, (isqrt(1 + 8 * (beyond // self.beta)) - 1) // 2)
            if q == self.records:
                return 2 * length - 1 - q, 0, 1
            q += 1
            more = q * (q + 1) // 2 * self.beta - beyond
            return 2 * length - 1 - q, more, q * self.beta
        n, corners = self._corners(length)
        i = bisect_left(corners, length, key=lambda corner: corner[0])
        steps, cost, w = corners[i]
        if i == 0:
            return cost - n * (steps - length), 0, 1
        steps, cost, _ = corners[i - 1]
        return cost + n * (length - steps), length - steps, w

    def costs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """As :meth:`cost`, for many lengths from 1 to below 2³¹."""
        longest = int(lengths.max(initial=1))
        if self.levels == 0:
            return lengths * (lengths + 1) // 2
        corners = [(0, 0, 1, 0), (1 + self.records, 1 + self.records, 1, 0)]
        n = 1
        while corners[-1][0] < longest:
            n += 1
            corners += [(steps, cost, n, w) for steps, cost, w in self.corners(n)]
        # The last corner may not fit 64 bits; what it costs is not needed.
        last = bisect_left(corners, (longest,))
        corners[last:] = [(longest, 0, *corners[last][2:])]
        steps, costs, slopes, shares = np.array(corners, np.int64).T
        at = np.searchsorted(steps, lengths)
        more = lengths - steps[at - 1]
        fewest: NDArray[np.int64] = costs[at - 1] + slopes[at] * more
        if shares.any():
            w = shares[at]
            fewest += np.where(w > 0, -(-more // np.maximum(w, 1)), 0)
        return fewest

    def slope(self, length: int) -> tuple[int, int]:
        """Return the slope at t steps as (n, w): n + 1/w, or n alone where w is 0."""
        n, corners = self._corners(length)
        w = corners[bisect_left(corners, length, key=lambda corner: corner[0])][2]
        return (n + 1, 0) if w == 1 else (n, w)

    def _twice(self) -> int:
        """Return T(2), as :meth:`reach` does, without a sum: no step more than twice, if α > β."""
        q = self.records
        return 2 + self.levels + q * (self.levels + 1) - q * (q + 1) // 2 * self.beta

    def reach(self, n: int) -> int:
        """Return T(n), the most steps at a marginal cost of at most n, up to n + 1."""
        if self.wide and self.beta == 1:
            return comb(self.levels + n + 1, n) - 1
        top, last = self.levels + n - 1, n - 1
        recorded = sum(comb(top - q, last) for q in range(self.beta, self.levels + 1, self.beta))
        return comb(self.levels + n, n - 1) + recorded

    def _corners(self, length: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Return the n of the slope at t steps, and all corners of that n, by increasing steps:
        (steps, cost, w of the edge that ends there, 0 for the edge of slope n)."""
        high = 2
        while self.reach(high) < length:
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.reach(middle) < length else (low, middle)
        return high, self.corners(high)

    def corners(self, n: int) -> list[tuple[int, int, int]]:
        """Return the corners of slopes n ≥ 2 to n + 1: (steps, cost, w of the edge before), by
        increasing steps. The edge of slope n has w = 0, and n + 1/w of the next may be n + 1."""
        steps = self.reach(n)
        if self.wide and self.beta == 1:
            return [(steps, n * (steps + 1) - comb(self.levels + n + 1, n - 1), 0)]
        cost = n * steps - comb(self.levels + n, n - 2)
        if self.wide and self.beta == 2 and self.levels >= 2:
            cost -= comb(self.levels + n - 4, n - 2)
        corners = []
        for w, edges in sorted(self._edges(n)):
            corners.append((steps, cost, w))
            steps -= w * edges
            cost -= (n * w + 1) * edges
        corners.append((steps, cost, 0))
        return corners[::-1]

    def _edges(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield w and the number of edges of slope n + 1/w, each of w steps."""
        top, last = self.levels + n - 2, n - 2
        for q in range(1, self.records + 1):
            w = q * (self.beta - 1) - 1 if self.wide else q * self.beta
            if w > 0:
                yield w, comb(top - q * self.beta, last)
            elif n > 2:  # α = β = 2 and q = 1: this edge is one slope higher
                yield 2, comb(top - 3, n - 3)

    def schedule(self, length: int, segments: Segments) -> int:
        """Add the segments of a cheapest schedule; returns the number of the whole."""
        if length <= 1 + self.records:
            return segments.add(0, length)
        n, w = self.slope(length) if self.levels < _MOST_CELLS // 6 else (2, 0)
        cells = 2 * (self.levels + 1) * (n + 1)
        if cells > _MOST_CELLS:
            raise ScheduleError(
                f"the schedule for {length} steps takes {cells} numbers for {self.levels + 1} "
                f"units of memory, expected at most {_MOST_CELLS}: plan blocks of steps, or count "
                "memory in larger units"
            )
        return segments.gather((0, self.levels, length, False), _Unfolding(self, n, w).divide)


# A segment: how much less its slope is than the whole's, its level, its steps, and whether these
# are too few for the slope.
_Node = tuple[int, int, int, bool]


class _Steps:
    """T of every level, directly beside a slope n + 1/w and those that are 1, 2, … less.

    The slope is between n + 1/(w+1) and n + 1/w.
    """

    def __init__(self, form: Mixed, n: int, w: int) -> None:
        self.form, self.n, self.w = form, n, w
        levels, beta = form.levels, form.beta
        self.rows = [[0] * (levels + 1), [1 + level // beta for level in range(levels + 1)]]
        for slope in range(2, n + 1):
            row, most = self.rows[-1], self._most(slope)
            sums, recorded = [*accumulate(row)], [*accumulate(row[::beta])]
            gains = [
                k - sums[k * beta] + (recorded[k] - row[0] if form.wide else 0)
                for k in range(min(most, form.records) + 1)
            ]
            by_level = chain(*(repeat(gain, beta) for gain in gains), repeat(gains[-1]))
            self.rows.append([slope + a + b for a, b in zip(sums, by_level, strict=False)])

    def at(self, depth: int, level: int) -> int:
        return self.rows[self.n - depth][level]

    def recorded(self, depth: int, level: int) -> int:
        """Return k, the steps that a segment of this level records after all that it stores."""
        return min(self._most(self.n - depth), level // self.form.beta)

    def _most(self, slope: int) -> int:
        wide, beta = self.form.wide, self.form.beta
        if slope < 2 or (wide and beta == 1):
            return _ANY
        if slope == 2:
            return (self.w + 1) // (beta - 1) if wide else self.w // beta
        return int(slope == 3 and wide and beta == 2 and self.w >= 2)


class _Unfolding:
    """How the segments of one schedule are divided."""

    def __init__(self, form: Mixed, n: int, w: int) -> None:
        self.form = form
        below, above = ((n, w), (n, w - 1)) if w else ((n - 1, 1), (n, _ANY))
        self.low, self.high = _Steps(form, *below), _Steps(form, *above)

    def divide(self, node: _Node) -> Segment:
        """Divide a segment, by the proof of proposition 5 in ``docs/science.md``."""
        depth, level, steps, scant = node
        beta, wide = self.form.beta, self.form.wide
        if steps <= 1 + level // beta:
            return Segment(0, steps)
        if level == 0 or steps == 2:  # the last step in the working core, and again
            return Segment(steps - 1, 1, None, (depth + 1, level, steps - 1, False))
        if scant:
            return self._divide_scant(depth, level, steps)
        low, high = self.low, self.high
        kept = low.recorded(depth, level)
        if level > kept * beta:
            return self._store(depth, level, steps)
        most = high.at(depth + 1, level) if wide else 0
        if kept == high.recorded(depth, level):
            if not wide:
                return Segment(0, kept, (depth, 0, steps - kept, False))
        elif steps > 1 + most + high.at(depth, level - beta):
            # Two numbers of recorded steps are best at this slope, and the larger leaves too few.
            if steps >= low.at(depth + 1, level) + low.at(depth, level - 1):
                return self._store(depth, level, steps)
            if wide:
                return _stored(depth, level, most, (depth, level - 1, steps - most, True))
            return self._divide_scant(depth, level, steps)
        y = min(most, steps - 1 - low.at(depth, level - beta)) if wide else 0
        left = (depth + 1, level, y, False) if y else None
        return Segment(y, 1, (depth, level - beta, steps - 1 - y, False), left)

    def _store(self, depth: int, level: int, steps: int) -> Segment:
        y = min(self.high.at(depth + 1, level), steps - self.low.at(depth, level - 1))
        return _stored(depth, level, y, (depth, level - 1, steps - y, False))

    def _divide_scant(self, depth: int, level: int, steps: int) -> Segment:
        """Divide a segment whose steps are between those of two numbers of recorded steps. Stored
        segments are so short that each is recorded whole. The levels below a record take the
        rest."""
        beta = self.form.beta
        below = (level - 1) // beta * beta
        # One of its steps more may be stored at no cost; then the rest is one recorded range.
        rest = self.high.at(depth, below) if self.form.wide else 1 + below // beta
        y = steps - rest if level == below + 1 else min(steps - rest, 1 + level // beta)
        scant = steps - y > rest
        right = (depth, level - 1, steps - y, True) if scant else (depth, below, rest, False)
        return _stored(depth, level, y, right)


def _stored(depth: int, level: int, y: int, right: _Node) -> Segment:
    """Return a segment that stores the state after ``y`` steps. A single step behind it is recorded
    in the working core, from the current state."""
    left = (depth + 1, level, y, False)
    return Segment(y, 1, None, left) if right[2] == 1 else Segment(y, 0, right, left)
