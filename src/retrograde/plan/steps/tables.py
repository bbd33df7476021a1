"""Two tables for sizes that no closed form covers: theorem C of ``docs/science.md``.

A segment of t steps has f units free beside its base, the hidden state that it begins at. B(t, f)
is its least cost if somebody else holds the base, A(t, f) if nobody does. A hidden state has size
s, an internal one α with its input and β without. A and B are 0 at t = 0, 1 at t = 1, ∞ at f < 0,
and else

    A(t, f) = min of  1 + B(t−1, f−α)                  record the first step with its input
                      B(t, f−s)                        store the base until the segment is done
                      y + A(t−y, f−s) + A(y, f)        store it until its last load, 1 ≤ y < t
    B(t, f) = min of  1 + B(t−1, f−β)                  record the first step
                      y + A(t−y, f) + B(y, f)          run y steps, 1 ≤ y < t

The policy ``"best"`` costs A(t, m). Without the third line of A, B(t, m−s) is MSM of Gruslys et al.
2016, eqs. 6 to 10. Where α ≥ β + s the two are equal.

*Ties*: the first line that is least, in the order above, and of its splits the largest y.

*Complexity*: 2·m·t² sums at most, by one compiled loop, and 8 bytes for each of m·t cells.
:func:`lower_bound` takes m operations for each slope.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrograde.plan.steps.unfold import NOTHING, Segment, Segments, compiled
from retrograde.schedule import Units

MOST_SUMS = 2 * 10**10  # some ten seconds

_NEVER = 2**29  # more than any cost; twice as much fits 32 bits beside a length
_LONGEST = 2**15 - 1  # a cost of t(t+1)/2 is below that
_SHARES = 24  # slopes of a bound between two integers


def sums(length: int, memory: int) -> int:
    """Return the sums that a table takes; beyond any limit where costs do not fit 32 bits. Up to
    100 steps the cells count, as 100 sums for each."""
    return length * max(100, length) * memory if length <= _LONGEST else 2**62


@dataclass(frozen=True, slots=True)
class Tables:
    """B as ``held`` and A as ``loose``, [f, t] each. ``reuse`` is False for MSM."""

    units: Units
    reuse: bool
    held: NDArray[np.int32]
    loose: NDArray[np.int32]

    @classmethod
    def fill(cls, length: int, memory: int, units: Units, *, reuse: bool) -> "Tables":
        """Fill the tables up to ``length`` steps and ``memory`` units, the initial state's too."""
        held, loose = np.full((2, memory + 1, length + 1), _NEVER, np.int32)
        compiled(_fill)(held, loose, units.state, units.alpha, units.beta, reuse)
        return cls(units, reuse, held, loose)

    def cost(self, length: Any, memory: Any) -> Any:
        """Return the fewest forward steps; arrays broadcast."""
        if self.reuse:
            return self.loose[memory, length]
        return self.held[memory - self.units.state, length]

    def schedule(self, length: int, memory: int, segments: Segments) -> tuple[int, bool]:
        """Add the segments of a cheapest schedule. Returns the number of the whole, and whether it
        needs the initial state to be stored before."""
        free, is_held = (memory, False) if self.reuse else (memory - self.units.state, True)
        if not is_held and free >= self.units.state:
            is_held = self.loose[free, length] == self.held[free - self.units.state, length]
            free -= self.units.state if is_held else 0

        return segments.gather((length, free, is_held), self._divide), is_held

    def _divide(self, segment: tuple[int, int, bool]) -> Segment:
        t, f, is_held = segment  # steps, free units, whether the base is held
        costs = self.held if is_held else self.loose
        if t == 1:
            return Segment(0, 1)
        kept = self.units.beta if is_held else self.units.alpha
        if f >= kept and costs[f, t] == 1 + self.held[f - kept, t - 1]:
            return Segment(0, 1, (t - 1, f - kept, True))
        # A loose base is stored here until its last load. If it had to be stored until the segment
        # is done, the segment before would have stored it.
        room = f if is_held else f - self.units.state
        y = np.arange(1, t)
        best = y[y + self.loose[room, t - y] + costs[f, y] == costs[f, t]]
        at = int(best[-1])
        stores = self._stores(t - at, room)
        right = (t - at, room - self.units.state if stores else room, stores)
        return Segment(at, 0 if stores else NOTHING, right, (at, f, is_held), base=not is_held)

    def _stores(self, t: int, f: int) -> bool:
        """Whether a loose base is stored until its segment is done."""
        state, alpha, cost = self.units.state, self.units.alpha, self.loose[f, t]
        if f < state or t == 1 or (f >= alpha and cost == 1 + self.held[f - alpha, t - 1]):
            return False
        return bool(cost == self.held[f - state, t])


def _fill(held: Any, loose: Any, state: int, alpha: int, beta: int, reuse: bool) -> None:
    """Write B and A, row by row of the free units."""
    units, size = held.shape
    same, less = np.empty(size, np.int32), np.empty(size, np.int32)  # A, reversed
    held_sums, loose_sums = np.empty(size, np.int32), np.empty(size, np.int32)  # y + B, y + A
    for f in range(units):
        for row in (held, loose):
            row[f, 0], row[f, 1] = 0, 1
        held_sums[1], loose_sums[1], same[size - 1 - 1] = 2, 2, 1
        for t in range(size if f >= state else 0):
            less[size - 1 - t] = loose[f - state, t]
        for t in range(2, size):
            shift = size - 1 - t
            best = np.int32(_NEVER)
            if f >= alpha:
                best = min(best, 1 + held[f - alpha, t - 1])
            if f >= state:
                best = min(best, held[f - state, t])
                if reuse:
                    for y in range(1, t):
                        best = min(best, loose_sums[y] + less[shift + y])
            loose[f, t] = best
            same[shift] = best
            loose_sums[t] = best + t
            best = np.int32(_NEVER)
            if f >= beta:
                best = min(best, 1 + held[f - beta, t - 1])
            for y in range(1, t):
                best = min(best, held_sums[y] + same[shift + y])
            held[f, t] = best
            held_sums[t] = best + t


def lower_bound(length: int, memory: int, units: Units) -> int:
    """Return a lower bound of A(length, memory) without a table.

    Let V(f, x) be what the equations of A and B give for the greatest x·t − A(t, f) over all t.
    Then x·t − V(f, x) is a bound for every x.
    """
    bound: int = compiled(_bound)(length, memory, units.state, units.alpha, units.beta)
    return max(length, bound)


def _bound(length: int, memory: int, state: int, alpha: int, beta: int) -> int:
    """Return the highest of the bounds at x = n + i/_SHARES. V of A and of B are ``loose`` and
    ``held``, times _SHARES, of x and of x − 1."""
    loose, held = np.zeros((2, memory + 1, _SHARES), np.int64)
    best, n, rises = 0, 1, True
    while rises:
        rises = False
        for i in range(_SHARES):
            earned = (n - 1) * _SHARES + i  # what one forward step earns
            for f in range(memory + 1):
                a = earned
                if f >= alpha:
                    a = max(a, earned + held[f - alpha, i])
                if f >= state:
                    a = max(a, held[f - state, i], loose[f - state, i] + loose[f, i])
                b = max(earned, a + held[f, i])
                if f >= beta:
                    b = max(b, earned + held[f - beta, i])
                loose[f, i], held[f, i] = min(a, 2**60), min(b, 2**60)
            bound = -((loose[memory, i] - (earned + _SHARES) * length) // _SHARES)
            if bound > best:
                best, rises = bound, True
        n += 1
    return best
