"""Slopes, products and Jacobians of the recurrent cells against torch's cells and autograd."""

import pytest
import torch
from torch.autograd.functional import jacobian

from oracles.jacobians import jacobians
from retrograde.kernels.cells import GATES, Weights, pull, slopes

CELLS = {
    "RNN_TANH": (torch.nn.RNNCell, {"nonlinearity": "tanh"}),
    "RNN_RELU": (torch.nn.RNNCell, {"nonlinearity": "relu"}),
    "GRU": (torch.nn.GRUCell, {}),
    "LSTM": (torch.nn.LSTMCell, {}),
}
EVERY_CELL = pytest.mark.parametrize("kind", CELLS)
STEPS, SAMPLES, INPUTS = 5, 2, 4


def cell_of(kind, size, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    type_, options = CELLS[kind]
    cell = type_(INPUTS, size, bias=bias, dtype=dtype, **options).requires_grad_(False)
    for p in cell.parameters():
        p.mul_(1.7)
    return cell


def weights_of(kind, cell):
    biases = (cell.bias_ih, cell.bias_hh) if cell.bias else (None, None)
    return Weights(kind, cell.weight_ih, cell.weight_hh, *biases)


def step(kind, cell, x, state):
    """The state after a step, (B, n), n = H, or 2 H for (h, c)."""
    if kind == "LSTM":
        return torch.cat(cell(x, tuple(state.chunk(2, -1))), -1)
    return cell(x, state)


def trajectory(kind, cell):
    """Inputs of every step, and the state before the first and after every step."""
    x = torch.randn(STEPS, SAMPLES, INPUTS, dtype=cell.weight_ih.dtype)
    n = cell.hidden_size * (2 if kind == "LSTM" else 1)
    states = [torch.randn(SAMPLES, n, dtype=x.dtype) / 2]
    for x_t in x:
        states.append(step(kind, cell, x_t, states[-1]))
    return x, torch.stack(states)


def slopes_of(kind, cell, x, states):
    h, size = states[..., : cell.hidden_size], cell.hidden_size
    c = states[0, :, size:].contiguous() if kind == "LSTM" else None
    return slopes(weights_of(kind, cell), x, h[:-1], h[1:], c)


def each(count):
    return [(t, b) for t in range(count) for b in range(SAMPLES)]


@EVERY_CELL
@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_a_jacobian_is_that_of_torchs_cell(kind, size, bias):
    cell = cell_of(kind, size, bias)
    x, states = trajectory(kind, cell)
    found = jacobians(slopes_of(kind, cell, x, states), cell.weight_hh)
    assert found.shape == (STEPS, SAMPLES, states.shape[-1], states.shape[-1])
    for t, b in each(STEPS):
        expected = jacobian(lambda s, t=t, b=b: step(kind, cell, x[t, b], s), states[t, b])
        torch.testing.assert_close(found[t, b], expected.mT, rtol=1e-12, atol=1e-13)


@EVERY_CELL
@pytest.mark.parametrize("size", [1, 7])
def test_a_jacobian_is_what_pull_makes_of_the_identity(kind, size):
    cell = cell_of(kind, size)
    x, states = trajectory(kind, cell)
    steps = slopes_of(kind, cell, x, states)
    eye = torch.eye(states.shape[-1], dtype=torch.float64).expand(STEPS, SAMPLES, -1, -1)
    rows = pull(steps, cell.weight_hh, eye)
    torch.testing.assert_close(rows.mT, jacobians(steps, cell.weight_hh), rtol=1e-12, atol=1e-14)


@EVERY_CELL
def test_pull_is_autograds_product_with_any_gradient(kind):
    cell = cell_of(kind, 7)
    x, states = trajectory(kind, cell)
    rows = torch.randn(SAMPLES, 3, states.shape[-1], dtype=torch.float64)
    for t in range(STEPS):
        found = pull(slopes_of(kind, cell, x, states).at(t), cell.weight_hh, rows)
        before = states[t].clone().requires_grad_()
        after = step(kind, cell, x[t], before)
        for r in range(3):
            (expected,) = torch.autograd.grad(after, before, rows[:, r], retain_graph=True)
            torch.testing.assert_close(found[:, r], expected, rtol=1e-12, atol=1e-13)


@EVERY_CELL
def test_slopes_times_a_gradient_are_the_gates_gradients(kind):
    """Each bias is added to its gate, so its gradient is the gate's: s of the hidden weights' side
    is that of bias_hh, and with the GRU's inner slope in the third place, that of bias_ih."""
    size = 3
    cell = cell_of(kind, size)
    x, states = trajectory(kind, cell)
    steps = slopes_of(kind, cell, x, states)
    assert steps.gates.shape == (STEPS, SAMPLES, GATES[kind], size)
    g = torch.randn(states.shape[-1], dtype=torch.float64)
    for t, b in each(STEPS):
        rows = [g[:size]] * GATES[kind]
        if kind == "LSTM":
            d = g[size:] + g[:size] * steps.inner[t, b]
            rows = [d, d, d, g[:size]]
        hidden = torch.stack(rows) * steps.gates[t, b]
        inputs = hidden.clone()
        if kind == "GRU":
            inputs[2] = g * steps.inner[t, b]
        biases = [bias.clone().requires_grad_() for bias in (cell.bias_ih, cell.bias_hh)]
        given = {"bias_ih": biases[0], "bias_hh": biases[1]}
        hx = states[t, b]
        hx = tuple(hx.chunk(2)) if kind == "LSTM" else hx
        after = torch.func.functional_call(cell, given, (x[t, b], hx))
        after = torch.cat(after) if kind == "LSTM" else after
        expected = torch.autograd.grad(after, biases, g)
        for found, want in zip([inputs, hidden], expected, strict=True):
            torch.testing.assert_close(found.flatten(), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", [1, 7])
def test_an_lstms_jacobian_is_the_product_of_two_sparse_factors(size):
    """[[I, E], [0, I]] · [[D W_o, 0], [A, F]], read off the gates here (W20; see the module)."""
    cell = cell_of("LSTM", size)
    x, states = trajectory("LSTM", cell)
    found = jacobians(slopes_of("LSTM", cell, x, states), cell.weight_hh)
    u_i, u_f, u_g, u_o = cell.weight_hh.chunk(4)
    eye, zero = torch.eye(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for t, b in each(STEPS):
        h, c = states[t, b].chunk(2)
        gates = cell.weight_ih @ x[t, b] + cell.bias_ih + cell.weight_hh @ h + cell.bias_hh
        i, f, g, o = gates.chunk(4)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        tanh_c = states[t + 1, b, size:].tanh()
        a = (g * i * (1 - i)).diag() @ u_i + (c * f * (1 - f)).diag() @ u_f
        a += (i * (1 - g**2)).diag() @ u_g
        d_wo, e = (tanh_c * o * (1 - o)).diag() @ u_o, (o * (1 - tanh_c**2)).diag()
        first = torch.cat([torch.cat([eye, e], 1), torch.cat([zero, eye], 1)])
        second = torch.cat([torch.cat([d_wo, zero], 1), torch.cat([a, f.diag()], 1)])
        torch.testing.assert_close(found[t, b].mT, first @ second, rtol=1e-12, atol=1e-13)


def test_a_relu_that_is_exactly_zero_passes_nothing_on():
    cell = cell_of("RNN_RELU", 3)
    x, states = torch.zeros(1, 1, INPUTS, dtype=torch.float64), torch.zeros(2, 1, 3).double()
    for p in cell.parameters():
        p.zero_()
    assert not slopes_of("RNN_RELU", cell, x, states).gates.any()
    assert not jacobian(lambda s: cell(x[0, 0], s), states[0, 0]).any()


@pytest.mark.parametrize("bias", [-80.0, -90.0, -120.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_output_gate_shut_or_open_to_the_last_bit_gives_finite_slopes(bias, dtype):
    """tanh c is read off h = o tanh c, where o may be denormal, or 0."""
    cell = cell_of("LSTM", 7, dtype=dtype)
    cell.bias_hh[-7:] = bias
    x, states = trajectory("LSTM", cell)
    found = jacobians(slopes_of("LSTM", cell, x, states), cell.weight_hh)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    for t, b in each(STEPS):
        expected = jacobian(lambda s, t=t, b=b: step("LSTM", cell, x[t, b], s), states[t, b])
        torch.testing.assert_close(found[t, b], expected.mT, rtol=0, atol=tolerance)


def test_weights_name_count_and_cast_what_there_is():
    weights = weights_of("LSTM", cell_of("LSTM", 7, bias=False))
    assert (weights.size, weights.state_size) == (7, 14)
    assert list(weights.tensors()) == ["inputs", "hidden"]
    half = weights.cast(torch.bfloat16)
    assert {t.dtype for t in half.tensors().values()} == {torch.bfloat16}
    assert half.kind == "LSTM"
    assert weights_of("GRU", cell_of("GRU", 7)).state_size == 7
