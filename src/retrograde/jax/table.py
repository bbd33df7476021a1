"""A schedule as a table of integers, which one compiled loop can follow.

Each row is one range of steps. It names the slots of the states before and after the range, and
the place of its internal states on the tape. The table also says how many slots and how long a
tape the rows need. This module does not use JAX.

A single recorded step that is backpropagated at once needs no tape. It is a ``STEP`` row, which
runs the step and backpropagates it. The last range of the forward sweep cannot be one, since its
outputs are needed before its gradient arrives. If that range is short, it may be run without
recording, and recorded only in the backward pass. The tape is then empty while the caller's
outputs and their gradients are made.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from retrograde.schedule import Action, Advance, Backward, Free, Load, Record, Schedule, Store


class Kind(IntEnum):
    """What a row does. ADVANCE runs steps, RECORD runs and records them, and TAPE backpropagates
    recorded steps. STEP runs one step and backpropagates it. END is the last row."""

    ADVANCE = 0
    RECORD = 1
    TAPE = 2
    STEP = 3
    END = 4


@dataclass(frozen=True)
class Table:
    """Rows (kind, start, stop, load, store, tape), the last of kind END."""

    rows: NDArray[np.int32]
    forward: int  # the number of rows of the forward sweep, which come first
    slots: int  # the most states that are held at once, the current one included
    tape: int  # the most recorded steps that are held at once
    first: int  # the slot of the initial state

    @property
    def steps(self) -> int:
        """Return the number of forward steps that the rows run."""
        kind, start, stop = self.rows[:, :3].T
        return int((stop - start)[kind != Kind.TAPE].sum())


# The last range is recomputed if it is no longer than this fraction of the length.
_SHORT = 1 / 7


def table_of(schedule: Schedule, again: bool = False) -> Table:
    """Return the table of a legal schedule. With ``again``, a short last range is recomputed."""
    actions = [*_split(schedule)]
    filler = _Filler({a.at for a in actions if isinstance(a, Load)})
    for action, after in zip(actions, [*actions[1:], None], strict=True):
        filler.add(action, after)
    if again:
        filler.run_last_again(schedule.length)
    rows = np.array([*filler.rows, (Kind.END, 0, 0, 0, 0, 0)], np.int32)
    return Table(rows, filler.forward, filler.slots, filler.tape, filler.first)


def _split(schedule: Schedule) -> Iterable[Action]:
    """Return the actions, with records divided where a state within one is loaded, and where a
    backward range begins."""
    actions = [*schedule]
    loaded = {a.at for a in actions if isinstance(a, Load)}
    cuts = sorted(loaded | {a.start for a in actions if isinstance(a, Backward)})
    for action in actions:
        if isinstance(action, Record):
            inside = cuts[bisect_right(cuts, action.start) : bisect_left(cuts, action.stop)]
            bounds = [action.start, *inside, action.stop]
            yield from map(Record, bounds[:-1], bounds[1:])
        else:
            yield action


class _Filler:
    """Makes the rows one by one, and assigns slots and places on the tape."""

    def __init__(self, loaded: set[int]) -> None:
        self.loaded = loaded
        self.rows: list[tuple[int, ...]] = []
        self.at: dict[int, int] = {}  # the slot of each held state
        self.free: list[int] = []
        self.slots, self.tape, self.height = 1, 0, 0  # slot 0 takes states that are not kept
        self.here = 0  # the current state's slot
        self.recorded: list[tuple[int, int, bool]] = []  # start, stop, whether only loads need stop
        self.first, self.forward = 0, -1

    def add(self, action: Action, after: Action | None) -> None:
        match action:
            case Store(at):
                if at not in self.at:  # the initial state; later states have a slot already
                    assert at == 0, "a state is stored when it is reached"
                    self.first = self._hold(at)
                self.here = self.at[at]
            case Load(at):
                self.here = self.at[at]
            case Free(at):
                self.free.append(self.at.pop(at))
            case Advance(start, stop):
                self._row(
                    Kind.ADVANCE, start, stop, self._hold(stop) if after == Store(stop) else 0
                )
            case Record(start, stop):
                at_once = stop - start == 1 and after == Backward(start, stop)
                if at_once and self.forward >= 0:
                    self._row(Kind.STEP, start, stop, 0)
                else:
                    self._record(start, stop, after == Store(stop))
            case Backward(start, _):
                self._back(start)

    def run_last_again(self, length: int) -> None:
        """Record the last range at the beginning of the backward pass instead. This is done only if
        the range is short and the forward sweep records nothing else."""
        *before, last = self.rows[: self.forward]
        kind, start, stop, load, _, _ = last
        recorded = any(row[0] == Kind.RECORD for row in before)
        if kind == Kind.RECORD and not recorded and stop - start <= _SHORT * length:
            aside = self.slots  # a new slot, since the state before the range is read again
            self.slots += 1
            self.rows.insert(self.forward - 1, (Kind.ADVANCE, start, stop, load, aside, 0))

    def _record(self, start: int, stop: int, stored: bool) -> None:
        for_loads = stop in self.loaded and not stored
        self._row(Kind.RECORD, start, stop, self._hold(stop) if stored or for_loads else 0)
        self.recorded.append((start, stop, for_loads))
        self.height += stop - start
        self.tape = max(self.tape, self.height)

    def _back(self, start: int) -> None:
        if self.forward < 0:
            self.forward = len(self.rows)
        while self.recorded and self.recorded[-1][0] >= start:
            first_step, stop, for_loads = self.recorded.pop()
            self.height -= stop - first_step
            self.rows.append((Kind.TAPE, first_step, stop, 0, 0, self.height))
            if for_loads:
                self.free.append(self.at.pop(stop))

    def _row(self, kind: Kind, start: int, stop: int, store: int) -> None:
        self.rows.append((kind, start, stop, self.here, store, self.height))
        self.here = store

    def _hold(self, state: int) -> int:
        """Return a free slot, a new one if need be, for a state."""
        if not self.free:
            self.free.append(self.slots)
            self.slots += 1
        self.at[state] = self.free.pop()
        return self.at[state]
