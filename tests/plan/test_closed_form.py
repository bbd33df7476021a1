from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.recurrences import fewest_actions_hsm, hsm_split, hsm_table, ism_table
from retrograde.errors import ScheduleError
from retrograde.plan import cost
from retrograde.plan.steps.closed_form import hsm_cost, ism_cost

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
    assert np.array_equal(cost(LENGTHS, MEMORIES), hsm[1:, 1:])


def test_ism_costs_are_those_of_the_recurrence(ism):
    assert np.array_equal(cost(LENGTHS, MEMORIES, "ism"), ism[1:, 1:])
    assert not any(ism_cost(0, memory) for memory in range(1, 9))


def test_hsm_splits_are_optimal(hsm):
    for t in range(2, LENGTH + 1):
        assert hsm_split(t, 1) == t - 1
        for m in range(2, MEMORY + 1):
            y = hsm_split(t, m)
            assert y + hsm[t - y, m - 1] + hsm[y, m] == hsm[t, m]


def test_hsm_splits_are_the_largest_that_lead_to_the_fewest_actions(hsm):
    fewer = [0] * LENGTH
    for m in range(1, 13):
        fewest = fewest_actions_hsm(LENGTH, m)
        for t in range(3, LENGTH + 1):
            actions = {}
            for y in range(1, t):
                if y + hsm[t - y, m - 1] + hsm[y, m] == hsm[t, m]:
                    actions[y] = fewest[y] + 4 + (fewer[t - y] if t - y > 1 else 0)
            assert m == 1 or hsm_split(t, m) == max(
                y for y, count in actions.items() if count == min(actions.values())
            )
        fewer = fewest


def test_ism_splits_are_optimal(ism):
    for t in range(1, LENGTH + 1):
        for m in range(1, MEMORY + 1):
            y = hsm_split(t + 1, m)
            assert y + ism[y - 1, m] + ism[t - y, m - 1] == ism[t, m]


@given(st.integers(2, 10**15), SLOTS)
def test_splits_are_optimal_at_any_size(length, memory):
    y = hsm_split(length, memory)
    assert 1 <= y < length
    right = hsm_cost(length - y, memory - 1) if length - y > 1 else 1
    assert y + hsm_cost(y, memory) + right == hsm_cost(length, memory)
    y = hsm_split(length + 1, memory)
    assert 1 <= y <= length
    left = ism_cost(y - 1, memory)
    right = ism_cost(length - y, memory - 1) if length - y else 0
    assert y + left + right == ism_cost(length, memory)


@pytest.mark.parametrize(
    ("length", "memory", "steps"),
    [(4, 4, 7), (10, 4, 24), (1000, 50, 2948), (10**4, 100, 34_747), (10**5, 1000, 298_998)],
)
def test_hsm_costs_published(length, memory, steps):
    assert hsm_cost(length, memory) == steps


def test_the_headline_one_third_more_time_at_five_percent():
    steps = ism_cost(1000, 50)
    assert steps == 1950
    assert (steps / 1000 + 2) / 3 == pytest.approx(1.317, abs=5e-4)


@given(st.integers(1, 10**6), SLOTS)
def test_arrays_and_scalars_agree(length, memory):
    assert cost([length], memory) == [hsm_cost(length, memory)]
    assert cost([length], memory, "ism") == [ism_cost(length, memory)]


def test_arrays_broadcast_to_64_bit_integers():
    costs = cost([[4], [10]], [1, 4, 2**62])
    assert costs.dtype == np.int64
    assert costs.tolist() == [[10, 7, 7], [55, 24, 19]]
    assert cost(np.zeros((0, 2), dtype=np.int64), 1).shape == (0, 2)


@pytest.mark.parametrize("longest", [2**31 - 1, 2**31])
def test_long_lengths_in_an_array_are_exact(longest):
    for memory in (1, 2, 3, 50, longest - 2, longest):
        assert cost([longest], memory) == [hsm_cost(longest, memory)]
    assert cost([10**12, 5], 10**6).tolist() == [3_499_997_499_997, 9]


def test_a_cost_beyond_64_bits_is_refused_in_an_array():
    assert cost([2**32 - 1], 1) == (2**32 - 1) * 2**31
    with pytest.raises(ScheduleError, match=r"a cost in the array is 9223372039002259456: .* int"):
        cost([2**32], 1)


def test_scalars_are_exact_at_any_size():
    assert hsm_cost(10**30, 1) == 10**30 * (10**30 + 1) // 2
    assert hsm_cost(10**30, 10**30) == 2 * 10**30 - 1
    assert ism_cost(10**30, 10**30) == 10**30


@given(st.integers(1, 10**9), st.integers(1, 10**4))
def test_the_power_bound_holds(length, memory):
    """Proposition 1: C(t, m) ≤ m·t^(1 + 1/m)."""
    assert hsm_cost(length, memory) <= memory * length ** (1 + 1 / memory) * (1 + 1e-12)


@given(st.integers(1, 10**9), st.integers(1, 10**4), st.integers(1, 12))
def test_the_linear_bounds_hold(length, memory, a):
    """Which is also proposition 2, T(a, m) ≥ m^(a−1)/(a−1)!, read the other way round."""
    if a <= memory and length * factorial(a) < memory**a:
        assert hsm_cost(length, memory) <= (a + 1) * length
    if a <= memory and length * factorial(a) <= memory**a:
        assert ism_cost(length, memory) <= a * length


def test_the_numerical_bounds_of_section_3_5():
    """Four times t^(1+1/m) holds; three times without the first sweep does not, at m = 29."""
    lengths = np.arange(1, 10**5)
    for memory in (*range(1, 40), 63, 100, 300, 999):
        powers = lengths ** (1 + 1 / memory)
        assert np.max(cost(lengths, memory) / powers) < 4
    excess = (cost(lengths, 29) - lengths) / lengths ** (1 + 1 / 29)
    assert np.max(excess) == pytest.approx(3.0499, abs=1e-4)
