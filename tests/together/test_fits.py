"""``rg.fit``: what a budget buys for cells, modules and chains, as their own ``fit`` tells it."""

import ctypes
import time

import pytest
import torch
from torch import nn

import retrograde as rg


def step_of(cell):
    def step(x, h):
        h = cell(x, h)
        return h, h

    return step


def test_the_graph_of_what_a_cell_captured_stays():
    encoder, gru = nn.Linear(16, 64), nn.GRUCell(32, 32)
    keys, values = encoder(torch.randn(4, 10, 16)).chunk(2, -1)
    keys = keys / 32**0.5  # the gradients of two results of one node are computed

    def step(_, h):
        weights = torch.softmax((keys @ h.unsqueeze(-1)).squeeze(-1), 1)
        h = gru((weights.unsqueeze(-1) * values).sum(1), h)
        return h, h

    x, h = torch.zeros(50, 4, 0), torch.ones(4, 32)
    assert rg.fit(step, x, h, memory="40%").seconds > 0
    assert encoder.weight.grad is None
    rg.unroll(step, x, h, memory="40%")[0].sum().backward()
    assert encoder.weight.grad.any()


def test_a_cell_is_asked_and_not_run():
    cell = nn.GRUCell(8, 16)
    x, h = torch.randn(200, 4, 8, requires_grad=True), torch.zeros(4, 16)
    found = rg.fit(step_of(cell), x, h, memory="10%")
    assert found.peak_bytes <= found.budget_bytes == found.ordinary_bytes // 10
    assert found.minimum_bytes <= found.budget_bytes
    assert 200 < found.forward_steps < 1000
    assert 0 < found.seconds < 10
    assert cell.weight_hh.grad is None
    rg.unroll(step_of(cell), x, h, memory=found.minimum_bytes)
    with pytest.raises(rg.BudgetError) as refusal:
        rg.fit(step_of(cell), x, h, memory=found.minimum_bytes - 1)
    assert refusal.value.minimum_bytes == found.minimum_bytes
    assert rg.fit(lambda x, h: (h, h + x), x.detach(), x[0].detach(), memory="50%").seconds > 0


@pytest.mark.parametrize("kind", [nn.LSTM, rg.LSTM, nn.GRU])
def test_a_module_is_asked_and_stays(kind):
    net, x = kind(8, 16), torch.randn(200, 4, 8)
    found = rg.fit(net, x, memory="10%")
    assert found.peak_bytes <= found.budget_bytes
    assert found.seconds > 0
    assert type(net) is kind
    assert getattr(net, "memory", None) is None
    both = kind(8, 16, num_layers=2, bidirectional=True)
    found = rg.fit(both, x, memory="60%")
    assert found.peak_bytes <= found.budget_bytes
    assert found.forward_steps >= 2 * 200
    assert "run forward for 200" in str(found)


@pytest.mark.parametrize("kind", [nn.Sequential, rg.Sequential])
def test_a_chain_is_asked(kind):
    net = kind(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)))
    x = torch.randn(64, 32)
    found = rg.fit(net, x, memory="50%")
    assert found.peak_bytes <= found.budget_bytes
    assert found.seconds > 0
    with pytest.raises(rg.CellError, match="got a state"):
        rg.fit(net, x, x, memory="50%")


def test_recurrent_and_stateful_cells_are_asked():
    net = rg.Recurrent(nn.GRUCell(8, 16), memory="90%")
    x = torch.randn(100, 4, 8)
    found = rg.fit(net, x, memory="20%")
    assert found.budget_bytes == found.ordinary_bytes // 5
    assert net.memory == "90%"

    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.v = nn.Linear(8, 8), 0.0

        def forward(self, x):
            self.v = 0.9 * self.v + self.linear(x)
            return self.v.tanh()

    leaky = Leaky()
    for cell in (leaky, nn.Sequential(nn.Linear(8, 8), leaky)):
        assert rg.fit(cell, x, memory="50%", stateful=[leaky]).forward_steps >= 100
    assert leaky.v == 0.0


class Wide(nn.GRUCell):
    """A cell that the loops of a layer do not run."""

    def forward(self, x, h):
        h = super().forward(x, h).tanh()
        return h, h


X, H = torch.randn(300, 8, 16, requires_grad=True), torch.zeros(8, 32)
CELL = nn.GRUCell(16, 32)
TOTALS = {
    "a layer": (rg.LSTM(16, 32, memory="10%"), lambda net: net.fit(X), X),
    "two directions": (
        rg.GRU(16, 32, 2, bidirectional=True, memory="60%"), lambda net: net.fit(X), X,
    ),
    "a cell": (
        rg.Recurrent(Wide(16, 32), memory="30%"), lambda net: rg.fit(net, X, H, memory="30%"), X, H,
    ),
    "layers": (
        rg.Sequential(*(nn.Linear(16, 16) for _ in range(9)), memory="90%"),
        lambda net: net.fit(X), X,
    ),
}  # fmt: skip


@pytest.mark.quick(9)
@pytest.mark.parametrize("kind", TOTALS)
def test_what_comes_on_top_is_told(kind):
    """It is a bound: not all of it is there at the peak of what a budget covers."""
    net, fit, *given = TOTALS[kind]
    wanted = [X, *net.parameters()]

    def call():
        y = net(*given)
        y = y if isinstance(y, torch.Tensor) else y[0]
        return y, torch.autograd.grad(y, wanted, torch.ones_like(y))

    found = fit(net)
    call()
    told = found.peak_bytes + found.beside_bytes
    assert 0.65 * told <= rg.measure(call).peak_bytes <= 1.02 * told
    assert "of outputs and gradients come on top" in str(found)


def test_a_busy_processor_is_told(monkeypatch):
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    for net, state in ((nn.LSTM(16, 32), None), (step_of(CELL), H)):
        found = rg.fit(net, X, state, memory="20%")
        assert found.is_busy
        assert str(found).endswith("but the processor was busy, so time it again")


class Heap(ctypes.Structure):
    _fields_ = [(f"field_{k}", ctypes.c_size_t) for k in range(10)]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc counts its heap")
@pytest.mark.parametrize("memory", ["100%", 12_000])
def test_nodes_of_small_cells_are_told(memory):
    """A biquad filter: a step holds 16 bytes of tensors, and 12 KB of nodes."""
    count = ctypes.CDLL(None).mallinfo2
    count.restype = Heap

    def heap():
        found = count()
        return found.field_4 + found.field_7  # what blocks take, in arenas and mapped

    def cell(x, s):
        x1, x2, y1, y2 = s
        y = c[0] * x + c[1] * x1 + c[2] * x2 - c[3] * y1 - c[4] * y2
        return y, (x, x1, y, y1)

    def call():
        outputs, _ = rg.unroll(cell, x, (z,) * 4, memory=memory)
        outputs.register_hook(lambda g: grown.append(heap()))
        outputs.sum().backward()

    c = nn.Parameter(torch.tensor([0.2, 0.3, 0.2, -0.5, 0.3]))
    x, z, grown = torch.randn(1000, 4), torch.zeros(4), []
    told = rg.fit(cell, x, (z,) * 4, memory=memory).node_bytes
    call()
    c.grad = None
    before = heap()
    call()  # when it goes back, the last steps that were recorded are still there
    assert grown[-1] - before < told < 2 * (grown[-1] - before)
