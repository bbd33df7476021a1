"""A convex bound of the cost of MSM, for every memory at once, by Legendre's transform.

C(t, m), the cost of :mod:`retrograde.plan.steps.msm`, is not convex in t. Let V(m, x) be the
maximum of x·t − C(t, m) over all t. With s, α and β the sizes of states, the recurrence gives

    V(m, x) ≤ max of  V(m, x−1) + V(m−s, x)               keep a hidden state
                      x − 1 + V(m−β, x)                   record the first step
                      x − 1 + V(m, x−1) + V(m−α, x)       record a later one, where α < β + s
                      x − 1 + V(m, x−1)                   the last step in the working core

Taken as an equality, this gives a convex piecewise linear function of x for each memory, from
x − 1 and from less memory. Transformed back, it is a convex H(·, m) ≤ C(·, m). Its edges are those
of the hulls below, merged by slope. H is a rigorous bound that takes a few operations a vertex.
Costs are integers, so ⌈H⌉ is a bound too.

*When it is exact.* A split between two convex functions attains its rounded-up minimum, since one
of the two parts can be put on a vertex. So where ⌈H⌉ is exact for all smaller parts, each *branch*
of the recurrence costs its own rounded-up bound. Then ⌈H⌉ is exact for the whole if it equals the
bound of some branch. :meth:`Problem.is_proven` checks that for every cell. With s = 1 it has never
failed; with larger states it does, by one step.

Memory is counted in the common divisor of the sizes. All memories that are enough for ordinary
backpropagation are one level. Lengths go to :data:`LONGEST`, where products of costs and steps fit
64 bits, memories to :data:`MOST_LEVELS` levels, vertices to :data:`LARGEST_TABLE_BYTES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.units import format_bytes

__all__ = ["LARGEST_TABLE_BYTES", "LONGEST", "MOST_LEVELS", "Problem", "Sizes", "pose"]

LARGEST_TABLE_BYTES = 2 * 2**30
LONGEST = 2**24
MOST_LEVELS = 2**22

_VERTEX_BYTES = 3 * 16  # steps and cost; three times, since arrays grow and are copied

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes s, α and β, and the memory of ordinary backpropagation, in one unit."""

    state: int
    alpha: int
    beta: int
    enough: int

    @property
    def wide(self) -> bool:
        """Whether recording a step after the first may be worth its memory."""
        return self.alpha < self.beta + self.state

    def links(self, m: int) -> tuple[int, int, int]:
        """Return what is left of ``m`` after a hidden state, and after an internal one at y = 1 and
        later. Memory that is enough for ordinary backpropagation stays enough, and only records."""
        if m >= self.enough:
            return -1, m, -1
        return m - self.state, m - self.beta, m - self.alpha if self.wide else -1


