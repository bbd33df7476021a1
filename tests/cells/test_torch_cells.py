"""Torch's own cells within a budget, which the loops of a layer run."""

import copy
import gc
import random
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import retrograde as rg
from retrograde.cells.as_cell import TorchCell

KINDS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}


def plainly(cell, x, state):
    """The loop that a program would write."""
    outputs = []
    for x_t in x:
        state = cell(x_t, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs), state


def parts_of(state):
    return state if isinstance(state, tuple) else () if state is None else (state,)


def gradients(run, cell, x, state):
    y, last = run(cell, x, state)
    loss = y.square().sum() + sum((k + 2) * s.sum() for k, s in enumerate(parts_of(last)))
    wanted = [t for t in (x, *parts_of(state), *cell.parameters()) if t.requires_grad]
    return [y.detach(), *(s.detach() for s in parts_of(last)), *torch.autograd.grad(loss, wanted)]


def within(memory):
    return lambda cell, x, state: rg.unroll(cell, x, state, memory=memory)


def drawn(seed):
    """A cell, its inputs and its state."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    name, dtype = draw.choice([*KINDS]), draw.choice([torch.float32, torch.float64])
    width, size, samples = draw.randint(1, 20), draw.randint(1, 40), draw.choice([1, 3, 8, None])
    options = {"nonlinearity": draw.choice(["tanh", "relu"])} if name == "RNN" else {}
    cell = KINDS[name](width, size, bias=draw.random() < 0.7, dtype=dtype, **options)
    if draw.random() < 0.2:
        cell.weight_hh.requires_grad_(False)
    batch = () if samples is None else (samples,)
    x = torch.randn(draw.randint(1, 150), *batch, width, dtype=dtype)
    if draw.random() < 0.5 and batch:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x.requires_grad_(draw.random() < 0.5)
    state = None
    if draw.random() < 0.7:
        state = tuple(torch.randn(*batch, size, dtype=dtype) for _ in range(1 + (name == "LSTM")))
        for part in state:
            part.requires_grad_(draw.random() < 0.5)
        state = state if name == "LSTM" else state[0]
    return cell, x, state


@pytest.mark.quick(6, every=10)
@pytest.mark.parametrize("seed", range(40))
def test_drawn_cells_have_the_loops_gradient_and_keep_every_budget(seed):
    cell, x, state = drawn(seed)
    expected = gradients(plainly, cell, x, state)
    whole = rg.fit(cell, x, state, memory="100%")
    between = whole.ordinary_bytes - whole.minimum_bytes
    near = 1e-6 if x.dtype == torch.float32 else 1e-12
    for part in (0.0, 0.2, 1.0):
        memory = max(1, whole.minimum_bytes + int(part * between))
        found = gradients(within(memory), cell, x, state)
        for a, b in zip(expected, found, strict=True):
            assert (a - b).norm() <= 4 * near * a.norm() + near
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        y, last = rg.unroll(cell, x, state, memory=memory)
        g = torch.ones_like(y)
        ends = [torch.ones_like(s) for s in parts_of(last)]
        del y, last

        def call(memory=memory, g=g, ends=ends):
            y, last = rg.unroll(cell, x, state, memory=memory)
            wanted = [t for t in (x, *parts_of(state), *cell.parameters()) if t.requires_grad]
            torch.autograd.grad([y, *parts_of(last)], wanted, [g, *ends])

        given = sum(t.nbytes for t in (x, *parts_of(state), *cell.parameters()) if t.requires_grad)
        held = (len(ends) + 1) * g.nbytes + given + 8 * (4096 if memory < 4096 else memory // 50)
        assert rg.measure(call).working_bytes <= memory + held


def test_the_least_budget_is_named_and_works():
    cell, x, state = drawn(3)
    with pytest.raises(rg.BudgetError) as refusal:
        rg.unroll(cell, x, state, memory=1)
    least = refusal.value.minimum_bytes
    expected = gradients(plainly, cell, x, state)
    found = gradients(within(least), cell, x, state)
    assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(expected, found, strict=True))
    with pytest.raises(rg.BudgetError, match=f"at least {least} bytes"):
        rg.unroll(cell, x, state, memory=least - 1)


def pruned(cell):
    prune.random_unstructured(cell, "weight_hh", 0.5)


def hooked(cell):
    cell.register_forward_hook(lambda _, __, result: 2 * result)


class Halved(nn.GRUCell):
    def forward(self, x, h):
        return super().forward(x, h) / 2


@pytest.mark.parametrize("change", [pruned, hooked, None])
def test_a_cell_that_does_more_than_torchs_runs_step_by_step(change):
    torch.manual_seed(0)
    cell = nn.GRUCell(5, 5)
    x, h = torch.randn(60, 4, 5, requires_grad=True), torch.zeros(4, 5)
    with torch.autocast("cpu", torch.bfloat16) if change is None else nullcontext():
        if change is not None:
            change(cell)
        expected = gradients(plainly, cell, x, h)
        found = gradients(within("40%"), cell, x, h)
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[2], found[2])  # of the inputs


def test_a_derived_cell_is_not_taken_for_torchs():
    torch.manual_seed(0)
    cell, x, h = Halved(5, 5), torch.randn(60, 4, 5, requires_grad=True), torch.zeros(4, 5)

    def step(x, h):
        h = cell(x, h)
        return h, h

    y, _ = rg.unroll(step, x, h, memory="40%")
    assert torch.equal(y, plainly(cell, x, h)[0])


def test_weights_that_change_between_calls_are_the_ones_that_count():
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(3, 6), torch.randn(50, 2, 3)
    for change in range(3):
        if change == 1:
            with torch.no_grad():
                cell.weight_hh.mul_(2)
        elif change == 2:
            cell.weight_hh = nn.Parameter(torch.randn(24, 6))
        expected, found = (gradients(run, cell, x, None) for run in (plainly, within("20%")))
        assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(expected, found, strict=True))
    other = copy.deepcopy(cell)
    gradients(within("20%"), other, x, None)
    assert all(p.grad is None for p in cell.parameters())


@pytest.mark.parametrize("samples", [0, 2])
def test_nothing_to_backpropagate_and_no_samples_are_as_in_the_loop(samples):
    cell, x = nn.GRUCell(3, 4), torch.randn(20, samples, 3)
    cell.requires_grad_(samples == 0)
    y, last = rg.unroll(cell, x, torch.zeros(samples, 4), memory="100%")
    expected, h = plainly(cell, x, torch.zeros(samples, 4))
    assert torch.equal(y, expected)
    assert torch.equal(last, h)


def test_no_cache_keeps_the_weights_of_a_cell_alive():
    cell = nn.LSTMCell(3, 6)
    gradients(within("50%"), cell, torch.randn(60, 2, 3), None)
    weight = weakref.ref(cell.weight_hh)
    del cell
    gc.collect()
    assert weight() is None


def test_a_function_around_a_cell_has_the_loops_bits():
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(3, 6), torch.randn(50, 2, 3, requires_grad=True)

    def step(x, state):
        h, c = cell(x, state)
        return h, (h, c)

    state = torch.zeros(2, 6), torch.zeros(2, 6)
    expected = gradients(plainly, cell, x, state)
    y, last = rg.unroll(step, x, state, memory="30%")
    (dx,) = torch.autograd.grad(y.square().sum() + 2 * last[0].sum() + 3 * last[1].sum(), [x])
    assert torch.equal(y, expected[0])
    assert torch.equal(dx, expected[3])


def test_recurrent_runs_them_too_with_samples_first():
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 6)
    net = rg.Recurrent(cell, memory="20%", batch_first=True)
    x = torch.randn(4, 70, 3, requires_grad=True)
    y, h = net(x)
    expected, last = plainly(cell, x.transpose(0, 1), torch.zeros(4, 6))
    assert torch.allclose(y, expected.transpose(0, 1), 1e-5, 1e-6)
    assert torch.allclose(h, last, 1e-5, 1e-6)
    assert net.fit(x).forward_steps <= 2 * 70
    y.sum().backward()
    assert TorchCell(cell).is_a_layer(x.transpose(0, 1), [])


@pytest.mark.parametrize(
    "layer", [nn.LSTM(8, 16), rg.GRU(8, 16, batch_first=True), nn.GRUCell(8, 16)]
)
def test_seconds_are_measured_beside_torchs_own(layer):
    x, before = torch.randn(40, 4, 8), torch.get_rng_state()
    found = rg.fit(layer, x, memory="50%")
    assert 0 < found.seconds < 60
    assert 0 < found.ordinary_seconds < 60
    assert f"{found.seconds / found.ordinary_seconds:.2f} times the ordinary one's" in str(found)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in layer.parameters())
