"""Schedules to and from the package ``checkpoint_schedules`` of Firedrake and pyadjoint.

The package has two kinds of checkpoints: *restart data* of a step (a hidden state) and *adjoint
data* of a step (an internal state). They are kept in ``RAM`` or on ``DISK``, and used in ``WORK``.

==================  ===============================================================================
here                there
==================  ===============================================================================
``Advance(a, b)``   ``Forward(a, b, False, False, WORK)``
``Store(a)``        the ``Forward`` that starts at ``a`` also writes restart data, into ``RAM``
``Load(a)``         ``Copy(a, RAM, WORK)``; the last one is a ``Move``
``Free(a)``         nothing: the last load was a ``Move``
``Record(a, b)``    ``Forward(k, k + 1, False, True, RAM)`` for each step k; into ``WORK`` for the
                    last one, where it is backpropagated at once
``Backward(a, b)``  for each step k from the last: ``Move(k, RAM, WORK)`` unless it is in ``WORK``,
                    then ``Reverse(k + 1, k, True)``
==================  ===============================================================================

So ``RAM`` there holds the states that count here, and ``WORK`` is the working core. Three things
differ:

1. Adjoint data hold no restart data. Where a schedule loads the output of a recorded step, the
   package keeps one checkpoint more.
2. A state is kept where a run begins at it, not where one ends. A state that nothing loads is not
   kept.
3. Restart data serve the steps of the ``Forward`` that wrote them, and may be loaded once all later
   steps are reversed.

A schedule that breaks these rules is legal here but cannot be exported. :func:`retrograde.plan`
makes none, nor does any planner that divides a sequence and backpropagates its right part first.

On import all storage becomes one memory, and states that are kept too long are freed.

Reference: Dolci, Maddison, Ham, Pallez, Herrmann, *checkpoint_schedules: schedules for incremental
checkpointing of adjoint simulations* (2024). Time and memory are linear in actions and recorded
steps. Limits: one reversal; the extra ``interchange``, which is imported when first called.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from retrograde.errors import ScheduleError
from retrograde.schedule import Schedule, Units, Verb, merge, simulate
from retrograde.schedule.actions import Code

if TYPE_CHECKING:
    from checkpoint_schedules import CheckpointSchedule

__all__ = ["from_checkpoint_schedules", "to_checkpoint_schedules"]

_ADVANCE, _STORE, _RECORD, _LOAD, _FREE, _BACKWARD = (verb.value for verb in Verb)
_RUNS = (_ADVANCE, _RECORD)
_UNITS = Units(alpha=1, beta=1, core=0, initial=1, state=1)  # every checkpoint counts 1


class _Move(NamedTuple):
    """One operation, in either language. Stores and frees follow from the loads."""

    verb: int
    start: int
    stop: int
    origin: int  # the index of the action that it comes from
    keep: bool  # whether the state at ``start`` may be kept here; once settled, whether it is


def to_checkpoint_schedules(schedule: Schedule) -> "CheckpointSchedule":
    """Return the same schedule as a ``checkpoint_schedules.CheckpointSchedule``.

    It can be iterated over once, and has ``n``, ``r``, ``max_n`` and ``is_exhausted`` as the
    package's own schedules do. All checkpoints are kept in ``StorageType.RAM``.

    Args:
        schedule: a legal schedule.

    Returns:
        A schedule for one reversal, of known length, which runs the same forward steps in the same
        order.

    Raises:
        ScheduleError: the schedule is not legal, or loads a state when the package cannot.
        ModuleNotFoundError: ``checkpoint_schedules`` is not installed.

    Example:
        >>> from retrograde.schedule import Backward, Free, Record, Schedule, Store
        >>> actions = [Store(0), Record(0, 2), Backward(0, 2), Free(0)]
        >>> for action in to_checkpoint_schedules(Schedule.from_actions(actions, length=2)):
        ...     print(action)
        Forward(0, 1, False, True, StorageType.RAM)
        Forward(1, 2, False, True, StorageType.WORK)
        EndForward()
        Reverse(2, 1, True)
        Move(0, StorageType.RAM, StorageType.WORK)
        Reverse(1, 0, True)
        EndReverse()
    """
    kind = _schedule_class()
    simulate(schedule)
    moves = _joined(_settled(_moves(schedule)))
    _check_loads(moves, schedule.length)
    exported: CheckpointSchedule = kind(moves, schedule.length)
    return exported


def from_checkpoint_schedules(stream: Iterable[Any], length: int | None = None) -> Schedule:
    """Return the first reversal of a ``checkpoint_schedules`` schedule, as a :class:`Schedule`.

    Tiers of storage become one memory, and states that are kept too long are freed. Schedules that
    learn their length as they run, such as ``TwoLevelCheckpointSchedule``, are given it
    (``finalize``).

    Args:
        stream: a schedule of the package, or any iterable of its actions; it is consumed up to the
            first ``EndReverse``.
        length: steps; needed where the stream does not know them.

    Returns:
        A legal schedule that runs the same forward steps in the same order. Its units count every
        checkpoint as 1, as the package does.

    Raises:
        ScheduleError: the stream is not valid, or never reverses; the message names the
            action and the reason.
        ModuleNotFoundError: ``checkpoint_schedules`` is not installed.

    Example:
        >>> from checkpoint_schedules import Revolve
        >>> schedule = from_checkpoint_schedules(Revolve(100, 10))
        >>> schedule.cost, schedule.peak
        (322, 10)
    """
    _require()
    if length is not None and (type(length) is not int or length < 1):
        raise ScheduleError(f"length is {length!r}: expected an integer, 1 or more, or None")
    known = getattr(stream, "max_n", None)
    if length is not None and known is not None and known != length:
        raise ScheduleError(
            f"length is {length}, and the stream has {known} steps: leave length out"
        )
    reader = _Reader(known if length is None else length)
    reader.read(stream)
    assert reader.length is not None  # known at EndForward at the latest
    codes = list(_codes(_settled(_runnable(reader))))
    return merge(Schedule.from_codes(codes, length=reader.length, policy="imported", units=_UNITS))


def _moves(schedule: Schedule) -> list[_Move]:
    """Return a schedule's runs and backward ranges, and the loads that something runs from."""
    moves: list[_Move] = []
    for index, (verb, start, stop) in enumerate(schedule.codes()):
        if verb in (_STORE, _FREE):
            continue
        if moves and moves[-1].verb == _LOAD and verb not in _RUNS:
            moves.pop()
        moves.append(_Move(verb, start, stop, index, True))
    if moves[-1].verb == _LOAD:
        moves.pop()
    return moves


