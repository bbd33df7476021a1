"""The policy "best": two tables where α < β + s, and what stands in for them beyond their size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.exhaustive import cheapest
from oracles.recurrences import plain_tables
from retrograde.errors import ScheduleError, UnitError
from retrograde.plan import cost, plan
from retrograde.plan.arguments import units_of
from retrograde.plan.steps import best as home
from retrograde.plan.steps.tables import Tables, lower_bound
from retrograde.schedule import Schedule

EQUAL = [(1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 2, 2), (2, 3, 3), (3, 2, 2), (2, 4, 3), (3, 3, 1)]
HOLDING = [(1, 2, 1), (1, 3, 2), (2, 3, 1), (2, 4, 2)]
WIDER = [(1, 2, 1), (1, 5, 4), (2, 5, 3), (5, 9, 4), (16, 105, 89)]


@pytest.mark.parametrize(("state", "alpha", "beta"), [*EQUAL, *HOLDING])
def test_no_legal_schedule_is_cheaper(state, alpha, beta):
    units = units_of(alpha, beta, state)
    tables = Tables.fill(6, 10, units, reuse=True)
    dearer = 0
    for length in range(1, 7):
        for memory in range(state, 11):
            least = cheapest(length, memory, alpha=alpha, beta=beta, state=state, initial=state)
            assert tables.cost(length, memory) == least
            assert lower_bound(length, memory, units) <= least
            sizes = {"state": state, "alpha": alpha, "beta": beta}
            dearer += plan(length, memory, "msm", **sizes).cost > least
    assert (dearer == 0) == (alpha >= beta + state)


@pytest.mark.parametrize(("state", "alpha", "beta"), [*EQUAL, *WIDER])
def test_it_is_no_dearer_than_msm_and_as_cheap_where_a_tape_holds_a_state(state, alpha, beta):
    length, memory = 80, 110
    _, _, msm = plain_tables(length, memory, alpha, beta, state)
    tables = Tables.fill(length, memory, units_of(alpha, beta, state), reuse=True)
    lengths, memories = np.arange(1, length + 1)[:, None], np.arange(state, memory + 1)
    costs = tables.cost(lengths, memories)
    assert np.all(costs <= msm[1:, state:])
    assert np.array_equal(costs, msm[1:, state:]) == (alpha >= beta + state)
    rest = Tables.fill(length, memory, units_of(alpha, beta, state), reuse=False)
    assert np.array_equal(rest.cost(lengths, memories), msm[1:, state:])


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
    schedule = plan(length, state + memory, "best", **sizes)
    assert schedule.cost == schedule.bound
    assert schedule.peak <= state + memory
    assert schedule.cost <= plan(length, state + memory, "msm", **sizes).cost
    assert lower_bound(length, state + memory, units_of(beta + more, beta, state)) <= schedule.cost
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize("bound", [{"alpha": 1}, {"alpha": 5}, {"alpha": 3, "beta": 3}])
def test_the_bound_is_near_the_cost(bound):
    for length in (1, 2, 63, 300):
        for memory in (1, 2, 9, 40):
            units = units_of(bound["alpha"], bound.get("beta"))
            steps = cost(length, memory, "best", **bound)
            assert 0.99 * steps <= lower_bound(length, memory, units) <= steps


@pytest.mark.parametrize(
    ("state", "alpha", "beta"), [(1, 1, 1), (1, 3, 3), (5, 9, 4), (16, 105, 89), (7, 9, 8)]
)
def test_beyond_the_tables_the_gap_is_certified(state, alpha, beta, monkeypatch):
    for length in (63, 200):
        for memory in (state, 3 * state + 1, 150):
            exact = plan(length, memory, "best", state=state, alpha=alpha, beta=beta)
            monkeypatch.setattr(home, "MOST_SUMS", 10**6)
            schedule = plan(length, memory, "best", state=state, alpha=alpha, beta=beta)
            monkeypatch.undo()
            assert schedule.bound <= exact.cost <= schedule.cost
            assert schedule.peak <= memory
            assert schedule.units == exact.units
            assert schedule.cost <= 1.25 * exact.cost


def test_a_cost_beyond_the_tables_is_that_of_the_schedule(monkeypatch):
    monkeypatch.setattr(home, "MOST_SUMS", 0)
    schedule = plan(300, 20, "best", alpha=3, beta=3)
    assert schedule.gap > 0
    assert cost(300, 20, "best", alpha=3, beta=3) == schedule.cost
    assert cost([300, 7], 20, "best", alpha=3, beta=3).tolist() == [schedule.cost, 7]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 80),
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(0, 900),
)
def test_bytes_are_kept_and_the_gap_is_never_wrong(length, state, beta, more, room):
    """Against brute force in single bytes."""
    alpha, memory = beta + more, state + room
    _, _, msm = plain_tables(length, memory, alpha, beta, state)
    schedule = plan(length, memory, "best", alpha=alpha, beta=beta, state=state)
    assert schedule.peak <= memory == schedule.memory
    assert schedule.bound <= msm[length, memory]
    assert schedule.bound <= schedule.cost
    assert alpha < beta + state or schedule.cost == msm[length, memory]


def test_memory_may_be_a_text_or_a_share():
    sizes = {"state": 65_536, "alpha": 458_752}
    schedule = plan(1000, "16MiB", "best", **sizes)
    assert schedule.memory == 2**24
    assert schedule.units == units_of(458_752, 393_216, 65_536)
    assert schedule == plan(1000, 2**24, "best", **sizes)
    share = plan(1000, "10%", "best", **sizes)
    assert share == plan(1000, 0.1, "best", **sizes)
    assert share.memory == (65_536 + 999 * 393_216) // 10
    assert plan(1000, 1.0, "best", **sizes).cost == 1000
    assert share.gap == 0


@pytest.mark.quick(0)
def test_sizes_of_no_common_unit_are_rounded_up_and_the_gap_shown():
    schedule = plan(2000, "5%", "best", state=262_148, alpha=1_000_004)
    assert schedule.peak <= schedule.memory
    assert 0 < schedule.gap < 0.005
    with pytest.raises(ScheduleError, match=r"take a table of 2000² · .* or policy='best'"):
        plan(2000, "5%", "msm", state=262_148, alpha=1_000_004)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"memory": 99}, ScheduleError, "memory is 99 bytes: expected at least 100, the initial"),
        ({"memory": "0%"}, UnitError, "the memory '0%' is 0 times"),
        ({"memory": "much"}, UnitError, "cannot read the memory 'much'"),
        ({"state": 0}, ScheduleError, "state is 0: expected an integer, 1 or more"),
        ({"state": 1.5}, ScheduleError, r"state is 1\.5: expected an integer"),
        ({"alpha": 500.5}, ScheduleError, r"alpha is 500\.5: expected an integer"),
        ({"beta": 501}, ScheduleError, "beta is 501 and alpha is 500"),
        ({"state": None, "alpha": 5.25}, ScheduleError, r"alpha is 5\.25: .* all sizes in bytes"),
        ({"policy": "hsm", "alpha": None}, ScheduleError, "'hsm' takes no state size"),
        ({"state": None, "memory": "1kB"}, ScheduleError, "memory is '1kB': expected an integer"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(given, error, message):
    request = {"memory": 5000, "policy": "best", "state": 100, "alpha": 500, **given}
    with pytest.raises(error, match=message):
        plan(10, **request)
