"""The inverse questions, against plain scans over every memory and every length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograde.errors import ScheduleError
from retrograde.plan import cost, least_memory, trade_off
from retrograde.plan.steps.closed_form import hsm_cost

KINDS = [
    ("hsm", {}),
    ("ism", {}),
    ("msm", {"alpha": 5}),
    ("msm", {"alpha": 3, "beta": 3}),
    ("msm", {"alpha": 9, "beta": 2}),
    ("best", {"alpha": 2, "beta": 2}),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("policy", "sizes"), KINDS)
@pytest.mark.parametrize("length", [1, 2, 3, 17, 63])
def test_the_curve_has_every_drop_and_nothing_else(policy, sizes, length):
    memories = np.arange(1, 4 * length + 9)
    costs = cost(length, memories, policy, **sizes)
    curve = trade_off(length, policy, **sizes)
    drops = [m for m in memories if m == 1 or costs[m - 1] < costs[m - 2]]
    assert curve.memory.tolist() == drops
    assert curve.cost.tolist() == [costs[m - 1] for m in drops]
    assert len(curve) == len(drops)
    assert [curve.at(int(m)) for m in memories] == costs.tolist()


@pytest.mark.parametrize(("policy", "sizes"), KINDS)
@pytest.mark.parametrize("length", [1, 2, 17, 63])
def test_the_least_memory_is_the_first_that_will_do(policy, sizes, length):
    memories = np.arange(1, 4 * length + 9)
    costs = cost(length, memories, policy, **sizes)
    for allowed in {*costs.tolist(), *(costs + 1).tolist(), 10**9}:
        first = int(memories[costs <= allowed][0])
        assert least_memory(length, allowed, policy, **sizes) == first


def test_values_of_the_paper():
    """The headline of G16, and where three forward steps a step end for 50 states."""
    assert least_memory(1000, 2948) == 50
    assert least_memory(1000, 1950, "ism") == 50
    assert (hsm_cost(1378, 50), hsm_cost(1379, 50)) == (3 * 1378, 3 * 1379 + 1)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3000), st.integers(1, 500), st.integers(1, 9))
def test_memory_and_cost_are_inverse(length, memory, alpha):
    steps = cost(length, memory, "msm", alpha=alpha)
    found = least_memory(length, steps, "msm", alpha=alpha)
    assert found <= memory
    assert cost(length, found, "msm", alpha=alpha) == steps
    assert found == 1 or cost(length, found - 1, "msm", alpha=alpha) > steps


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: least_memory(1000, 999), "cost is 999: no memory is enough; 1000 steps of 'hsm' "),
        (lambda: least_memory(9, 16), "take at least 17 forward steps, with a memory of 8"),
        (lambda: least_memory(9, 8, "msm", alpha=5), "at least 9 forward steps, with a memory of"),
        (lambda: least_memory(0, 8), "length is 0: expected an integer, 1 or more"),
        (lambda: least_memory(9, 8.5), "cost is 8.5: expected an integer, 1 or more"),
        (lambda: least_memory(9, 9, "msm"), "the policy 'msm' needs alpha"),
        (lambda: least_memory(9, 9, "lru"), "unknown policy 'lru': use one of hsm, ism, msm, best"),
        (lambda: least_memory(9, 9, "store-all"), "'store-all' takes no memory, .* use 'hsm'"),
        (lambda: trade_off(10**7), "has 9999999 memories, expected at most 1000000: ask for"),
        (lambda: trade_off(9, "ism", alpha=2), "the policy 'ism' .* takes neither alpha nor beta"),
        (lambda: trade_off(9, "msm", alpha=2, beta=3), "beta is 3 and alpha is 2"),
    ],
)
def test_what_has_no_answer_is_refused(ask, message):
    with pytest.raises(ScheduleError, match=message):
        ask()
