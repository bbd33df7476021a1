from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from retrograde.plan import plan
from retrograde.plan.steps.mixed import Mixed
from retrograde.plan.steps.unfold import Segments
from retrograde.schedule import Advance, Backward, Free, Load, Record, Schedule, Store, Units, merge


def merged(*actions):
    return list(merge(Schedule.from_actions(actions, length=9)))


def test_adjacent_ranges_of_one_verb_become_one():
    assert merged(Advance(0, 1), Advance(1, 2), Advance(2, 5)) == [Advance(0, 5)]
    assert merged(Record(0, 1), Record(1, 3)) == [Record(0, 3)]
    assert merged(Backward(3, 4), Backward(1, 3), Backward(0, 1)) == [Backward(0, 4)]


def test_ranges_that_do_not_meet_stay_apart():
    for pair in (
        (Advance(0, 1), Advance(2, 3)),
        (Backward(0, 1), Backward(1, 2)),
        (Advance(0, 1), Record(1, 2)),
        (Store(1), Store(1)),
        (Load(1), Load(1)),
        (Free(1), Free(1)),
    ):
        assert merged(*pair) == list(pair)


def test_whatever_lies_between_keeps_ranges_apart():
    actions = [Advance(0, 1), Store(1), Advance(1, 2)]
    assert merged(*actions) == actions


def test_nothing_merges_to_nothing():
    assert merged() == []


@settings(deadline=None)  # the first example may compile
@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 6), st.integers(0, 2))
def test_cost_and_peak_stay_as_they_were(length, memory, alpha, less):
    beta = max(1, alpha - less)
    for form in (Mixed(memory - 1, beta, alpha == beta), Mixed(memory - 1, 1, wide=True)):
        parts = Segments()
        root = parts.add(0, 0, form.schedule(length, parts))  # stored before, freed after
        schedule = Schedule(length, "parts", None, Units(), *parts.actions(root, length))
        short = merge(schedule)
        assert (short.cost, short.peak) == (schedule.cost, schedule.peak)
        assert merge(short) == short
        assert len(short) <= len(schedule)


def test_a_state_that_is_freed_and_stored_again_stays():
    schedule = plan(53, 6, "best", alpha=2, beta=2)
    for one, after in pairwise(schedule):
        assert not (isinstance(one, Free) and after == Store(one.at))
    twice = []
    for action in schedule:
        twice += (
            [action, Free(action.at), Store(action.at)] if isinstance(action, Load) else [action]
        )
    again = Schedule.from_actions(twice, length=53, units=schedule.units)
    assert [*merge(again)] == [*schedule]
