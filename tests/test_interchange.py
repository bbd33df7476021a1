"""The package's conventions, replayed here: what each action may do, and what it leaves behind."""

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograde.errors import ScheduleError
from retrograde.interchange import from_checkpoint_schedules, to_checkpoint_schedules
from retrograde.plan import cost, plan
from retrograde.schedule import (
    Advance,
    Backward,
    Free,
    Load,
    Record,
    Schedule,
    Store,
    Verb,
    simulate,
)

package = pytest.importorskip("checkpoint_schedules")
Copy, Move, Forward, Reverse = package.Copy, package.Move, package.Forward, package.Reverse
EndForward, EndReverse = package.EndForward, package.EndReverse
F = Forward
RAM, DISK = package.StorageType.RAM, package.StorageType.DISK
WORK, NONE = package.StorageType.WORK, package.StorageType.NONE

SIZES = [(1, 1), (2, 1), (2, 2), (3, 2), (5, 1), (13, 3), (63, 1), (64, 7), (65, 64), (65, 200)]
POLICIES = [
    {"policy": "hsm"},
    {"policy": "ism"},
    {"policy": "msm", "alpha": 1},
    {"policy": "msm", "alpha": 2},
    {"policy": "msm", "alpha": 3, "beta": 3},
    {"policy": "msm", "alpha": 5},
    {"policy": "msm", "alpha": 5, "beta": 2},
    {"policy": "best", "alpha": 1},
    {"policy": "best", "alpha": 3, "beta": 3},
]
PLANNED = [(t, {"memory": m, **policy}) for t, m in SIZES for policy in POLICIES] + [
    (t, {"policy": "store-all"}) for t, _ in SIZES
]


@dataclass
class Model:
    """A model that runs by the package's actions and refuses whatever it could not carry out.

    Restart and adjoint data are sets of the steps that they serve. The checkpoint of step n in a
    storage holds both sets.
    """

    length: int
    at: int | None = 0
    reversed: list[int] = field(default_factory=list)
    restart: set[int] = field(default_factory=set)
    adjoint: set[int] = field(default_factory=set)
    kept: dict[object, dict[int, tuple[set[int], set[int]]]] = field(
        default_factory=lambda: {RAM: {}, DISK: {}}
    )
    steps: int = 0
    most: Counter = field(default_factory=Counter)  # the most checkpoints in each storage
    ended: bool = False

    @property
    def left(self) -> int:
        return self.length - len(self.reversed)

    def do(self, action) -> None:
        """Carry out one action."""
        getattr(self, f"do_{type(action).__name__}")(action)
        for storage, held in self.kept.items():
            self.most[storage] = max(self.most[storage], len(held))
        self.most[WORK] = max(self.most[WORK], bool(self.restart) + len(self.adjoint))

    def do_Forward(self, action) -> None:  # noqa: N802
        assert action.n0 == self.at, "starts where the forward is"
        assert action.n0 < action.n1 <= self.left, "up to what is reversed at most"
        steps = set(range(action.n0, action.n1))
        restart = steps if action.write_ics else set()
        adjoint = steps if action.write_adj_deps else set()
        self.restart, self.adjoint = set(), set()
        if action.storage in self.kept:
            assert restart or adjoint, "writes something"
            assert action.n0 not in self.kept[action.storage], "writes over nothing"
            self.kept[action.storage][action.n0] = restart, adjoint
        elif action.storage == WORK:
            self.restart, self.adjoint = restart, adjoint
        self.at = action.n1
        self.steps += len(steps)

    def do_Reverse(self, action) -> None:  # noqa: N802
        assert self.ended, "not before EndForward"
        assert action.n0 < action.n1 == self.left, "from the last step that is left"
        assert self.adjoint >= set(range(action.n0, action.n1)), "adjoint data are there"
        self.reversed += reversed(range(action.n0, action.n1))
        if action.clear_adj_deps:
            self.adjoint = set()

    def do_Copy(self, action, take=False) -> None:  # noqa: N802
        assert self.ended, "a model that is run for the first time cannot go back"
        assert not self.restart, "no unused data in WORK"
        assert not self.adjoint, "no unused data in WORK"
        assert action.n < self.left, "before the adjoint"
        source = self.kept[action.from_storage]
        restart, adjoint = source.pop(action.n) if take else source[action.n]
        assert restart or adjoint, "holds something"
        assert action.to_storage == WORK
        self.restart, self.adjoint = set(restart), set(adjoint)
        self.at = action.n if restart else None
        if restart:
            assert restart >= set(range(action.n, self.left)), "reaches to the adjoint"

    def do_Move(self, action) -> None:  # noqa: N802
        self.do_Copy(action, take=True)

    def do_EndForward(self, _) -> None:  # noqa: N802
        assert not self.ended
        assert self.at == self.length
        self.ended = True

    def do_EndReverse(self, _) -> None:  # noqa: N802
        assert self.reversed == list(reversed(range(self.length))), "each step once, in order"


