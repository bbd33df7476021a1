"""The executable specification: which schedules are legal, what they cost, what they hold.

At the start, state 0 is current and nothing is kept. The rules, action by action:

1. ``Advance`` and ``Record`` start at the current state and run at least one step. None of the
   steps is recorded or backpropagated already.
2. ``Store`` keeps the current state, once.
3. ``Load`` makes a state current that is stored, or is the output of a recorded step. In a chain,
   the internal state of that layer must refer to its output. The state is not current yet.
4. ``Backward`` continues where the last one ended (the first one at the end of the sequence), and
   all its steps are recorded. No state is current afterwards.
5. ``Free`` follows the last use of a stored state directly: a ``Load(at)``, or a ``Backward`` that
   ends at it. No recorded step may still rest on the state.
6. At the end every step is backpropagated and nothing is kept.

A legal schedule may still be wasteful: it may run steps that a ``Load`` throws away, or keep a
state that it could do without.

*Accounting*, as in G16, sections 3.1 to 3.4. A stored state counts ``units.state`` (state 0:
``units.initial``). A recorded step counts β where its input state is kept too, else α; within a
range each step rests on the one before. If a ``Backward`` from its end follows a ``Record``
directly, the last step is in the working core and counts ``units.core``. The peak is the largest
sum after any action; the cost is the number of forward steps. Where ``units`` is a
:class:`~retrograde.schedule.chain.Chain`, the peak is in bytes and includes temporaries, and there
are seconds too (:mod:`retrograde.schedule.account`).

Time and memory are linear in actions and steps.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.schedule.account import OfChain, OfUnits, Units
from retrograde.schedule.actions import Code, Verb, decode
from retrograde.schedule.chain import Chain

if TYPE_CHECKING:
    from retrograde.schedule.schedule import Schedule

_ADVANCE, _STORE, _RECORD, _LOAD, _FREE, _BACKWARD = (verb.value for verb in Verb)
_NOTHING: Code = (-1, -1, -1)


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a legal schedule. ``cost`` is in forward steps and ``peak`` in the
    schedule's units. Three read-only arrays of shape (actions,) describe each action. ``kept`` is
    held after it and ``high`` is the most held during it. ``clock`` is the seconds until its end (0
    where steps have no time)."""

    cost: int
    peak: int
    actions: int
    kept: NDArray[np.int64] = field(repr=False, compare=False)
    high: NDArray[np.int64] = field(repr=False, compare=False)
    clock: NDArray[np.float64] = field(repr=False, compare=False)


def simulate(schedule: "Schedule") -> Replay:
    """Replay a schedule, step by step, and count.

    Args:
        schedule: a schedule, legal or not.

    Returns:
        Its cost and its peak.

    Raises:
        ScheduleError: the schedule is not legal; the message names the action and the reason.

    Example:
        >>> from retrograde.schedule import Backward, Free, Record, Schedule, Store
        >>> actions = [Store(0), Record(0, 3), Backward(0, 3), Free(0)]
        >>> simulate(Schedule.from_actions(actions, length=3))
        Replay(cost=3, peak=3, actions=4)
        >>> simulate(Schedule.from_actions(actions[:3], length=3))
        Traceback (most recent call last):
        ...
        retrograde.errors.ScheduleError: after the last action state 0 is still stored: free it
    """
    length = schedule.length
    if type(length) is not int or length < 1:
        raise ScheduleError(f"the schedule has length {length!r}: expected at least 1 step")
    if isinstance(schedule.units, Chain) and len(schedule.units) != length:
        raise ScheduleError(
            f"the schedule has length {length} and its chain has {len(schedule.units)} layers: "
            "expected one step for each layer"
        )
    codes = list(schedule.codes())
    machine = _Machine(length, schedule.units)
    account = machine.account
    kept, high = np.zeros((2, len(codes)), dtype=np.int64)
    clock = np.zeros(len(codes))
    previous = _NOTHING
    for index, (code, following) in enumerate(zip(codes, [*codes[1:], _NOTHING], strict=False)):
        account.high = 0
        reason = machine.apply(code, previous, following)
        if reason:
            raise ScheduleError(f"action {index}, {decode(*code)}: {reason}")
        kept[index], high[index] = account.held, max(account.high, account.held)
        clock[index] = account.seconds
        previous = code
    reason = machine.unfinished()
    if reason:
        raise ScheduleError(f"after the last action {reason}")
    for column in (kept, high, clock):
        column.flags.writeable = False
    return Replay(machine.cost, int(high.max()), len(codes), kept, high, clock)