def _settled(moves: Sequence[_Move]) -> list[_Move]:
    """Keep each state exactly until its last load.

    A move keeps the state that it starts from if that is loaded again before another move could
    keep it. A run does not keep the state that it was just loaded from.
    """
    settled = list(moves)
    loaded_next: dict[int, bool] = {}
    for i in range(len(moves) - 1, -1, -1):
        move = moves[i]
        loads = move.verb == _LOAD
        counts = loads or (move.verb in _RUNS and not (i and moves[i - 1].verb == _LOAD))
        if counts and move.keep:
            settled[i] = move._replace(keep=loaded_next.get(move.start, False))
            loaded_next[move.start] = loads
        else:
            settled[i] = move._replace(keep=False)
    return settled


def _joined(moves: Sequence[_Move]) -> list[_Move]:
    """Join runs at states that need not be kept."""
    joined: list[_Move] = []
    for move in moves:
        last = joined[-1] if joined else None
        if last and last.verb == move.verb == _ADVANCE and not move.keep:
            joined[-1] = last._replace(stop=move.stop)
        else:
            joined.append(move)
    return joined


def _check_loads(moves: Sequence[_Move], length: int) -> None:
    """Refuse to load restart data that were not written, or that serve too few steps."""
    frontier = length
    reach: dict[int, int] = {}
    for move in moves:
        if move.verb == _ADVANCE and move.keep:
            reach[move.start] = move.stop
        elif move.verb == _BACKWARD:
            frontier = move.start
        elif move.verb == _LOAD and reach.get(move.start, -1) < frontier:
            where, end = f"action {move.origin}, load {move.start}", reach.get(move.start)
            if end is None:
                raise ScheduleError(
                    f"{where}: the state was kept where a run ends, and checkpoint_schedules keeps "
                    f"one where a run begins; run from state {move.start} before another load"
                )
            raise ScheduleError(
                f"{where}: checkpoint_schedules keeps the state for the run to state {end}, and "
                f"loads it when all steps from there on are reversed, but step {frontier - 1} is "
                f"not; backpropagate down to state {end} first"
            )