def replay(schedule, length):
    """Carry out a whole schedule of the package; its bookkeeping must agree all along."""
    model = Model(length)
    assert (schedule.n, schedule.r, schedule.is_exhausted) == (0, 0, False)
    for action in schedule:
        model.do(action)
        assert model.at is None or schedule.n == model.at
        assert schedule.r == len(model.reversed)
        assert schedule.max_n == length
        assert schedule.is_exhausted == isinstance(action, EndReverse)
    with pytest.raises(StopIteration):
        next(schedule)
    assert model.left == 0
    assert model.kept == {RAM: {}, DISK: {}}, "nothing is left in storage"
    assert not model.restart, "nothing is left in WORK"
    assert not model.adjoint, "nothing is left in WORK"
    return model


def words(stream):
    """Actions as plain values: they do not compare in 1.0.4, and Mixed gives numpy integers."""
    plain = (bool, package.StorageType)
    return [
        (type(a).__name__, *(v if isinstance(v, plain) else int(v) for v in a.args)) for a in stream
    ]


def backward_order(schedule):
    return [
        step
        for verb, start, stop in schedule.codes()
        if verb == Verb.BACKWARD
        for step in reversed(range(start, stop))
    ]


# to the package


@pytest.mark.parametrize(
    "theirs",
    [
        lambda t, m: package.MultistageCheckpointSchedule(t, m, 0),
        lambda t, m: package.MultistageCheckpointSchedule(t, 0, m, trajectory="revolve"),
        lambda t, m: package.MixedCheckpointSchedule(t, m),
        lambda t, m: package.Revolve(t, m),
    ],
)
@pytest.mark.parametrize(("t", "m"), SIZES[1:])
def test_the_model_runs_the_packages_own_schedules(theirs, t, m):
    assert replay(theirs(t, m), t).steps <= t * (t + 1) // 2


@pytest.mark.parametrize(("t", "arguments"), PLANNED)
def test_every_plan_is_carried_out_at_its_cost(t, arguments):
    schedule = plan(t, **arguments)
    exported = to_checkpoint_schedules(schedule)
    assert isinstance(exported, package.CheckpointSchedule)
    model = replay(exported, t)
    assert model.steps == schedule.cost
    assert model.most[WORK] == 1, "one step at a time, as the working core"
    assert model.most[DISK] == 0
    assert exported.uses_storage_type(RAM) == (model.most[RAM] > 0)
    assert exported.uses_storage_type(WORK)
    assert not exported.uses_storage_type(DISK)
    assert not exported.uses_storage_type(NONE)


@pytest.mark.parametrize(("t", "m"), SIZES)
def test_hidden_states_are_the_checkpoints_in_ram(t, m):
    assert replay(to_checkpoint_schedules(plan(t, m)), t).most[RAM] == min(m, t - 1)


@pytest.mark.parametrize(("t", "m"), SIZES)
def test_the_optimal_schedule_costs_what_the_packages_own_costs(t, m):
    theirs = replay(package.MultistageCheckpointSchedule(t, m, 0), t)
    ours = replay(to_checkpoint_schedules(plan(t, m)), t)
    assert (ours.steps, ours.most) == (theirs.steps, theirs.most)


