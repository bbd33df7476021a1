import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograde.errors import ScheduleError
from retrograde.plan import plan
from retrograde.schedule import Advance, Backward, Free, Load, Record, Schedule, Store, Units

POSITIONS = st.integers(0, 2**63 - 1)
ACTIONS = st.one_of(
    *(st.builds(verb, POSITIONS, POSITIONS) for verb in (Advance, Record, Backward)),
    *(st.builds(verb, POSITIONS) for verb in (Store, Load, Free)),
)
SCHEDULE = plan(5, 2)


@given(
    st.lists(ACTIONS, max_size=20),
    st.integers(1, 2**40),
    st.text(),
    st.none() | st.integers(1, 2**80),
    st.none() | st.integers(0, 2**80),
)
def test_any_schedule_comes_back_equal(actions, length, policy, memory, bound):
    units = Units(alpha=7, beta=3, core=2, initial=4, state=5)
    schedule = Schedule.from_actions(
        actions, length=length, policy=policy, memory=memory, units=units
    )
    schedule = replace(schedule, bound=bound)
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_the_text_is_compact_versioned_and_on_one_line():
    text = plan(3, policy="store-all").to_json()
    assert text == (
        '{"format":"retrograde-schedule","version":1,"length":3,"policy":"store-all",'
        '"memory":null,"units":{"alpha":2,"beta":1,"core":0,"initial":1,"state":1},'
        '"actions":"S0 R0:3 B0:3 F0"}'
    )


def test_ten_thousand_steps_stay_small():
    schedule = plan(10_000, 100)
    assert len(schedule.to_json()) < 12 * len(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"not a schedule: the text is not JSON \(Expecting value"),
        ("{", r"not a schedule: the text is not JSON"),
        ("[1]", r"not a schedule: expected a JSON object, got \[1\]"),
        ("{}", r"'format' is None: expected 'retrograde-schedule'"),
        (b"\xff", r"not a schedule: the text is not JSON"),
        (None, r"not a schedule: the text is not JSON"),
    ],
)
def test_text_of_another_kind_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "'version' is 2: this library reads 1"),
        ({"length": 0}, "'length' is 0: expected an integer, 1 or more"),
        ({"length": True}, "'length' is True: expected an integer"),
        ({"length": 1.5}, "'length' is 1.5: expected an integer"),
        ({"policy": 7}, "'policy' is 7: expected a name"),
        ({"memory": -1}, "'memory' is -1: expected an integer, 1 or more, or null"),
        ({"bound": -1}, "'bound' is -1: expected an integer, 0 or more, or null"),
        ({"units": 3}, "'units' is 3: expected an object"),
        ({"units": {}}, "'units' lacks 'alpha', 'beta', 'core', 'initial', 'state'"),
        ({"actions": ["S0"]}, r"'actions' is \['S0'\]: expected text such as"),
        ({"actions": "S0 X1"}, "action 1 is 'X1': expected such as 'A0:5'"),
        ({"actions": "S0:1"}, "action 0 is 'S0:1'"),
        ({"actions": "A0"}, "action 0 is 'A0'"),
        ({"actions": "A-1:2"}, "action 0 is 'A-1:2'"),
        ({"actions": f"S{2**63}"}, "a position does not fit 64 bits"),
        ({"colour": 1}, "the object has the unknown 'colour'"),
    ],
)
def test_a_malformed_part_is_named(changes, message):
    document = {**json.loads(SCHEDULE.to_json()), **changes}
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(json.dumps(document))


@pytest.mark.parametrize("part", ["length", "policy", "memory", "units", "actions"])
def test_a_missing_part_is_named(part):
    document = json.loads(SCHEDULE.to_json())
    del document[part]
    with pytest.raises(ScheduleError, match=f"the object lacks '{part}'"):
        Schedule.from_json(json.dumps(document))


def test_units_are_checked_on_reading():
    document = json.loads(SCHEDULE.to_json())
    document["units"]["beta"] = 9
    with pytest.raises(ScheduleError, match="beta is 9 and alpha is 2"):
        Schedule.from_json(json.dumps(document))
    document["units"]["gamma"] = 1
    with pytest.raises(ScheduleError, match="'units' has the unknown 'gamma'"):
        Schedule.from_json(json.dumps(document))
