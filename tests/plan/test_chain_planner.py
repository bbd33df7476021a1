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
from retrograde.plan import chain_minimum, chain_trade_off, cost, plan
from retrograde.plan.chain.search import plan_chain, record_everything
from retrograde.plan.chain.segments import all_cells
from retrograde.plan.chain.solver import LONGEST, Solver
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
    least, most = chain_minimum(chain, policy)[0], record_everything(chain).peak
    between = np.linspace(least, max(least, most), count + 1).astype(int).tolist()
    return sorted({max(1, m) for m in (*between, least + 1, max(least, most - 1), most + 99)
                   if m >= least})  # fmt: skip


def agrees_with_the_search(chain: Chain, policy: str) -> None:
    least = chain_minimum(chain, policy)[0]
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
    least, layer = chain_minimum(chain, policy)
    assert 0 <= layer < length
    schedules = [plan(chain, memory, policy) for memory in budgets(chain, policy)]
    for schedule in schedules:
        assert schedule.units == chain
        assert schedule.peak <= schedule.memory
        # Levels are bytes here, so what the table promised is what is done.
        assert schedule.seconds == pytest.approx(schedule.bound, rel=1e-12)
    assert all(a.seconds >= b.seconds for a, b in pairwise(schedules))
    assert least == 0 or schedules[0].peak == least
    if policy != "hsm":
        assert schedules[-1].seconds == chain.ordinary_seconds


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 60), st.integers(0, 10**6), st.sampled_from(POLICIES), st.integers(2, 200),
    st.floats(0, 1),
)  # fmt: skip
def test_rounded_levels_keep_the_budget_and_prove_a_bound(length, seed, policy, levels, share):
    chain = random_chain(length, seed, scale=1000)
    least, most = chain_minimum(chain, policy)[0], record_everything(chain).peak
    memory = max(1, int(least + share * max(0, most - least)))
    coarse = plan_chain(chain, memory, policy, certify=True, levels=levels)
    assert coarse.peak <= memory
    assert coarse.bound <= coarse.seconds
    fine = plan_chain(chain, memory, policy, certify=True, levels=4 * levels)
    assert coarse.bound <= fine.seconds * (1 + 1e-12)
    assert fine.bound <= coarse.seconds * (1 + 1e-12)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_bound_is_below_the_exact_optimum(policy):
    for seed in range(12):
        chain = random_chain(12, seed, scale=5)
        for memory in budgets(chain, policy):
            exact = plan(chain, memory, policy)
            assert exact.gap == pytest.approx(0, abs=1e-12)
            for levels in (2, 10, 33):
                coarse = plan_chain(chain, memory, policy, certify=True, levels=levels)
                assert coarse.bound <= exact.seconds * (1 + 1e-12)
                assert exact.seconds <= coarse.seconds * (1 + 1e-12)


def test_ordinary_backpropagation_from_its_own_peak_on():
    for seed in range(30):
        chain = random_chain(1 + seed, seed)
        ordinary = plan(chain, policy="store-all")
        assert str(ordinary) == f"store 0, record 0→{1 + seed}, backward {1 + seed}→0, free 0"
        assert ordinary.seconds == chain.ordinary_seconds
        schedule = plan(chain, max(1, ordinary.peak))
        assert (schedule.seconds, list(schedule)) == (ordinary.seconds, list(ordinary))
        if ordinary.peak - 1 >= max(1, chain_minimum(chain)[0]):
            assert plan(chain, ordinary.peak - 1).seconds >= ordinary.seconds


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_layers_cost_what_the_mixed_policy_costs(size):
    """No tape refers to its input, so one is as large whether or not that is kept: α = β."""
    for length in (1, 2, 3, 7, 16):
        chain = equal_chain(length, size)
        for memory in range(1, size * length + 3):
            expected = cost(length, memory, "msm", alpha=size, beta=size)
            assert forward_steps(chain, memory - 1, "msm") == expected, (length, memory)


@pytest.mark.parametrize("policy", ["hsm", "ism"])
def test_equal_layers_cost_what_states_of_one_kind_cost(policy):
    """The first state is HSM's first slot, and the working core is ISM's: neither counts here."""
    for length in (1, 2, 3, 7, 16, 40):
        chain = equal_chain(length, 1)
        for memory in (1, 2, 3, 5, length):
            assert forward_steps(chain, memory - 1, policy) == cost(length, memory, policy)


def equal_chain(length: int, size: int) -> Chain:
    return Chain([1] * length, [0] * length, [1] * length, [size] * length,
                 keeps_input=[False] * length)  # fmt: skip