class _Machine:
    """The state of a replay; each verb returns the reason why it is refused, or ""."""

    def __init__(self, length: int, units: Units | Chain) -> None:
        self.length = length
        self.account: OfChain | OfUnits
        if isinstance(units, Chain):
            self.account, self.outputs = OfChain(units), units.keeps_output
        else:
            self.account, self.outputs = OfUnits(units, length), (True,) * length
        self.current = 0  # -1 where no state is current
        self.stored = bytearray(length + 1)
        self.recorded = bytearray(length)
        self.frontier = length  # steps from here on are backpropagated
        self.cost = 0

    def apply(self, code: Code, previous: Code, following: Code) -> str:
        verb, start, stop = code
        if verb in (_ADVANCE, _RECORD):
            in_core = following[0] == _BACKWARD and following[2] == stop
            return self._run(start, stop, records=verb == _RECORD, in_core=in_core)
        if verb == _STORE:
            return self._store(start)
        if verb == _LOAD:
            return self._load(start)
        if verb == _FREE:
            return self._free(start, previous)
        return self._backward(start, stop)

    def unfinished(self) -> str:
        if self.frontier:
            return f"step {self.frontier - 1} is not backpropagated"
        state = self.stored.find(1)
        return f"state {state} is still stored: free it" if state >= 0 else ""

    def _run(self, start: int, stop: int, *, records: bool, in_core: bool) -> str:
        if reason := self._bad_range(start, stop):
            return reason
        if start != self.current:
            return f"{self._where()}, not state {start}: load it first"
        if stop > self.frontier:
            step = max(start, self.frontier)
            return f"step {step} is backpropagated already"
        step = self.recorded.find(1, start, stop)
        if step >= 0:
            return f"step {step} is recorded already: load its output, state {step + 1}"
        if records:
            self.account.record(start, stop, resting=self._is_kept(start), in_core=in_core)
            self.recorded[start:stop] = b"\1" * (stop - start)
        else:
            self.account.advance(start, stop)
        self.current = stop
        self.cost += stop - start
        return ""

    def _store(self, at: int) -> str:
        if at != self.current:
            return f"{self._where()}, not state {at}: only the current state can be stored"
        if self.stored[at]:
            return f"state {at} is stored already"
        self.stored[at] = 1
        self.account.hold(at)
        return ""

    def _load(self, at: int) -> str:
        if not 0 <= at <= self.length:
            return f"there is no state {at}: expected 0 to {self.length}"
        if at == self.current:
            return f"state {at} is current already"
        if not self._is_kept(at):
            return f"state {at} is neither stored nor the output of a recorded step"
        self.current = at
        self.account.move(at)
        return ""

    def _free(self, at: int, previous: Code) -> str:
        if not 0 <= at <= self.length or not self.stored[at]:
            return f"state {at} is not stored"
        if previous[:2] not in ((_LOAD, at), (_BACKWARD, at)):
            return (
                f"state {at} is not freed directly after its last use: expected load {at} or a "
                f"backward to {at} just before"
            )
        if at < self.length and self.recorded[at]:
            return f"the recorded step {at} still rests on state {at}"
        self.stored[at] = 0
        self.account.release(at)
        return ""

    def _backward(self, start: int, stop: int) -> str:
        if reason := self._bad_range(start, stop):
            return reason
        if stop != self.frontier:
            return f"the next step to be backpropagated is {self.frontier - 1}, not {stop - 1}"
        step = self.recorded.rfind(0, start, stop)
        if step >= 0:
            return f"step {step} is not recorded"
        self.recorded[start:stop] = bytes(stop - start)
        self.account.backward(start, stop)
        self.frontier = start
        self.current = -1
        return ""

    def _bad_range(self, start: int, stop: int) -> str:
        if 0 <= start < stop <= self.length:
            return ""
        return f"the range is empty or not within steps 0 to {self.length - 1}"

    def _is_kept(self, state: int) -> bool:
        if self.stored[state]:
            return True
        return bool(state and self.recorded[state - 1] and self.outputs[state - 1])

    def _where(self) -> str:
        return "no state is current" if self.current < 0 else f"state {self.current} is current"
