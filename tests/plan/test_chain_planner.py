"""Chains of unequal layers: the least seconds within a budget in bytes, and never a byte more."""

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.chains import fastest
from retrograde import BudgetError, ScheduleError, UnitError
from retrograde.plan import chain_minimum, cost, plan
from retrograde.plan.call_planner import MayKeep
from retrograde.plan.call_planner import fastest as fastest_calls
from retrograde.plan.calls import CallSizes, Way, seconds_of
from retrograde.plan.chains import LONGEST, plan_chain
from retrograde.schedule import Chain, Schedule, Verb, simulate

POLICIES = ("msm", "hsm", "ism")


def random_chain(length: int, seed: int, scale: int = 1, running: int = 5) -> Chain:
    """Unequal integers, sizes and seconds of 0 among them, and any flags."""
    draw = np.random.default_rng(seed)

    def column(low, high):
        return draw.integers(low, high, length).tolist()

    outputs, tapes = column(0, 20 * scale), column(0, 20 * scale)
    return Chain(
        forward_seconds=column(0, 10),
        backward_seconds=column(0, 20),
        output_bytes=outputs,
        internal_bytes=[a + b for a, b in zip(outputs, tapes, strict=True)],
        forward_transient_bytes=column(0, running * scale),
        backward_transient_bytes=column(0, 5 * scale),
        record_transient_bytes=column(0, 5 * scale),
        keeps_input=[bool(flag) for flag in column(0, 2)],
        keeps_output=[bool(flag) for flag in column(0, 2)],
        overhead_bytes=int(draw.integers(0, 3)),
    )


def budgets(chain: Chain, policy: str, count: int = 3) -> list[int]:
    """From the least one to more than enough."""
    least, most = chain_minimum(chain, policy), plan(chain, policy="store-all").peak
    between = np.linspace(least, max(least, most), count + 1).astype(int).tolist()
    return sorted({max(1, m) for m in (*between, least + 1, max(least, most - 1), most + 99)
                   if m >= least})  # fmt: skip


def agrees_with_the_search(chain: Chain, policy: str) -> None:
    least = chain_minimum(chain, policy)
    assert fastest(chain, least - 1, policy) == math.inf
    for memory in budgets(chain, policy):
        schedule = plan(chain, memory, policy)
        spent = schedule.seconds - sum(chain.backward_seconds)
        assert spent == fastest(chain, memory, policy), (memory, str(schedule))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(40))
def test_as_fast_as_the_best_of_all_schedules(seed, policy):
    agrees_with_the_search(random_chain(1 + seed % 4, seed), policy)


@pytest.mark.parametrize("seed", range(20))
def test_as_fast_as_the_best_where_running_takes_the_most(seed):
    agrees_with_the_search(random_chain(4, seed, running=60), "hsm")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(100, 160))
def test_as_fast_as_the_best_of_all_schedules_of_more_layers(seed, policy):
    agrees_with_the_search(random_chain(5 + seed % 2, seed), policy)


@pytest.mark.quick(0)
def test_schedules_that_drop_states_early_win_seldom():
    """What being persistent costs, bounded: see :mod:`oracles.chains`."""
    slower = []
    for seed in range(24):
        chain = random_chain(1 + seed % 4, seed)
        for memory in budgets(chain, "msm"):
            spent = plan(chain, memory).seconds - sum(chain.backward_seconds)
            best = fastest(chain, memory, persistent=False)
            assert best <= spent
            slower.append(spent > best)
    assert sum(slower) <= 0.1 * len(slower)


@pytest.mark.quick(0)
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.integers(0, 10**6), st.sampled_from(POLICIES))
def test_kept_promises_of_longer_chains(length, seed, policy):
    chain = random_chain(length, seed)
    least = chain_minimum(chain, policy)
    schedules = [plan(chain, memory, policy) for memory in budgets(chain, policy)]
    for schedule in schedules:
        assert schedule.units == chain
        assert schedule.peak <= schedule.memory
        if schedule.memory <= 1000:  # there is a level for each byte
            assert schedule.gap == 0
    assert all(a.seconds >= b.seconds for a, b in pairwise(schedules))
    assert least == 0 or schedules[0].peak == least
    if policy != "hsm":
        assert schedules[-1].seconds == chain.ordinary_seconds


