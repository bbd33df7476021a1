"""MSM: hidden states and internal states share one memory (G16, sections 3.3 and 3.4).

With s for the size of a hidden state (1 in the paper), C(t, m) is the least of

    Q1 = y + C(y, m) + C(t−y, m−s)                              1 ≤ y < t,  keep the hidden state y
    Q2 = y + C(y−1, m) + C(t−y, m − (β if y = 1 else α))        1 ≤ y ≤ t,  record step y

with C(0, ·) = 0, C(1, m) = 1 and C(t, m) = ∞ for m < s ≤ t·s: eqs. 6 to 10. A segment's own base
state is part of its m. The base of a right part after Q2 is the recorded step's output, which its
internal state holds. The last step of a sweep is in the working core, so Q2 at y = t needs no
memory: C(t, m) ≤ t + C(t−1, m), and t(t+1)/2 where nothing else fits. Where α ≥ β + s the branch Q2
is needed at y = 1 only: a later one is no better than storing the state before it.

*The search.* C is not convex in t, so no descent finds the best y. But
:mod:`retrograde.plan.steps.hull` gives a convex bound ⌈H⌉ ≤ C. If a schedule costs e more than its
bound, its parts cost at most e more than theirs. And y + H(y, m) + H(t−y, m−s) is convex in y, so
the candidate splits are an interval. So the reachable parts are marked and filled by the plain
recurrence over those intervals. A cost within e of the bound is the proven minimum; else e is
doubled. Costs alone need no table where the bound is proven to be exact. For few costs, choices
that attain the bound prove it; for many, a check of every cell.

*Ties* break by the fewest actions, merged ranges counting one, among the schedules that the
recurrence can express. Of equal ones, the order is: record the first step, put the last step in the
working core, record another, store. Then the largest y wins. To this end costs and actions are
packed into one integer. Each cell has a bit that says whether a best schedule begins with a
``Record``, which would merge with one before it.

*Memory*: 1 byte for each step and level, 8 for those between the least and the most marked steps of
a level, :data:`~retrograde.plan.steps.hull.LARGEST_TABLE_BYTES` in all. Beyond that, or beyond
:data:`MOST_CELLS` cells or :data:`MOST_SPLITS` splits, each part takes the best split near the real
optimum instead. Its cost then stands beside ``schedule.bound``. Where the two are equal, as in all
cases tried with s = 1, only the rule for ties is lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScheduleError
from retrograde.plan.steps.hull import LARGEST_TABLE_BYTES, Problem, pose
from retrograde.plan.steps.unfold import NOTHING, Parts, recall
from retrograde.schedule import Schedule, Units, merge

__all__ = ["MOST_CELLS", "MOST_SPLITS", "mixed_bounds", "mixed_costs", "plan_blocks"]

MOST_CELLS = 2 * 10**8
MOST_SPLITS = 4 * 10**9

_CORE, _RECORD, _STORE, _WIDE = 0, 1, 2, 3  # the branches, as the kernels number them
_PACKED = 2**61
_FEW = 100  # up to so many costs are proven one by one, more by a check of all cells

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Table:
    """The cells of a schedule within reach of the bound; a forward step counts ``scale``, an action
    1. ``marks`` (rows, length + 1) is 1 where there is a cell, and that of t steps is at
    ``places[row] + t``. A cell is twice the packed cost, and 1 more where no best schedule begins
    with a ``Record``."""

    scale: int
    marks: NDArray[np.uint8]
    places: _Ints
    cells: _Ints

    def best(self, row: int, t: "int | _Ints") -> Any:
        """Packed C(t, m)."""
        return self.cells[self.places[row] + t] >> 1

    def cost(self, row: int, t: int) -> int:
        """C(t, m)."""
        return int(self.best(row, t)) // self.scale

    def after_record(self, row: int, t: "int | _Ints") -> Any:
        """Packed C(t, m) directly after a recorded step."""
        return (self.cells[self.places[row] + t] + 1) >> 1


def plan_blocks(length: int, memory: int, *, state: int = 1, alpha: int, beta: int) -> Schedule:
    """Return the cheapest mixed schedule of steps, or of blocks of steps, in the longest ranges.
    ``memory`` counts the initial state but not the working core, in the unit of the sizes. No
    schedule costs less than its ``bound``. Raises ScheduleError if an argument makes no sense or
    the problem is too large."""
    problem, ample = pose(length, [memory], state=state, alpha=alpha, beta=beta)
    row = problem.rows[ample[0]]
    parts = Parts()
    solved = _solve(problem, [(row, length)])
    if solved is None:
        choose, bound = (lambda row, t, _: problem.nearest(row, t)), problem.bound(row, length)
    else:
        choose, bound = partial(_choose, problem, solved), solved.cost(row, length)
    root = _describe(problem, parts, row, length, choose)
    units = Units(alpha=alpha, beta=beta, core=0, initial=state, state=state)
    return merge(
        parts.unfold(root, length=length, policy="msm", memory=memory, units=units, bound=bound)
    )


def mixed_costs(
    length: ArrayLike, memory: ArrayLike, *, state: int = 1, alpha: int, beta: int
) -> _Ints:
    """Return the fewest forward steps C(t, m), for lengths (0 or more) and memories that broadcast.
    Sizes and errors are those of :func:`plan_blocks`. ScheduleError also where a minimum could not
    be proven within the largest table."""
    sizes = {"state": state, "alpha": alpha, "beta": beta}
    asked = _ask(length, memory, **sizes)
    if asked is None:
        return np.zeros(np.broadcast_shapes(np.shape(length), np.shape(memory)), np.int64)
    problem, rows, lengths = asked
    costs = _bounds(problem, rows, lengths)
    if lengths.size > _FEW:
        return costs if problem.is_proven() else _solved_costs(problem, rows, lengths)
    for index, row in np.ndenumerate(rows):
        if (
            lengths[index]
            and _approached_cost(problem, int(row), int(lengths[index])) > costs[index]
        ):
            return _solved_costs(problem, rows, lengths)
    return costs


def mixed_bounds(
    length: ArrayLike, memory: ArrayLike, *, state: int = 1, alpha: int, beta: int
) -> _Ints:
    """Return ⌈H(t, m)⌉, a lower bound of the cost of every mixed schedule. Arguments are those of
    :func:`mixed_costs`. Whether a schedule attains the bound is not proven."""
    asked = _ask(length, memory, state=state, alpha=alpha, beta=beta)
    if asked is None:
        return np.zeros(np.broadcast_shapes(np.shape(length), np.shape(memory)), np.int64)
    return _bounds(*asked)


def _ask(
    length: ArrayLike, memory: ArrayLike, *, state: int, alpha: int, beta: int
) -> tuple[Problem, _Ints, _Ints] | None:
    """Return one problem, and each question's row and steps; None if no step is asked."""
    lengths, memories = np.broadcast_arrays(np.asarray(length), np.asarray(memory))
    if not lengths.size or not lengths.max():
        return None
    levels, level_of = np.unique(memories, return_inverse=True)
    problem, ample = pose(int(lengths.max()), levels.tolist(), state=state, alpha=alpha, beta=beta)
    rows = np.array([problem.rows[m] for m in ample])[level_of.reshape(lengths.shape)]
    return problem, rows, lengths


