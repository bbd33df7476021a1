import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.exhaustive import cheapest
from oracles.recurrences import fewest_actions, hsm_table, ism_table, msm_table, plain_tables
from retrograde.errors import ScheduleError
from retrograde.plan import cost
from retrograde.plan.steps import hull
from retrograde.plan.steps import msm as mixed
from retrograde.plan.steps.closed_form import hsm_cost, ism_cost
from retrograde.plan.steps.hull import LONGEST
from retrograde.plan.steps.msm import mixed_bounds, mixed_costs, plan_blocks

LENGTH, MEMORY = 60, 30
SIZES = [(alpha, beta) for alpha in range(1, 8) for beta in range(1, alpha + 1)]
FAR = [(2, 1), (2, 2), (3, 2), (5, 1), (5, 2), (5, 4), (5, 5), (9, 2), (11, 10), (21, 20), (40, 40)]


def table(length, memory, **sizes):
    """C(t, m) for all lengths and memories, indexed [t, m] from t = 0 and m = state."""
    memories = np.arange(sizes.get("state", 1), memory + 1)
    return mixed_costs(np.arange(length + 1)[:, None], memories, **sizes)


@pytest.mark.parametrize(("alpha", "beta"), SIZES)
def test_costs_are_those_of_the_recurrence(alpha, beta):
    costs = table(LENGTH, MEMORY, alpha=alpha, beta=beta)
    assert np.array_equal(costs, msm_table(LENGTH, MEMORY, alpha, beta)[:, 1:])


@pytest.mark.parametrize(("alpha", "beta"), FAR)
def test_every_policy_costs_what_brute_force_finds_up_to_400_steps(alpha, beta):
    length, memory = 400, 120
    hsm, ism, msm = plain_tables(length, memory, alpha, beta, 1)
    lengths, memories = np.arange(1, length + 1)[:, None], np.arange(1, memory + 1)
    assert np.array_equal(cost(lengths, memories, "hsm"), hsm[1:, 1:])
    assert np.array_equal(cost(lengths, memories, "ism"), ism[1:, 1:])
    assert np.array_equal(cost(lengths, memories, "msm", alpha=alpha, beta=beta), msm[1:, 1:])


STATES = [(3, 7, 5), (2, 3, 3), (4, 4, 2), (5, 9, 4), (2, 6, 4), (3, 3, 3), (16, 105, 89)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("state", "alpha", "beta"), STATES)
def test_hidden_states_may_be_of_any_size(state, alpha, beta):
    for length, memory in ((30, 40), (200, 260)):
        costs = table(length, memory, state=state, alpha=alpha, beta=beta)
        _, _, msm = plain_tables(length, memory, alpha, beta, state)
        assert np.array_equal(costs, msm[:, state:])


def test_the_oracles_agree():
    """The compiled loops against the tables written down equation by equation."""
    hsm, ism, msm = plain_tables(30, 40, 7, 5, 3)
    assert np.array_equal(hsm[1:, 1:], hsm_table(30, 40)[1:, 1:])
    assert np.array_equal(ism[1:, 1:], ism_table(30, 40)[1:, 1:])
    assert np.array_equal(msm[:, 3:], msm_table(30, 40, 7, 5, 3)[:, 3:])


@pytest.mark.parametrize(("state", "alpha", "beta"), [(1, 5, 4), (1, 3, 3), (5, 9, 4), (2, 3, 3)])
def test_the_bound_is_never_wrong_and_never_far(state, alpha, beta):
    """With states of size 1 it is the cost itself; else at most one step below, in these cells."""
    _, _, msm = plain_tables(90, 60, alpha, beta, state)
    below = {
        int(msm[length, memory]) - mixed_bounds(length, memory, state=state, alpha=alpha, beta=beta)
        for length in range(1, 91, 4)
        for memory in range(state, 61, 3)
    }
    assert below == ({0} if state == 1 else {0, 1})


@pytest.mark.parametrize("sizes", [(1, 5, 4), (1, 3, 3), (5, 9, 4), (16, 105, 89)])
def test_past_the_exact_size_the_gap_is_certified(sizes, monkeypatch):
    state, alpha, beta = sizes
    monkeypatch.setattr(mixed, "MOST_CELLS", 0)
    for length in (1, 2, 63, 200):
        _, _, msm = plain_tables(length, 200, alpha, beta, state)
        for memory in (state, state + 1, 37, 63, 200):
            schedule = plan_blocks(length, memory, state=state, alpha=alpha, beta=beta)
            assert schedule.bound <= msm[length, memory] <= schedule.cost
            assert schedule.peak <= memory
            assert schedule.gap <= (0 if state == 1 else 0.05)


def test_a_long_schedule_is_planned_within_a_certified_gap():
    schedule = plan_blocks(10**6, 300, alpha=5, beta=4)
    assert schedule.cost == schedule.bound == mixed_bounds(10**6, 300, alpha=5, beta=4)
    assert schedule.peak <= 300


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
            schedule = plan_blocks(length, memory, alpha=alpha, beta=beta)
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
    assert schedule.cost == schedule.bound == mixed_costs(length, state + memory, **sizes)
    assert schedule.peak <= state + memory


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(3, 60), st.integers(2, 6), st.integers(2, 1000))
def test_the_unit_does_not_matter(length, memory, beta, unit):
    small = plan_blocks(length, memory, state=3, alpha=beta + 3, beta=beta)
    sizes = {"state": 3 * unit, "alpha": (beta + 3) * unit, "beta": beta * unit}
    assert list(plan_blocks(length, memory * unit + unit - 1, **sizes)) == list(small)


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
            (10**7, 10**9, 1, 5, 4),
            r"10000000 steps and 39999997 units of memory have more than 4194304 levels",
        ),
    ],
)
def test_what_makes_no_sense_or_does_not_fit_is_refused(arguments, message):
    length, memory, state, alpha, beta = arguments
    with pytest.raises(ScheduleError, match=message):
        plan_blocks(length, memory, state=state, alpha=alpha, beta=beta)


def test_bounds_that_are_too_large_are_refused(monkeypatch):
    monkeypatch.setattr(hull, "LARGEST_TABLE_BYTES", 48 * 10)
    with pytest.raises(ScheduleError, match=r"300 steps and a memory of 40 take more than 480 B: "):
        plan_blocks(300, 40, alpha=5, beta=4)


def test_costs_that_cannot_be_proven_are_refused(monkeypatch):
    monkeypatch.setattr(mixed, "MOST_CELLS", 0)
    assert mixed_costs(200, 37, alpha=5, beta=4) == plan_blocks(200, 37, alpha=5, beta=4).bound
    with pytest.raises(ScheduleError, match="could not be proven within 0 cells: ask for fewer"):
        mixed_costs(np.arange(200), 200, state=5, alpha=9, beta=4)
