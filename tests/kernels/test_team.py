"""Threads: as many as pay, and the same bits with one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import retrograde as rg
from retrograde.kernels.cpu.llvm import threads as team
from retrograde.kernels.cpu.llvm.lanes import compiled
from retrograde.kernels.cpu.llvm.threads import paced, ranges, share

pytestmark = pytest.mark.usefixtures("ours_however_short")

WORKS = {
    "small": ("LSTM", 8, 64, 8, 60, {}),
    "a GRU of two directions": ("GRU", 24, 96, 16, 50, {"bidirectional": True}),
    "wide": ("LSTM", 64, 256, 32, 40, {}),
    "a wide GRU of two layers": ("GRU", 64, 256, 16, 40, {"num_layers": 2}),
    "an RNN": ("RNN", 16, 128, 32, 60, {"nonlinearity": "relu"}),
}


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(team, "_alone", [0.0, 0.1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("memory", ["100%", "20%"])
@pytest.mark.parametrize("work", WORKS)
def test_one_thread_gives_the_same_bits(work, memory):
    kind, inputs, hidden, batch, length, options = WORKS[work]
    torch.manual_seed(0)
    x = torch.randn(length, batch, inputs, requires_grad=True)
    net = getattr(rg, kind)(inputs, hidden, memory=memory, **options)

    def results(until):
        team._alone[0] = until
        y, _ = net(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])]

    for one, other in zip(results(0.0), results(float("inf")), strict=True):
        assert torch.equal(one, other)


class Core:
    """Notes the threads of each call."""

    def __init__(self, kind="cpu"):
        self.surroundings = SimpleNamespace(device=torch.device(kind))

    @paced
    def run(self, fails=False):
        if fails:
            raise ValueError("no")
        return torch.get_num_threads(), ranges(7, 2)


def run_at(monkeypatch, core, *clocks, **options):
    times = iter(clocks)
    monkeypatch.setattr(team, "_clocks", lambda: next(times))
    return core.run(**options)


CROWDED = (1.0, 0.0, 0), (1.1, 0.05, 3)  # ran for half of the time, and was made to stop
CALM = (1.0, 0.0, 0), (1.1, 0.1, 3)
WAITING = (1.0, 0.0, 0), (1.1, 0.01, 0)  # for a lock, say: nobody wants the processor


@pytest.mark.parametrize(("first", "threads"), [(CROWDED, 1), (CALM, 2), (WAITING, 2)])
def test_a_thread_that_was_made_to_stop_is_alone_next_time(monkeypatch, first, threads):
    core = Core()
    assert run_at(monkeypatch, core, *first) == (2, [(0, 4), (4, 7)])
    later = (1.15, 0.2, 3), (1.16, 0.21, 3)
    assert run_at(monkeypatch, core, *later) == (threads, [(0, 4), (4, 7)])
    assert torch.get_num_threads() == 2


def test_how_long_it_is_alone(monkeypatch):
    core = Core()
    run_at(monkeypatch, core, *CROWDED)
    assert team._alone == [pytest.approx(1.2), 0.2]
    # Crowded still: longer. Calm: until then, and two threads are tried again.
    assert run_at(monkeypatch, core, (1.15, 0, 0), (1.18, 0.01, 1))[0] == 1
    assert team._alone == [pytest.approx(1.38), 0.4]
    assert run_at(monkeypatch, core, (1.3, 0, 0), (1.35, 0.05, 0))[0] == 1
    assert team._alone == [pytest.approx(1.38), 0.4]
    assert run_at(monkeypatch, core, (1.4, 0, 0), (1.45, 0.05, 0))[0] == 2
    assert team._alone == [0.0, 0.1]


def test_an_error_and_short_calls_and_other_devices_change_nothing(monkeypatch):
    core = Core()
    team._alone[0] = 5.0
    with pytest.raises(ValueError, match="no"):
        run_at(monkeypatch, core, (1.0, 0, 0), (1.1, 0.1, 0), fails=True)
    assert torch.get_num_threads() == 2
    team._alone[0] = 0.0
    run_at(monkeypatch, core, (1.0, 0, 0), (1.0005, 0, 1))
    assert team._alone == [0.0, 0.1]
    team._alone[0] = 5.0
    assert Core("meta").run()[0] == 2


@compiled
def note(seen, first, last):
    seen[seen[0]] = 10 * first + last
    seen[0] += 1


def test_alone_all_parts_are_run_in_order():
    seen = np.ones(3, np.int64)

    class Alone(Core):
        @paced
        def run(self):
            share(note, ranges(8, 2), seen)

    team._alone[0] = float("inf")
    Alone().run()
    assert list(seen) == [3, 4, 48]
