"""Cells are measured on four steps: the budget holds for ranges of any length that follow."""

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.loops import assert_near, gradients, least, leaves_of, loop

DOUBLE = torch.float64


def wide_inputs():
    """Gradients of inputs are most of what a range's backward pass takes."""
    net = nn.Linear(400, 3, dtype=DOUBLE)

    def cell(x, h):
        h = torch.tanh(net(x) + h)
        return h, h

    return cell, (2, 400), (2, 3), list(net.parameters())


def wide_outputs():
    """Outputs are of many numbers that no step holds."""
    net = nn.Linear(3, 3, dtype=DOUBLE)

    def cell(x, h):
        h = torch.tanh(net(x) + h)
        return h.repeat(1, 90) + 0, h

    return cell, (2, 3), (2, 3), list(net.parameters())


def heavy_steps():
    """A step works with far more than it holds."""
    net = nn.Linear(3, 3, dtype=DOUBLE)

    def cell(x, h):
        with torch.no_grad():
            shift = (h.repeat(1, 500) * 2).mean()
        h = torch.tanh(net(x) + h) + shift
        return h, h

    return cell, (2, 3), (2, 3), list(net.parameters())


def heavy_backward_steps():
    """Going back through a step takes more than the gradients of the inputs of many."""
    net = nn.Linear(60, 3, dtype=DOUBLE)

    def cell(x, h):
        h = torch.tanh(net(x) + h) + 0.1 * h.repeat(1, 900).mean(-1, keepdim=True)
        return h, h

    return cell, (2, 60), (2, 3), list(net.parameters())


def several_parts():
    """Inputs and states of several parts, some without a gradient, and an output that is none."""
    net = nn.GRUCell(5, 7, dtype=DOUBLE)

    def cell(x, state):
        h, total = state
        h = net(x, h)
        return (h[:, :2], total > 0), (h, total + h.detach().sum(-1))

    return cell, (4, 5), [(4, 7), (4,)], list(net.parameters())


CELLS = [wide_inputs, wide_outputs, heavy_steps, heavy_backward_steps, several_parts]


@pytest.mark.quick(1, every=3)
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("make", CELLS)
@pytest.mark.parametrize("length", [40, 150])
def test_long_ranges_are_within_the_budget(make, length, wanted):
    torch.manual_seed(0)
    cell, size, sizes, parameters = make()
    x = torch.randn(length, *size, dtype=DOUBLE, requires_grad=wanted)
    sizes = sizes if isinstance(sizes, list) else [sizes]
    state = tuple(torch.randn(s, dtype=DOUBLE) for s in sizes)
    state = state[0] if len(state) == 1 else state
    leaves = [t for t in (x, *parameters) if t.requires_grad]
    outputs, last = loop(cell, x, state)
    expected = gradients(outputs, last, leaves)
    one = torch.ones((), dtype=DOUBLE)
    seeds = [one.expand(t.shape) for t in leaves_of(outputs) if t.requires_grad]

    def call(memory):
        y, after = rg.unroll(cell, x, state, memory=memory)
        roots = [t for t in leaves_of(y) if t.requires_grad]
        found = torch.autograd.grad(roots, leaves, seeds)
        return [t.detach() for t in leaves_of((y, after))], found

    smallest = least(call)
    whole = rg.fit(cell, x, state, memory="100%").ordinary_bytes
    for memory in {smallest, *(smallest + (whole - smallest) * k // 8 for k in range(1, 8))}:
        call(memory)
        assert rg.measure(lambda memory=memory: call(memory)).working_bytes <= memory
    ours, after = rg.unroll(cell, x, state, memory=(smallest + whole) // 2)
    assert_near(gradients(ours, after, leaves), expected)


def test_a_number_in_the_state_may_make_a_later_step_a_heavy_one():
    net = nn.Linear(3, 3, dtype=DOUBLE)

    def cell(x, state):
        h, k = state
        h = torch.tanh(net(x) + h)
        if k == 30:
            h = (h.unsqueeze(-1) * torch.ones(50, dtype=DOUBLE)).tanh().mean(-1)
        return h, (h, k + 1)

    x, h = torch.randn(60, 2, 3, dtype=DOUBLE), torch.zeros(2, 3, dtype=DOUBLE)
    y, _ = rg.unroll(cell, x, (h, 0), memory="70%")
    plain, _ = loop(cell, x, (h, 0))
    weights = list(net.parameters())
    assert_near(torch.autograd.grad(y.sum(), weights), torch.autograd.grad(plain.sum(), weights))


def test_a_tensor_that_a_later_call_uses_by_its_data_is_noticed():
    """What one call has shown is not taken for shown where a captured tensor has not been used."""
    first, second = (torch.randn(3, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    net = nn.Linear(3, 3, dtype=DOUBLE)

    def cell(x, h):
        h = torch.tanh(net(x) + h) * (second if float(x.sum()) > 1e3 else first)
        return h, h

    x, h = torch.randn(20, 2, 3, dtype=DOUBLE), torch.zeros(2, 3, dtype=DOUBLE)
    for _ in range(2):
        rg.unroll(cell, x, h, memory="60%")[0].sum().backward()
    x[7] = 1e3
    with pytest.raises(rg.CellError, match="at step 7 the cell uses a tensor"):
        rg.unroll(cell, x, h, memory="60%")[0].sum().backward()
