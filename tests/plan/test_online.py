"""States that are held while the end is unknown, and what it costs to end: against all policies."""

from functools import cache
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import retrograde as rg
from oracles.exhaustive import cheapest
from retrograde.plan.fit import fit, predict_peak_bytes
from retrograde.plan.footprint import Curve, Footprint
from retrograde.plan.open_end import OpenPlan
from retrograde.plan.steps.closed_form import hsm_cost
from retrograde.plan.steps.online import Thinned, online_schedule
from retrograde.run.arriving import OpenEnd
from retrograde.schedule import Record

least_cost = cache(hsm_cost)


def footprint(held, state=1, **options):
    """Of steps that take a few bytes; with ``held`` above every budget no tape is kept."""
    flat = Curve(((1, 7),))
    return Footprint(
        state, flat, Curve.affine(0, held), Curve.affine(3, held), Curve.affine(9, 2),
        ordinary=Curve(((1, 0),)), gradient_bytes=state, heap_bytes=None, **options,
    )  # fmt: skip


def plan_of(slots, held=10**9, **options):
    sizes = footprint(held, **options)
    return OpenPlan.within(sizes.minimum_bytes() + (slots - 1) * sizes.state_bytes, sizes)


def swept(plan, steps):
    """What is held, and how many steps are recorded, if the loop ends after each number of steps:
    the forward pass of the library, without a cell."""
    run = SimpleNamespace(tapes=[], length=0)
    run.core = SimpleNamespace(surroundings=SimpleNamespace(sources=()))
    thinned = Thinned(plan.slots)
    for action in OpenEnd(plan, lambda step: step < steps)._actions(run, thinned):
        if isinstance(action, Record):
            run.tapes.append(SimpleNamespace(start=action.start))
        if hasattr(action, "stop"):
            yield action.stop, thinned.held, len(run.tapes)


def cost_of_ending(slots, length, held, recorded):
    bounds = (*held, length - recorded)
    return length + sum(least_cost(b - a, slots - i) for i, (a, b) in enumerate(pairwise(bounds)))


@pytest.mark.parametrize("slots", [5, 100, 6, 8, 13, 19, 20, 31, 60, 300, 1000])
@pytest.mark.quick(1, every=3)
def test_ending_anywhere_costs_at_most_a_fifteenth_more_than_if_the_end_were_known(slots):
    """The promise is 1.15."""
    every, worst = max(1, slots // 20), 0.0
    for length, held, recorded in swept(plan_of(slots), 100_000):
        if length <= 3 * slots or length % every == 0:
            cost = cost_of_ending(slots, length, held, recorded)
            worst = max(worst, cost / least_cost(length, slots))
    assert worst <= 16 / 15


@pytest.mark.parametrize("slots", [2, 3, 4, 5])
@pytest.mark.quick(4)
def test_no_policy_is_much_better_for_short_sequences(slots):
    """Every policy: which of the states that are there it holds at each step, without knowing when
    the loop ends. Its worth is the worst ratio of all ends."""
    longest = 18

    def ratio(length, held):
        return cost_of_ending(slots, length, held, 1) / least_cost(length, slots)

    @cache
    def best(length, held):
        here = ratio(length, held) if length > 1 else 1.0
        if length == longest:
            return here
        more = (*held, length - 1) if length > 1 else held
        ways = (
            [more]
            if len(more) <= slots
            else [more[:i] + more[i + 1 :] for i in range(1, len(more))]
        )
        return max(here, min(best(length + 1, way) for way in ways))

    plan = plan_of(slots)
    ours = [(length, (*held,)) for length, held, recorded in swept(plan, longest) if recorded]
    worst = max(ratio(length, held) for length, held in ours if length > 1)
    assert worst <= 1.03 * best(1, (0,))


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.quick(3)
def test_what_is_left_is_planned_as_well_as_by_any_schedule(slots):
    """From the states that are held, against all legal schedules."""
    for length, held, recorded in swept(plan_of(slots), 8):
        end = length - recorded
        if not end:
            continue
        exact = cheapest(end, slots, alpha=99, beta=99, held=(*held,))
        assert cost_of_ending(slots, length, held, recorded) == length + exact


@pytest.mark.parametrize("slots", [3, 5, 8])
def test_it_never_helps_to_let_go_of_a_state_at_the_end(slots):
    for length, held, recorded in swept(plan_of(slots), 200):
        whole = cost_of_ending(slots, length, held, recorded)
        for count in range(len(held)):
            for some in combinations(held[1:], count):
                assert whole <= cost_of_ending(slots, length, (0, *some), recorded)


@pytest.mark.parametrize("slots", [1, 2, 5, 20])
def test_the_schedule_is_legal_and_costs_what_is_told(slots):
    for length, held, recorded in swept(plan_of(slots), 60):
        schedule, done = online_schedule(
            length, held, recorded, lambda steps, left: rg.plan(steps, slots - left)
        )
        assert schedule.cost == cost_of_ending(slots, length, held, recorded)
        assert schedule.peak <= slots
        performed = schedule[:done]
        assert max(a.stop for a in performed if hasattr(a, "stop")) == length


@pytest.mark.quick(6)
@pytest.mark.parametrize("seed", range(60))
def test_a_plan_in_bytes_is_legal_and_within_its_budget(seed):
    rng = np.random.default_rng(seed)
    sizes = footprint(
        int(rng.integers(1, 90)), int(rng.integers(1, 30)), call_bytes=5, extra_bytes=2
    )
    budget = sizes.minimum_bytes() + int(rng.integers(0, 3000))
    plan = OpenPlan.within(budget, sizes)
    for length, held, recorded in swept(plan, 120):
        schedule, _ = plan.schedule(length, held, recorded)
        assert schedule.cost >= length
        assert predict_peak_bytes(schedule, sizes) <= budget
    known = fit(length, budget, plan.sizes).forward_steps
    assert schedule.cost <= 2 * known


def test_where_all_is_recorded_nothing_runs_again():
    plan = plan_of(300, held=2)
    for length, held, recorded in swept(plan, 100):
        assert (held, recorded) == ([0], length)
        assert plan.schedule(length, held, recorded)[0].cost == length


def test_a_budget_below_the_least_is_refused():
    sizes = footprint(20, 8)
    with pytest.raises(
        rg.BudgetError, match=r"steps of an unknown number need at least 55 bytes"
    ) as e:
        OpenPlan.within(sizes.minimum_bytes() - 1, sizes)
    assert e.value.minimum_bytes == sizes.minimum_bytes()
