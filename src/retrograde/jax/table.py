"""A schedule as a table of integers, which one compiled loop can follow.

Each row is one range of steps: where its first state lies, where its last one goes, and where its
internal states are on the tape. States lie in slots and internal states on a stack, so the table
also says how many of each there must be. It knows no arrays and no JAX.

A single recorded step that is backpropagated at once needs no tape: it is a ``STEP`` row, which
runs the step and goes back through it. The last range of the forward sweep is recorded in any case,
since its outputs are wanted before its gradient is there. If it is short, it may be run again
instead, so that nothing is on the tape while the caller's outputs and their gradients are made.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from retrograde.schedule import Action, Advance, Backward, Free, Load, Record, Schedule, Store

__all__ = ["Kind", "Table", "table_of"]


class Kind(IntEnum):
    """What a row does: run steps; run and record them; go back through recorded ones; run one step
    and go back through it; nothing any more."""

    ADVANCE = 0
    RECORD = 1
    TAPE = 2
    STEP = 3
    END = 4


@dataclass(frozen=True)
class Table:
    """Rows (kind, start, stop, load, store, tape), the last one being the end.

    Attributes:
        forward: rows of the forward sweep, which come first.
        slots: states that are held at most, the current one included.
        tape: steps that are recorded at once, at most.
        first: the slot of the initial state.
    """

    rows: NDArray[np.int32]
    forward: int
    slots: int
    tape: int
    first: int

    @property
    def steps(self) -> int:
        """Forward steps in all."""
        kind, start, stop = self.rows[:, :3].T
        return int((stop - start)[kind != Kind.TAPE].sum())


# The last range is run again if it is no longer than this share of all.
_SHORT = 1 / 7


def table_of(schedule: Schedule, again: bool = False) -> Table:
    """The table of a legal schedule; ``again``: a short last range may be run again."""
    actions = [*_split(schedule)]
    filler = _Filler({a.at for a in actions if isinstance(a, Load)})
    for action, after in zip(actions, [*actions[1:], None], strict=True):
        filler.add(action, after)
    if again:
        filler.run_last_again(schedule.length)
    rows = np.array([*filler.rows, (Kind.END, 0, 0, 0, 0, 0)], np.int32)
    return Table(rows, filler.forward, filler.slots, filler.tape, filler.first)


def _split(schedule: Schedule) -> Iterable[Action]:
    """The actions, with records divided where a state within them is loaded, and where a backward
    range begins."""
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
    """Makes the rows one by one, and keeps the books of slots and tape."""

    def __init__(self, loaded: set[int]) -> None:
        self.loaded = loaded
        self.rows: list[tuple[int, ...]] = []
        self.at: dict[int, int] = {}  # held states: their slots
        self.free: list[int] = []
        self.slots, self.tape, self.height = 1, 0, 0  # slot 0 is for states that are not kept
        self.here = 0  # the slot of the current state
        self.recorded: list[tuple[int, int, bool]] = []  # start, stop, whether only loads need stop
        self.first, self.forward = 0, -1

    def add(self, action: Action, after: Action | None) -> None:
        match action:
            case Store(at):
                if at not in self.at:  # the initial state; others are put where they are kept
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
        """Record the last range at the beginning of the backward pass, if it is short and nothing
        else is recorded before."""
        *before, last = self.rows[: self.forward]
        kind, start, stop, load, _, _ = last
        recorded = any(row[0] == Kind.RECORD for row in before)
        if kind == Kind.RECORD and not recorded and stop - start <= _SHORT * length:
            aside = self.slots  # a slot of its own: the first state of the range is wanted again
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
            first, stop, for_loads = self.recorded.pop()
            self.height -= stop - first
            self.rows.append((Kind.TAPE, first, stop, 0, 0, self.height))
            if for_loads:
                self.free.append(self.at.pop(stop))

    def _row(self, kind: Kind, start: int, stop: int, store: int) -> None:
        self.rows.append((kind, start, stop, self.here, store, self.height))
        self.here = store

    def _hold(self, state: int) -> int:
        """A slot for a state."""
        if not self.free:
            self.free.append(self.slots)
            self.slots += 1
        self.at[state] = self.free.pop()
        return self.at[state]
