"""Ctrl-C at the worst moment: what was begun is ended all the same."""

import signal

import pytest
import torch

from retrograde.sizes import allocations
from retrograde.sizes.allocations import is_profiled, measure


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