def test_the_actions_of_one_schedule_word_for_word():
    actions = [
        *(Store(0), Record(0, 1), Advance(1, 3), Store(3), Record(3, 5), Backward(3, 5), Free(3)),
        *(Load(1), Advance(1, 2), Record(2, 3), Backward(2, 3)),
        *(Load(1), Record(1, 2), Backward(0, 2), Free(0)),
    ]
    stream = list(to_checkpoint_schedules(Schedule.from_actions(actions, length=5)))
    assert [str(action).replace("StorageType.", "") for action in stream] == [
        "Forward(0, 1, False, True, RAM)",
        "Forward(1, 3, True, False, RAM)",  # the output of recorded step 0: one checkpoint more
        "Forward(3, 4, False, True, RAM)",  # state 3 is never run from again, and not written
        "Forward(4, 5, False, True, WORK)",
        "EndForward()",
        "Reverse(5, 4, True)",
        "Move(3, RAM, WORK)",
        "Reverse(4, 3, True)",
        "Copy(1, RAM, WORK)",
        "Forward(1, 2, False, False, WORK)",
        "Forward(2, 3, False, True, WORK)",
        "Reverse(3, 2, True)",
        "Move(1, RAM, WORK)",
        "Forward(1, 2, False, True, WORK)",
        "Reverse(2, 1, True)",
        "Move(0, RAM, WORK)",
        "Reverse(1, 0, True)",
        "EndReverse()",
    ]


def test_what_is_loaded_or_stored_to_no_end_is_left_out():
    plain = [Store(0), Advance(0, 2), Record(2, 3), Backward(2, 3)]
    plain += [Load(0), Free(0), Record(0, 2), Backward(0, 2)]
    idle = [Store(0), Advance(0, 2), Store(2), Record(2, 3), Store(3), Load(2), Backward(2, 3)]
    idle += [Free(2), Load(0), Free(0), Record(0, 2), Backward(0, 2), Load(3), Free(3)]
    exported, expected = (
        to_checkpoint_schedules(Schedule.from_actions(actions, length=3))
        for actions in (idle, plain)
    )
    assert words(exported) == words(expected)


def test_a_step_recorded_before_others_above_it_goes_back_waits_in_ram():
    actions = [
        *(Store(0), Advance(0, 5), Record(5, 6), Backward(5, 6), Load(0), Advance(0, 2)),
        *(Record(2, 5), Load(0), Free(0), Record(0, 2), Backward(0, 5)),
    ]
    schedule = Schedule.from_actions(actions, length=6)
    model = replay(to_checkpoint_schedules(schedule), 6)
    assert (model.steps, model.most[RAM], model.most[WORK]) == (schedule.cost, 5, 1)


def test_an_illegal_schedule_is_refused_before_it_begins():
    schedule = Schedule.from_actions([Store(0), Record(0, 3), Backward(0, 3)], length=3)
    with pytest.raises(ScheduleError, match="state 0 is still stored: free it"):
        to_checkpoint_schedules(schedule)


def test_a_load_that_the_package_does_not_allow_is_refused_before_it_begins():
    actions = [
        *(Store(0), Advance(0, 2), Store(2), Advance(2, 4), Record(4, 5), Backward(4, 5)),
        *(Load(0), Advance(0, 1), Load(2), Free(2), Record(2, 4), Backward(2, 4)),
        *(Load(0), Free(0), Record(0, 2), Backward(0, 2)),
    ]
    with pytest.raises(ScheduleError) as error:
        to_checkpoint_schedules(Schedule.from_actions(actions, length=5))
    assert str(error.value) == (
        "action 6, load 0: checkpoint_schedules keeps the state for the run to state 2, and loads "
        "it when all steps from there on are reversed, but step 3 is not; backpropagate down to "
        "state 2 first"
    )


def test_a_state_kept_where_a_run_ends_is_refused():
    actions = [
        *(Store(0), Advance(0, 3), Record(3, 4), Backward(3, 4), Load(0), Advance(0, 2), Store(2)),
        *(Load(0), Free(0), Record(0, 1), Load(2), Free(2), Record(2, 3), Backward(2, 3)),
        *(Load(1), Record(1, 2), Backward(0, 2)),
    ]
    with pytest.raises(ScheduleError) as error:
        to_checkpoint_schedules(Schedule.from_actions(actions, length=4))
    assert str(error.value) == (
        "action 10, load 2: the state was kept where a run ends, and checkpoint_schedules keeps "
        "one where a run begins; run from state 2 before another load"
    )


