"""Which hidden states to hold while nobody knows where the sequence ends.

A state that was freed cannot come back. Let the sequence end at step t, with states held at
0 = p_0 < p_1 < … < p_{k-1} in m slots. The segments between them are reversed from the right. Left
of segment i are i states, so it has m − i slots, its own included. Ending then takes

    t + Σ C_HSM(p_{i+1} − p_i, m − i)        with p_k = t

forward steps. If no slot is free, the state is freed whose loss adds least to this sum: of equal
ones the leftmost. The step that runs next may have been recorded last, and is then not run again.
With 20 slots or more a tenth of the states is freed at a time, no two of them neighbours.

*Reference.* Stumm and Walther 2010 and Wang, Moin and Iaccarino 2009 bound how often each step
runs. Their rules keep the least number of repetitions, but run up to 1.30 times the optimum's
forward steps. This rule follows the cost itself.

*Complexity.* O(m) look-ups of a cost when states are freed, so at most some fifty for a step.

*Known limits.* The bound is measured, not proven. For t ≤ 100,000 and 5 ≤ m ≤ 1,000 the cost is at
most 1.07 times C_HSM(t, m). Below five slots it is up to 1.22 times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from retrograde.plan.steps.closed_form import hsm_cost
from retrograde.schedule import Chain, Schedule, Units, Verb
from retrograde.schedule.actions import Code

_AT_A_TIME = 10  # the part of all slots that becomes free at a time is one of so many


@dataclass
class Thinned:
    """The states that are ``held`` in ``slots``, in order; state 0 always is."""

    slots: int
    held: list[int] = field(default_factory=lambda: [0])

    def add(self, state: int) -> list[int]:
        """Hold the state that follows all others, if it is worth a slot; return what is freed,
        which may be the state itself.

        Example:
            >>> thinned = Thinned(3)
            >>> [thinned.add(state) for state in range(1, 6)], thinned.held
            ([[], [], [1], [2], [3]], [0, 4, 5])
        """
        self.held.append(state)
        if len(self.held) <= self.slots:
            return []
        costs = sorted((cost, i) for i, cost in enumerate(_costs_without(self.held, self.slots), 1))
        gone: set[int] = set()
        for _, i in costs:
            if not gone & {i - 1, i + 1}:
                gone.add(i)
            if len(gone) == max(1, self.slots // _AT_A_TIME):
                break
        lost = [self.held[i] for i in sorted(gone)]
        self.held = [p for i, p in enumerate(self.held) if i not in gone]
        return lost


_cost = lru_cache(2**17)(hsm_cost)


def _costs_without(held: Sequence[int], slots: int) -> list[int]:
    """Return, for each held state but the first, what to end costs without it."""
    gaps = [b - a for a, b in pairwise((*held, held[-1] + 1))]
    gap_costs = [_cost(gap, max(1, slots - i)) for i, gap in enumerate(gaps)]
    left, right = 0, sum(_cost(gap, slots - i + 1) for i, gap in enumerate(gaps) if i > 1)
    costs = []
    for i in range(1, len(gaps)):
        costs.append(left + _cost(gaps[i - 1] + gaps[i], slots - i + 1) + right)
        left += gap_costs[i - 1]
        right -= _cost(gaps[i + 1], slots - i) if i + 1 < len(gaps) else 0
    return costs


#: Returns the schedule of a segment, by its steps and the number of states held left of it.
OfSegment = Callable[[int, int], Schedule]


def online_schedule(
    length: int, held: Sequence[int], recorded: int, of_segment: OfSegment
) -> tuple[Schedule, int]:
    """Return the schedule of a sequence whose end is now known, and the number of actions that have
    been performed. States are ``held``, and so are tapes of the last ``recorded`` steps. Segments
    begin with ``Store`` and end with ``Free``.

    Example:
        >>> from retrograde.plan import plan
        >>> of_segment = lambda steps, left: plan(steps, 2 - left)
        >>> schedule, done = online_schedule(5, [0, 3], 1, of_segment)
        >>> print(schedule[done:][0], schedule.cost, schedule.peak)
        backward 5→4 11 2
    """
    end, codes = length - recorded, list[Code]()
    units: Units | Chain = Units()
    for a, b in pairwise((*held, end)):
        codes += [(Verb.STORE, a, a), (Verb.ADVANCE, a, b)]
    codes = codes if end else [(Verb.STORE, 0, 0)]
    steps = range(end, length)
    codes += [(Verb.RECORD, k, k + 1) for k in steps]  # each step has a tape of its own
    done = len(codes)
    codes += [(Verb.BACKWARD, k, k + 1) for k in reversed(steps)]
    if not end:
        return Schedule.from_codes(
            [*codes, (Verb.FREE, 0, 0)], length=length, policy="online"
        ), done
    arrays: list[ArrayLike] = [codes]
    for i, (a, b) in reversed([*enumerate(pairwise((*held, end)))]):
        segment = of_segment(b - a, i)
        part = np.column_stack((segment.kind, segment.start + a, segment.stop + a))
        part[0], units = (
            (Verb.LOAD, a, a),
            segment.units,
        )  # where the segment by itself stores its first state
        arrays.append(part)
    verbs, start, stop = np.concatenate(arrays).T
    return Schedule(length, "online", None, units, verbs, start, stop), done
