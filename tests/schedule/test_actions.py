from dataclasses import FrozenInstanceError

import pytest

from retrograde.schedule import Advance, Backward, Free, Load, Record, Store, Verb
from retrograde.schedule.actions import decode, encode

ALL = [Advance(2, 5), Store(5), Record(5, 7), Load(2), Free(5), Backward(5, 7)]


@pytest.mark.parametrize("action", ALL, ids=str)
def test_codes_go_both_ways(action):
    assert decode(*encode(action)) == action


def test_codes_number_the_verbs_in_order():
    assert [encode(action)[0] for action in ALL] == list(Verb)


@pytest.mark.parametrize("action", ALL, ids=str)
def test_actions_are_frozen_values(action):
    with pytest.raises(FrozenInstanceError):
        setattr(action, action.__match_args__[0], 1)
    assert not hasattr(action, "__dict__")
    assert len({action, type(action)(*encode(action)[1:][: len(action.__match_args__)])}) == 1


def test_actions_can_be_read_aloud():
    read = ["advance 2→5", "store 5", "record 5→7", "load 2", "free 5", "backward 7→5"]
    assert [str(action) for action in ALL] == read


def test_what_is_no_action_is_refused():
    with pytest.raises(TypeError, match=r"^'store' is not an action: expected Advance, Store"):
        encode("store")
    with pytest.raises(ValueError, match="6 is not a valid Verb"):
        decode(6, 0, 0)
