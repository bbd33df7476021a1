"""MSM: hidden states and internal states share one memory (G16, sections 3.3 and 3.4).

With s for the size of a hidden state (1 in the paper), C(t, m) is the least of

    Q1 = y + C(y, m) + C(t−y, m−s)                              1 ≤ y < t,  keep the hidden state y
    Q2 = y + C(y−1, m) + C(t−y, m − (β if y = 1 else α))        1 ≤ y ≤ t,  record step y

with C(0, ·) = 0, C(1, m) = 1 and C(t, m) = ∞ for m < s ≤ t·s: eqs. 6 to 10. A segment's own base
state is part of its m; the base of a right part after Q2 is the recorded step's output, which its
internal state holds. The last step of a sweep is in the working core, so that Q2 at y = t needs no
room: C(t, m) ≤ t + C(t−1, m), and t(t+1)/2 where nothing else fits. Where α ≥ β + s the branch Q2
is needed at y = 1 only: a later one is no better than storing the state before it.

*The bound.* C is not convex in t, so the least split cannot be found by descent. But let V(m, x) be
the most that x·t − C(t, m) can be. By the recurrence

    V(m, x) ≤ max( V(m, x−1) + V(m−s, x),  x−1 + V(m−β, x),  x−1 + V(m−α, x) + V(m, x−1), … )

and taking it as an equality gives a convex piecewise linear function, for each x in terms of x − 1
and of less memory; turned back (Legendre), a convex H(·, m) ≤ C(·, m): its vertices are sums of
edges of the hulls below. That is a rigorous bound, for the cost of a few operations a vertex. As a
cost is an integer, ⌈H⌉ is a bound too. A split between two convex functions attains its rounded-up
least, since one of the parts can be put on a vertex; so if ⌈H⌉ is exact below, each *branch* of the
recurrence costs its rounded-up bound, and ⌈H⌉ is exact here wherever some branch's is equal to it.
:func:`mixed_costs` checks just that. With s = 1 it has never failed, in every cell tried; with
larger s it does, by one step.

*The schedule.* Only parts that cost their bound (or an excess e more, where the whole does) can be
part of an optimal schedule, and y + H(y, m) + H(t−y, m−s) is convex in y, so the splits to look at
are an interval. :func:`plan_blocks` marks what can be reached, fills those cells by the plain
recurrence over those intervals, and compares: a cost within e of the bound is the minimum, proven.
If it is not, e is doubled.

*Ties* break by the fewest actions, merged ranges counting one, among the schedules that the
recurrence can express; of equal ones, by recording the first step, then the last
in the working core, then another, then by storing; then by the largest y. To this end costs and
actions are packed into one integer, and each cell knows whether a ``Record`` at its front, which
would merge with one before it, is among its best.

Sizes are divided by their common divisor first, and memory that is enough for ordinary
backpropagation is one level. Memory: 1 byte for each step and level, 8 for those between the least
and the most marked steps of a level, :data:`LARGEST_TABLE_BYTES` in all. Beyond, or with more than
:data:`MOST_CELLS` cells or :data:`MOST_SPLITS` splits to look at, each part takes the best split
near the real optimum instead; its cost stands beside ``schedule.bound``, and where the two are
equal, as they were in all cases tried with s = 1, only the rule for ties is lost. Lengths go to
:data:`LONGEST`, memories to :data:`MOST_LEVELS` levels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScheduleError
from retrograde.plan.unfold import NOTHING, Parts, recall
from retrograde.schedule import Schedule, Units, merge
from retrograde.units import format_bytes

__all__ = [
    "LARGEST_TABLE_BYTES",
    "LONGEST",
    "MOST_CELLS",
    "MOST_SPLITS",
    "mixed_bound",
    "mixed_costs",
    "plan_blocks",
]

LARGEST_TABLE_BYTES = 2 * 2**30
LONGEST = 2**24
MOST_CELLS = 2 * 10**8
MOST_LEVELS = 2**22
MOST_SPLITS = 4 * 10**9

_CORE, _RECORD, _STORE = 0, 1, 2  # as the kernel numbers branches
_VERTEX_BYTES = 16
_PACKED = 2**61

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes s, α and β, and what ordinary backpropagation takes, in one unit."""

    state: int
    alpha: int
    beta: int
    enough: int

    @property
    def wide(self) -> bool:
        """Whether internal states after the first step may be worth their room."""
        return self.alpha < self.beta + self.state

    def links(self, m: int) -> tuple[int, int, int]:
        """What is left of ``m`` after a hidden state, and an internal one at y = 1 and later.

        Memory that is enough for all stays enough for what is left, and only records.
        """
        if m >= self.enough:
            return -1, m, -1
        return m - self.state, m - self.beta, m - self.alpha if self.wide else -1


