"""Verdicts of a GPU are read when they have arrived, and the first bad one warns, once."""

import pytest
import torch

from retrograde.kernels.verdicts import Verdicts


class OnCard:
    """A verdict on a card: it arrives when the test says so."""

    is_cuda, shape, dtype, device = True, (1,), torch.int32, "a card"

    def __init__(self, value):
        self.value, self.arrived = value, False

    def record(self):
        pass

    def query(self):
        return self.arrived

    def copy_(self, other, non_blocking):
        assert non_blocking
        return self

    def __bool__(self):
        assert self.arrived, "the program would have waited"
        return self.value


@pytest.fixture
def card(monkeypatch):
    """Give a verdict to add; ``capturing`` is whether the caller records a graph."""
    state = {"capturing": False, "now": None}

    def add(verdicts, verdict):
        state["now"] = verdict
        verdicts.add(verdict)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "device", lambda _: pytest.MonkeyPatch.context())
    monkeypatch.setattr(torch, "empty", lambda *_, **__: state["now"])
    monkeypatch.setattr(torch.cuda, "Event", lambda: state["now"])
    return add, state


def test_a_verdict_is_read_by_a_later_call_which_warns_once(card):
    (add, _), said = card, []
    verdicts = Verdicts(lambda: said.append("swept"))
    good, bad, more = OnCard(False), OnCard(True), OnCard(False)
    add(verdicts, good)
    add(verdicts, bad)
    bad.arrived = True  # but verdicts are read in their order
    add(verdicts, more)
    assert not said
    good.arrived = True
    add(verdicts, OnCard(True))
    assert said == ["swept"]
    add(verdicts, OnCard(True))
    assert said == ["swept"]
    assert not verdicts.coming


def test_nothing_is_read_while_a_caller_records_a_graph(card):
    add, state = card
    verdicts = Verdicts(lambda: pytest.fail("warned"))
    state["capturing"] = True
    add(verdicts, OnCard(True))
    assert not verdicts.coming
