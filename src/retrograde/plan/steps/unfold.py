"""From a few distinct segments to all the actions of a schedule.

A planner divides a sequence into segments, and those again. The same segment (so many steps, so
much memory) occurs in many places. So a planner describes each *distinct* segment once, and this
module writes out the actions. A segment that begins at hidden state b, which is current, is

    Advance(b, b+a),   keep,   the right segment,   drop,   Load(b),   the left segment

where *keep* and *drop* are ``Store`` and ``Free`` of the hidden state b+a, or ``Record`` and
``Backward`` of n steps from there, or nothing. The left segment runs from b to b+a again; either
segment may be missing. The base b is kept by somebody else. Else the segment stores it first and
frees it after the one load. This is the divide-and-conquer of Gruslys et al. 2016, figures 1 and 4.

Complexity: linear in the actions, 17 bytes each. The one loop is interpreted for short schedules
and compiled by numba for those of more than :data:`INTERPRETED` actions.
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.schedule import Chain, Schedule, Units, Verb
from retrograde.schedule.schedule import merged
from retrograde.units import format_bytes

INTERPRETED = 20_000
LARGEST_BYTES = 8 * 2**30
NOTHING = -1

_ACTION_BYTES = 17

_ADVANCE, _STORE, _RECORD, _LOAD, _FREE, _BACKWARD = (verb.value for verb in Verb)
_Key = TypeVar("_Key", bound=Hashable)
_Row = tuple[int, int, int, int, bool]
_Verbs = NDArray[np.uint8]
_Places = NDArray[np.int64]


def check_size(length: int, actions: int) -> None:
    """Refuse a schedule of more than :data:`LARGEST_BYTES` before it is begun."""
    size = _ACTION_BYTES * actions
    if size > LARGEST_BYTES:
        raise ScheduleError(
            f"the schedule for {length} steps has {actions} actions and takes "
            f"{format_bytes(size)}, expected at most {format_bytes(LARGEST_BYTES)}: plan blocks of "
            "steps; cost takes any length"
        )


class Segment(NamedTuple):
    """A segment: ``advance`` steps, then what it keeps, then the segments inside it, by any keys.

    It keeps the internal states of ``keep`` steps, the hidden state if 0, or nothing if −1.
    ``right`` is the segment behind that, ``left`` the segment of the ``advance`` steps. ``base`` is
    whether it stores its own base until the load.
    """

    advance: int
    keep: int
    right: Hashable = None
    left: Hashable = None
    base: bool = False


class Segments:
    """The distinct segments of one schedule, each described after the segments inside it.

    Example:
        >>> segments = Segments()
        >>> last = segments.add(0, 1)
        >>> whole = segments.add(2, 0, last, segments.add(0, 2))
        >>> print(segments.schedule(whole, length=3, policy="custom"))
        store 0, advance 0→2, store 2, record 2→3, backward 3→2, free 2, load 0, record 0→2,
        backward 2→0, free 0
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def add(
        self, advance: int, keep: int, right: int = NOTHING, left: int = NOTHING, base: bool = False
    ) -> int:
        """Add a :class:`Segment` whose segments inside are given by number; returns its number."""
        self._rows.append((advance, keep, right, left, base))
        return len(self._rows) - 1

    def gather(self, root: _Key, divide: Callable[[_Key], Segment]) -> int:
        """Add a segment and all segments inside it; returns its number. ``divide`` describes the
        segment of a key, and is asked once for each."""
        numbers: dict[Hashable, int] = {None: NOTHING}
        divided: dict[Hashable, Segment] = {}
        waiting: list[Any] = [root]
        while waiting:
            key = waiting.pop()
            if key in numbers:
                continue
            if key not in divided:
                segment = divided[key] = divide(key)
                waiting += (key, segment.right, segment.left)
                continue
            advance, keep, right, left, base = divided[key]
            numbers[key] = self.add(advance, keep, numbers[right], numbers[left], base)
        return numbers[root]

    def total(self, root: int, of_row: Callable[[_Row], int]) -> int:
        """Return the sum of ``of_row`` over all occurrences of segments in a whole."""
        sums = [0] * (len(self._rows) + 1)  # the last is that of NOTHING
        for segment, row in enumerate(self._rows):
            sums[segment] = of_row(row) + sums[row[2]] + sums[row[3]]
        return sums[root]

    def first_advances(self, root: int) -> list[int]:
        """Return the lengths of all advances from the beginning of a whole."""
        lengths = []
        while root != NOTHING and (advance := self._rows[root][0]):
            lengths.append(advance)
            root = self._rows[root][3]
        return lengths

    def actions(self, root: int, length: int) -> tuple[_Verbs, _Places, _Places]:
        """Write out a segment: the verbs and positions of its actions, with ranges not yet
        merged."""
        size = self.total(root, _actions)
        check_size(length, size)
        verbs = np.empty(size, np.uint8)
        start, stop = np.empty(size, np.int64), np.empty(size, np.int64)
        if size > INTERPRETED:
            compiled(_unfold)(np.array(self._rows, np.int64), root, verbs, start, stop)
        else:
            _unfold(self._rows, root, verbs, start, stop)
        return verbs, start, stop

    def schedule(
        self,
        root: int,
        *,
        length: int,
        policy: str,
        memory: int | None = None,
        units: Units | Chain | None = None,
        bound: int | float | None = None,
        is_held: bool = True,
    ) -> Schedule:
        """Return a segment as a schedule, in the longest ranges. If ``is_held``, it is between
        ``Store(0)`` and ``Free(0)``. The others are those of
        :class:`~retrograde.schedule.Schedule`."""
        root = self.add(0, 0, root) if is_held else root
        actions = merged(*self.actions(root, length))
        return Schedule(length, policy, memory, units or Units(), *actions, bound)


def _actions(row: _Row) -> int:
    advance, keep, _, left, base = row
    return (advance > 0) + 2 * (keep >= 0) + (left != NOTHING) + 2 * base


def store_all(length: int, units: Units | Chain | None = None) -> Schedule:
    """Ordinary backpropagation through time: every step is recorded once, in one range."""
    segments = Segments()
    return segments.schedule(
        segments.add(0, length), length=length, policy="store-all", units=units
    )


def _unfold(segments: Any, root: int, verbs: _Verbs, start: _Places, stop: _Places) -> None:
    """Write out the actions; a stack holds what is still to be written: a segment, or one
    action."""
    at = 0
    # A verb (−1 for a segment), its first position (the segment), and its second (the base).
    stack = [(-1, root, 0)]
    while len(stack) > 0:
        verb, first, second = stack.pop()
        if verb >= 0:
            verbs[at], start[at], stop[at] = verb, first, second
            at += 1
            continue
        here, segment = second, segments[first]
        advance, steps, right, left = segment[0], segment[1], segment[2], segment[3]
        base = segment[4]
        if left >= 0:
            stack.append((-1, left, here))
            if base:
                stack.append((_FREE, here, here))
            stack.append((_LOAD, here, here))
        keep = here + advance
        after = keep + max(steps, 0)
        if base:
            verbs[at], start[at], stop[at] = _STORE, here, here
            at += 1
        if advance > 0:
            verbs[at], start[at], stop[at] = _ADVANCE, here, keep
            at += 1
        if steps >= 0:
            verbs[at], start[at], stop[at] = (_RECORD if steps else _STORE), keep, after
            at += 1
            stack.append((_BACKWARD if steps else _FREE, keep, after))
        if right >= 0:
            stack.append((-1, right, after))


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as compiled by numba, which is imported on the first call."""
    from retrograde import compiler

    return cast(Callable[..., Any], compiler.compiled(function))
