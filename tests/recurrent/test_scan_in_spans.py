"""A scan within a budget: each span of held layers is scanned, in few steps in turn."""

import math
from dataclasses import replace

import pytest
import torch

import retrograde as rg
from retrograde.kernels import kernels
from retrograde.recurrent import backward
from retrograde.recurrent.backward import LayerBackward
from retrograde.recurrent.forward import LayerForward
from retrograde.recurrent.plan import HeldPlan

SETTINGS = [
    ("RNN", 3000, 2, 8, "20%"),
    ("RNN", 2000, 16, 20, "5%"),
    ("RNN", 1000, 1, 33, "50%"),
    ("GRU", 3000, 4, 20, "20%"),
    ("GRU", 3000, 4, 20, "5%"),
    ("GRU", 2500, 1, 20, "3%"),
    ("GRU", 1200, 3, 65, "20%"),
    ("LSTM", 3000, 4, 20, "20%"),
    ("LSTM", 3000, 4, 20, "5%"),
    ("LSTM", 1500, 2, 64, "10%"),
]


def planned(kind, length, batch, size, memory):
    """The module, an input, and the plan of its calls."""
    torch.manual_seed(length + size)
    net = getattr(rg, kind)(5, size, memory=memory, backward="scan")
    x = torch.randn(length, batch, 5, requires_grad=True)
    net(x)
    found = [one.result for one in net._fits._found.values()]
    (plan,) = (one.parts[0][0] for one in found if getattr(one, "parts", ()))
    assert isinstance(plan, HeldPlan)
    return net, x, plan


@pytest.mark.quick(3)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_steps_in_turn_and_evaluations_are_those_of_the_formula(setting, monkeypatch):
    """Theorem F of docs/science.md."""
    _, length, batch, *_ = setting
    net, x, plan = planned(*setting)
    turns, forward, again = [], [], []

    def scan(steps, hidden, dy, g, chunk):
        count = len(steps.gates)
        chunks = count // chunk
        turns.append(count if chunks < 2 else 2 * chunk + chunks + count % chunk)
        return kernels("cpu", torch.float32, net.hidden_size).scan(steps, hidden, dy, g, chunk)

    def counted(*of):
        return replace(kernels(*of), scan=scan)

    run, add = LayerForward.__call__, LayerBackward.add
    monkeypatch.setattr(backward, "kernels", counted)
    monkeypatch.setattr(backward, "safe_chunk", lambda hidden, chunk: chunk)
    monkeypatch.setattr(
        LayerForward, "__call__", lambda s, x, *o: (forward.append(len(x)), run(s, x, *o))
    )
    monkeypatch.setattr(LayerBackward, "add", lambda s, b, *o: (
        again.append(0 if b.kept is not None else len(b.x)), add(s, b, *o))[1])  # fmt: skip
    net(x)[0].sum().backward()
    n, chunk = plan.block // batch, plan.chunk
    assert n % chunk == 0
    assert abs(chunk - math.sqrt(n / 2)) <= 1
    assert sum(forward) == length
    assert sum(again) == length - plan.kept
    assert sum(forward) + sum(again) == 2 * length - plan.kept
    whole, rest = divmod(length - plan.kept, n)
    assert (
        turns[len(turns) - whole - bool(rest) :][: whole + bool(rest)].count(2 * chunk + n // chunk)
        >= whole
    )
    assert sum(turns) <= 2 * math.sqrt(2) * length / math.sqrt(n) + 2 * len(turns) + 3 * chunk


@pytest.mark.quick(3)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_gradients_are_torchs_within_the_budget(setting):
    net, x, _ = planned(*setting)
    theirs = getattr(torch.nn, setting[0])(5, net.hidden_size)
    theirs.load_state_dict(net.state_dict())
    seed = torch.randn(*x.shape[:2], net.hidden_size)

    def call(module=net):
        y, last = module(x)
        return y, last, torch.autograd.grad(y, [x, *module.parameters()], seed)

    assert rg.measure(call).working_bytes <= net.fit(x).peak_bytes <= net.fit(x).budget_bytes
    for a, b in zip(call()[2], call(theirs)[2], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_shorter_chunks_hold_no_more_products_at_a_time(monkeypatch):
    """Weights that would overflow have shorter chunks, which are scanned in more parts."""
    net, x, plan = planned("GRU", 3000, 4, 20, "20%")
    counts = []

    def scan(steps, hidden, dy, g, chunk):
        counts.append((len(steps.gates), chunk))
        return kernels("cpu", torch.float32, 20).scan(steps, hidden, dy, g, chunk)

    monkeypatch.setattr(backward, "kernels", lambda *of: replace(kernels(*of), scan=scan))
    monkeypatch.setattr(backward, "safe_chunk", lambda hidden, chunk: chunk // 3)
    budget = net.fit(x).budget_bytes
    seed = torch.randn(3000, 4, 20)

    def call():
        y, last = net(x)
        return y, last, torch.autograd.grad(y, [x, *net.parameters()], seed)

    assert rg.measure(call).working_bytes <= budget
    most = plan.block // 4 // plan.chunk
    assert all(chunk == plan.chunk // 3 and length // chunk <= most for length, chunk in counts)
    assert sum(length for length, _ in counts) % 3000 == 0
