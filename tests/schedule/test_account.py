"""A chain's numbers, and what a schedule of it is seen to hold and to take."""

from dataclasses import replace

import pytest

from retrograde.errors import ScheduleError
from retrograde.schedule import (
    Advance,
    Backward,
    Chain,
    Free,
    Load,
    Record,
    Schedule,
    Store,
    simulate,
)

# Three layers; every number is another power of ten times a digit, so that sums can be read.
CHAIN = Chain(
    forward_seconds=[1, 10, 100],
    backward_seconds=[2, 20, 200],
    output_bytes=[3, 50, 700],
    internal_bytes=[13, 250, 3700],  # beyond the output: 10, 200, 3000
    forward_transient_bytes=[10_000, 20_000, 30_000],
    backward_transient_bytes=[100_000, 200_000, 300_000],
    record_transient_bytes=[40_000, 50_000, 60_000],
    input_bytes=9,
)
STORE_ALL = [Store(0), Record(0, 3), Backward(0, 3), Free(0)]
RECOMPUTE = [
    *(Store(0), Advance(0, 2), Record(2, 3), Backward(2, 3)),
    *(Load(0), Advance(0, 1), Record(1, 2), Backward(1, 2)),
    *(Load(0), Record(0, 1), Backward(0, 1), Free(0)),
]


def replay(actions, chain=CHAIN):
    return simulate(Schedule.from_actions(actions, length=3, units=chain))


def test_everything_recorded():
    seen = replay(STORE_ALL)
    # States 1 and 2 and all tapes; the output is the caller's. Going back, the gradient of the
    # output comes first.
    tapes = 10 + 200 + 3000
    assert seen.kept.tolist() == [0, tapes + 3 + 50, 0, 0]
    assert seen.high[1] == 3 + 50 + 10 + 200 + 3000 + 60_000
    assert seen.high[2] == 3 + 50 + tapes + 700 + 50 + 300_000
    assert seen.peak == seen.high[2]
    assert seen.clock.tolist() == [0, 111, 333, 333]


def test_everything_recomputed():
    seen = replay(RECOMPUTE)
    assert seen.kept.tolist() == [
        *(0, 50, 50 + 3000, 50),  # current: state 2; then its gradient
        *(50, 50 + 3, 3 + 200 + 50 + 50, 3),
        *(3, 3 + 10 + 3, 0, 0),
    ]
    assert seen.high.tolist() == [
        *(0, 3 + 50 + 20_000, 50 + 3000 + 60_000, 50 + 3000 + 700 + 50 + 300_000),
        *(50, 50 + 3 + 10_000, 50 + 3 + 200 + 50 + 50_000, 50 + 3 + 200 + 50 + 3 + 200_000),
        *(3, 3 + 10 + 3 + 40_000, 3 + 10 + 3 + 100_000, 0),
    ]
    assert seen.clock[-1] == 333 + 11 + 1
    assert seen.cost == 3 + 1 + 2 - 0


def test_a_state_that_no_tape_refers_to_is_not_held():
    loose = replace(CHAIN, keeps_input=[True, False, False], keeps_output=[False, False, True])
    seen = replay(STORE_ALL, loose)
    # Nobody refers to states 1 and 2; each is held until the next layer has run.
    assert seen.kept[1] == 10 + 200 + 3000
    assert seen.high[1] == 10 + 200 + 50 + 3000 + 60_000


def test_a_state_that_no_tape_refers_to_cannot_be_loaded():
    actions = [Store(0), Record(0, 1), Advance(1, 2), Load(1)]
    with pytest.raises(ScheduleError, match=r"^after the last action step 2 is not backprop"):
        replay(actions)
    with pytest.raises(ScheduleError, match=r"^action 3, load 1: state 1 is neither stored nor"):
        replay(actions, replace(CHAIN, keeps_output=[False, True, True]))


def test_a_stored_state_is_counted_once():
    actions = [Store(0), Record(0, 1), Store(1), Record(1, 3), Backward(1, 3), Free(1)]
    seen = replay([*actions, Backward(0, 1), Free(0)])
    assert seen.kept[1:4].tolist() == [13, 13, replay(STORE_ALL).kept[1]]
    assert seen.peak == replay(STORE_ALL).peak


def test_overhead_is_held_from_first_to_last():
    seen = replay(STORE_ALL, replace(CHAIN, overhead_bytes=10**7))
    assert (seen.kept - replay(STORE_ALL).kept).tolist() == [10**7] * 4


def test_seconds_belong_to_chains():
    assert Schedule.from_actions(STORE_ALL, length=3, units=CHAIN).seconds == 333
    assert Schedule.from_actions(STORE_ALL, length=3).seconds is None


def test_text_both_ways():
    schedule = Schedule.from_actions(RECOMPUTE, length=3, units=CHAIN)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert Chain.from_json(CHAIN.to_json()) == CHAIN


def test_printed_as_a_table():
    lines = str(replace(CHAIN, names=["conv", "relu", "pool"])).splitlines()
    assert lines[0].split() == ["layer", "forward", "backward", "output", "internal", "transient"]
    assert lines[2].split()[:3] == ["relu", "1e+04", "ms"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"forward_seconds": []}, "the chain has no layers"),
        ({"output_bytes": [1]}, "output_bytes has 1 entries and forward_seconds has 3"),
        ({"output_bytes": [1, 2.0, 3]}, r"output_bytes\[1\] is 2.0: expected bytes"),
        (
            {"internal_bytes": [3, 49, 700]},
            r"internal_bytes\[1\] is 49 and output_bytes\[1\] is 50",
        ),
        ({"backward_seconds": [1, 2, float("nan")]}, r"backward_seconds\[2\] is nan"),
        ({"backward_seconds": [1, -2, 3]}, r"backward_seconds\[1\] is -2"),
        ({"keeps_input": [True, 2, True]}, r"keeps_input\[1\] is 2: expected True or False"),
        ({"input_bytes": -1}, "input_bytes is -1"),
    ],
)
def test_bad_numbers_are_refused(change, reason):
    with pytest.raises(ScheduleError, match=reason):
        replace(CHAIN, **change)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", CHAIN.to_json().replace('"input_bytes":9', '"input":9'),
     CHAIN.to_json().replace("[1.0,10.0,100.0]", "1")],
)  # fmt: skip
def test_bad_text_is_refused(text):
    with pytest.raises(ScheduleError, match="not a chain"):
        Chain.from_json(text)


def test_a_schedule_and_its_chain_are_of_one_length():
    with pytest.raises(ScheduleError, match="has length 2 and its chain has 3 layers"):
        simulate(Schedule.from_actions(STORE_ALL, length=2, units=CHAIN))
