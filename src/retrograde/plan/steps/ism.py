"""The schedule of ISM: internal states only, in the longest recorded ranges.

By G16 eqs. 4 and 5, an optimal schedule of t steps is one of t+1 steps of HSM, and so a tree
(:mod:`retrograde.plan.steps.closed_form`). With m slots and at most r repetitions, let R = r − 1.
All optimal trees share one frame, which has binom(m+R, m) − 1 steps:

- frame(M, R), R ≥ 2: frame(M, R−1), one recorded step, frame(M−1, R);
- frame(j, 1): j recorded steps, with j down to 1 slots free before each of them.

The remaining steps go into *gaps* of the frames of the last kind. Before a recorded step with ℓ
free slots, up to ℓ steps may be advanced over; they are recorded later as one range. Such a gap
adds five actions: ``Advance``, ``Load``, ``Record``, ``Backward``, and the ``Record`` that it
divides. A gap before the first step of its frame divides none and adds four. So the fewest actions
come from covering the remaining steps with the longest gaps of both kinds. The best number of first
gaps is found by trying all of them.

Time and memory: the distinct parts, the actions, and the remaining steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from retrograde.plan.steps.closed_form import ism_cost, repetitions
from retrograde.plan.steps.unfold import NOTHING, Parts, check_size, recall
from retrograde.schedule import Schedule, Units

__all__ = ["ism_schedule"]

_UNITS = Units(alpha=1, beta=1, core=1, initial=0)
_FIRST, _OTHER = 4, 5  # actions that a gap adds


def ism_schedule(length: int, memory: int) -> Schedule:
    """The schedule of ISM with the fewest actions, in the longest recorded ranges."""
    builder = _Builder(length, memory)
    return builder.parts.unfold(
        builder.root(), length=length, policy="ism", memory=memory, units=_UNITS,
        bound=ism_cost(length, memory),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The gaps of one kind that are used: all longer than ``least``, and ``some`` of that length.
    One of the latter is ``short`` steps shorter."""

    least: int
    some: int
    short: int = 0

    def length(self, longest: int) -> int:
        """Return the length of one gap of up to ``longest`` steps, if ``some`` is for it alone."""
        if longest == self.least:
            return longest - self.short if self.some else 0
        return longest if longest > self.least else 0

    def share(self, available: int) -> tuple["_Gaps", "_Gaps"]:
        """Split the gaps: those of a part with ``available`` least gaps, and the others."""
        taken = min(self.some, available)
        short = self.short if taken else 0
        here = _Gaps(self.least, taken, short)
        return here, _Gaps(self.least, self.some - taken, self.short - short)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame (``depth`` = R ≥ 1), or a last frame without its first step (``depth`` = 0)."""

    slots: int
    depth: int
    firsts: _Gaps
    others: _Gaps


class _Builder:
    """Adds frames to parts, and remembers the number of steps of each part."""

    def __init__(self, length: int, memory: int) -> None:
        self.length, self.memory = length, memory
        self.depth = repetitions(length + 1, memory) - 1
        self.parts = Parts()
        self.steps: dict[int, int] = {NOTHING: 0}

    def root(self) -> int:
        if self.depth == 0:
            return self.parts.record(0, self.length)
        beyond = self.length + 1 - comb(self.memory + self.depth, self.memory)
        # No more gaps are tried than there are remaining steps; each takes 8 bytes.
        check_size(self.length, beyond)
        firsts, others = _cover(beyond, self.memory, self.depth)
        return recall(_Frame(self.memory, self.depth, firsts, others), self._describe)

    def _describe(self, frame: _Frame, number: Callable[[_Frame], int]) -> int:
        if frame.depth > 1:
            return self._divide(frame, number)
        gaps = frame.firsts if frame.depth else frame.others
        gap = gaps.length(frame.slots)
        following = frame.slots - 1
        right, recorded = NOTHING, 1 + following
        if frame.others.length(following):
            recorded = 1
            right = number(_Frame(following, 0, frame.firsts, frame.others))
        left = self._add(0, gap) if gap else NOTHING
        return self._add(gap, recorded, right, left)

    def _divide(self, frame: _Frame, number: Callable[[_Frame], int]) -> int:
        slots, depth = frame.slots, frame.depth
        firsts, firsts_right = frame.firsts.share(_firsts(frame.firsts.least, slots, depth - 1))
        others, others_right = frame.others.share(_others(frame.others.least, slots, depth - 1))
        left = number(_Frame(slots, depth - 1, firsts, others))
        right = NOTHING
        if slots > 1:
            right = number(_Frame(slots - 1, depth, firsts_right, others_right))
        return self._add(self.steps[left], 1, right, left)

    def _add(self, advance: int, recorded: int, right: int = NOTHING, left: int = NOTHING) -> int:
        part = self.parts.record(advance, recorded, right, left)
        self.steps[part] = advance + recorded + self.steps[right]
        return part


def _firsts(length: int, slots: int, depth: int) -> int:
    """Return the number of last frames of ``length`` slots in a frame."""
    if depth == 1:
        return int(length == slots)
    return comb(slots - length + depth - 2, depth - 2) if 1 <= length <= slots else 0


def _others(length: int, slots: int, depth: int) -> int:
    """Return the number of last frames of more than ``length`` slots in a frame."""
    return comb(slots - length + depth - 2, depth - 1) if 1 <= length < slots else 0


def _cover(beyond: int, slots: int, depth: int) -> tuple[_Gaps, _Gaps]:
    """Return the gaps of both kinds that hold ``beyond`` steps with the fewest actions."""
    first_gaps = _longest(beyond, slots, depth, _firsts)
    other_gaps = _longest(beyond, slots, depth, _others)
    first_steps = np.concatenate(([0], np.cumsum(first_gaps)))
    other_steps = np.concatenate(([0], np.cumsum(other_gaps)))
    needed = np.searchsorted(other_steps, beyond - first_steps)
    possible = np.flatnonzero(needed < len(other_steps))
    actions = _FIRST * possible + _OTHER * needed[possible]
    firsts = int(possible[np.argmin(actions)])
    others = int(needed[firsts])
    short = int(first_steps[firsts] + other_steps[others]) - beyond
    used = _used(first_gaps[:firsts]), _used(other_gaps[:others])
    # The excess is taken from one gap of the shortest length.
    if others and (not firsts or used[1].least <= used[0].least):
        return used[0], _Gaps(used[1].least, used[1].some, short)
    return _Gaps(used[0].least, used[0].some, short), used[1]


def _longest(
    beyond: int, slots: int, depth: int, count: Callable[[int, int, int], int]
) -> NDArray[np.int64]:
    """Return the lengths of the gaps of one kind, longest first, as many as could be used."""
    lengths: list[int] = []
    counts: list[int] = []
    steps = 0
    for length in range(slots, 0, -1):
        if steps >= beyond:
            break
        found = min(count(length, slots, depth), -(-(beyond - steps) // length))
        lengths.append(length)
        counts.append(found)
        steps += found * length
    return np.repeat(np.array(lengths, np.int64), np.array(counts, np.int64))


def _used(gaps: NDArray[np.int64]) -> _Gaps:
    """Describe all of these gaps by the shortest of them; none is longer than the longest frame."""
    if not gaps.size:
        return _Gaps(2**62, 0)
    return _Gaps(int(gaps[-1]), int(np.sum(gaps == gaps[-1])))