@cache
def _schedule_class() -> type[Any]:
    """Return the class of exported schedules, made on first use."""
    _require()
    from checkpoint_schedules import CheckpointSchedule, EndReverse, Forward, Reverse, StorageType

    class ExportedSchedule(CheckpointSchedule):  # type: ignore[misc]
        """A schedule of retrograde, for one reversal."""

        def __init__(self, moves: Sequence[_Move], length: int) -> None:
            super().__init__(max_n=length)
            self._moves = moves
            self._exhausted = False

        def _iterator(self) -> Iterator[Any]:
            for action, location in _package_actions(self._moves, self._max_n):
                self._n = location
                if isinstance(action, Reverse):
                    self._r += len(action)
                yield action
            self._exhausted = True
            yield EndReverse()

        @property
        def is_exhausted(self) -> bool:
            """Whether the one reversal is done."""
            return self._exhausted

        def uses_storage_type(self, storage_type: Any) -> bool:
            """Whether anything is ever written to that storage."""
            return storage_type in (StorageType.RAM, StorageType.WORK) and any(
                action.storage == storage_type
                for action, _ in _package_actions(self._moves, self._max_n)
                if isinstance(action, Forward) and (action.write_ics or action.write_adj_deps)
            )

    return ExportedSchedule


def _package_actions(moves: Sequence[_Move], length: int) -> Iterator[tuple[Any, int]]:
    """Iterate over the package's actions except the last, each with the position of the forward."""
    from checkpoint_schedules import Copy, EndForward, Forward, Move, Reverse, StorageType

    ram, work = StorageType.RAM, StorageType.WORK
    ended, in_work = False, -1
    for i, (verb, start, stop, _, keep) in enumerate(moves):
        if verb == _LOAD:
            yield (Copy if keep else Move)(start, ram, work), start
        elif verb == _ADVANCE:
            yield Forward(start, stop, keep, False, ram if keep else work), stop
        elif verb == _RECORD:
            follows = moves[i + 1]
            in_work = stop - 1 if follows.verb == _BACKWARD and follows.stop == stop else -1
            for step in range(start, stop):
                into = work if step == in_work else ram
                yield Forward(step, step + 1, False, True, into), step + 1
        else:
            for step in reversed(range(start, stop)):
                if step != in_work:
                    yield Move(step, ram, work), step + 1  # as the package's own Mixed does
                yield Reverse(step + 1, step, True), step + 1
        if not ended and verb in _RUNS and stop == length:
            ended = True
            yield EndForward(), stop


class _Reader:
    """The state of reading a stream: forward, adjoint, and the content of each storage.

    Args:
        length: steps; None where only ``EndForward`` gives them.
    """

    def __init__(self, length: int | None) -> None:
        from checkpoint_schedules import StorageType

        self.length = length
        self.moves: list[_Move] = []
        self.used: set[int] = set()  # moves whose adjoint data a Reverse used
        self._at: int | None = 0
        self._left: int | None = None  # steps to reverse; None until EndForward
        self._work: dict[int, int] = {}  # step: the move that wrote its adjoint data
        self._kept: dict[tuple[Any, int], tuple[bool, dict[int, int]]] = {}
        self._tiers = (StorageType.RAM, StorageType.DISK)
        self._workspace = StorageType.WORK
        self._index, self._action = -1, None

    def read(self, stream: Iterable[Any]) -> None:
        """Read a stream up to its first EndReverse."""
        from checkpoint_schedules import Copy, EndForward, EndReverse, Forward, Move, Reverse

        for self._index, action in enumerate(stream):
            self._action = action
            if isinstance(action, Forward):
                self._forward(action)
                if self._at == self.length and getattr(stream, "max_n", self) is None:
                    stream.finalize(self.length)  # type: ignore[attr-defined]
            elif isinstance(action, Copy | Move):
                self._load(action, isinstance(action, Move))
            elif isinstance(action, Reverse):
                self._reverse(action)
            elif isinstance(action, EndForward):
                self._end_forward()
            elif isinstance(action, EndReverse):
                if self._left != 0:
                    self._refuse(f"{self._remaining()} to be reversed")
                return
            else:
                self._refuse(
                    "expected Forward, Reverse, Copy, Move, EndForward or EndReverse of "
                    "checkpoint_schedules"
                )
        raise ScheduleError(
            f"the stream ends after {self._index + 1} actions and without EndReverse: "
            f"{self._remaining()} to be reversed"
        )

    def _forward(self, action: Any) -> None:
        start, stop = int(action.n0), int(action.n1)  # Mixed gives numpy integers
        if self._left is None:
            if self.length is None and stop >= sys.maxsize:
                self._refuse("the stream does not know its length; give length=…")
            stop = min(stop, self.length or stop)
        elif stop > self._left:
            self._refuse(f"step {self._left} is reversed already")
        if self._at is None:
            self._refuse("adjoint data were loaded, and the forward cannot restart from them")
        if start != self._at:
            self._refuse(f"the forward is at step {self._at}, not at {start}")
        if start >= stop:
            self._refuse("it runs no step")
        self._at, self._work = stop, {}
        keeps = action.storage in self._tiers
        restarts = keeps and bool(action.write_ics)
        steps = self._run(start, stop, restarts, bool(action.write_adj_deps))
        if action.storage == self._workspace:
            self._work = steps
        elif keeps and (restarts or steps):
            self._keep(action.storage, start, restarts, steps)

    def _run(self, start: int, stop: int, restarts: bool, adjoint: bool) -> dict[int, int]:
        """Add the moves of some steps, one by one where each may be recorded; return those."""
        if not adjoint:
            self.moves.append(_Move(_ADVANCE, start, stop, self._index, restarts))
            return {}
        first = len(self.moves)
        self.moves += (
            _Move(_RECORD, step, step + 1, self._index, restarts and step == start)
            for step in range(start, stop)
        )
        return {step: first + step - start for step in range(start, stop)}

    def _keep(self, storage: Any, at: int, restarts: bool, steps: dict[int, int]) -> None:
        if (storage, at) in self._kept:
            self._refuse(f"{storage!r} holds data of step {at} already")
        self._kept[storage, at] = restarts, steps

    def _load(self, action: Any, moves: bool) -> None:
        at, source, target = int(action.n), action.from_storage, action.to_storage
        if (source, at) not in self._kept:
            self._refuse(f"{source!r} holds no data of step {at}")
        restarts, steps = self._kept[source, at]
        if moves:
            del self._kept[source, at]
        if target in self._tiers:
            self._keep(target, at, restarts, steps)
        elif target == self._workspace:
            self._work |= steps
            self._at = at if restarts else None
            if restarts:
                self.moves.append(_Move(_LOAD, at, at, self._index, True))

    def _reverse(self, action: Any) -> None:
        start, stop = int(action.n0), int(action.n1)
        if self._left is None:
            self._refuse("the forward has not ended: EndForward comes first")
        if stop != self._left or not 0 <= start < stop:
            self._refuse(f"{self._remaining()} to be reversed, from the last")
        missing = [step for step in range(start, stop) if step not in self._work]
        if missing:
            self._refuse(f"StorageType.WORK holds no adjoint data of step {missing[-1]}")
        self.used |= {self._work[step] for step in range(start, stop)}
        self.moves.append(_Move(_BACKWARD, start, stop, self._index, False))
        self._left = start
        if action.clear_adj_deps:
            self._work = {}

    def _end_forward(self) -> None:
        if self._left is not None:
            self._refuse("the forward has ended already")
        length = self.length or self._at
        if not length or self._at != length:
            self._refuse(f"the forward is at step {self._at}, not at the end")
        self.length = self._left = length

    def _remaining(self) -> str:
        if self._left is None:
            return "the forward has not ended, and all steps are"
        return f"{self._left} of {self.length} steps are"

    def _refuse(self, reason: str) -> NoReturn:
        raise ScheduleError(f"action {self._index}, {self._action!r}: {reason}")