# from the package


@pytest.mark.parametrize("t", range(1, 33))
def test_multistage_and_revolve_are_hsm_slot_for_slot(t):
    for m in range(1, t + 2):
        for stream in (
            package.MultistageCheckpointSchedule(t, m, 0),
            package.MultistageCheckpointSchedule(t, 0, m, trajectory="revolve"),
            package.MultistageCheckpointSchedule(t, m // 2, m - m // 2),
            package.Revolve(t, m),
        ):
            schedule = from_checkpoint_schedules(stream)
            assert schedule.cost == cost(t, m, "hsm")
            assert schedule.peak == min(m, t - 1)


@pytest.mark.parametrize("t", range(1, 33))
def test_mixed_keeps_its_slots_and_never_beats_msm_with_one_more(t):
    for m in range(1, t + 2):
        schedule = from_checkpoint_schedules(package.MixedCheckpointSchedule(t, m))
        ours = cost(t, m + 1, "msm", alpha=1, beta=1)
        assert schedule.peak == min(m, t - 1)
        assert ours <= schedule.cost <= cost(t, m, "hsm")
        assert (ours == schedule.cost) == (m >= t - 1)


@pytest.mark.parametrize(("t", "m"), [*SIZES, (100, 9)])
def test_the_packages_schedules_come_back_word_for_word(t, m):
    for make in (
        lambda: package.MultistageCheckpointSchedule(t, m, 0),
        lambda: package.MixedCheckpointSchedule(t, m, storage=RAM),
    ):
        back = to_checkpoint_schedules(from_checkpoint_schedules(make()))
        assert words(back) == words(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda t, m: package.HRevolve(t, m, m),
        lambda t, m: package.DiskRevolve(t, m),
        lambda t, m: package.PeriodicDiskRevolve(t, m),
        lambda t, m: package.MultistageCheckpointSchedule(t, m, m),
        lambda t, m: package.TwoLevelCheckpointSchedule(m, 2),
        lambda t, m: package.TwoLevelCheckpointSchedule(3, m, binomial_storage=RAM),
    ],
)
@pytest.mark.parametrize(("t", "m"), [(3, 1), (5, 2), (13, 3), (65, 5)])
def test_tiers_of_storage_become_one_memory(make, t, m):
    schedule = from_checkpoint_schedules(make(t, m), t)
    assert backward_order(schedule) == list(reversed(range(t)))
    assert cost(t, schedule.peak) <= schedule.cost <= t + t * (t + 1) // 2
    assert replay(to_checkpoint_schedules(schedule), t).steps == schedule.cost


@pytest.mark.parametrize("t", [1, 2, 63])
def test_everything_kept_is_ordinary_backpropagation(t):
    for stream in (
        package.SingleMemoryStorageSchedule(),
        package.SingleDiskStorageSchedule(),
        package.SingleDiskStorageSchedule(move_data=True),
    ):
        schedule = from_checkpoint_schedules(stream, t)
        assert list(schedule) == [Record(0, t), Backward(0, t)]
        assert stream.max_n == t


def test_what_is_kept_or_recorded_to_no_end_is_dropped():
    stream = [
        *(Forward(0, 2, True, True, DISK), Forward(2, 3, True, False, RAM)),
        *(Forward(3, 4, False, True, WORK), EndForward(), Reverse(4, 3, True)),
        *(Copy(2, RAM, DISK), Move(2, RAM, NONE), Copy(2, DISK, WORK), Move(2, DISK, WORK)),
        *(Forward(2, 3, True, True, WORK), Reverse(3, 2, False), Copy(0, DISK, WORK)),
        *(Reverse(2, 1, False), Reverse(1, 0, False), EndReverse()),
    ]
    schedule = from_checkpoint_schedules(stream)
    assert str(schedule) == (  # step 1 is recorded, so its output, state 2, need not be stored
        "record 0→2, advance 2→3, record 3→4, backward 4→3, load 2, record 2→3, backward 3→0"
    )
    assert (schedule.length, schedule.policy, schedule.memory) == (4, "imported", None)
    assert (schedule.cost, schedule.peak) == (5, 2)