@dataclass(frozen=True, slots=True)
class _Problem:
    """The recurrence in its smallest units, with the convex bound of every level.

    Args:
        length: the largest number of steps.
        sizes: s, α, β.
        rows: memory to row.
        links: for each row those with less memory, shape (rows, 3).
        offsets: where each row's vertices begin, shape (rows + 1,).
        hull: steps and costs of all vertices.
    """

    length: int
    sizes: _Sizes
    rows: dict[int, int]
    links: _Ints
    offsets: _Ints
    hull: tuple[_Ints, _Ints]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.length + 1

    def bounds(self, row: int, lengths: _Ints) -> _Ints:
        """⌈H⌉ of one row, for many numbers of steps."""
        first, last = self.offsets[row : row + 2]
        steps, costs = self.hull[0][first:last], self.hull[1][first:last]
        i = np.clip(np.searchsorted(steps, lengths, side="right") - 1, 0, len(steps) - 2)
        run, rise = steps[i + 1] - steps[i], costs[i + 1] - costs[i]
        found: _Ints = costs[i] - (-rise * (lengths - steps[i])) // run
        return found

    def bound(self, row: int, length: int) -> int:
        return int(self.bounds(row, np.array([length]))[0])


@dataclass(frozen=True, slots=True)
class _Table:
    """The cells that a schedule within reach of the bound is made of.

    Args:
        scale: what one forward step counts; one action counts 1.
        marks: 1 where there is a cell, shape (rows, length + 1).
        places: the cell of t steps in a row is at ``places[row] + t``.
        cells: twice the packed cost, and 1 more where no best schedule begins with a ``Record``.
    """

    scale: int
    marks: NDArray[np.uint8]
    places: _Ints
    cells: _Ints

    def best(self, row: int, t: "int | _Ints") -> Any:
        """Packed C(t, m)."""
        return self.cells[self.places[row] + t] >> 1

    def after_record(self, row: int, t: "int | _Ints") -> Any:
        """Packed C(t, m) directly after a recorded step."""
        return (self.cells[self.places[row] + t] + 1) >> 1


def plan_blocks(length: int, memory: int, *, state: int = 1, alpha: int, beta: int) -> Schedule:
    """The cheapest mixed schedule, in the longest ranges.

    Args:
        length: steps, or blocks of steps.
        memory: room, the initial state included and the working core not, in any unit.
        state: the size of a stored hidden state, the initial one too, in the same unit.
        alpha: that of an internal state whose input is not in memory.
        beta: that of one whose input is.

    Returns:
        A schedule whose units are those sizes. Its ``bound`` is proven; where that is its cost,
        there is none cheaper.

    Raises:
        ScheduleError: memory is below ``state``; a size makes no sense; the tables are too large.

    Example:
        >>> schedule = plan_blocks(1000, 300, alpha=5, beta=4)
        >>> schedule.cost, schedule.bound, schedule.peak <= 300
        (1928, 1928, True)
    """
    problem, ample = _pose(length, [memory], state=state, alpha=alpha, beta=beta)
    row = problem.rows[ample[0]]
    parts = Parts()
    solved = _solve(problem, [(row, length)])
    if solved is None:
        root, bound = _approach(problem, parts, row, length), problem.bound(row, length)
    else:
        root = _trace(problem, solved, parts, row, length)
        bound = int(solved.best(row, length)) // solved.scale
    units = Units(alpha=alpha, beta=beta, core=0, initial=state, state=state)
    return merge(
        parts.unfold(root, length=length, policy="msm", memory=memory, units=units, bound=bound)
    )


def mixed_costs(
    length: ArrayLike, memory: ArrayLike, *, state: int = 1, alpha: int, beta: int
) -> _Ints:
    """The fewest forward steps of MSM, for many lengths and memories at once.

    Args:
        length: steps, 0 or more, any shape.
        memory: rooms, each at least ``state``, any shape that broadcasts with it.
        state: as in :func:`plan_blocks`.
        alpha: likewise.
        beta: likewise.

    Returns:
        C(t, m), of the broadcast shape.

    Raises:
        ScheduleError: as :func:`plan_blocks`; or the minimum could not be proven within the largest
            table.

    Example:
        >>> mixed_costs([0, 1, 2, 3, 4, 5], [[1], [5]], alpha=2, beta=1).tolist()
        [[0, 1, 3, 6, 10, 15], [0, 1, 2, 3, 4, 5]]
    """
    lengths, memories = np.broadcast_arrays(np.asarray(length), np.asarray(memory))
    costs = np.zeros(lengths.shape, np.int64)
    if not lengths.size or not lengths.max():
        return costs
    levels, level_of = np.unique(memories, return_inverse=True)
    problem, ample = _pose(int(lengths.max()), levels.tolist(), state=state, alpha=alpha, beta=beta)
    rows = np.array([problem.rows[m] for m in ample])[level_of.reshape(lengths.shape)]
    if not _is_proven(problem):
        return _solved_costs(problem, rows, lengths)
    for row in np.unique(rows).tolist():
        where = rows == row
        costs[where] = problem.bounds(row, lengths[where])
    return costs