def forward_steps(chain: Chain, kept: int, policy: str) -> float:
    """The table's, where only what is kept counts and nothing is needed for a while."""
    from retrograde.plan.chain.columns import layers_of
    from retrograde.plan.chain.fill import LANES, Grid, Kinds, Table, fill

    layers = layers_of(chain)
    size = len(chain)
    nothing = np.zeros(size, np.int64)
    states = np.array([0, *[1] * size])
    free = layers._replace(
        state=states, enter=nothing, through=nothing, record=-states[:-1], back=nothing,
        gradient=np.zeros(size + 1, np.int64),
    )  # fmt: skip
    table = np.empty((kept // LANES + 1, all_cells(size).rows, LANES))
    kinds = Kinds(stores=policy != "ism", records=policy != "hsm")
    cells, least = all_cells(size), np.zeros((size, size + 1), np.int64)
    fill(Table(free, kinds, Grid(1, 0, False), cells, least, least, table))
    return table[kept // LANES, cells.row[size], kept % LANES]


def test_many_budgets_from_one_table():
    chain = random_chain(30, 1)
    memories = budgets(chain, "msm", 9)
    found = chain_trade_off(chain, memories)
    assert [schedule.memory for schedule in found] == memories
    assert [s.seconds for s in found] == [plan(chain, m).seconds for m in memories]
    assert chain_trade_off(chain, []) == []
    assert chain_trade_off(chain, ["90%"])[0].memory == 9 * record_everything(chain).peak // 10


def test_memory_may_be_a_text_or_a_share():
    chain = random_chain(20, 3, scale=1000)
    most = plan(chain, policy="store-all").peak
    assert plan(chain, "75%") == plan(chain, 0.75) == plan(chain, 3 * most // 4)
    assert plan(chain, "1GiB").memory == 2**30
    assert plan(chain, "75%").policy == "msm"


def test_a_schedule_and_its_bound_as_text():
    schedule = plan_chain(random_chain(20, 3, scale=1000), "75%", certify=True, levels=100)
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
    assert chain_minimum(chain)[1] == 1
    least = chain_minimum(chain)[0]
    assert simulate(plan(chain, least)).peak == least
    with pytest.raises(BudgetError, match=rf"at least {least} .*layer 'attention' needs") as error:
        plan(chain, least - 1)
    assert error.value.minimum_bytes == least
    with pytest.raises(BudgetError, match="memory is 1 bytes"):
        chain_trade_off(chain, [10**6, 1])


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


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_long_chains_of_every_policy(policy):
    chain = random_chain(LONGEST + 100, 7, scale=1000)
    least = chain_minimum(chain, policy)[0]
    for memory in ("40%", least, least + 1):
        schedule = plan(chain, memory, policy)
        assert schedule.peak <= schedule.memory
        assert schedule.bound <= schedule.seconds
    assert plan(chain, "40%", policy).gap < 0.02


@pytest.mark.quick(0)
@settings(deadline=None, max_examples=60)
@given(st.integers(2, 90), st.integers(0, 10**6), st.sampled_from(POLICIES), st.floats(0, 1))
def test_a_band_of_short_segments_is_planned_as_the_whole_table_is(length, seed, policy, share):
    """As for long chains, at lengths where the optimum is known; the minimum is kept too."""
    chain = random_chain(length, seed)
    least, most = chain_minimum(chain, policy)[0], record_everything(chain).peak
    memory = max(1, int(least + share * max(0, most - least)))
    exact = plan(chain, memory, policy)
    with pytest.MonkeyPatch.context() as patch:
        long_from(patch, longest=1)
        banded = plan_chain(chain, memory, policy, certify=True)
        lowest = plan_chain(chain, max(1, least), policy)
        coarse = plan_chain(chain, memory, policy, levels=2 * length)
    for schedule in (banded, lowest, coarse):
        assert schedule.peak <= schedule.memory
        assert schedule.bound <= exact.seconds or schedule is lowest
    assert banded.bound <= exact.seconds * (1 + 1e-12) <= banded.seconds * (1 + 1e-9)


def long_from(patch: pytest.MonkeyPatch, longest: int, groups: int = 3000) -> None:
    """Treat short chains as long ones are."""
    home, solver = (sys.modules[f"retrograde.plan.chain.{name}"] for name in ("search", "solver"))
    patch.setattr(home, "LONGEST", longest)
    for name, value in {"LONGEST": longest, "_SHORT": 0, "_BAND": 4, "_ENDS": 3}.items():
        patch.setattr(solver, name, value)
    patch.setattr(solver, "_GROUPS", groups)


def test_a_band_is_hardly_slower_than_the_whole_table():
    for seed in range(8):
        chain = random_chain(60, seed)
        exact = plan(chain, "40%")
        with pytest.MonkeyPatch.context() as patch:
            long_from(patch, longest=1)
            patch.setattr(sys.modules["retrograde.plan.chain.solver"], "_BAND", 16)
            assert plan(chain, "40%").seconds <= 1.01 * exact.seconds


@pytest.mark.parametrize("policy", POLICIES)
def test_more_layers_than_are_told_apart_are_taken_in_groups(policy):
    for seed in range(6):
        chain = random_chain(40, seed)
        memory = budgets(chain, policy)[2]
        exact = plan(chain, memory, policy)
        with pytest.MonkeyPatch.context() as patch:
            long_from(patch, longest=1, groups=15)
            assert len(Solver.of(chain, policy).places) < 20
            grouped = plan_chain(chain, max(memory, chain_minimum(chain, policy)[0]), policy)
        assert grouped.peak <= grouped.memory
        assert grouped.bound <= exact.seconds
        if grouped.memory == memory and policy != "hsm":  # which keeps a group's tapes
            assert exact.seconds <= grouped.seconds


@pytest.mark.parametrize("seed", range(120))
def test_no_schedule_undercuts_the_bound(seed):
    """Of any kind: not only those that keep what they have until its turn."""
    from retrograde.plan.chain.bound import least_seconds
    from retrograde.plan.chain.fill import Kinds

    chain = random_chain(1 + seed % 4, seed, running=5 + 10 * (seed % 3))
    for policy in POLICIES:
        kinds = Kinds(stores=policy != "ism", records=policy != "hsm")
        for memory in budgets(chain, policy):
            bound = least_seconds(chain, memory, kinds) - sum(chain.backward_seconds)
            assert bound <= fastest(chain, memory, policy, persistent=False) + 1e-9


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(0, 10**6), st.booleans())
def test_the_relaxation_is_the_least_of_all_choices(length, seed, stores):
    """Summed from the definitions, for every set of layers that may be kept."""
    from retrograde.plan.chain.bound import _Columns, _relaxed

    chain, draw = random_chain(length, seed), np.random.default_rng(seed)
    price, limit = draw.choice([0.0, 0.1, 0.3, 1.0], length), draw.uniform(0, 60, length)
    inputs, outputs = np.array(chain.keeps_input), np.array(chain.keeps_output)
    state, seconds = np.array(chain.state_bytes, float), np.array(chain.forward_seconds)
    tape, over = np.array(chain.tape_bytes, float), np.empty(length)
    columns = _Columns(seconds, state, tape, inputs, outputs, limit, stores, True)
    found = _relaxed(columns, price, over)

    def value(kept: set[int]) -> float:
        total = sum(seconds[k] for k in range(length) if k not in kept)
        for k in range(length):
            tapes = [j for j in kept if j < k]
            held = {j for j in tapes if inputs[j]} | {j + 1 for j in tapes if outputs[j]}
            held -= {k} if inputs[k] else set()
            if k == length - 1:
                bases = {j + 1 for j in tapes if j + 1 not in kept}
                if not stores and bases - held:
                    return math.inf
                held |= bases
            needed = sum(tape[j] for j in tapes) + sum(state[j] for j in held)
            total += price[k] * (needed - limit[k])
        return total

    choices = ({k for k in range(length - 1) if bits >> k & 1} for bits in range(2 ** (length - 1)))
    assert found == pytest.approx(min(value(kept | {length - 1}) for kept in choices), abs=1e-9)


def test_the_bound_is_close_and_grows_as_memory_shrinks():
    from retrograde.plan.chain.bound import least_seconds
    from retrograde.plan.chain.fill import Kinds

    for seed in range(3):
        chain = random_chain(100, seed, scale=1000)
        shares = ("30%", "50%", "80%", "100%")
        schedules = [plan_chain(chain, share, levels=300) for share in shares]
        bounds = [least_seconds(chain, s.memory, Kinds(True, True)) for s in schedules]
        assert all(a >= b for a, b in pairwise(bounds))
        for schedule, bound in zip(schedules, bounds, strict=True):
            assert bound <= schedule.seconds <= 1.02 * bound
        assert bounds[-1] == pytest.approx(chain.ordinary_seconds)


def test_what_is_let_go_of_early_does_not_spoil_the_bound():
    """``release_bytes``, which the planner leaves aside and the books do not."""
    from retrograde.plan.chain.bound import least_seconds
    from retrograde.plan.chain.fill import Kinds

    chain = Chain([1, 1], [0, 0], [8, 8], keeps_input=[True, True], release_bytes=[0, 8],
                  keeps_output=[False, False], backward_transient_bytes=[0, 30])  # fmt: skip
    ordinary = record_everything(chain)
    assert least_seconds(chain, ordinary.peak, Kinds(True, True)) <= ordinary.seconds


@pytest.mark.quick(0)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_thousand_layers_within_a_hundredth(share):
    """With fewer levels than by default, for time; sizes without a common divisor."""
    chain = random_chain(1000, 5, scale=10**5)
    schedule = plan_chain(chain, share, levels=400)
    assert schedule.peak <= schedule.memory
    assert schedule.gap < 0.01
