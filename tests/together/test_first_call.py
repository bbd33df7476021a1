"""What a first call measures by is held to the budget too, up to what docs/first_call.md names."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.loops import least
from oracles.strangers import watched
from retrograde.sizes import allocations
from retrograde.sizes.ordinary import FEW_BYTES, FEW_STEPS

DOUBLE = torch.float64
SMALL = 4096  # bytes that a call holds besides: random states, scalars


def room(budget, few, whole, outputs, weights):
    """What measuring may take: the budget, or twice a few steps, or a MiB. As in any call, what is
    handed on comes on top, for as many steps: outputs, their gradients, gradients of weights."""
    return max(budget, 2 * few, FEW_BYTES) * (1 + 2 * outputs / whole) + weights + SMALL


def working(call):
    return watched(call)[1].working_bytes()


@pytest.mark.quick(1, every=2)
@pytest.mark.parametrize("memory", ["5%", "20%", "least"])
@pytest.mark.parametrize("way", ["unroll", "bptt"])
def test_a_cell_is_measured_within_the_budget_beyond_a_few_steps(memory, way):
    x, h = torch.randn(200, 64, 48, dtype=DOUBLE), torch.zeros(64, 48, dtype=DOUBLE)

    def call(memory, steps=200):
        net = nn.GRUCell(48, 48, dtype=DOUBLE)  # another one, so that nothing is known of it

        def cell(a, h):
            h = net(a, h)
            return h, h

        if way == "bptt":
            return rg.bptt(cell, x[:steps], h, loss=lambda t, y: y.square().sum(), memory=memory)
        outputs, _ = rg.unroll(cell, x[:steps], h, memory=memory)
        torch.autograd.backward(outputs, seeds[:steps])
        return net, outputs.detach()

    seeds = torch.ones(200, 64, 48, dtype=DOUBLE)
    weights = sum(p.nbytes for p in nn.GRUCell(48, 48, dtype=DOUBLE).parameters())
    unbounded = None if way == "unroll" else "1GiB"
    few = working(lambda: call(unbounded, FEW_STEPS))
    whole = working(lambda: call(unbounded))
    if memory == "least":
        memory = budget = least(call)
    else:
        budget = int(float(memory[:-1]) / 100 * whole)
    most = room(budget, few, whole, seeds.nbytes, weights)
    assert working(lambda: call(memory)) <= most < whole / 2


@pytest.mark.parametrize("memory", ["least", "3%", "20%"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", [rg.RNN, rg.GRU, rg.LSTM])
@pytest.mark.quick(1, every=6)
def test_a_module_is_measured_within_the_budget_beyond_a_few_steps(kind, layers, memory):
    x = torch.randn(200, 32, 16)

    def call(memory, steps=200):
        net = kind(16, 64, layers, memory=memory)
        y, _ = net(x[:steps])
        torch.autograd.backward(y, seeds[:steps])
        return net, y

    seeds = torch.ones(200, 32, 64)
    few = working(lambda: call(None, FEW_STEPS))
    fit = kind(16, 64, layers, memory="100%").fit(x)
    budget = (
        fit.minimum_bytes if memory == "least" else fit.ordinary_bytes * int(memory[:-1]) // 100
    )
    if budget < fit.minimum_bytes:
        pytest.skip("less than the least")
    whole = working(lambda: call(None))
    most = room(
        budget, few, whole, seeds.nbytes, sum(w.nbytes for w in kind(16, 64, layers).parameters())
    )
    assert working(lambda: call(budget)) <= most < whole


def test_a_loop_within_a_loop_is_measured_by_few_steps(monkeypatch):
    class Counted:
        def __getattr__(self, name):
            return getattr(real, name)

        def gru_cell(self, *a):
            steps.append(None)
            return real.gru_cell(*a)

    def hour(x, h):
        h = fast(x, h)
        return h, h

    def day(xs, state):
        h, g = state
        ys, h = rg.unroll(hour, xs, h, memory="50%")
        g = slow(ys.mean(0), g)
        return g, (h, g)

    real, steps, beside = torch.nn.modules.rnn._VF, [], []
    monkeypatch.setattr(torch.nn.modules.rnn, "_VF", Counted())
    anew = allocations._beside
    monkeypatch.setattr(allocations, "_beside", lambda *a: beside.append(a) or anew(*a))
    fast, slow = nn.GRUCell(8, 32), nn.GRUCell(32, 16)
    x, state = torch.randn(10, 8, 8, 8), (torch.zeros(8, 32), torch.zeros(8, 16))
    y, _ = rg.unroll(day, x, state, memory="60%")
    torch.autograd.grad(y.sum(), [*fast.parameters(), *slow.parameters()])
    plain = 10 * (8 + 1)
    assert not beside  # the inner call is not measured anew within a measurement
    assert len(steps) <= 16 * plain


class Fork(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inside = nn.Linear(width, width)

    def forward(self, x):
        x, skip = x if isinstance(x, tuple) else (x, x)
        return self.inside(x).tanh(), skip


class Join(nn.Module):
    def forward(self, x):
        return x[0] + x[1]


def convolutions():
    widths = [3, 8, 8, 16, 16, 8]
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(0.1)]
    return layers, torch.randn(8, 3, 16, 16)


def dense(count, width):
    for _ in range(count):
        yield from (nn.Linear(width, width), nn.Tanh())


CHAINS = {
    "wide": lambda: ([*dense(8, 64)], torch.randn(512, 64)),
    "heavy": lambda: ([*dense(6, 256)], torch.randn(4, 256)),
    "convolutions": convolutions,
    "forks": lambda: (
        [Fork(32), Fork(32), Fork(32), Join(), nn.Tanh(), nn.Linear(32, 8)],
        torch.randn(256, 32),
    ),
}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_measured_within_the_budget_beyond_a_layer(name, share):
    layers, x = CHAINS[name]()
    fit = rg.Sequential(*layers, memory="100%").fit(x)
    budget = int(fit.minimum_bytes + share * (fit.ordinary_bytes - fit.minimum_bytes))
    weights = max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
    beside = max(size.output_bytes for size in fit.sizes) + x.nbytes + weights

    def call():
        net = rg.Sequential(*layers, memory=budget)
        for p in net.parameters():
            p.grad = None
        y = net(x)
        torch.autograd.backward(y, seed)
        return y

    seed = torch.ones_like(nn.Sequential(*layers)(x))

    found = working(call)
    assert found <= max(budget, fit.minimum_bytes + beside) + SMALL


@pytest.mark.quick(1)
def test_a_chain_does_not_load_torchs_compiler():
    """Loading it takes a second."""
    code = (
        "import sys, torch, retrograde as rg; from torch import nn\n"
        "layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(10)]\n"
        "net = rg.Sequential(*layers, memory='70%')\n"
        "net(torch.randn(512, 64)).sum().backward()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