def mixed_bound(length: int, memory: int, *, state: int = 1, alpha: int, beta: int) -> int:
    """What no mixed schedule undercuts, without proof that one attains it.

    Args:
        length: as :func:`plan_blocks` has it.
        memory: likewise.
        state: likewise.
        alpha: likewise.
        beta: likewise.

    Returns:
        ⌈H(t, m)⌉, in forward steps.

    Raises:
        ScheduleError: as :func:`plan_blocks`.

    Example:
        >>> mixed_bound(1000, 300, alpha=5, beta=4)
        1928
    """
    problem, ample = _pose(length, [memory], state=state, alpha=alpha, beta=beta)
    return problem.bound(problem.rows[ample[0]], length)


def _pose(
    length: int, memories: Sequence[int], *, state: int, alpha: int, beta: int
) -> tuple[_Problem, list[int]]:
    """The problem in its smallest units, and the memories in those."""
    _check(length, memories, state, alpha, beta)
    from retrograde.plan.mixed_kernel import hulls

    unit = gcd(state, alpha, beta)
    enough = (state + beta * (length - 1)) // unit
    sizes = _Sizes(state // unit, alpha // unit, beta // unit, enough)
    ample = [min(m // unit, enough) for m in memories]
    levels = _levels(sizes, ample, length)
    rows = {m: row for row, m in enumerate(levels)}
    links = np.array([[rows.get(m, -1) for m in sizes.links(level)] for level in levels], np.int64)
    offsets, steps, costs = hulls(length, links, sizes.wide, LARGEST_TABLE_BYTES // _VERTEX_BYTES)
    if offsets[-1] < 0:
        raise _too_large(length, max(memories), LARGEST_TABLE_BYTES)
    return _Problem(length, sizes, rows, links, offsets, (steps, costs)), ample


def _levels(sizes: _Sizes, memories: Sequence[int], length: int) -> list[int]:
    """Every memory that can be left, in increasing order."""
    if sizes.state == 1 and max(memories) > MOST_LEVELS:
        raise _too_many(length, max(memories))
    levels = set(memories)
    waiting = list(levels)
    while waiting and len(levels) <= MOST_LEVELS:
        left = {m for m in sizes.links(waiting.pop()) if m >= sizes.state} - levels
        levels |= left
        waiting += left
    if len(levels) > MOST_LEVELS:
        raise _too_many(length, max(memories))
    return sorted(levels)


def _too_many(length: int, memory: int) -> ScheduleError:
    return ScheduleError(
        f"{length} steps and {memory} units of memory have more than {MOST_LEVELS} levels, which "
        "would be planned one by one: count memory in coarser units, or plan blocks of steps"
    )


def _too_large(length: int, memory: int, size: int) -> ScheduleError:
    return ScheduleError(
        f"the tables for {length} steps and {memory} units of memory take {format_bytes(size)} or "
        f"more, expected at most {format_bytes(LARGEST_TABLE_BYTES)}: count memory in coarser "
        "units, or plan blocks of steps"
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


def _is_proven(problem: _Problem) -> bool:
    from retrograde.plan.mixed_kernel import proven

    sizes = problem.sizes
    return proven(problem.length, problem.links, sizes.wide, problem.offsets, problem.hull)


def _solve(problem: _Problem, roots: Sequence[tuple[int, int]]) -> _Table | None:
    """The exact dynamic program around the bound; None where that would be too large."""
    goals = [problem.bound(row, t) for row, t in roots]
    scale = 1 << (8 * problem.length + 16).bit_length()
    excess = 0
    while 2 * scale * (max(goals) + excess + 1) < _PACKED:
        table = _fill(problem, roots, excess, scale)
        if table is None:
            return None
        costs = [int(table.best(row, t)) // scale for row, t in roots]
        if all(c <= goal + excess for c, goal in zip(costs, goals, strict=True)):
            return table
        excess = max(1, 2 * excess)
    return None


def _fill(
    problem: _Problem, roots: Sequence[tuple[int, int]], excess: int, scale: int
) -> _Table | None:
    from retrograde.plan.mixed_kernel import fill, reach

    rows, size = problem.shape
    if rows * size > MOST_CELLS:
        return None
    marks = np.zeros((rows, size), np.uint8)
    for row, t in roots:
        marks[row, t] = 1
    common = problem.links, problem.sizes.wide, problem.offsets, problem.hull, excess, marks
    low, high, splits = reach(*common)
    spans = high - low + 1
    if rows * size + 8 * int(spans.sum()) > LARGEST_TABLE_BYTES or splits > MOST_SPLITS:
        return None
    places = np.cumsum(spans) - spans - low
    cells = np.empty(int(spans.sum()), np.int64)
    fill(*common, low, high, places, scale, cells)
    return _Table(scale, marks, places, cells)


def _solved_costs(problem: _Problem, rows: _Ints, lengths: _Ints) -> _Ints:
    """The costs where the bound alone proves nothing."""
    asked = sorted({(int(r), int(t)) for r, t in zip(rows.flat, lengths.flat, strict=True) if t})
    table = _solve(problem, asked)
    if table is None:
        size = len(problem.rows) * (problem.length + 1) * 9
        raise _too_large(problem.length, max(problem.rows), size)
    found = {(row, t): int(table.best(row, t)) // table.scale for row, t in asked}
    costs = [found.get((int(r), int(t)), 0) for r, t in zip(rows.flat, lengths.flat, strict=True)]
    return np.array(costs, np.int64).reshape(lengths.shape)


def _trace(problem: _Problem, table: _Table, parts: Parts, row: int, length: int) -> int:
    """The optimal choices, part by part."""

    def describe(part: tuple[int, int, bool], number: Callable[[Any], int]) -> int:
        row, t, merges = part
        branch, y = _choose(problem, table, row, t, merges)
        state, beta, alpha = problem.links[row].tolist()
        if branch == _RECORD:
            return parts.record(0, 1, number((beta, t - 1, True)) if t > 1 else NOTHING)
        if branch == _CORE:
            return parts.record(t - 1, 1, NOTHING, number((row, t - 1, False)))
        if branch == _STORE:
            right = number((state, t - y, False))
            return parts.store(y, right, number((row, y, False)))
        right = number((alpha, t - y, True))
        return parts.record(y - 1, 1, right, number((row, y - 1, False)))

    return recall((row, length, False), describe)


def _choose(problem: _Problem, table: _Table, row: int, t: int, merges: bool) -> tuple[int, int]:
    """The branch to take, and its y."""
    scale, marks = table.scale, table.marks
    state, beta, alpha = problem.links[row].tolist()
    goal = int(table.after_record(row, t) if merges else table.best(row, t))
    if t == 1:
        return _RECORD, 1
    reached = beta >= 0 and marks[beta, t - 1]
    if reached and scale + int(table.after_record(beta, t - 1)) == goal:
        return _RECORD, 1
    goal -= merges  # what does not begin with a Record is one action more after one
    if marks[row, t - 1] and int(table.best(row, t - 1)) + scale * t + 4 == goal:
        return _CORE, t
    if problem.sizes.wide and alpha >= 0:
        y = 2 + np.flatnonzero(marks[row, 1 : t - 1] & marks[alpha, t - 2 : 0 : -1])
        left = table.best(row, y - 1) + scale * (y - 1) + 2
        hits = y[left + scale + table.after_record(alpha, t - y) == goal]
        if hits.size:
            return _STORE + 1, int(hits[-1])
    y = 1 + np.flatnonzero(marks[row, 1 : t - 1] & marks[state, t - 1 : 1 : -1])
    left = table.best(row, y) + scale * y + 2
    hits = y[left + table.best(state, t - y) + 2 == goal]
    return _STORE, int(hits[-1])


def _approach(problem: _Problem, parts: Parts, row: int, length: int) -> int:
    """Choices that keep to the bound part by part, without a table."""
    from retrograde.plan.mixed_kernel import nearest

    common = problem.links, problem.sizes.wide, problem.offsets, problem.hull

    def describe(part: tuple[int, int], number: Callable[[Any], int]) -> int:
        row, t = part
        if t == 1:
            return parts.record(0, 1)
        branch, y = nearest(*common, row, t)
        state, beta, alpha = problem.links[row].tolist()
        if branch == _RECORD:
            return parts.record(0, 1, number((beta, t - 1)))
        if branch == _CORE:
            return parts.record(t - 1, 1, NOTHING, number((row, t - 1)))
        if branch == _STORE:
            return parts.store(y, number((state, t - y)), number((row, y)))
        return parts.record(y - 1, 1, number((alpha, t - y)), number((row, y - 1)))

    return recall((row, length), describe)
