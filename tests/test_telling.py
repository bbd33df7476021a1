"""What makes a first call long is told on a terminal, and nowhere else."""

import io
import time
from types import SimpleNamespace

import pytest

import retrograde as rg
from retrograde import machine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def told(monkeypatch):
    """Calls at some seconds, and returns the lines that a terminal shows."""
    shown, clock = Terminal(), [1000.0]
    monkeypatch.setattr(machine, "sys", SimpleNamespace(stderr=shown))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(machine, "tell", machine._Teller())

    def tell(*moments):
        for moment in moments:
            clock[0] = 1000.0 + moment
            machine.tell(f"at {moment}")
        return shown.getvalue().splitlines()

    return tell


def test_a_short_wait_is_silent(told):
    assert told(0, 0.5, 1.9) == []


def test_a_long_one_is_told_now_and_then(told):
    assert told(0, 1, 2, 3, 6, 7, 9) == ["retrograde: at 2", "retrograde: at 7"]


def test_another_one_begins_anew(told):
    assert told(0, 3, 60, 61, 63) == ["retrograde: at 3", "retrograde: at 63"]


def test_nothing_is_told_if_nobody_reads_it(told, monkeypatch):
    monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    assert told(0, 3) == []


def test_it_may_be_switched_off(told):
    rg.quiet()
    try:
        assert told(0, 3) == []
    finally:
        rg.quiet(False)
    assert told(4) == ["retrograde: at 4"]