def _bounds(problem: Problem, rows: _Ints, lengths: _Ints) -> _Ints:
    bounds = np.zeros(lengths.shape, np.int64)
    for row in np.unique(rows).tolist():
        where = rows == row
        bounds[where] = problem.bounds(row, lengths[where])
    return bounds


def _solve(problem: Problem, roots: Sequence[tuple[int, int]]) -> _Table | None:
    """Run the exact dynamic program around the bound; None where it would be too large."""
    goals = [problem.bound(row, t) for row, t in roots]
    scale = 1 << (8 * problem.length + 16).bit_length()
    excess = 0
    while 2 * scale * (max(goals) + excess + 1) < _PACKED:
        table = _fill(problem, roots, excess, scale)
        if table is None:
            return None
        costs = [table.cost(row, t) for row, t in roots]
        if all(c <= goal + excess for c, goal in zip(costs, goals, strict=True)):
            return table
        excess = max(1, 2 * excess)
    return None


def _fill(
    problem: Problem, roots: Sequence[tuple[int, int]], excess: int, scale: int
) -> _Table | None:
    from retrograde.plan.steps.msm_kernel import fill, mark_candidates

    rows, size = problem.shape
    if rows * size > MOST_CELLS:
        return None
    marks = np.zeros((rows, size), np.uint8)
    for row, t in roots:
        marks[row, t] = 1
    common = problem.links, problem.sizes.wide, problem.offsets, problem.hull, excess, marks
    low, high, splits = mark_candidates(*common)
    spans = high - low + 1
    if rows * size + 8 * int(spans.sum()) > LARGEST_TABLE_BYTES or splits > MOST_SPLITS:
        return None
    places = np.cumsum(spans) - spans - low
    cells = np.empty(int(spans.sum()), np.int64)
    fill(*common, low, high, places, scale, cells)
    return _Table(scale, marks, places, cells)