def test_adjoint_data_that_the_next_forward_overwrites_are_no_record():
    stream = [
        *(F(0, 1, True, False, RAM), F(1, 2, False, True, WORK), F(2, 3, False, True, WORK)),
        *(EndForward(), Reverse(3, 2, True), Copy(0, RAM, WORK), F(0, 1, False, False, WORK)),
        *(F(1, 2, False, True, WORK), Reverse(2, 1, True), Copy(0, RAM, WORK)),
        *(F(0, 1, False, True, WORK), Reverse(1, 0, True), EndReverse()),
    ]
    assert str(from_checkpoint_schedules(stream)) == (
        "store 0, advance 0→2, record 2→3, backward 3→2, load 0, advance 0→1, record 1→2, "
        "backward 2→1, load 0, free 0, record 0→1, backward 1→0"
    )


def test_a_list_of_actions_will_do():
    stream = list(package.MixedCheckpointSchedule(13, 3))  # its positions are numpy integers
    schedule = from_checkpoint_schedules(stream)
    assert schedule == from_checkpoint_schedules(package.MixedCheckpointSchedule(13, 3))
    assert simulate(schedule).cost == sum(map(len, filter(lambda a: isinstance(a, F), stream)))


def test_a_schedule_is_read_up_to_the_first_end_of_a_reversal():
    stream = package.TwoLevelCheckpointSchedule(2, 1)
    schedule = from_checkpoint_schedules(stream, 5)
    assert stream.r == 0
    assert isinstance(next(stream), Copy)
    assert schedule.length == 5


END = [EndForward(), Reverse(2, 1, True)]
TWO = [F(0, 1, True, False, RAM), F(1, 2, False, True, WORK), *END]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([], "the stream ends after 0 actions and without EndReverse: the forward has not ended"),
        (["x"], "action 0, 'x': expected Forward, Reverse, Copy, Move, EndForward or EndReverse"),
        ([F(1, 2, True, False, RAM)], "action 0, Forward.*: the forward is at step 0, not at 1"),
        ([F(0, 0, True, False, RAM)], "action 0, Forward.*: it runs no step"),
        ([F(0, sys.maxsize, False, True, WORK)], "does not know its length; give length=…"),
        ([EndForward()], "action 0, EndForward.*: the forward is at step 0, not at the end"),
        ([Reverse(1, 0, True)], "the forward has not ended: EndForward comes first"),
        ([EndReverse()], "the forward has not ended, and all steps are to be reversed"),
        ([Copy(0, RAM, WORK)], "action 0, Copy.*: StorageType.RAM holds no data of step 0"),
        ([F(0, 2, False, False, NONE), *END], "WORK holds no adjoint data of step 1"),
        ([F(0, 2, False, True, WORK), *END], "without EndReverse: 1 of 2 steps are to be reversed"),
        ([F(0, 2, False, True, WORK), *END, EndReverse()], "action 3, EndReverse.*: 1 of 2 steps"),
        ([F(0, 2, False, True, WORK), *END, END[1]], "1 of 2 steps are to be reversed, from the"),
        ([F(0, 2, False, True, WORK), *END, END[0]], "the forward has ended already"),
        (
            [F(0, 2, False, True, RAM), EndForward(), Move(0, RAM, WORK), F(0, 1, 0, 0, WORK)],
            "action 3, .*: adjoint data were loaded, and the forward cannot restart from them",
        ),
        (
            [
                *(F(0, 1, False, True, WORK), F(1, 2, False, True, RAM), EndForward()),
                *(Move(1, RAM, WORK), Reverse(2, 1, False), Reverse(1, 0, True)),
            ],
            "action 5, .*: StorageType.WORK holds no adjoint data of step 0",
        ),
        (
            [*TWO, Copy(0, RAM, WORK), F(0, 2, False, False, WORK)],
            "action 5, .*: step 1 is reversed already",
        ),
        (
            [*TWO, Copy(0, RAM, WORK), F(0, 1, True, False, RAM)],
            "action 5, .*: StorageType.RAM holds data of step 0 already",
        ),
        (
            [
                *(F(0, 1, True, True, RAM), *TWO[1:], Copy(0, RAM, WORK)),
                *(F(0, 1, False, False, WORK), Copy(0, RAM, WORK), Reverse(1, 0, True)),
                EndReverse(),
            ],
            "action 5, forward from 0: it runs step 0 again while adjoint data of it are kept",
        ),
    ],
)
def test_a_stream_that_cannot_be_carried_out_is_refused(stream, message):
    with pytest.raises(ScheduleError, match=message):
        from_checkpoint_schedules(stream)


