"""``rg.unroll`` runs every kind of cell as the plain loop does, within every budget."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.cells import CASES, linear, normal, usual
from oracles.loops import assert_bitwise, assert_near, gradients, least, leaves_of, loop

DOUBLE = torch.float64


def seed(case):
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    case.reset()


def budgets(case):
    """The least, 5 % or what is needed in its place, and more than enough."""

    def call(memory):
        seed(case)  # what a cell takes may depend on the coin that it throws
        return rg.unroll(case.cell, case.x, case.state, memory=memory)

    smallest = least(call)
    try:
        call("5%")
    except rg.BudgetError:
        return [smallest, 2 * smallest, "1GiB"]
    return [smallest, "5%", "1GiB"]


@pytest.mark.parametrize("length", [1, 2, 63])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(1, every=30)
def test_every_kind_of_cell_within_every_budget(name, length):
    torch.manual_seed(length)
    case = CASES[name](length)
    arguments = [t for t in leaves_of((case.x, case.state)) if t.requires_grad]
    seed(case)
    outputs, after = loop(case.cell, case.x, case.state)
    expected = gradients(outputs, after, [*arguments, *case.parameters])
    for memory in budgets(case):
        seed(case)
        ours, last = rg.unroll(case.cell, case.x, case.state, memory=memory)
        assert_bitwise(leaves_of((ours, last)), leaves_of((outputs, after)))
        found = gradients(ours, last, [*arguments, *case.parameters])
        if name != "its own inputs captured":  # whose gradients are added in another order
            assert_bitwise(found[: len(arguments)], expected[: len(arguments)])
        assert_near(found, expected)


def test_a_cell_that_keeps_a_state_of_its_own_is_refused():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.potential, self.seen = linear(), torch.zeros(()), None

        def forward(self, x, h):
            self.potential = 0.9 * self.potential + self.net(x)
            return self.potential, h

    with pytest.raises(rg.CellError, match=r"a state of its own in Leaky\.potential: .*stateful="):
        rg.unroll(Leaky(), *usual(5), schedule=rg.plan(5, 2))


def test_a_cell_may_leave_a_tensor_to_be_looked_at():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.last = linear(), None

        def forward(self, x, h):
            self.last = torch.tanh(self.net(x) + h)
            return self.last, self.last

    cell, (x, h) = Watched(), usual(63)
    wanted = [x, h, *cell.parameters()]
    expected = gradients(*loop(cell, x, h), wanted)
    assert_bitwise(gradients(*rg.unroll(cell, x, h, memory="30%"), wanted), expected)


def test_an_output_that_is_the_state_at_step_0_only_is_refused():
    def cell(x, s):
        h = torch.tanh(x + s[0])
        return (h if s[1] == 0 else 2 * h), (h, s[1] + 1)

    x, h = usual(5)
    with pytest.raises(rg.CellError, match=r"its new state at step 0, but another .*clone\(\)"):
        rg.unroll(cell, x, (h, torch.tensor(0)), schedule=rg.plan(5, 2))[0].sum().backward()


def test_a_buffer_that_changes_at_later_steps_only_is_noticed():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x, s):
            if s[1] > 2:
                self.count.add_(1)
            h = torch.tanh(x + s[0]) * (1 + self.count)
            return h, (h, s[1] + 1)

    x, h = usual(5)
    y, _ = rg.unroll(Counting(), x, (h, torch.tensor(0)), schedule=rg.plan(5, 2))
    with pytest.raises(rg.RetrogradeError, match="computed something else when it ran again"):
        y.sum().backward()


def test_a_generator_that_is_drawn_from_at_later_steps_only_is_noticed():
    def cell(x, s):
        h = torch.tanh(x + s[0]) * (random.random() if s[1] > 2 else 1)
        return h, (h, s[1] + 1)

    x, h = usual(5)
    y, _ = rg.unroll(cell, x, (h, torch.tensor(0)), schedule=rg.plan(5, 2))
    with pytest.raises(rg.RetrogradeError, match="computed something else when it ran again"):
        y.sum().backward()


def test_a_captured_tensor_that_is_used_in_a_custom_function_and_elsewhere_is_refused():
    """Nothing can stand in for it there."""
    base = normal(3)
    derived = base * 2.0

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad * b, (grad * a).sum(0)

    def cell(x, h):
        h = torch.tanh(Times.apply(x, derived) + h * base)
        return h, h

    with pytest.raises(rg.CellError, match=r"uses a tensor that requires a gradient"):
        rg.unroll(cell, *usual(5), schedule=rg.plan(5, 2))[0].sum().backward()
