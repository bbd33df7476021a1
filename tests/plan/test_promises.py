"""What holds for the schedules of every policy."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.mutations import mutants
from retrograde.errors import ScheduleError
from retrograde.plan import POLICIES, cost, plan
from retrograde.schedule import Free, Schedule, Store, merge, simulate

GOLDEN = Path(__file__).parents[1] / "golden"


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of plan(): every policy, memory from the least to more than enough."""
    policy = draw(st.sampled_from(POLICIES))
    request: dict[str, object] = {"length": draw(st.integers(1, 150)), "policy": policy}
    if policy != "store-all":
        request["memory"] = draw(st.integers(1, 200))
    if policy not in ("hsm", "ism"):
        request["alpha"] = alpha = draw(st.integers(1, 9))
        request["beta"] = draw(st.none() | st.integers(1, alpha))
    return request


@settings(deadline=None, max_examples=400)
@given(requests())
def test_cost_and_peak_are_what_was_promised(request):
    schedule = plan(**request)
    replay = simulate(schedule)
    assert replay.cost == schedule.cost == cost(**request)
    assert replay.peak == schedule.peak
    assert schedule.memory is None or replay.peak <= schedule.memory
    assert replay.kept[-1] == 0


@settings(deadline=None)
@given(requests())
def test_ranges_are_the_longest_and_the_initial_state_is_kept_throughout(request):
    """``best`` alone may drop the initial state before the end."""
    schedule = plan(**request)
    assert merge(schedule) == schedule
    if schedule.policy != "best":
        assert (schedule[0], schedule[-1]) == (Store(0), Free(0))
    assert Schedule.from_json(schedule.to_json()) == schedule


@settings(deadline=None)
@given(requests())
def test_more_memory_never_costs_more(request):
    if "memory" in request:
        assert cost(**{**request, "memory": request["memory"] + 1}) <= cost(**request)


@settings(deadline=None)
@given(requests())
def test_best_is_no_dearer_than_msm(request):
    if request["policy"] == "msm":
        assert cost(**{**request, "policy": "best"}) <= cost(**request)


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 100), st.integers(2, 9))
def test_msm_is_no_dearer_than_either_of_its_parts(length, memory, alpha):
    """Its search space holds both; ISM's slots are α units, and one more is its working core."""
    mixed = cost(length, memory, "msm", alpha=alpha)
    assert mixed <= cost(length, memory, "hsm")
    slots = (memory - 1) // alpha + 1
    assert mixed <= cost(length, slots, "ism")


GOOD = [
    *(plan(t, m) for t in (1, 2, 3, 7, 10) for m in (1, 2, 4)),
    *(plan(t, m, "ism") for t in (1, 2, 3, 7, 12) for m in (1, 2, 4)),
    *(
        plan(t, m, "msm", alpha=alpha, beta=beta)
        for t in (2, 7, 11)
        for m in (2, 4, 9)
        for alpha, beta in ((2, 1), (3, 2), (3, 3), (6, 2))
    ),
    *(
        plan(t, m, "best", alpha=alpha, beta=beta)
        for t in (2, 7, 11)
        for m in (2, 4, 9)
        for alpha, beta in ((1, 1), (2, 2), (3, 3))
    ),
    *(plan(t, policy="store-all") for t in (1, 2, 5, 11)),
    plan(9, 7, "msm", state=2, alpha=4, beta=2),
    plan(9, 11, "best", state=2, alpha=3, beta=3),
]


@pytest.mark.parametrize("schedule", GOOD, ids=repr)
def test_every_single_edit_of_a_good_schedule_is_rejected(schedule):
    simulate(schedule)
    for edit, mutant in mutants(schedule):
        with pytest.raises(ScheduleError, match=r"^(action \d+, .+: |after the last action )."):
            pytest.fail(f"{edit}: {simulate(mutant)}")


@pytest.mark.parametrize(("name", "length"), [("figure_3a", 4), ("figure_3b", 10)])
def test_the_policies_of_figure_3(name, length):
    schedule = plan(length, 4)
    assert str(schedule) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").strip()
    assert schedule.cost == {4: 7, 10: 24}[length]