@pytest.mark.parametrize(
    ("stream", "length", "message"),
    [
        (package.Revolve(3, 1), 0, "length is 0: expected an integer, 1 or more, or None"),
        (package.Revolve(3, 1), True, "length is True: expected an integer"),
        (package.Revolve(3, 1), 2.0, r"length is 2\.0: expected an integer"),
        (package.Revolve(3, 1), 4, "length is 4, and the stream has 3 steps: leave length out"),
        (package.NoneCheckpointSchedule(), 4, "the stream ends after 2 actions .* 4 of 4 steps"),
        (package.SingleMemoryStorageSchedule(), None, "does not know its length; give length=…"),
    ],
)
def test_a_length_that_does_not_fit_is_refused(stream, length, message):
    with pytest.raises(ScheduleError, match=message):
        from_checkpoint_schedules(stream, length)


def test_a_stream_that_has_begun_is_refused():
    stream = package.Revolve(5, 2)
    next(stream)
    with pytest.raises(ScheduleError, match=r"action 0, .*: the forward is at step 0, not at "):
        from_checkpoint_schedules(stream)


# there and back


@pytest.mark.parametrize(("t", "arguments"), PLANNED)
def test_cost_and_order_survive_there_and_back(t, arguments):
    schedule = plan(t, **arguments)
    back = from_checkpoint_schedules(to_checkpoint_schedules(schedule))
    assert (back.length, back.cost) == (schedule.length, schedule.cost)
    assert backward_order(back) == backward_order(schedule)
    units = schedule.units
    peak = replace(back, units=units).peak
    if units.alpha <= units.beta + units.state:
        assert peak <= schedule.peak
    if units.alpha == units.beta + units.state and t > 1 and "memory" in arguments:
        assert peak == schedule.peak
    assert from_checkpoint_schedules(to_checkpoint_schedules(back)) == back


@st.composite
def nested(draw):
    """A legal schedule that divides as it likes, storing or recording as it likes."""
    actions = []

    def divide(start, steps, kept):
        """From the current state ``start``, which is kept; ``kept`` if it is stored."""
        if steps == 1 or draw(st.booleans()):
            actions.extend([Record(start, start + steps), Backward(start, start + steps)])
        elif draw(st.booleans()):
            left = draw(st.integers(1, steps - 1))
            actions.extend([Advance(start, start + left), Store(start + left)])
            divide(start + left, steps - left, True)
            actions.append(Load(start))
            divide(start, left, kept)
            return
        else:
            left = draw(st.integers(0, steps - 2))
            if left:
                actions.append(Advance(start, start + left))
            actions.append(Record(start + left, start + left + 1))
            divide(start + left + 1, steps - left - 1, False)
            actions.append(Backward(start + left, start + left + 1))
            if left:
                actions.append(Load(start))
                divide(start, left, kept)
                return
        if kept:
            actions.append(Free(start))

    length = draw(st.integers(1, 20))
    actions.append(Store(0))
    divide(0, length, True)
    return Schedule.from_actions(actions, length=length)


@given(nested())
def test_any_nested_schedule_is_carried_out_and_comes_back(schedule):
    model = replay(to_checkpoint_schedules(schedule), schedule.length)
    assert model.steps == schedule.cost
    back = from_checkpoint_schedules(to_checkpoint_schedules(schedule))
    assert back.cost == schedule.cost
    assert replace(back, units=schedule.units).peak <= schedule.peak


