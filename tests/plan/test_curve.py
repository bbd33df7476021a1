"""The trade-off curve, against plain scans over every memory."""

import numpy as np
import pytest

from retrograde.errors import ScheduleError
from retrograde.plan import cost, trade_off
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


def test_values_of_the_paper():
    """The headline of G16, and where three forward steps a step end for 50 states."""
    assert trade_off(1000).at(50) == 2948 < trade_off(1000).at(49)
    assert trade_off(1000, "ism").at(50) == 1950 < trade_off(1000, "ism").at(49)
    assert (hsm_cost(1378, 50), hsm_cost(1379, 50)) == (3 * 1378, 3 * 1379 + 1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: trade_off(0), "length is 0: expected an integer, 1 or more"),
        (lambda: trade_off(8.5), "length is 8.5: expected an integer, 1 or more"),
        (lambda: trade_off(9, "msm"), "the policy 'msm' needs alpha"),
        (lambda: trade_off(9, "lru"), "unknown policy 'lru': use one of hsm, ism, msm, best"),
        (lambda: trade_off(9, "store-all"), "'store-all' takes no memory, .* use 'hsm'"),
        (lambda: trade_off(10**7), "has 9999999 memories, expected at most 1000000: ask for"),
        (lambda: trade_off(9, "ism", alpha=2), "the policy 'ism' .* takes neither alpha nor beta"),
        (lambda: trade_off(9, "msm", alpha=2, beta=3), "beta is 3 and alpha is 2"),
    ],
)
def test_what_has_no_answer_is_refused(ask, message):
    with pytest.raises(ScheduleError, match=message):
        ask()