def _runnable(reader: _Reader) -> list[_Move]:
    """Drop loads that nothing needs, and record only what is backpropagated from there.

    The output of a recorded step need not be kept, since its internal state holds it.
    """
    moves, length = reader.moves, reader.length or 0
    runnable: list[_Move] = []
    recorded = bytearray(length)
    current = 0
    for i, move in enumerate(moves):
        verb, start, stop, index, keep = move
        if verb == _LOAD:
            if current == start or i + 1 == len(moves) or moves[i + 1].verb not in _RUNS:
                continue
            current = start
        elif verb == _BACKWARD:
            current = -1
        elif (step := recorded.find(1, start, stop)) >= 0:
            raise ScheduleError(
                f"action {index}, forward from {start}: it runs step {step} again while adjoint "
                "data of it are kept for later; a Schedule runs no step that is recorded"
            )
        else:
            if current != start:  # loaded before a Reverse, which leaves no state current here
                runnable.append(_Move(_LOAD, start, start, index, True))
            current = stop
        keep = keep and not (start and recorded[start - 1])
        if verb == _RECORD and i in reader.used:
            recorded[start] = 1
        elif verb == _RECORD:
            verb = _ADVANCE
        runnable.append(_Move(verb, start, stop, index, keep))
    return runnable


def _codes(moves: Sequence[_Move]) -> Iterator[Code]:
    """Iterate over the codes of the six verbs; each free follows the last load directly."""
    stored: set[int] = set()
    for verb, start, stop, _, keep in moves:
        if verb in _RUNS and keep:
            stored.add(start)
            yield _STORE, start, start
        yield verb, start, stop
        if verb == _LOAD and not keep and start in stored:
            stored.remove(start)
            yield _FREE, start, start


def _require() -> None:
    try:
        import checkpoint_schedules  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "retrograde.interchange needs checkpoint_schedules: install it with "
            "pip install 'retrograde[interchange]'",
            name=error.name,
        ) from error
