import numpy as np
import pytest

from retrograde.errors import ScheduleError
from retrograde.plan import plan
from retrograde.schedule import Backward, Free, Record, Schedule, Store, Units

ACTIONS = [Store(0), Record(0, 3), Backward(0, 3), Free(0)]


def make(**changes) -> Schedule:
    return Schedule.from_actions(ACTIONS, **{"length": 3, "policy": "store-all", **changes})


def test_it_is_a_sequence_of_actions():
    schedule = make()
    assert list(schedule) == ACTIONS
    assert len(schedule) == 4
    assert (schedule[1], schedule[-1]) == (Record(0, 3), Free(0))
    assert schedule[1:3] == (Record(0, 3), Backward(0, 3))
    assert Record(0, 3) in schedule
    with pytest.raises(IndexError):
        schedule[4]


def test_equal_parts_make_equal_schedules():
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != ACTIONS


@pytest.mark.parametrize(
    "changes", [{"length": 4}, {"policy": "other"}, {"memory": 7}, {"units": Units(alpha=5)}]
)
def test_every_part_counts_for_equality(changes):
    assert make(**changes) != make()


def test_every_action_counts_for_equality():
    assert Schedule.from_actions(ACTIONS[:3], length=3, policy="store-all") != make()


def test_nothing_in_it_can_be_changed():
    schedule = make()
    with pytest.raises(AttributeError):
        schedule.length = 4
    for part in (schedule.kind, schedule.start, schedule.stop):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 1


def test_it_does_not_share_the_arrays_it_was_made_of():
    kind, start = np.array([1], dtype=np.uint8), np.array([0])
    schedule = Schedule(1, "custom", None, Units(), kind, start, start)
    start[0] = 5
    assert schedule[0] == Store(0)


def test_cost_and_peak_are_replayed():
    schedule = make(units=Units(alpha=5, beta=4))
    assert (schedule.cost, schedule.peak) == (3, 9)
    assert isinstance(schedule.cost, int)
    assert isinstance(schedule.peak, int)


def test_an_illegal_schedule_has_no_cost():
    schedule = Schedule.from_actions(ACTIONS[:3], length=3)
    with pytest.raises(ScheduleError, match="state 0 is still stored"):
        _ = schedule.cost


def test_it_is_read_aloud_on_one_line():
    assert str(make()) == "store 0, record 0→3, backward 3→0, free 0"
    assert repr(make()) == "<Schedule 'store-all', length=3, memory=None, 4 actions>"


def test_a_long_one_is_shortened_in_the_middle():
    schedule = plan(100, 10)
    words = str(schedule).split(", ")
    assert len(words) == 121
    assert words[60] == f"… {len(schedule) - 120} more …"
    assert words[:60] == [str(action) for action in schedule[:60]]
    assert words[61:] == [str(action) for action in schedule[-60:]]


def test_a_position_beyond_64_bits_is_refused():
    with pytest.raises(ScheduleError, match="a position does not fit 64 bits"):
        Schedule.from_actions([Store(2**64)], length=1)


def test_arrays_of_different_shapes_are_refused():
    with pytest.raises(ScheduleError, match=r"shapes \[\(1,\), \(2,\)\]: expected one"):
        Schedule(1, "custom", None, Units(), np.zeros(1), np.zeros(2), np.zeros(2))


def test_an_unknown_verb_is_refused():
    with pytest.raises(ScheduleError, match="a verb is numbered 6: expected 0 to 5"):
        Schedule.from_codes([(6, 0, 0)], length=1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"alpha": 2.5}, "the unit alpha is 2.5: expected an integer, 0 or more"),
        ({"core": -1}, "the unit core is -1: expected an integer, 0 or more"),
        ({"state": True}, "the unit state is True: expected an integer"),
        ({"alpha": 2, "beta": 3}, "beta is 3 and alpha is 2: .* expected beta <= alpha"),
    ],
)
def test_units_that_make_no_sense_are_refused(sizes, message):
    with pytest.raises(ScheduleError, match=message):
        Units(**sizes)
