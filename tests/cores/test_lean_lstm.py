"""The lean LSTM kernel against its reference, ``torch.lstm``."""

import pytest
import torch

import retrograde as rg
from retrograde.cores.candidates import candidates, runner_of
from retrograde.cores.fused import Fused, Layers, run_lean, run_lean_record
from retrograde.cores.lean_lstm import lean_lstm
from retrograde.nn import scheduled
from retrograde.run.autograd import run_schedule


def both(net, x, state, seeds):
    wanted = [t for t in (x, *state, *net.parameters()) if t.requires_grad]
    y, (h, c) = net(x, state)
    theirs = [y, h, c, *torch.autograd.grad([y, h, c], wanted, seeds)]
    outputs = lean_lstm(x, state, net._flat_weights, net.num_layers, net.bias)
    return [*outputs, *torch.autograd.grad(outputs, wanted, seeds)], theirs


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("length", [1, 2, 63])
@pytest.mark.parametrize("size", [1, 2, 65])
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (1, False), (3, True)])
def test_outputs_and_gradients(dtype, tolerance, length, size, layers, bias):
    torch.manual_seed(size)
    net = torch.nn.LSTM(5, size, layers, bias=bias, dtype=dtype)
    x = torch.randn(length, 3, 5, dtype=dtype, requires_grad=True)
    h, c = (torch.randn(layers, 3, size, dtype=dtype, requires_grad=True) for _ in range(2))
    seeds = [torch.randn(length, 3, size, dtype=dtype), *(torch.randn_like(t) for t in (h, c))]
    ours, torchs = both(net, x, (h, c), seeds)
    x, h, c = (t.detach().double().requires_grad_() for t in (x, h, c))
    _, exact = both(net.double(), x, (h, c), [seed.double() for seed in seeds])
    for a, b, true in zip(ours, torchs, exact, strict=True):
        assert a.dtype == dtype
        allowed = max(tolerance * true.norm(), (b - true).norm())  # torch rounds as well
        assert (a - true).norm() <= allowed


def test_expanded_gradients_and_frozen_parts():
    net = torch.nn.LSTM(5, 7, dtype=torch.float64)
    net.weight_hh_l0.requires_grad_(False)
    x = torch.randn(9, 3, 5, dtype=torch.float64)
    state = tuple(torch.randn(1, 3, 7, dtype=torch.float64) for _ in range(2))
    seeds = [torch.ones((), dtype=torch.float64).expand(9, 3, 7), *map(torch.ones_like, state)]
    for a, b in zip(*both(net, x, state, seeds), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_gradcheck_passes():
    net = torch.nn.LSTM(2, 3, dtype=torch.float64)
    core = Fused((Layers("LSTM", net._flat_weights, 1, True),), run_lean)
    sizes = [(4, 2, 2), (1, 2, 3), (1, 2, 3)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]
    assert torch.autograd.gradcheck(
        lambda x, *state: tuple(run_schedule(core, rg.plan(4, 2), [x], list(state))[0]), inputs
    )


def test_a_graph_of_it_is_used_once():
    net = torch.nn.LSTM(2, 3)
    state = (torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    y, _, _ = lean_lstm(torch.randn(4, 2, 2), state, net._flat_weights, 1, True)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used once"):
        y.sum().backward()


def test_it_holds_six_numbers_a_unit_and_step():
    length, batch, size = 50, 8, 32
    net = torch.nn.LSTM(size, size)
    x = torch.randn(length, batch, size)
    state = tuple(torch.zeros(1, batch, size) for _ in range(2))
    m = rg.measure(lambda: lean_lstm(x, state, net._flat_weights, 1, True))
    one = batch * size * 4
    assert m.retained_bytes <= 6 * length * one + 5 * one


@pytest.mark.parametrize(("kernel", "memory"), [(run_lean_record, "1%"), (run_lean, "0.6%")])
def test_it_keeps_to_tight_budgets(kernel, memory, monkeypatch):
    def only(*args, **options):
        return [one for one in candidates(*args, **options) if runner_of(one.core) is kernel]

    monkeypatch.setattr(scheduled, "candidates", only)
    torch.manual_seed(0)
    ours = rg.LSTM(64, 64, memory=memory)
    theirs = torch.nn.LSTM(64, 64)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(600, 16, 64, requires_grad=True)
    seed = torch.randn(600, 16, 64)
    plan = ours._read(x, (), ours.memory).plan()
    assert [chosen for chosen, _ in plan.parts] == [kernel]

    def call(net):
        y, state = net(x)
        y.backward(seed)
        return y, state

    gradients = []
    for net in (theirs, ours):
        x.grad = None
        m = rg.measure(lambda net=net: call(net))
        gradients.append([x.grad, *(p.grad for p in net.parameters())])
    assert m.working_bytes <= plan.fit.budget_bytes
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
