"""MSM: the closed form and the tables against the recurrence, equation by equation."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.exhaustive import cheapest
from oracles.recurrences import fewest_actions, hsm_table, ism_table, msm_table, plain_tables
from retrograde.errors import ScheduleError
from retrograde.plan import cost, plan
from retrograde.plan.steps.closed_form import hsm_cost, ism_cost
from retrograde.plan.steps.mixed import Mixed

LENGTH, MEMORY = 60, 30
SIZES = [(alpha, beta) for alpha in range(1, 8) for beta in range(1, alpha + 1)]
FAR = [(2, 1), (2, 2), (3, 2), (5, 1), (5, 2), (5, 4), (5, 5), (9, 2), (11, 10), (21, 20), (40, 40)]
STATES = [(3, 7, 5), (2, 3, 3), (4, 4, 2), (5, 9, 4), (2, 6, 4), (3, 3, 3), (16, 105, 89)]


@pytest.mark.parametrize(("alpha", "beta"), SIZES)
def test_costs_are_those_of_the_recurrence(alpha, beta):
    lengths, memories = np.arange(1, LENGTH + 1)[:, None], np.arange(1, MEMORY + 1)
    costs = cost(lengths, memories, "msm", alpha=alpha, beta=beta)
    assert np.array_equal(costs, msm_table(LENGTH, MEMORY, alpha, beta)[1:, 1:])


@pytest.mark.parametrize(("alpha", "beta"), FAR)
def test_every_policy_costs_what_brute_force_finds_up_to_400_steps(alpha, beta):
    length, memory = 400, 120
    hsm, ism, msm = plain_tables(length, memory, alpha, beta, 1)
    lengths, memories = np.arange(1, length + 1)[:, None], np.arange(1, memory + 1)
    assert np.array_equal(cost(lengths, memories, "hsm"), hsm[1:, 1:])
    assert np.array_equal(cost(lengths, memories, "ism"), ism[1:, 1:])
    assert np.array_equal(cost(lengths, memories, "msm", alpha=alpha, beta=beta), msm[1:, 1:])


@pytest.mark.parametrize("beta", range(1, 21))
def test_the_closed_form_is_the_recurrence_in_5000_drawn_cells(beta):
    """250 cells for each β of 1 to 20, with α = β in every fourth, one by one."""
    rng = random.Random(beta)
    for wide in (False, True):
        _, _, msm = plain_tables(500, 160, beta if wide else beta + 1, beta, 1)
        for _ in range(63 if wide else 188):
            length, memory = rng.randint(1, 500), rng.randint(1, 160)
            assert Mixed(memory - 1, beta, wide).cost(length) == msm[length, memory]


@given(st.integers(1, 2**31 - 1), st.integers(1, 4000), st.integers(2, 4000), st.booleans())
def test_arrays_and_scalars_agree(length, memory, beta, wide):
    form = Mixed(memory - 1, beta, wide)
    lengths = np.unique(np.maximum(1, length // np.array([1, 2, 7, 1000])))
    if memory > 2:
        assert form.costs(lengths).tolist() == [form.cost(t) for t in lengths.tolist()]


def test_published_costs():
    assert cost(10**9, 1000, "msm", alpha=5) == 3_959_175_102
    assert cost(1000, [10, 50, 100, 300, 500], "msm", alpha=5).tolist() == [
        4603, 2663, 1988, 1928, 1877,
    ]  # fmt: skip


def test_a_billion_steps_cost_half_a_second_and_a_million_are_planned_in_one():
    plan(30_000, 100, "msm", alpha=5)  # loads what is compiled
    start = time.process_time()
    assert cost(10**9, 1000, "msm", alpha=5) == 3_959_175_102
    assert time.process_time() - start < 0.5
    start = time.process_time()
    schedule = plan(10**6, 1000, "msm", alpha=5)
    assert time.process_time() - start < 1
    assert schedule.cost == schedule.bound == cost(10**6, 1000, "msm", alpha=5)
    assert schedule.peak <= 1000


@pytest.mark.quick(1)
@pytest.mark.parametrize(("state", "alpha", "beta"), STATES)
def test_hidden_states_may_be_of_any_size(state, alpha, beta):
    for length, memory in ((30, 40), (200, 260)):
        _, _, msm = plain_tables(length, memory, alpha, beta, state)
        for room in range(state, memory + 1, 7):
            schedule = plan(length, room, "msm", state=state, alpha=alpha, beta=beta)
            assert schedule.cost == schedule.bound == msm[length, room]
            assert schedule.peak <= room


def test_the_oracles_agree():
    """The compiled loops against the tables written down equation by equation."""
    hsm, ism, msm = plain_tables(30, 40, 7, 5, 3)
    assert np.array_equal(hsm[1:, 1:], hsm_table(30, 40)[1:, 1:])
    assert np.array_equal(ism[1:, 1:], ism_table(30, 40)[1:, 1:])
    assert np.array_equal(msm[:, 3:], msm_table(30, 40, 7, 5, 3)[:, 3:])


@pytest.mark.parametrize("alpha", [2, 3, 4, 5])
def test_no_legal_schedule_is_cheaper_than_msm(alpha):
    for length in range(1, 7):
        for memory in range(1, 9):
            best = cheapest(length, memory, alpha=alpha, beta=alpha - 1)
            assert plan(length, memory, "msm", alpha=alpha).cost == best


def test_no_legal_schedule_is_cheaper_than_hsm_where_only_hidden_states_fit():
    for length in range(1, 7):
        for memory in range(1, 7):
            assert hsm_cost(length, memory) == cheapest(length, memory, alpha=99, beta=99)


@pytest.mark.quick(0)
def test_no_legal_schedule_is_cheaper_than_ism_where_states_are_of_one_size():
    for length in range(1, 7):
        for memory in range(1, 7):
            best = cheapest(length, memory, alpha=1, beta=1, core=1, initial=0)
            assert ism_cost(length, memory) == best


@pytest.mark.parametrize(("alpha", "beta"), [(2, 1), (3, 2), (4, 3), (4, 2), (2, 2), (3, 3)])
def test_a_schedule_has_few_more_actions_than_any_that_is_as_cheap(alpha, beta):
    """The rule for ties, the longest left parts first, is not always the fewest actions."""
    fewest = fewest_actions(11, 13, alpha, beta)
    more = [
        len(plan(length, memory, "msm", alpha=alpha, beta=beta)) - 2 - fewest[length, memory]
        for length in range(1, 12)
        for memory in range(1, 14)
    ]
    assert min(more) >= 0
    assert max(more) <= 7
    assert np.mean(more) < 1


@settings(deadline=None)
@given(
    length=st.integers(1, 120),
    memory=st.integers(0, 200),
    state=st.integers(1, 9),
    beta=st.integers(1, 20),
    more=st.integers(0, 12),
)
def test_a_schedule_keeps_what_was_promised(length, memory, state, beta, more):
    _, _, msm = plain_tables(length, state + memory, beta + more, beta, state)
    sizes = {"state": state, "alpha": beta + more, "beta": beta}
    schedule = plan(length, state + memory, "msm", **sizes)
    assert schedule.cost == schedule.bound == msm[length, state + memory]
    assert schedule.peak <= state + memory


@pytest.mark.quick(0)
@settings(deadline=None, max_examples=300)
@given(
    length=st.integers(1, 3000),
    memory=st.integers(1, 400),
    beta=st.integers(1, 30),
    wide=st.booleans(),
)
def test_a_schedule_in_closed_form_costs_what_the_closed_form_says(length, memory, beta, wide):
    sizes = {"alpha": beta if wide else beta + 1, "beta": beta}
    schedule = plan(length, memory, "msm", **sizes)
    assert schedule.cost == cost(length, memory, "msm", **sizes) == schedule.bound
    assert schedule.peak <= memory


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(3, 60), st.integers(2, 6), st.integers(2, 1000))
def test_the_unit_does_not_matter(length, memory, beta, unit):
    small = plan(length, memory, "msm", state=3, alpha=beta + 3, beta=beta)
    sizes = {"state": 3 * unit, "alpha": (beta + 3) * unit, "beta": beta * unit}
    assert list(plan(length, memory * unit + unit - 1, "msm", **sizes)) == list(small)


def test_memory_is_enough_at_one_state_and_all_but_one_step():
    """Erratum 5: t forward steps at m = 1 + β(t−1)."""
    for length in (1, 2, 9, 65):
        enough = 1 + 4 * (length - 1)
        assert plan(length, enough, "msm", alpha=5).cost == length
        assert length == 1 or plan(length, enough - 1, "msm", alpha=5).cost > length


@pytest.mark.parametrize("sizes", [{"alpha": 5}, {"alpha": 9, "beta": 5, "state": 2}])
def test_more_than_enough_memory_takes_no_table(sizes):
    schedule = plan(20_000, 10**12, "msm", **sizes)
    assert (schedule.cost, len(schedule)) == (20_000, 4)


def test_one_state_of_room_recomputes_all():
    assert plan(20, 7, "msm", state=7, alpha=9, beta=2).cost == 210
    assert plan(20, 13, "msm", state=7, alpha=19, beta=12).cost == 210
    assert plan(20, 9, "msm", state=7, alpha=9, beta=2).cost < 210


def test_sizes_without_a_closed_form_are_refused_where_their_table_is_too_large():
    message = (
        r"10000 steps in 300 units of memory, with state = 2, alpha = 7 and beta = 5, take a table "
        r"of 10000² · 300 sums, expected at most 20000000000: give sizes in a larger unit, beta a "
    )
    with pytest.raises(ScheduleError, match=message):
        plan(10_000, 300, "msm", state=2, alpha=7, beta=5)


def test_a_schedule_of_too_many_levels_is_refused():
    with pytest.raises(
        ScheduleError,
        match="takes 600000000 numbers for 100000000 units of memory, expected at most 20000000: ",
    ):
        plan(10**9, 10**8, "msm", alpha=5)