@pytest.mark.quick(0)
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(0, 10**6), st.sampled_from(POLICIES), st.floats(0, 1))
def test_rounded_levels_keep_the_budget_and_prove_a_bound(length, seed, policy, share):
    """With 20 levels at most: what is found with a thousand is between bound and schedule."""
    chain = random_chain(length, seed, scale=1000)
    least, most = chain_minimum(chain, policy), plan(chain, policy="store-all").peak
    memory = max(1, int(least + share * max(0, most - least)))
    fine = plan_chain(chain, memory, policy, certify=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["retrograde.plan.call_planner"], "_MOST_LEVELS", 20)
        coarse = plan_chain(chain, memory, policy, certify=True)
    for schedule in (coarse, fine):
        assert schedule.peak <= memory
        assert schedule.bound <= schedule.seconds
    assert coarse.bound <= fine.seconds
    assert fine.bound <= coarse.seconds


@pytest.mark.quick(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bound_is_below_the_exact_optimum(policy):
    for seed in range(12):
        chain = random_chain(12, seed)
        for memory in budgets(chain, policy):
            exact = plan(chain, memory, policy)
            assert exact.gap == pytest.approx(0, abs=1e-12)
            for levels in (2, 10, 33):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(
                        sys.modules["retrograde.plan.call_planner"], "_MOST_LEVELS", levels
                    )
                    coarse = plan_chain(chain, memory, policy, certify=True)
                assert coarse.bound <= exact.seconds * (1 + 1e-12)
                assert exact.seconds <= coarse.seconds * (1 + 1e-12)


def test_a_common_divisor_makes_large_sizes_exact():
    sizes, tapes = [3, 7, 2, 5, 4, 6], [5, 11, 2, 9, 7, 8]
    chains = [
        Chain([1, 3, 2, 4, 1, 2], [2] * 6, [n * scale for n in sizes], [n * scale for n in tapes])
        for scale in (1, 2**30 + 1)
    ]
    for share in ("55%", "70%", "90%"):
        small, large = (plan(chain, share) for chain in chains)
        assert list(small) == list(large)
        assert large.gap == 0


@pytest.mark.quick(0)
def test_ordinary_backpropagation_from_its_own_peak_on():
    for seed in range(30):
        chain = random_chain(1 + seed, seed)
        ordinary = plan(chain, policy="store-all")
        assert str(ordinary) == f"store 0, record 0→{1 + seed}, backward {1 + seed}→0, free 0"
        assert ordinary.seconds == chain.ordinary_seconds
        schedule = plan(chain, max(1, ordinary.peak))
        assert (schedule.seconds, list(schedule)) == (ordinary.seconds, list(ordinary))
        if ordinary.peak - 1 >= max(1, chain_minimum(chain)):
            assert plan(chain, ordinary.peak - 1).seconds >= ordinary.seconds


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_layers_cost_what_the_mixed_policy_costs(size):
    """No tape refers to its input, so one is as large whether or not that is kept: α = β."""
    for length in (1, 2, 3, 7, 16):
        for memory in range(1, size * length + 3):
            expected = cost(length, memory, "msm", alpha=size, beta=size)
            assert forward_steps(length, size, memory - 1) == expected, (length, memory)


@pytest.mark.parametrize("policy", ["hsm", "ism"])
def test_equal_layers_cost_what_states_of_one_kind_cost(policy):
    """The first state is HSM's first slot, and the working core is ISM's: neither counts here."""
    for length in (1, 2, 3, 7, 16, 40):
        for memory in (1, 2, 3, 5, length):
            assert forward_steps(length, 1, memory - 1, policy) == cost(length, memory, policy)


def forward_steps(length: int, size: int, kept: int, policy: str = "msm") -> float:
    """Where only what is kept counts and nothing is needed for a while."""
    calls = []
    for k in range(length):
        before, after = int(k > 0), int(k + 1 < length)
        recorded = Way(size - after, -1, 0, 0.0, 1.0, keeps_input=False, keeps_output=True)
        calls.append(
            CallSizes(before, after, -1, 1.0, (recorded, Way(0, -1, 0, 1.0, 1.0, dropped=True)))
        )
    kinds = MayKeep(inputs=policy != "ism", tapes=policy != "hsm")
    return length + seconds_of(calls, fastest_calls(calls, kept, kinds))


def test_memory_may_be_a_text_or_a_share():
    chain = random_chain(20, 3, scale=1000)
    most = plan(chain, policy="store-all").peak
    assert plan(chain, "75%") == plan(chain, 0.75) == plan(chain, 3 * most // 4)
    assert plan(chain, "1GiB").memory == 2**30
    assert plan(chain, "75%").policy == "msm"


def test_a_schedule_and_its_bound_as_text():
    schedule = plan(random_chain(20, 3, scale=1000), "75%", certify=True)
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule
    assert again.gap == schedule.gap == schedule.seconds / schedule.bound - 1 >= 0
    spoilt = schedule.to_json().replace(f'"bound":{schedule.bound}', '"bound":-1.5')
    with pytest.raises(ScheduleError, match=r"'bound' is -1.5: expected seconds, 0 or more"):
        Schedule.from_json(spoilt)


def test_a_range_is_as_long_as_can_be():
    kinds = plan(random_chain(40, 5), "70%").kind
    assert not ((kinds[1:] == kinds[:-1]) & (kinds[1:] == Verb.ADVANCE)).any()


def test_a_budget_below_the_least_names_the_layer():
    chain = Chain([1] * 3, [2] * 3, [8, 8, 8], backward_transient_bytes=[0, 900, 0],
                  names=["conv", "attention", "head"])  # fmt: skip
    least = chain_minimum(chain)
    assert simulate(plan(chain, least)).peak == least
    with pytest.raises(BudgetError, match=rf"at least {least} .*layer 'attention' needs") as error:
        plan(chain, least - 1)
    assert error.value.minimum_bytes == least


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"policy": "lru"}, ScheduleError, "unknown policy 'lru' for a chain: use one of hsm, ism"),
        ({"policy": "chen-sqrt"}, ScheduleError, "unknown policy 'chen-sqrt' for a chain"),
        ({"alpha": 5}, ScheduleError, "alpha is 5 beside a chain, .*: leave alpha out"),
        ({"state": 5}, ScheduleError, "state is 5 beside a chain"),
        ({"memory": None}, ScheduleError, "the policy 'msm' needs a memory: give bytes"),
        ({"policy": "store-all"}, ScheduleError, "'store-all' takes no memory, since what"),
        ({"memory": 0}, UnitError, "the memory 0 is 0 bytes: expected at least 1"),
        ({"memory": "much"}, UnitError, "cannot read the memory 'much'"),
        ({"memory": 1.5}, UnitError, "expected a fraction above 0 and at most 1"),
    ],
)
def test_bad_arguments_are_refused_with_a_remedy(given, error, message):
    with pytest.raises(error, match=message):
        plan(random_chain(5, 0), **{"memory": 10**6, **given})


