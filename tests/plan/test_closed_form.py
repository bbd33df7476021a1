import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.recurrences import hsm_table, ism_table
from retrograde.errors import ScheduleError
from retrograde.plan.closed_form import (
    hsm_cost,
    hsm_costs,
    hsm_linear_bound,
    hsm_power_bound,
    hsm_schedule,
    hsm_split,
    ism_cost,
    ism_costs,
    ism_linear_bound,
    ism_schedule,
    ism_split,
)

LENGTH, MEMORY = 60, 30
LENGTHS, MEMORIES = np.arange(1, LENGTH + 1)[:, None], np.arange(1, MEMORY + 1)
SLOTS = st.integers(1, 10**6)


@pytest.fixture(scope="module")
def hsm():
    return hsm_table(LENGTH, MEMORY)


@pytest.fixture(scope="module")
def ism():
    return ism_table(LENGTH, MEMORY)


def test_hsm_costs_are_those_of_the_recurrence(hsm):
    assert np.array_equal(hsm_costs(LENGTHS, MEMORIES), hsm[1:, 1:])


def test_ism_costs_are_those_of_the_recurrence(ism):
    assert np.array_equal(ism_costs(LENGTHS, MEMORIES), ism[1:, 1:])
    assert not ism_costs(0, MEMORIES).any()


def test_hsm_splits_are_the_largest_optimal_ones(hsm):
    for t in range(2, LENGTH + 1):
        assert hsm_split(t, 1) == t - 1
        for m in range(2, MEMORY + 1):
            y = np.arange(1, t)
            costs = y + hsm[t - y, m - 1] + hsm[y, m]
            assert hsm_split(t, m) == y[costs == costs.min()].max()


def test_ism_splits_are_the_largest_optimal_ones(ism):
    for t in range(1, LENGTH + 1):
        for m in range(1, MEMORY + 1):
            y = np.arange(1, t + 1)
            costs = y + ism[y - 1, m] + ism[t - y, m - 1]
            assert ism_split(t, m) == y[costs == costs.min()].max()


@pytest.mark.parametrize(
    ("length", "memory", "cost"),
    [(4, 4, 7), (10, 4, 24), (1000, 50, 2948), (10**4, 100, 34_747), (10**5, 1000, 298_998)],
)
def test_hsm_costs_published(length, memory, cost):
    assert hsm_cost(length, memory) == cost


def test_the_headline_one_third_more_time_at_five_percent():
    cost = ism_cost(1000, 50)
    assert cost == 1950
    assert (cost / 1000 + 2) / 3 == pytest.approx(1.317, abs=5e-4)


@given(st.integers(1, 10**6), SLOTS)
def test_arrays_and_scalars_agree(length, memory):
    assert hsm_costs(length, memory) == hsm_cost(length, memory)
    assert ism_costs(length, memory) == ism_cost(length, memory)


def test_arrays_broadcast_to_64_bit_integers():
    costs = hsm_costs([[4], [10]], [1, 4, 2**62])
    assert costs.dtype == np.int64
    assert costs.tolist() == [[10, 7, 7], [55, 24, 19]]
    assert hsm_costs(np.zeros((0, 2), dtype=np.int64), 1).shape == (0, 2)


def test_the_longest_length_in_an_array_is_still_exact():
    longest = 2**31 - 1
    for memory in (1, 2, 3, 50, longest - 2, longest):
        assert int(hsm_costs(longest, memory)) == hsm_cost(longest, memory)


def test_a_length_beyond_64_bit_costs_is_refused_in_an_array():
    with pytest.raises(ScheduleError, match=r"length 2147483648 in an array: .* as an int"):
        hsm_costs([2**31], 1)


def test_scalars_are_exact_at_any_size():
    assert hsm_cost(10**30, 1) == 10**30 * (10**30 + 1) // 2
    assert hsm_cost(10**30, 10**30) == 2 * 10**30 - 1
    assert ism_cost(10**30, 10**30) == 10**30


@pytest.mark.parametrize("memory", [1, 2, 3, 4, 7, 30, 100])
def test_schedules_cost_what_the_closed_form_says(memory):
    for length in (*range(1, 40), 63, 64, 65, 200):
        assert hsm_schedule(length, memory).cost == hsm_cost(length, memory)
        assert ism_schedule(length, memory).cost == ism_cost(length, memory)


def test_hsm_uses_every_slot_until_one_less_than_the_length():
    """Fewer slots would cost more up to m = t − 1, where 2t − 1 is reached (erratum 5)."""
    for length in range(1, 40):
        for memory in range(1, 45):
            assert hsm_schedule(length, memory).peak == min(memory, max(1, length - 1))


def test_ism_uses_every_slot_until_the_length():
    for length in range(1, 40):
        for memory in range(1, 45):
            assert ism_schedule(length, memory).peak == min(memory, length)


@given(st.integers(1, 10**9), st.integers(1, 10**4))
def test_the_power_bound_holds(length, memory):
    assert hsm_cost(length, memory) <= hsm_power_bound(length, memory) * (1 + 1e-12)


@given(st.integers(1, 10**9), st.integers(1, 10**4))
def test_the_linear_bounds_hold(length, memory):
    """Which is also proposition 2, T(a, m) ≥ m^(a−1)/(a−1)!, read the other way round."""
    hsm, ism = hsm_linear_bound(length, memory), ism_linear_bound(length, memory)
    assert hsm is None or hsm_cost(length, memory) <= hsm
    assert ism is None or ism_cost(length, memory) <= ism


def test_the_linear_bounds_know_where_they_end():
    assert hsm_linear_bound(3, 2) is None
    assert ism_linear_bound(2, 2) == 2
    assert ism_linear_bound(3, 2) is None


def test_the_numerical_bounds_of_section_3_5():
    """Four times t^(1+1/m) holds; three times without the first sweep does not, at m = 29."""
    lengths = np.arange(1, 10**5)
    for memory in (*range(1, 40), 63, 100, 300, 999):
        powers = lengths ** (1 + 1 / memory)
        assert np.max(hsm_costs(lengths, memory) / powers) < 4
    excess = (hsm_costs(lengths, 29) - lengths) / lengths ** (1 + 1 / 29)
    assert np.max(excess) == pytest.approx(3.0499, abs=1e-4)
