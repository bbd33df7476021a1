"""A schedule: all actions of one policy for one length and one memory, as an immutable value.

To its user, a schedule is a sequence of frozen actions. Inside, it is three read-only arrays of
equal length (verb, start, stop). An action takes 17 bytes, so 300 000 actions take 5 MB.
Schedules are equal when their parts are equal, and they are hashable.

The cost and the peak are not stored: :mod:`retrograde.schedule.simulate` replays the actions when
one of them is first read. A schedule may be illegal; only a replay shows it.

Limits: positions are 64-bit integers; a slice gives a tuple of actions, not a schedule.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.schedule.account import Units
from retrograde.schedule.actions import Action, Code, Verb, decode, encode, of_word, to_word
from retrograde.schedule.chain import Chain
from retrograde.schedule.json_text import check_keys, fail, read, write
from retrograde.schedule.simulate import Replay, simulate
from retrograde.units import Memory, parse_memory

_Verbs = NDArray[np.uint8]
_Places = NDArray[np.int64]

_KEYS = ("length", "policy", "memory", "units", "actions")
_SHOWN = 60  # actions that str() shows of a long schedule, at each end


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """An immutable sequence of actions, with what is needed to replay it.

    Args:
        length: steps, at least 1.
        policy: the name of the policy that made it.
        memory: the memory that the planner was given, in ``units``; None where it takes none.
        units: the units of the peak; a chain, where layers have their own bytes and seconds.
        kind: verbs (:class:`~retrograde.schedule.actions.Verb`), shape (actions,).
        start: first positions, shape (actions,).
        stop: second positions, shape (actions,); equal to ``start`` for verbs with one position.
        bound: a proven lower bound of the cost, over all schedules of the policy: forward steps,
            or seconds where ``units`` is a chain; None where nothing was proven.

    Raises:
        ScheduleError: the arrays differ in shape, or a verb is unknown.

    Example:
        >>> from retrograde.schedule import Backward, Free, Record, Store
        >>> actions = [Store(0), Record(0, 3), Backward(0, 3), Free(0)]
        >>> schedule = Schedule.from_actions(actions, length=3, policy="store-all")
        >>> len(schedule), schedule[1], schedule.cost, schedule.peak
        (4, Record(start=0, stop=3), 3, 3)
    """

    length: int
    policy: str
    memory: int | None
    units: Units | Chain
    kind: NDArray[np.uint8]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    bound: int | float | None = None

    def __post_init__(self) -> None:
        shapes = {np.shape(part) for part in (self.kind, self.start, self.stop)}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise ScheduleError(
                f"kind, start and stop have the shapes {sorted(shapes)}: expected one, (actions,)"
            )
        if np.size(self.kind) and np.max(self.kind) > max(Verb):
            raise ScheduleError(
                f"a verb is numbered {np.max(self.kind)}: expected 0 to {max(Verb):d}"
            )
        for name, dtype in (("kind", np.uint8), ("start", np.int64), ("stop", np.int64)):
            part = np.array(getattr(self, name), dtype=dtype)
            part.flags.writeable = False
            object.__setattr__(self, name, part)

    @classmethod
    def from_actions(
        cls,
        actions: Iterable[Action],
        *,
        length: int,
        policy: str = "custom",
        memory: int | None = None,
        units: Units | Chain | None = None,
    ) -> "Schedule":
        """Make a schedule from actions in the order of their execution, without a replay.

        The others are those of :class:`Schedule`; ``units`` is ``Units()`` by default. Positions
        that do not fit 64 bits raise ScheduleError.

        Example:
            >>> from retrograde.schedule import Store
            >>> Schedule.from_actions([Store(0)], length=1)[0]
            Store(at=0)
        """
        codes = [encode(action) for action in actions]
        return cls.from_codes(codes, length=length, policy=policy, memory=memory, units=units)

    @classmethod
    def from_codes(
        cls, codes: Sequence[Code], *, length: int, policy: str = "custom",
        memory: int | None = None, units: Units | Chain | None = None,
    ) -> "Schedule":  # fmt: skip
        """As :meth:`from_actions`, from codes (verb, start, stop), for long schedules."""
        try:
            table = np.array(codes, dtype=np.int64).reshape(-1, 3)
        except OverflowError:
            raise ScheduleError("a position does not fit 64 bits: expected 0 to length") from None
        verbs, start, stop = table[:, 0].astype(np.uint8), table[:, 1], table[:, 2]
        return cls(length, policy, memory, units or Units(), verbs, start, stop)

    @cached_property
    def _replay(self) -> Replay:
        return simulate(self)

    @property
    def cost(self) -> int:
        """Forward steps in all, the first sweep included; ScheduleError if not legal."""
        return self._replay.cost

    @property
    def peak(self) -> int:
        """The most that is held at any time, in ``units``; ScheduleError if not legal."""
        return self._replay.peak

    @property
    def seconds(self) -> float | None:
        """Seconds of one iteration, where ``units`` is a chain; None for steps without a time.
        ScheduleError if not legal."""
        return float(self._replay.clock[-1]) if isinstance(self.units, Chain) else None

    @property
    def gap(self) -> float | None:
        """How far the cost, or a chain's seconds, is above ``bound``, as a share of it; 0.0 is
        optimal. None where there is no bound."""
        if self.bound is None:
            return None
        spent = self.cost if self.seconds is None else self.seconds
        return spent / self.bound - 1 if self.bound else 0.0

    def codes(self) -> Iterator[Code]:
        """Iterate over the codes (verb, start, stop) of all actions, as Python integers.

        Example:
            >>> list(Schedule.from_codes([(1, 0, 0)], length=1).codes())
            [(1, 0, 0)]
        """
        return zip(self.kind.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)

    def to_json(self) -> str:
        """Return the schedule as one line of compact JSON. Its actions are one string of letters
        and positions, such as ``"S0 A0:5 S5 R5:6 B5:6"``.

        Example:
            >>> from retrograde.schedule import Store
            >>> text = Schedule.from_actions([Store(0)], length=1).to_json()
            >>> Schedule.from_json(text)[0]
            Store(at=0)
        """
        units = self.units
        entries = {
            "length": self.length,
            "policy": self.policy,
            "memory": self.memory,
            "units": {"chain": json.loads(units.to_json())}
            if isinstance(units, Chain)
            else asdict(units),
            **({} if self.bound is None else {"bound": self.bound}),
            "actions": " ".join(to_word(*code) for code in self.codes()),
        }
        return write("schedule", entries)

    @staticmethod
    def from_json(text: str) -> "Schedule":
        """Read what :meth:`to_json` wrote, without a replay; ScheduleError says where it is
        malformed."""
        entries = read("schedule", text, _KEYS, ["bound"])

        def need(name: str, is_right: bool, expected: str) -> None:
            if not is_right:
                fail("schedule", f"{name!r} is {entries[name]!r}: expected {expected}")

        memory, bound = entries["memory"], entries.get("bound")
        need("length", _is_whole(entries["length"]), "an integer, 1 or more")
        need("policy", isinstance(entries["policy"], str), "a name")
        need("memory", memory is None or _is_whole(memory), "an integer, 1 or more, or null")
        need("actions", isinstance(entries["actions"], str), "text such as 'S0 R0:5 B0:5 F0'")
        units = entries["units"] = _units(entries["units"])
        expected = "seconds" if isinstance(units, Chain) else "an integer"
        kinds = (int, float) if isinstance(units, Chain) else (int,)
        is_right = bound is None or (type(bound) in kinds and 0 <= bound < inf)
        need("bound", is_right, f"{expected}, 0 or more, or null")
        entries.pop("bound", None)
        codes = [_code(index, word) for index, word in enumerate(entries.pop("actions").split())]
        return replace(Schedule.from_codes(codes, **entries), bound=bound)

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[Action]:
        return (decode(*code) for code in self.codes())

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Action, ...]: ...

    def __getitem__(self, index: int | slice) -> Action | tuple[Action, ...]:
        verb, start, stop = (part[index].tolist() for part in (self.kind, self.start, self.stop))
        if isinstance(index, slice):
            return tuple(map(decode, verb, start, stop))
        return decode(verb, start, stop)

    def _key(self) -> tuple[Any, ...]:
        arrays = (self.kind.tobytes(), self.start.tobytes(), self.stop.tobytes())
        return (self.length, self.policy, self.memory, self.units, self.bound, *arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        if len(self) <= 2 * _SHOWN:
            return ", ".join(map(str, self))
        head, tail = self[:_SHOWN], self[-_SHOWN:]
        gap = f"… {len(self) - 2 * _SHOWN} more …"
        return ", ".join([*map(str, head), gap, *map(str, tail)])

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.policy!r}, length={self.length}, memory={self.memory}, "
            f"{len(self)} actions>"
        )


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 1


def _units(document: object) -> Units | Chain:
    if not isinstance(document, dict):
        fail("schedule", f"'units' is {document!r}: expected an object")
    if document.keys() == {"chain"}:
        return Chain.from_json(json.dumps(document["chain"]))
    check_keys("schedule", "'units'", document, [field.name for field in fields(Units)])
    return Units(**document)


def _code(index: int, word: str) -> Code:
    code = of_word(word)
    if code is None:
        expected = "such as 'A0:5', 'S5', 'R5:6', 'L0', 'F5', 'B5:6'"
        fail("schedule", f"action {index} is {word!r}: expected {expected}")
    return code


def merge(schedule: Schedule) -> Schedule:
    """Join adjacent ranges of one verb: a range is one call of a fused kernel, however many steps
    it has. The same steps run and the same states are held, so cost and peak do not change.

    >>> from retrograde.schedule import Advance, Store
    >>> steps = Schedule.from_actions([Store(0), Advance(0, 1), Advance(1, 3)], length=3)
    >>> print(merge(steps))
    store 0, advance 0→3
    """
    verbs, start, stop = merged(schedule.kind, schedule.start, schedule.stop)
    return replace(schedule, kind=verbs, start=start, stop=stop)


def merged(verbs: _Verbs, start: _Places, stop: _Places) -> tuple[_Verbs, _Places, _Places]:
    """As :func:`merge`, for the arrays of a schedule. Ranges are joined wherever one begins where
    the other ends. A state that is freed and at once stored again stays."""
    if not len(verbs):
        return verbs, start, stop
    again = (verbs[:-1] == Verb.FREE) & (verbs[1:] == Verb.STORE) & (start[:-1] == start[1:])
    kept = ~(np.append(again, False) | np.append(False, again))
    verbs, start, stop = verbs[kept], start[kept], stop[kept]
    onward = ((verbs[1:] == Verb.ADVANCE) | (verbs[1:] == Verb.RECORD)) & (start[1:] == stop[:-1])
    downward = (verbs[1:] == Verb.BACKWARD) & (stop[1:] == start[:-1])
    joins = (verbs[1:] == verbs[:-1]) & (onward | downward)
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    last = np.concatenate((first[1:] - 1, [len(verbs) - 1]))
    verbs = verbs[first]
    down = verbs == Verb.BACKWARD
    start, stop = np.where(down, start[last], start[first]), np.where(down, stop[first], stop[last])
    return verbs, start, stop


def forward_ranges(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each range that runs forward, recorded or not, begins and ends."""
    runs = (schedule.kind == Verb.ADVANCE) | (schedule.kind == Verb.RECORD)
    return schedule.start[runs], schedule.stop[runs]


def check_limit(memory: Memory | None, schedule: Schedule | None) -> None:
    """Refuse a budget that cannot be read, and by a ScheduleError one beside a schedule."""
    if memory is not None:
        parse_memory(memory)
        if schedule is not None:
            raise ScheduleError("given both memory and schedule: expected one; leave one out")


def check_schedule(schedule: Schedule, length: int) -> None:
    """Refuse a schedule for another length, or one that is not legal, by a ScheduleError."""
    if schedule.length != length:
        raise ScheduleError(
            f"the schedule is for {schedule.length} steps, but the inputs have {length}: "
            f"plan one for {length}"
        )
    _ = schedule.cost  # replays the schedule once, which checks it
