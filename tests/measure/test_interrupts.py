"""Ctrl-C at the worst moment: what was begun is ended all the same."""

import signal

import pytest
import torch

from retrograde.measure import allocations
from retrograde.measure.allocations import is_profiled, measure
from retrograde.measure.interrupts import interrupts_put_off


def press():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("name", ["_start_profiler", "_allocations", "_synchronize"])
def test_ctrl_c_leaves_no_profiler_running(monkeypatch, name):
    part = getattr(allocations, name)

    def pressed(*arguments):
        result = part(*arguments)
        press()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(allocations, name, pressed)
        with pytest.raises(KeyboardInterrupt):
            measure(lambda: torch.zeros(256))
    assert not is_profiled()
    assert measure(lambda: torch.zeros(256)).peak_bytes == 1024


def test_ctrl_c_interrupts_what_is_measured():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        measure(lambda: (press(), reached.append(1)))
    assert not reached
    assert not is_profiled()


def test_only_what_may_be_interrupted_is():
    done = []

    def work():
        with interrupts_put_off() as interruptible:
            press()
            done.append("before")
            try:
                with interruptible():
                    press()
                    done.append("never")
            finally:
                press()
                done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["before", "after"]
    with pytest.raises(KeyboardInterrupt):
        press()


def test_the_callers_own_handler_is_asked():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with interrupts_put_off() as interruptible:
            press()
            assert not seen
            with interruptible():
                press()
                assert len(seen) == 1
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGINT, before)