@dataclass(frozen=True, slots=True)
class Problem:
    """The recurrence in its smallest units, with the convex bound of every level. ``rows`` maps a
    memory to its row. ``links``, ``offsets`` and ``hull`` are those of
    :mod:`retrograde.plan.steps.hull_kernel`."""

    length: int
    sizes: Sizes
    rows: dict[int, int]
    links: _Ints
    offsets: _Ints
    hull: tuple[_Ints, _Ints]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and of step counts from 0."""
        return len(self.rows), self.length + 1

    def bounds(self, row: int, lengths: _Ints) -> _Ints:
        """Return ⌈H⌉ of one row, for many numbers of steps."""
        first, last = self.offsets[row : row + 2]
        steps, costs = self.hull[0][first:last], self.hull[1][first:last]
        i = np.clip(np.searchsorted(steps, lengths, side="right") - 1, 0, len(steps) - 2)
        run, rise = steps[i + 1] - steps[i], costs[i + 1] - costs[i]
        found: _Ints = costs[i] - (-rise * (lengths - steps[i])) // run
        return found

    def bound(self, row: int, length: int) -> int:
        """Return ⌈H⌉ of one row at one number of steps."""
        return int(self.bounds(row, np.array([length]))[0])

    def is_proven(self) -> bool:
        """Whether ⌈H⌉ is the cost in every row and for every number of steps."""
        from retrograde.plan.steps.hull_kernel import proven

        return proven(self.length, self.links, self.sizes.wide, self.offsets, self.hull)

    def nearest(self, row: int, length: int) -> tuple[int, int]:
        """Return the branch and the split with the least ⌈H⌉ near the real-valued optimum."""
        from retrograde.plan.steps.hull_kernel import nearest

        if length == 1:
            return 1, 1  # one step is recorded at once
        return nearest(self.links, self.sizes.wide, self.offsets, self.hull, row, length)


def pose(
    length: int, memories: Sequence[int], *, state: int, alpha: int, beta: int
) -> tuple[Problem, list[int]]:
    """Return the problem in its smallest units, and each memory as a key of ``rows``. Sizes are in
    the unit of ``memories``, and the problem has up to ``length`` steps. Raises ScheduleError if a
    size makes no sense, or if a limit of the module's docstring is exceeded."""
    _check(length, memories, state, alpha, beta)
    from retrograde.plan.steps.hull_kernel import hulls

    unit = gcd(state, alpha, beta)
    enough = (state + beta * (length - 1)) // unit
    sizes = Sizes(state // unit, alpha // unit, beta // unit, enough)
    ample = [min(m // unit, enough) for m in memories]
    levels = _levels(sizes, ample, length)
    rows = {m: row for row, m in enumerate(levels)}
    links = _rows_of(np.array(levels, np.int64), sizes)
    offsets, steps, costs = hulls(length, links, sizes.wide, LARGEST_TABLE_BYTES // _VERTEX_BYTES)
    if offsets[-1] < 0:
        raise ScheduleError(
            f"the bounds for {length} steps and a memory of {max(memories)} take more than "
            f"{format_bytes(LARGEST_TABLE_BYTES)}: count memory in coarser units, or plan blocks "
            "of steps"
        )
    return Problem(length, sizes, rows, links, offsets, (steps, costs)), ample


def _levels(sizes: Sizes, memories: Sequence[int], length: int) -> list[int]:
    """Return every memory that can be left, in increasing order."""
    if sizes.state == 1 and max(memories) > MOST_LEVELS:
        raise _too_many(length, max(memories))
    if sizes.state == 1:  # each level leads to the one below
        most = max((m for m in memories if m < sizes.enough), default=0)
        return [*range(1, most + 1), *sorted({m for m in memories if m >= sizes.enough})]
    levels = set(memories)
    waiting = list(levels)
    while waiting and len(levels) <= MOST_LEVELS:
        left = {m for m in sizes.links(waiting.pop()) if m >= sizes.state} - levels
        levels |= left
        waiting += left
    if len(levels) > MOST_LEVELS:
        raise _too_many(length, max(memories))
    return sorted(levels)


def _rows_of(levels: _Ints, sizes: Sizes) -> _Ints:
    """Return, for every level, the rows of its :meth:`Sizes.links`; −1 where there is none."""
    gone = np.full_like(levels, -1)
    left = [levels - sizes.state, levels - sizes.beta, levels - sizes.alpha if sizes.wide else gone]
    enough = levels >= sizes.enough
    wanted = np.where(enough[:, None], np.stack([gone, levels, gone], 1), np.stack(left, 1))
    rows = np.minimum(np.searchsorted(levels, wanted), len(levels) - 1)
    found: _Ints = np.where(levels[rows] == wanted, rows, -1)
    return found


def _too_many(length: int, memory: int) -> ScheduleError:
    return ScheduleError(
        f"{length} steps and {memory} units of memory have more than {MOST_LEVELS} levels: count "
        "memory in coarser units, or plan blocks of steps"
    )


def _check(length: int, memories: Sequence[int], state: int, alpha: int, beta: int) -> None:
    if not 1 <= length <= LONGEST:
        raise ScheduleError(
            f"length is {length}: the mixed policy takes 1 to {LONGEST} steps; plan blocks of steps"
        )
    if not (state >= 1 and 1 <= beta <= alpha):
        raise ScheduleError(
            f"state={state}, alpha={alpha}, beta={beta}: expected state >= 1 and 1 <= beta <= alpha"
        )
    if min(memories) < state:
        raise ScheduleError(
            f"memory is {min(memories)}: expected at least {state}, the initial state alone"
        )
