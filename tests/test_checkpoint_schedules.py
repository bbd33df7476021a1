"""Plans and schedules of ``checkpoint_schedules``: the recipes go both ways.

The package's conventions are replayed here: what each action may do, and what it leaves behind.
"""

import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from retrograde.plan import cost, plan
from retrograde.schedule import Verb

package = pytest.importorskip("checkpoint_schedules")
EndReverse = package.EndReverse
RAM, DISK = package.StorageType.RAM, package.StorageType.DISK
WORK, NONE = package.StorageType.WORK, package.StorageType.NONE

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "recipes"))
Exported = importlib.import_module("to_checkpoint_schedules").Exported
imported = importlib.import_module("from_checkpoint_schedules").imported
sys.path.pop(0)

SIZES = [(1, 1), (2, 1), (2, 2), (3, 2), (5, 1), (13, 3), (63, 1), (64, 7), (65, 64), (65, 200)]
PLANNED = [(t, {"memory": m}) for t, m in SIZES] + [(t, {"policy": "store-all"}) for t, _ in SIZES]


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


def backward_order(schedule):
    return [
        step
        for verb, start, stop in schedule.codes()
        if verb == Verb.BACKWARD
        for step in reversed(range(start, stop))
    ]


@pytest.mark.quick(0)
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


@pytest.mark.quick(9)
@pytest.mark.parametrize(("t", "arguments"), PLANNED)
def test_every_plan_of_hsm_and_of_a_baseline_is_carried_out_at_its_cost(t, arguments):
    schedule = plan(t, **arguments)
    exported = Exported(schedule)
    assert isinstance(exported, package.CheckpointSchedule)
    model = replay(exported, t)
    assert model.steps == schedule.cost
    assert model.most[WORK] == 1, "one step at a time, as the working core"
    assert model.most[DISK] == 0
    assert [exported.uses_storage_type(s) for s in (RAM, WORK, DISK, NONE)] == [1, 1, 0, 0]


@pytest.mark.parametrize(("t", "m"), SIZES)
def test_hidden_states_are_the_checkpoints_in_ram(t, m):
    ours = replay(Exported(plan(t, m)), t)
    theirs = replay(package.MultistageCheckpointSchedule(t, m, 0), t)
    assert ours.most[RAM] == min(m, t - 1)
    assert (ours.steps, ours.most) == (theirs.steps, theirs.most)


@pytest.mark.parametrize("policy", [{"policy": "ism"}, {"policy": "msm", "alpha": 2}])
def test_a_plan_that_loads_recorded_outputs_is_refused(policy):
    with pytest.raises(ValueError, match=r"cannot export a plan of '(ism|msm)': take one of 'hsm'"):
        Exported(plan(13, 3, **policy))


@pytest.mark.parametrize("t", range(1, 33))
def test_multistage_and_revolve_are_hsm_slot_for_slot(t):
    for m in range(1, t + 2):
        for stream in (
            package.MultistageCheckpointSchedule(t, m, 0),
            package.MultistageCheckpointSchedule(t, 0, m, trajectory="revolve"),
            package.MultistageCheckpointSchedule(t, m // 2, m - m // 2),
            package.Revolve(t, m),
        ):
            schedule = imported(stream)
            assert schedule.cost == cost(t, m, "hsm")
            assert schedule.peak == min(m, t - 1)


@pytest.mark.quick(0)
@pytest.mark.parametrize("t", range(1, 33))
def test_mixed_never_beats_msm_with_one_more_slot(t):
    for m in range(1, t + 2):
        schedule = imported(package.MixedCheckpointSchedule(t, m))
        assert cost(t, m + 1, "msm", alpha=1, beta=1) <= schedule.cost <= cost(t, m, "hsm")


@pytest.mark.parametrize(
    "make",
    [
        lambda t, m: package.HRevolve(t, m, m),
        lambda t, m: package.DiskRevolve(t, m),
        lambda t, m: package.PeriodicDiskRevolve(t, m),
        lambda t, m: package.MultistageCheckpointSchedule(t, m, m),
    ],
)
@pytest.mark.parametrize(("t", "m"), [(3, 1), (5, 2), (13, 3), (65, 5)])
def test_tiers_of_storage_become_one_memory(make, t, m):
    schedule = imported(make(t, m))
    assert backward_order(schedule) == list(reversed(range(t)))
    assert schedule.cost == sum(len(a) for a in make(t, m) if isinstance(a, package.Forward))
    assert schedule.cost >= cost(t, schedule.peak)


@pytest.mark.parametrize(("t", "arguments"), PLANNED)
def test_cost_and_order_survive_there_and_back(t, arguments):
    schedule = plan(t, **arguments)
    back = imported(Exported(schedule))
    assert (back.length, back.cost) == (schedule.length, schedule.cost)
    assert backward_order(back) == backward_order(schedule)