@pytest.mark.quick(0, every=1)
@pytest.mark.parametrize("policy", POLICIES)
def test_long_chains_of_every_policy(policy):
    chain = random_chain(150, 7, scale=1000)
    least = chain_minimum(chain, policy)
    for memory in ("40%", least, least + 1):
        schedule = plan(chain, memory, policy)
        assert schedule.peak <= schedule.memory
    assert plan(chain, "40%", policy, certify=True).gap < 0.02


@pytest.mark.parametrize("share", ["50%", "80%"])
def test_a_layer_of_a_part_of_a_level_is_not_free(share):
    """Convolution, norm, activation, sum: 96 layers in 60 levels, beside a thousand."""
    kinds = [k % 4 for k in range(96)]
    sizes = [1000 - 5 * (k // 4 % 7) for k in range(96)]
    seconds = [(12, 1.5, 1, 1.2)[kind] for kind in kinds]
    chain = Chain(
        seconds, seconds, sizes,
        forward_transient_bytes=[n // 2 * (k == 0) for n, k in zip(sizes, kinds, strict=True)],
        keeps_input=[kind < 2 for kind in kinds], keeps_output=[kind == 2 for kind in kinds],
    )  # fmt: skip
    fine = plan(chain, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["retrograde.plan.call_planner"], "_MOST_LEVELS", 60)
        assert plan(chain, share).seconds <= 1.02 * fine.seconds


def test_too_many_layers_are_refused():
    with pytest.raises(ScheduleError, match=f"{LONGEST + 1} layers: expected at most {LONGEST};"):
        plan(random_chain(LONGEST + 1, 0), "50%")
