"""From bytes to what is kept while nobody knows where a sequence ends, and to its schedule then.

While there is room, the tapes of the last steps are kept: if the sequence ends there, none of them
runs again. The oldest tape makes room for the next one and leaves its first state behind. When
states fill the budget, they are thinned (:mod:`retrograde.plan.steps.online`). At the end each
segment between two states is planned by :func:`retrograde.plan.fit.fit`, in the bytes that the
states left of it leave. Segments that can be recorded at once are one segment.

Complexity: one fit for each distinct segment, whose free bytes are rounded down by 3 % at most.
"""

import sys
from dataclasses import dataclass, replace
from functools import lru_cache

from retrograde.errors import BudgetError, UnitError
from retrograde.plan.fit import fit
from retrograde.plan.footprint import Footprint
from retrograde.plan.steps.online import online_schedule
from retrograde.schedule import Schedule
from retrograde.units import Memory, as_given, format_bytes, parse_memory

_DIGITS = 5  # binary digits of the free bytes that a segment is planned for
_RECORDED = 4  # steps are recorded as they come up to so many for each slot
# However small, a state takes about a kilobyte of Python's memory, and a tape some more.
_MOST_STATES = 2**15
_MOST_TAPES = 2**12
_MOST_STEPS = 2**10  # that are recorded as one graph: autograd recurses into very long ones


@dataclass(frozen=True)
class OpenPlan:
    """What is kept within a budget. Without ``sizes`` every step is recorded."""

    budget: int = 0
    sizes: Footprint | None = None

    @classmethod
    def within(cls, memory: Memory, sizes: Footprint) -> "OpenPlan":
        """Return the plan for a budget in bytes, or raise BudgetError, which names the least."""
        budget, least = bytes_of(memory), sizes.minimum_bytes()
        if budget < least:
            raise BudgetError(
                f"the memory {as_given(memory, budget, 0)}, but steps of an unknown number need at "
                f"least {least} bytes ({format_bytes(least)}): raise the budget, or make the batch "
                "or the state smaller",
                least,
            )
        heap = sizes.held(_MOST_STEPS)
        return cls(budget, replace(sizes, scheduled=True, trial_bytes=0, heap_bytes=heap))

    @property
    def slots(self) -> int:
        """The most states that are held."""
        if self.sizes is None:
            return 1
        return min(_MOST_STATES, 1 + self._free(1) // self.sizes.state_bytes)

    def tapes(self, states: int, now: int) -> int:
        """Return how many tapes may be kept beside so many states, with that of step ``now``. If it
        is 0, the step is not recorded."""
        if self.sizes is None:
            return sys.maxsize
        more = min(_MOST_TAPES, max(0, self._free(states)) // self.sizes.held(1))
        return more + 1 if more or now < _RECORDED * self.slots else 0

    def schedule(self, length: int, held: list[int], recorded: int) -> tuple[Schedule, int]:
        """Return the schedule when the end is known, as :func:`online_schedule` does."""
        sizes, kept, stop = self.sizes, [*held], length - recorded
        if sizes is None:
            return online_schedule(length, [0], recorded, lambda *_: NotImplemented)
        for i in range(len(held) - 1, 0, -1):
            left = self.budget - (i - 1) * sizes.state_bytes
            steps = stop - held[i - 1]
            if steps <= _MOST_STEPS and sizes.overhead_bytes(steps) <= left:
                del kept[i]
            else:
                stop = held[i]

        def of_segment(steps: int, left: int) -> Schedule:
            return _segment(steps, _rounded(self._free(left + 1)), sizes)

        return online_schedule(length, kept, recorded, of_segment)

    def _free(self, states: int) -> int:
        """Return the bytes beside so many states and the working core."""
        assert self.sizes is not None
        return self.budget - self.sizes.overhead_bytes(1) - states * self.sizes.state_bytes


def bytes_of(memory: Memory) -> int:
    """Return a budget in bytes; UnitError for a share, since nobody knows what it is of."""
    size = parse_memory(memory)
    if not isinstance(size, int):
        raise UnitError(
            f"the memory {memory!r} is a share of ordinary backpropagation's, which is not known "
            "before the sequence ends: expected bytes (67108864) or a size ('64MiB')"
        )
    return size


def _rounded(size: int) -> int:
    unit = max(0, size.bit_length() - _DIGITS)
    return size >> unit << unit


@lru_cache(2**12)
def _segment(steps: int, free: int, sizes: Footprint) -> Schedule:
    return fit(steps, sizes.minimum_bytes() + free, sizes).schedule
