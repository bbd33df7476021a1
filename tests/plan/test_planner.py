import re
import subprocess
import sys

import numpy as np
import pytest

from retrograde.errors import ScheduleError
from retrograde.plan import POLICIES, cost, plan
from retrograde.schedule import Units


def test_the_policies_are_known_by_name():
    assert list(POLICIES) == ["hsm", "ism", "msm", "best", "store-all"]


def test_a_schedule_says_what_it_was_planned_for():
    schedule = plan(20, 6, "msm", alpha=3)
    assert (schedule.length, schedule.memory, schedule.policy) == (20, 6, "msm")
    assert schedule.units == Units(alpha=3, beta=2, core=0, initial=1)
    assert plan(20, 6, "ism").units == Units(alpha=1, beta=1, core=1, initial=0)
    assert plan(20, 6).policy == "hsm"
    assert plan(20, policy="store-all").memory is None
    assert plan(20, policy="store-all").units.alpha == 2


def test_beta_is_one_less_than_alpha_unless_given():
    assert plan(20, 6, "msm", alpha=4) == plan(20, 6, "msm", alpha=4, beta=3)
    assert plan(20, 6, "msm", alpha=1).units.beta == 1
    assert plan(20, policy="store-all", alpha=4).peak == 1 + 3 * 19


def test_scalars_give_integers_and_arrays_arrays():
    assert type(cost(1000, 50)) is int
    assert type(cost(np.int64(20), np.int32(6), "msm", alpha=3)) is int
    assert type(cost(20, policy="store-all")) is int
    costs = cost([[5], [20]], [1, 6, 100], "msm", alpha=3)
    assert costs.dtype == np.int64
    assert costs.shape == (2, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_arrays_agree_with_scalars(policy):
    sizes = {"alpha": 3, "beta": 3} if policy in ("msm", "best") else {}
    lengths = np.array([[1, 20, 7], [64, 65, 20]])
    memories = None if policy == "store-all" else np.array([[1], [6]])
    costs = cost(lengths, memories, policy, **sizes)
    for index, length in np.ndenumerate(lengths):
        memory = None if memories is None else int(memories[index[0], 0])
        assert costs[index] == cost(int(length), memory, policy, **sizes)


def test_empty_arrays_cost_nothing():
    assert cost([], 5).shape == (0,)
    assert cost([], 5, "msm", alpha=3).shape == (0,)
    assert cost([], None, "store-all").shape == (0,)


def test_a_scalar_cost_is_exact_beyond_64_bits():
    assert cost(10**30, 1) == 10**30 * (10**30 + 1) // 2


LIST = "hsm, ism, msm, best, store-all"


@pytest.mark.parametrize("ask", [plan, cost])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 0}, "length is 0: expected an integer, 1 or more"),
        ({"length": -3}, "length is -3: expected an integer, 1 or more"),
        ({"length": 2.5}, "length is 2.5: expected an integer, 1 or more"),
        ({"length": "9"}, "length is '9': expected an integer, 1 or more"),
        ({"length": True}, "length is True: expected an integer, 1 or more"),
        ({"memory": 0}, "memory is 0: expected an integer, 1 or more"),
        ({"memory": -1}, "memory is -1: expected an integer, 1 or more"),
        ({"memory": 3.0}, "memory is 3.0: expected an integer, 1 or more"),
        ({"memory": np.True_}, "memory is np.True_: expected an integer, 1 or more"),
        ({"memory": None}, "the policy 'hsm' needs a memory: give its slots, 1 or more"),
        ({"policy": "lru"}, f"unknown policy 'lru': use one of {LIST}"),
        (
            {"policy": "store-all"},
            "the policy 'store-all' takes no memory, since what it keeps is fixed",
        ),
        ({"policy": "msm"}, "the policy 'msm' needs alpha, .*: give such as alpha=5"),
        ({"policy": "msm", "beta": 1}, "the policy 'msm' needs alpha"),
        ({"policy": "msm", "alpha": 0}, "alpha is 0: expected an integer, 1 or more"),
        ({"policy": "msm", "alpha": 2.5}, "alpha is 2.5: expected an integer, 1 or more"),
        ({"policy": "msm", "alpha": 3, "beta": 0}, "beta is 0: expected an integer, 1 or more"),
        ({"policy": "msm", "alpha": 3, "beta": 4}, "beta is 4 and alpha is 3: .* beta <= alpha"),
        ({"alpha": 3}, "the policy 'hsm' .* takes neither alpha nor beta: leave them out"),
        ({"policy": "ism", "beta": 3}, "the policy 'ism' .* takes neither alpha nor beta"),
    ],
)
def test_bad_arguments_are_refused_with_a_remedy(ask, given, message):
    with pytest.raises(ScheduleError, match="^" + message):
        ask(**{"length": 10, "memory": 3, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": [1, 0]}, "length is 0: expected integers, 1 or more"),
        ({"length": [1.5]}, "length is an array of float64: expected integers, 1 or more"),
        ({"memory": [True]}, "memory is an array of bool: expected integers, 1 or more"),
        ({"memory": [3, -1]}, "memory is -1: expected integers, 1 or more"),
        ({"length": [2**40], "memory": 1}, "a cost in the array is 604462909807864343166976: exp"),
        ({"length": [2**70]}, "length is an array of object: expected integers"),
    ],
)
def test_bad_arrays_are_refused(given, message):
    with pytest.raises(ScheduleError, match="^" + re.escape(message)):
        cost(**{"length": 10, "memory": 3, **given})


def test_importing_the_planner_loads_neither_torch_nor_numba():
    code = (
        "import sys; from retrograde.plan import plan; plan(9, 3); plan(9, 3, 'ism');"
        "print(sorted({'torch', 'numba'} & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
