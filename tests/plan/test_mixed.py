import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.exhaustive import cheapest
from oracles.recurrences import fewest_actions, msm_table
from retrograde.errors import ScheduleError
from retrograde.plan.closed_form import hsm_cost, ism_cost
from retrograde.plan.mixed import LONGEST, mixed_costs, plan_blocks
from retrograde.schedule import Backward, Record, merge

LENGTH, MEMORY = 60, 30
SIZES = [(alpha, beta) for alpha in range(1, 8) for beta in range(1, alpha + 1)]


@pytest.mark.parametrize(("alpha", "beta"), SIZES)
def test_costs_are_those_of_the_recurrence(alpha, beta):
    costs = mixed_costs(LENGTH, range(1, MEMORY + 1), alpha=alpha, beta=beta)
    assert np.array_equal(costs.T, msm_table(LENGTH, MEMORY, alpha, beta)[:, 1:])


@pytest.mark.parametrize(
    ("state", "alpha", "beta"), [(3, 7, 5), (2, 3, 3), (4, 4, 2), (5, 9, 4), (2, 6, 4), (3, 3, 3)]
)
def test_hidden_states_may_be_of_any_size(state, alpha, beta):
    memories = range(state, 41)
    costs = mixed_costs(30, memories, state=state, alpha=alpha, beta=beta)
    assert np.array_equal(costs.T, msm_table(30, 40, alpha, beta, state)[:, state:])


@pytest.mark.parametrize("alpha", [2, 3, 4, 5])
def test_no_legal_schedule_is_cheaper_than_msm(alpha):
    for length in range(1, 7):
        for memory in range(1, 9):
            best = cheapest(length, memory, alpha=alpha, beta=alpha - 1)
            assert plan_blocks(length, memory, alpha=alpha, beta=alpha - 1).cost == best


def test_no_legal_schedule_is_cheaper_than_hsm_where_only_hidden_states_fit():
    for length in range(1, 7):
        for memory in range(1, 7):
            assert hsm_cost(length, memory) == cheapest(length, memory, alpha=99, beta=99)


def test_no_legal_schedule_is_cheaper_than_ism_where_states_are_of_one_size():
    for length in range(1, 7):
        for memory in range(1, 7):
            best = cheapest(length, memory, alpha=1, beta=1, core=1, initial=0)
            assert ism_cost(length, memory) == best


def test_without_a_smaller_beta_the_recurrence_is_not_the_best_of_all():
    """The base of a segment is kept after its last use: 14 instead of 13."""
    assert plan_blocks(7, 4, alpha=3, beta=3).cost == 14
    assert cheapest(7, 4, alpha=3, beta=3) == 13


@pytest.mark.parametrize(
    ("alpha", "beta"), [(2, 1), (3, 2), (4, 3), (4, 2), (1, 1), (2, 2), (3, 3)]
)
def test_ties_break_by_the_fewest_actions(alpha, beta):
    fewest = fewest_actions(11, 13, alpha, beta)
    for length in range(1, 12):
        for memory in range(1, 14):
            schedule = merge(plan_blocks(length, memory, alpha=alpha, beta=beta))
            assert len(schedule) == 2 + fewest[length, memory]


@settings(deadline=None)
@given(
    length=st.integers(1, 120),
    memory=st.integers(0, 200),
    state=st.integers(1, 9),
    beta=st.integers(1, 20),
    more=st.integers(0, 12),
)
def test_a_schedule_keeps_what_was_promised(length, memory, state, beta, more):
    sizes = {"state": state, "alpha": beta + more, "beta": beta}
    schedule = plan_blocks(length, state + memory, **sizes)
    assert schedule.cost == mixed_costs(length, [state + memory], **sizes)[0, length]
    assert schedule.peak <= state + memory


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(3, 60), st.integers(2, 6), st.integers(2, 1000))
def test_the_unit_does_not_matter(length, memory, beta, unit):
    small = plan_blocks(length, memory, state=3, alpha=beta + 3, beta=beta)
    sizes = {"state": 3 * unit, "alpha": (beta + 3) * unit, "beta": beta * unit}
    assert list(plan_blocks(length, memory * unit + unit - 1, **sizes)) == list(small)


def test_every_recorded_step_is_an_action_of_its_own():
    schedule = plan_blocks(40, 12, alpha=3, beta=2)
    ranges = [a for a in schedule if isinstance(a, Record | Backward)]
    assert len(ranges) == 80
    assert all(a.stop == a.start + 1 for a in ranges)


def test_memory_is_enough_at_one_state_and_all_but_one_step():
    """Erratum 5: t forward steps at m = 1 + β(t−1)."""
    for length in (1, 2, 9, 65):
        enough = 1 + 4 * (length - 1)
        assert plan_blocks(length, enough, alpha=5, beta=4).cost == length
        assert length == 1 or plan_blocks(length, enough - 1, alpha=5, beta=4).cost > length


def test_more_than_enough_memory_takes_no_table():
    schedule = plan_blocks(20_000, 10**12, alpha=5, beta=4)
    assert (schedule.cost, schedule.peak) == (20_000, 1 + 4 * 19_999)


def test_one_state_of_room_recomputes_all():
    assert plan_blocks(20, 7, state=7, alpha=9, beta=2).cost == 210
    assert plan_blocks(20, 13, state=7, alpha=19, beta=12).cost == 210
    assert plan_blocks(20, 9, state=7, alpha=9, beta=2).cost < 210


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 3, 4, 9, 5), "memory is 3: expected at least 4, the initial state alone"),
        ((10, 3, 0, 9, 5), "state=0, alpha=9, beta=5: expected state >= 1 and 1 <= beta <= alpha"),
        ((10, 3, 1, 2, 3), "state=1, alpha=2, beta=3: expected"),
        ((10, 3, 1, 2, 0), "state=1, alpha=2, beta=0: expected"),
        ((0, 3, 1, 2, 1), f"length is 0: the mixed policy takes 1 to {LONGEST} steps"),
        ((LONGEST + 1, 3, 1, 2, 1), f"length is {LONGEST + 1}: .* plan blocks of steps"),
        (
            (10_000, 30_000, 1, 5, 4),
            r"10000 steps and a memory of 30000 may take 4.47 GiB, expected at most 2 GiB: count",
        ),
    ],
)
def test_what_makes_no_sense_or_does_not_fit_is_refused(arguments, message):
    length, memory, state, alpha, beta = arguments
    with pytest.raises(ScheduleError, match=message):
        plan_blocks(length, memory, state=state, alpha=alpha, beta=beta)
