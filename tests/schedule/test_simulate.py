import re

import numpy as np
import pytest

from retrograde.errors import ScheduleError
from retrograde.plan import plan
from retrograde.schedule import (
    Advance,
    Backward,
    Free,
    Load,
    Record,
    Replay,
    Schedule,
    Store,
    Units,
    simulate,
)

UNITS = Units(alpha=100, beta=10, core=1, initial=10_000, state=1000)


def replay(*actions, length=4, units=UNITS) -> Replay:
    return simulate(Schedule.from_actions(actions, length=length, units=units))


def test_a_recorded_range_rests_on_its_stored_input():
    seen = replay(Store(0), Record(0, 4), Backward(0, 4), Free(0))
    assert (seen.cost, seen.peak, seen.actions) == (4, 10_031, 4)
    assert seen.kept.tolist() == [10_000, 10_031, 10_000, 0]


def test_a_range_not_backpropagated_at_once_is_not_in_the_core():
    seen = replay(Record(0, 2), Store(2), Record(2, 4), Backward(2, 4), Free(2), Backward(0, 2))
    assert seen.kept.tolist() == [110, 1110, 1110 + 11, 1110, 110, 0]


def test_an_input_that_is_not_in_memory_counts_once():
    seen = replay(
        *(Store(0), Advance(0, 2), Record(2, 3), Record(3, 4), Backward(2, 4)),
        *(Load(0), Record(0, 2), Backward(0, 2), Free(0)),
    )
    assert seen.kept.tolist() == [10_000, 10_000, 10_100, 10_101, 10_000, 10_000, 10_011, 10_000, 0]
    assert seen.cost == 6


def test_the_output_of_a_recorded_step_is_an_input_in_memory():
    seen = replay(
        *(Store(0), Record(0, 1), Advance(1, 3), Record(3, 4), Backward(3, 4)),
        *(Load(1), Record(1, 2), Record(2, 3), Backward(0, 3), Free(0)),
    )
    assert seen.kept[6] == 10_000 + 10 + 10
    assert seen.cost == 1 + 2 + 1 + 2


def test_a_backward_may_cover_a_part_of_a_range():
    seen = replay(Store(0), Record(0, 4), Backward(2, 4), Backward(0, 2), Free(0))
    assert seen.kept.tolist() == [10_000, 10_031, 10_020, 10_000, 0]


def test_a_current_state_may_be_freed_before_it_runs_on():
    seen = replay(
        *(Store(0), Advance(0, 3), Record(3, 4), Backward(3, 4)),
        *(Load(0), Free(0), Record(0, 3), Backward(0, 3)),
    )
    assert seen.kept.tolist() == [10_000, 10_000, 10_001, 10_000, 10_000, 0, 121 - 10, 0]


def test_a_legal_schedule_may_be_wasteful():
    units, back = Units(), (Load(0), Record(0, 1), Backward(0, 1), Free(0))
    assert replay(Store(0), Advance(0, 1), *back, length=1, units=units).cost == 2  # 1 would do
    kept = Store(1), Record(1, 2), Backward(1, 2), Free(1)
    peaks = [
        replay(Store(0), Advance(0, 1), *last, *back, length=2, units=units).peak
        for last in (kept, kept[1:3])
    ]
    assert peaks == [2, 1]


def test_what_was_seen_cannot_be_changed():
    seen = replay(Store(0), Record(0, 4), Backward(0, 4), Free(0))
    with pytest.raises(ValueError, match="read-only"):
        seen.kept[0] = 1
    assert seen == Replay(4, 10_031, 4, *_NO_COLUMNS)


_NO_COLUMNS = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))

S, R = Store(0), Record(0, 4)
RANGE = "the range is empty or not within steps 0 to 3"
LAST = "state 3 is not freed directly after its last use: expected load 3 or a backward to 3"


@pytest.mark.parametrize(
    ("actions", "index", "reason"),
    [
        ([Advance(1, 2)], 0, "state 0 is current, not state 1: load it first"),
        ([Record(1, 2)], 0, "state 0 is current, not state 1: load it first"),
        ([S, R, Backward(3, 4), Record(0, 1)], 3, "no state is current, not state 0: load it"),
        ([Advance(0, 0)], 0, RANGE),
        ([Advance(2, 1)], 0, RANGE),
        ([Record(0, 5)], 0, RANGE),
        ([Record(-1, 2)], 0, RANGE),
        ([R, Backward(-1, 4)], 1, RANGE),
        ([R, Backward(4, 4)], 1, RANGE),
        ([S, R, Backward(3, 4), Load(3), Advance(3, 4)], 4, "step 3 is backpropagated already"),
        ([S, R, Backward(3, 4), Load(3), Record(3, 4)], 4, "step 3 is backpropagated already"),
        ([S, R, Load(0), Record(0, 1)], 3, "step 0 is recorded already: load its output, state 1"),
        ([S, R, Load(2), Advance(2, 3)], 3, "step 2 is recorded already: load its output, state 3"),
        ([Store(1)], 0, "state 0 is current, not state 1: only the current state can be stored"),
        ([R, Backward(0, 4), S], 2, "no state is current, not state 0: only the current"),
        ([S, S], 1, "state 0 is stored already"),
        ([Load(0)], 0, "state 0 is current already"),
        ([Load(5)], 0, "there is no state 5: expected 0 to 4"),
        ([Load(-1)], 0, "there is no state -1: expected 0 to 4"),
        ([Load(1)], 0, "state 1 is neither stored nor the output of a recorded step"),
        ([R, Backward(3, 4), Load(4)], 2, "state 4 is neither stored nor the output"),
        ([Free(0)], 0, "state 0 is not stored"),
        ([Free(9)], 0, "state 9 is not stored"),
        ([Free(-1)], 0, "state -1 is not stored"),
        ([S, Free(0)], 1, "state 0 is not freed directly after its last use"),
        ([Advance(0, 3), Store(3), Record(3, 4), Free(3)], 3, LAST),
        ([S, R, Load(0), Free(0)], 3, "the recorded step 0 still rests on state 0"),
        ([R, Backward(0, 3)], 1, "the next step to be backpropagated is 3, not 2"),
        ([R, Backward(2, 4), Backward(1, 3)], 2, "the next step to be backpropagated is 1, not 2"),
        ([Advance(0, 2), Record(2, 4), Backward(0, 4)], 2, "step 1 is not recorded"),
    ],
)
def test_an_illegal_action_is_named_with_its_reason(actions, index, reason):
    message = re.escape(f"action {index}, {actions[index]}: {reason}")
    with pytest.raises(ScheduleError, match="^" + message):
        replay(*actions)


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([], "step 3 is not backpropagated"),
        ([S, R, Backward(1, 4)], "step 0 is not backpropagated"),
        ([S, R, Backward(0, 4)], "state 0 is still stored: free it"),
    ],
)
def test_an_unfinished_schedule_is_refused(actions, reason):
    with pytest.raises(ScheduleError, match=f"^after the last action {reason}$"):
        replay(*actions)


@pytest.mark.parametrize("length", [0, -1, 2.5, True])
def test_a_length_that_makes_no_sense_is_refused(length):
    with pytest.raises(ScheduleError, match=f"has length {length}: expected at least 1 step"):
        replay(length=length)


def test_the_replay_is_linear_in_a_long_range():
    schedule = plan(200_000, policy="store-all")
    assert simulate(schedule) == Replay(200_000, 200_000, 4, *_NO_COLUMNS)
