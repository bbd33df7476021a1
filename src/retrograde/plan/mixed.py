"""MSM: hidden states and internal states share one memory (G16, sections 3.3 and 3.4).

With s for the size of a hidden state (1 in the paper), C(t, m) is the least of

    Q1 = y + C(y, m) + C(t−y, m−s)                              1 ≤ y < t,  keep the hidden state y
    Q2 = y + C(y−1, m) + C(t−y, m − (β if y = 1 else α))        1 ≤ y ≤ t,  record step y

with C(0, ·) = 0, C(1, m) = 1 and C(t, m) = ∞ for m < s ≤ t·s: eqs. 6 to 10. A segment's own base
state is part of its m; the base of a right part after Q2 is the recorded step's output, which its
internal state holds. The last step of a sweep is in the working core, so that Q2 at y = t needs no
room: C(t, m) ≤ t + C(t−1, m), and t(t+1)/2 where nothing else fits.

Where α ≥ β + s the branch Q2 is needed at y = 1 only: a later one is no better than storing the
state before it. At equality it would save a ``Store``, which costs nothing to run. C is not convex
in t, so no monotone argmin is assumed: the minimum over y is taken in full.

*Ties* break by the fewest actions, merged ranges counting one, among the schedules that the
recurrence can express; of equal ones, by recording the first step, then the last
in the working core, then another, then by storing; then by the largest y. To this end
costs and actions are packed into one integer, and each cell is kept twice: on its own, and after a
recorded step, where a ``Record`` at its front would merge.

Complexity: O(t²) additions for each level of memory that can be reached from the budget by taking
away s, β and α; the sizes are divided by their common divisor first, and memory that is enough for
ordinary backpropagation is one level. 16 bytes a cell. Limits: lengths to 2¹⁹, where
packed costs stay within 63 bits, and tables to 2 GiB; larger ones are refused before they begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.schedule import Schedule, Units, Verb
from retrograde.schedule.actions import Code
from retrograde.units import format_bytes

__all__ = ["LARGEST_TABLE_BYTES", "LONGEST", "mixed_costs", "plan_blocks"]

LARGEST_TABLE_BYTES = 2 * 2**30
LONGEST = 2**19

_ADVANCE, _STORE, _RECORD, _LOAD, _FREE, _BACKWARD = (verb.value for verb in Verb)
_BYTES_PER_CELL = 16


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
class _Table:
    """The filled dynamic program.

    Args:
        sizes: s, α, β.
        scale: what one forward step counts; one action counts 1.
        rows: memory to row.
        best: packed C(t, m), shape (rows, length + 1).
        after_record: the same directly after a recorded step.
    """

    sizes: _Sizes
    scale: int
    rows: dict[int, int]
    best: NDArray[np.int64]
    after_record: NDArray[np.int64]


def plan_blocks(length: int, memory: int, *, state: int = 1, alpha: int, beta: int) -> Schedule:
    """The cheapest mixed schedule, every recorded step an action of its own.

    Args:
        length: steps, or blocks of steps.
        memory: room, the initial state included and the working core not, in any unit.
        state: the size of a stored hidden state, the initial one too, in the same unit.
        alpha: that of an internal state whose input is not in memory.
        beta: that of one whose input is.

    Returns:
        A schedule whose units are those sizes.

    Raises:
        ScheduleError: memory is below ``state``; a size makes no sense; the table is too large.

    Example:
        >>> schedule = plan_blocks(1000, 300, alpha=5, beta=4)
        >>> schedule.cost, schedule.peak <= 300
        (1928, True)
    """
    table, ample = _table(length, [memory], state=state, alpha=alpha, beta=beta)
    codes = _trace(table, length, ample[0])
    units = Units(alpha=alpha, beta=beta, core=0, initial=state, state=state)
    return Schedule.from_codes(codes, length=length, policy="msm", memory=memory, units=units)


def mixed_costs(
    length: int, memories: Sequence[int], *, state: int = 1, alpha: int, beta: int
) -> NDArray[np.int64]:
    """The fewest forward steps of MSM, for all lengths up to one and some memories, at once.

    Args:
        length: the largest number of steps.
        memories: rooms, each at least ``state``.
        state: as in :func:`plan_blocks`.
        alpha: likewise.
        beta: likewise.

    Returns:
        C(t, m), shape (memories, length + 1), column t for t steps.

    Raises:
        ScheduleError: as :func:`plan_blocks`.

    Example:
        >>> mixed_costs(5, [1, 5], alpha=2, beta=1).tolist()
        [[0, 1, 3, 6, 10, 15], [0, 1, 2, 3, 4, 5]]
    """
    table, ample = _table(length, memories, state=state, alpha=alpha, beta=beta)
    return table.best[[table.rows[m] for m in ample]] // table.scale


def _table(
    length: int, memories: Sequence[int], *, state: int, alpha: int, beta: int
) -> tuple[_Table, list[int]]:
    """The dynamic program in its smallest units, and the memories in those."""
    _check(length, memories, state, alpha, beta)
    unit = gcd(state, alpha, beta)
    enough = (state + beta * (length - 1)) // unit
    sizes = _Sizes(state // unit, alpha // unit, beta // unit, enough)
    ample = [min(m // unit, enough) for m in memories]
    levels = _levels(sizes, ample, length)
    rows = {m: row for row, m in enumerate(levels)}
    links = np.array([[rows.get(m, -1) for m in sizes.links(level)] for level in levels], np.int64)
    shape = (len(levels), length + 1)
    table = _Table(
        sizes,
        1 << (8 * length + 16).bit_length(),
        rows,
        np.empty(shape, dtype=np.int64),
        np.empty(shape, dtype=np.int64),
    )
    from retrograde.plan.mixed_kernel import fill

    fill(table.best, table.after_record, links, table.scale, sizes.wide)
    return table, ample


def _levels(sizes: _Sizes, memories: Sequence[int], length: int) -> list[int]:
    """Every memory that can be left, in increasing order."""
    row_bytes = _BYTES_PER_CELL * (length + 1)
    most = LARGEST_TABLE_BYTES // row_bytes
    levels = set(memories)
    waiting = list(levels)
    while waiting and len(levels) <= most:
        left = {m for m in sizes.links(waiting.pop()) if m >= sizes.state} - levels
        levels |= left
        waiting += left
    if len(levels) > most:
        raise ScheduleError(
            f"the table for {length} steps and a memory of {max(memories)} may take "
            f"{format_bytes(row_bytes * max(memories))}, expected at most "
            f"{format_bytes(LARGEST_TABLE_BYTES)}: count memory in coarser units, or plan blocks "
            "of steps"
        )
    return sorted(levels)


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


def _trace(table: _Table, length: int, memory: int) -> list[Code]:
    """Follow the optimal choices, left parts waiting on a stack."""
    codes: list[Code] = [(_STORE, 0, 0)]
    waiting: list[tuple[int, int, int, int]] = []  # base, steps, memory, what closes the right part
    base, steps, m, merges = 0, length, memory, False
    while True:
        while steps > 0:
            closing, y, left = _choose(table, steps, m, merges)
            start = base + y if closing != _BACKWARD else base + y - 1
            if start > base:
                codes.append((_ADVANCE, base, start))
            if closing == _FREE:
                codes.append((_STORE, start, start))
            else:
                codes.append((_RECORD, start, start + 1))
            waiting.append((base, start - base, m, closing))
            base, steps, m, merges = base + y, steps - y, left, closing == _BACKWARD
        while waiting and steps == 0:
            base, steps, m, closing = waiting.pop()
            at = base + steps
            codes.append((_FREE, at, at) if closing == _FREE else (_BACKWARD, at, at + 1))
        if steps == 0:
            break
        codes.append((_LOAD, base, base))
        merges = False
    codes.append((_FREE, 0, 0))
    return codes


def _choose(table: _Table, t: int, m: int, merges: bool) -> tuple[int, int, int]:
    """What closes the next right part (Free or Backward), its y, and its memory."""
    scale, best, after_record = table.scale, table.best, table.after_record
    links = table.sizes.links(m)
    row, (state, beta, alpha) = table.rows[m], (table.rows.get(less, -1) for less in links)
    goal = int((after_record if merges else best)[row, t])
    if t == 1 or (beta >= 0 and scale + int(after_record[beta, t - 1]) == goal):
        return _BACKWARD, 1, links[1]
    goal -= merges  # what does not begin with a Record is one action more after one
    if int(best[row, t - 1]) + scale * t + 4 == goal:
        return _BACKWARD, t, m
    left = best[row, 1 : t - 1] + scale * np.arange(1, t - 1) + 2
    if alpha >= 0:
        hits = np.flatnonzero(left + scale + after_record[alpha, t - 2 : 0 : -1] == goal)
        if hits.size:
            return _BACKWARD, int(hits[-1]) + 2, links[2]
    hits = np.flatnonzero(left + best[state, t - 1 : 1 : -1] + 2 == goal)
    return _FREE, int(hits[-1]) + 1, links[0]