def _solved_costs(problem: Problem, rows: _Ints, lengths: _Ints) -> _Ints:
    """Return the costs by the dynamic program, where the bound alone proves nothing."""
    asked = sorted({(int(r), int(t)) for r, t in zip(rows.flat, lengths.flat, strict=True) if t})
    table = _solve(problem, asked)
    if table is None:
        raise ScheduleError(
            f"the costs up to {problem.length} steps and {max(problem.rows)} units of memory could "
            f"not be proven within {MOST_CELLS} cells: ask for fewer, or for a plan, which has a "
            "bound"
        )
    found = {(row, t): table.cost(row, t) for row, t in asked}
    costs = [found.get((int(r), int(t)), 0) for r, t in zip(rows.flat, lengths.flat, strict=True)]
    return np.array(costs, np.int64).reshape(lengths.shape)


def _describe(
    problem: Problem, parts: Parts, row: int, length: int, choose: Callable[..., tuple[int, int]]
) -> int:
    """Add all parts of a schedule; ``choose(row, t, merges)`` gives the division of each."""

    def describe(part: tuple[int, int, bool], number: Callable[[Any], int]) -> int:
        row, t, merges = part
        branch, y = choose(row, t, merges)
        right, left = _divide(problem, row, t, branch, y)
        after = number((*right, branch != _STORE)) if right else NOTHING
        before = number((*left, False)) if left else NOTHING
        if branch == _STORE:
            return parts.store(y, after, before)
        return parts.record(y - 1, 1, after, before)

    return recall((row, length, False), describe)


def _divide(
    problem: Problem, row: int, t: int, branch: int, y: int
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return row and steps of the right part and of the left part; None where a part is empty."""
    state, beta, alpha = problem.links[row].tolist()
    kept = {_CORE: -1, _RECORD: beta, _STORE: state, _WIDE: alpha}[branch]
    before = y if branch == _STORE else y - 1
    return (kept, t - y) if t > y else None, (row, before) if before else None


def _choose(problem: Problem, table: _Table, row: int, t: int, merges: bool) -> tuple[int, int]:
    """Return the branch of a best schedule, and its y."""
    scale, marks = table.scale, table.marks
    state, beta, alpha = problem.links[row].tolist()
    goal = int(table.after_record(row, t) if merges else table.best(row, t))
    if t == 1:
        return _RECORD, 1
    reached = beta >= 0 and marks[beta, t - 1]
    if reached and scale + int(table.after_record(beta, t - 1)) == goal:
        return _RECORD, 1
    goal -= merges  # after a Record, a part that does not begin with one has an action more
    if marks[row, t - 1] and int(table.best(row, t - 1)) + scale * t + 4 == goal:
        return _CORE, t
    if problem.sizes.wide and alpha >= 0:
        y = 2 + np.flatnonzero(marks[row, 1 : t - 1] & marks[alpha, t - 2 : 0 : -1])
        left = table.best(row, y - 1) + scale * (y - 1) + 2
        hits = y[left + scale + table.after_record(alpha, t - y) == goal]
        if hits.size:
            return _WIDE, int(hits[-1])
    y = 1 + np.flatnonzero(marks[row, 1 : t - 1] & marks[state, t - 1 : 1 : -1])
    left = table.best(row, y) + scale * y + 2
    hits = y[left + table.best(state, t - y) + 2 == goal]
    return _STORE, int(hits[-1])


def _approached_cost(problem: Problem, row: int, length: int) -> int:
    """Return the cost of the choices nearest to the bound: the minimum if equal to it."""

    def cost(part: tuple[int, int], number: Callable[[Any], int]) -> int:
        branch, y = problem.nearest(*part)
        return y + sum(number(inner) for inner in _divide(problem, *part, branch, y) if inner)

    return recall((row, length), cost)
