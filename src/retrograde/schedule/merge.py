"""Merging: the same schedule in the longest ranges.

A range is one call of a fused kernel, however many steps it has. Adjacent ``Advance``s become one,
and so do adjacent ``Record``s and ``Backward``s, wherever one begins where the other ends. A state
that is freed and at once stored again stays. The same steps run and the same states are held, so
cost and peak do not change.

The time is linear in the number of actions, and the code is vectorised.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from retrograde.schedule.actions import Verb
from retrograde.schedule.schedule import Schedule

_Verbs = NDArray[np.uint8]
_Places = NDArray[np.int64]


def merge(schedule: Schedule) -> Schedule:
    """Join adjacent ranges of one verb, which leaves the cost and the peak as they are.

    >>> from retrograde.schedule import Advance, Store
    >>> steps = Schedule.from_actions([Store(0), Advance(0, 1), Advance(1, 3)], length=3)
    >>> print(merge(steps))
    store 0, advance 0→3
    """
    kind, start, stop = merged(schedule.kind, schedule.start, schedule.stop)
    return replace(schedule, kind=kind, start=start, stop=stop)


def merged(kind: _Verbs, start: _Places, stop: _Places) -> tuple[_Verbs, _Places, _Places]:
    """As :func:`merge`, for the arrays of a schedule."""
    if not len(kind):
        return kind, start, stop
    again = (kind[:-1] == Verb.FREE) & (kind[1:] == Verb.STORE) & (start[:-1] == start[1:])
    kept = ~(np.append(again, False) | np.append(False, again))
    kind, start, stop = kind[kept], start[kept], stop[kept]
    onward = ((kind[1:] == Verb.ADVANCE) | (kind[1:] == Verb.RECORD)) & (start[1:] == stop[:-1])
    downward = (kind[1:] == Verb.BACKWARD) & (stop[1:] == start[:-1])
    joins = (kind[1:] == kind[:-1]) & (onward | downward)
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    last = np.concatenate((first[1:] - 1, [len(kind) - 1]))
    kind = kind[first]
    down = kind == Verb.BACKWARD
    start, stop = np.where(down, start[last], start[first]), np.where(down, stop[first], stop[last])
    return kind, start, stop
