"""The schedules of HSM and ISM."""

import pytest

from oracles.recurrences import fewest_actions_hsm, fewest_actions_ism, hsm_split
from retrograde.errors import ScheduleError
from retrograde.plan import plan
from retrograde.plan.steps import unfold
from retrograde.plan.steps.closed_form import hsm_cost, ism_cost
from retrograde.schedule import Advance, Store


@pytest.mark.parametrize("memory", [1, 2, 3, 4, 7, 30, 100])
def test_schedules_cost_what_the_closed_form_says(memory):
    for length in (*range(1, 40), 63, 64, 65, 200):
        assert plan(length, memory).cost == hsm_cost(length, memory)
        assert plan(length, memory, "ism").cost == ism_cost(length, memory)


@pytest.mark.quick(0)
def test_hsm_uses_every_slot_until_one_less_than_the_length():
    """Fewer slots would cost more up to m = t − 1, where 2t − 1 is reached (erratum 5)."""
    for length in range(1, 40):
        for memory in range(1, 45):
            assert plan(length, memory).peak == min(memory, max(1, length - 1))


def test_ism_uses_every_slot_until_the_length():
    for length in range(1, 40):
        for memory in range(1, 45):
            assert plan(length, memory, "ism").peak == min(memory, length)


@pytest.mark.parametrize(("length", "memory"), [(10_001, 63), (20_000, 1000), (3_001, 2)])
def test_long_schedules_are_unfolded_by_compiled_code_alike(length, memory, monkeypatch):
    for policy, cost in (("hsm", hsm_cost), ("ism", ism_cost)):
        compiled = plan(length, memory, policy)
        assert compiled.cost == compiled.bound == cost(length, memory)
        assert compiled.peak == min(memory, length)
        monkeypatch.setattr(unfold, "INTERPRETED", 10**9)
        assert plan(length, memory, policy) == compiled
        monkeypatch.undo()


def test_hsm_ties_break_by_the_fewest_actions():
    for memory in range(1, 13):
        fewest = fewest_actions_hsm(70, memory)
        for length in range(1, 71):
            assert len(plan(length, memory)) == 2 + fewest[length]


def test_ism_has_few_more_actions_than_any_schedule_that_is_as_cheap():
    """The rule for ties, the longest left parts first, is not always the fewest actions."""
    for memory in range(1, 13):
        fewest = fewest_actions_ism(70, memory)
        more = [len(plan(t, memory, "ism")) - 2 - fewest[t] for t in range(1, 71)]
        assert min(more) >= 0
        assert sum(more) <= sum(fewest) / 8


def test_the_rule_for_ties_is_a_thousandfold_where_all_is_recorded():
    """As many launches as before, were each of 5,000 internal states recorded for itself."""
    assert len(plan(5000, 5000, "ism")) == 4
    assert len(plan(10**5, 1000, "ism")) == 528


def test_a_schedule_begins_with_its_split():
    for length in range(3, 60):
        for memory in range(2, 12):
            y = hsm_split(length, memory)
            actions = plan(length, memory)[1:3]
            assert actions[0] == Advance(0, y)
            assert actions[1] == Store(y) or y == length - 1


def test_what_would_not_fit_is_refused_before_it_is_begun():
    with pytest.raises(ScheduleError, match=r"1000000000000 steps has .* TiB, expected at most 8 "):
        plan(10**12, 10**6)
    for policy in ("hsm", "ism"):
        with pytest.raises(ScheduleError, match="expected at most 8 GiB: plan blocks of steps"):
            plan(10**10, 10, policy)