@given(nested(), st.data())
def test_no_action_of_an_exported_schedule_can_be_left_out(schedule, data):
    stream = list(to_checkpoint_schedules(schedule))
    gone = data.draw(st.integers(0, len(stream) - 2))
    model = Model(schedule.length)
    with pytest.raises((AssertionError, KeyError)):
        any(map(model.do, stream[:gone] + stream[gone + 1 :]))


class Walk(Model):
    """A model that writes down what it does: any walk by the package's rules.

    Copies before EndForward and restart data that serve too few steps are let pass.
    """

    def __init__(self, length, draw):
        super().__init__(length)
        self.draw = draw
        self.actions = []

    def flag(self):
        return self.draw(st.booleans())

    def forward(self, stop, restart, adjoint, storage):
        if storage != WORK and (self.at in self.kept[storage] or not (restart or adjoint)):
            storage = WORK
        self.note(Forward(self.at, stop, restart, adjoint, storage))
        self.restart = set()
        if stop == self.length and not self.ended:
            self.note(EndForward())

    def note(self, action):
        self.do(action)
        self.actions.append(action)

    def do_Copy(self, action, take=False):  # noqa: N802
        source = self.kept[action.from_storage]
        restart, adjoint = source.pop(action.n) if take else source[action.n]
        self.at, self.adjoint = action.n if restart else None, set(adjoint)

    def reverse(self):
        start = self.left - 1
        while start - 1 in self.adjoint and self.flag():
            start -= 1
        self.note(Reverse(self.left, start, self.flag()))

    def load(self, storage, step):
        take = (storage, step) != (DISK, 0) and self.flag()
        self.note((Move if take else Copy)(step, storage, WORK))


@st.composite
def streams(draw):
    """A length and a stream: wasteful, out of order, from state 0 on disk where all else fails."""
    walk = Walk(draw(st.integers(1, 7)), draw)
    walk.forward(draw(st.integers(1, walk.length)), True, walk.flag(), DISK)
    for turn in count():
        tired = turn > 30
        if not walk.left:
            break
        if walk.ended and walk.left - 1 in walk.adjoint:
            walk.reverse()
        elif walk.at is not None and walk.at < walk.left and (tired or walk.flag()):
            last = walk.left if not walk.ended or walk.at == walk.left - 1 else walk.left - 1
            stop = last if tired else draw(st.integers(walk.at + 1, walk.left))
            storage = WORK if tired else draw(st.sampled_from([RAM, WORK]))
            walk.forward(stop, walk.flag(), tired or walk.flag(), storage)
        else:
            kept = [(s, n) for s, held in walk.kept.items() for n in held if n < walk.left]
            walk.load(*((DISK, 0) if tired else draw(st.sampled_from(kept))))
    return walk.length, [*walk.actions, EndReverse()]


@settings(max_examples=300)
@given(streams())
def test_any_stream_of_the_package_becomes_legal_at_its_cost(case):
    length, stream = case
    try:
        schedule = from_checkpoint_schedules(stream)
    except ScheduleError as error:
        assert "again while adjoint data of it are kept for later" in str(error)  # noqa: PT017
        return
    assert schedule.length == length
    assert simulate(schedule).cost == sum(len(a) for a in stream if isinstance(a, Forward))
    try:
        exported = to_checkpoint_schedules(schedule)
    except ScheduleError as error:
        assert "checkpoint_schedules keeps" in str(error)  # noqa: PT017
        return
    assert replay(exported, length).steps == schedule.cost


def test_the_package_is_asked_for_where_it_is_missing():
    code = (
        "import sys; sys.modules['checkpoint_schedules'] = None\n"
        "import retrograde as rg\n"
        "from retrograde import interchange\n"
        "for name in interchange.__all__:\n"
        "    try: getattr(interchange, name)(rg.plan(3, 2))\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == 2 * [
        "retrograde.interchange needs checkpoint_schedules: install it with "
        "pip install 'retrograde[interchange]'"
    ]
