"""States that are views, or one tensor twice, under ``rg.unroll``: the loop's bits, in budget."""

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.loops import assert_bitwise, assert_near, gradients, least, leaves_of, loop

DOUBLE = torch.float64
VIEWS = {
    "last of a stack": lambda path: torch.stack(path)[-1],
    "column of a stack": lambda path: torch.stack(path, -1)[..., -1],
    "chunk": lambda path: torch.cat([path[-1], path[0]], -1).chunk(2, -1)[0],
    "padded": lambda path: nn.functional.pad(path[-1], (3, 9))[:, 3:-9],
    "transposed": lambda path: path[-1].T.contiguous().T,
    "expanded": lambda path: path[-1].mean(-1, keepdim=True).expand_as(path[-1]),
}


def budgets(call):
    smallest = least(call)
    return [smallest, smallest + smallest // 3, 3 * smallest]


def check(cell, x, state, parameters, seed=5):
    """The loop's bits, and no more than the budget, from the least on."""
    wanted = [t for t in leaves_of((x, state)) if t.requires_grad]
    torch.manual_seed(seed)
    outputs, after = loop(cell, x, state)
    expected = gradients(outputs, after, [*wanted, *parameters])

    def call(memory):
        torch.manual_seed(seed)
        ours, last = rg.unroll(cell, x, state, memory=memory)
        found = gradients(ours, last, [*wanted, *parameters])
        return [t.detach() for t in leaves_of((ours, last))], found

    for memory in budgets(call):
        results, found = call(memory)
        assert_bitwise(results, leaves_of((outputs, after)))
        assert_bitwise(found[: len(wanted)], expected[: len(wanted)])
        assert_near(found, expected)


def kept(cell, x, state, chosen, parameters=()):
    """Whether a loss of some results keeps its budgets, by bytes."""
    wanted = [t for t in (*leaves_of((x, state)), *parameters) if t.requires_grad]
    results = chosen(*loop(cell, x, state))
    seeds = [torch.ones((), dtype=t.dtype).expand(t.shape) for t in results]

    def call(memory):
        outputs, last = rg.unroll(cell, x, state, memory=memory)
        roots = chosen(outputs, last)
        found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        return [t.detach() for t in leaves_of((outputs, last))], found

    for memory in budgets(call):
        call(memory)
        held = rg.measure(lambda memory=memory: call(memory)).working_bytes
        assert held <= memory, (held, memory)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("length", [1, 2, 11])
def test_a_state_that_is_a_view_gives_the_same_bits(view, length):
    torch.manual_seed(3)
    net = nn.GRUCell(7, 63, dtype=DOUBLE)

    def cell(a, h):
        path = [net(a, h)]
        path += [net(a, path[-1]), torch.tanh(path[-1])]
        h = VIEWS[view](path)
        return h[:, :1] + a.mean(), h

    x = torch.randn(length, 9, 7, dtype=DOUBLE, requires_grad=True)
    h = torch.randn(9, 63, dtype=DOUBLE, requires_grad=True)
    check(cell, x, h, list(net.parameters()))
    kept(cell, x, h, lambda outputs, last: [outputs, last], list(net.parameters()))


def again(net):
    """Both parts of the new state, and both outputs, are one tensor."""

    def cell(a, state):
        h = net(a, state[0] * state[1])
        return (h, h), (h, h)

    return cell


def held(net):
    """The second part stays what it was in the beginning: the first one's value."""

    def cell(a, state):
        h = net(a, state[0]) + 0.3 * state[1]
        return h, (h, state[1])

    return cell


@pytest.mark.parametrize("make", [again, held])
@pytest.mark.parametrize("length", [1, 2, 11])
def test_parts_of_a_state_that_are_one_tensor_give_the_same_bits(make, length):
    torch.manual_seed(3)
    net = nn.GRUCell(7, 5, dtype=DOUBLE)
    x = torch.randn(length, 3, 7, dtype=DOUBLE, requires_grad=True)
    h = torch.randn(3, 5, dtype=DOUBLE, requires_grad=True)
    check(make(net), x, (h, h), list(net.parameters()))


@pytest.mark.parametrize("length", [1, 7])
def test_one_tensor_and_its_detached_self_are_two(length):
    torch.manual_seed(3)
    net = nn.GRUCell(7, 5, dtype=DOUBLE)

    def cell(a, state):
        h = net(a, state[0]) * state[1]
        return h, (h, h.detach())

    x = torch.randn(length, 3, 7, dtype=DOUBLE, requires_grad=True)
    h = torch.randn(3, 5, dtype=DOUBLE, requires_grad=True)
    check(cell, x, (h, h.detach()), list(net.parameters()))


def test_a_second_backward_pass_takes_one_tensor_for_one():
    torch.manual_seed(3)
    net = nn.GRUCell(7, 5, dtype=DOUBLE)
    x = torch.randn(11, 3, 7, dtype=DOUBLE, requires_grad=True)
    root = torch.randn(3, 5, dtype=DOUBLE, requires_grad=True)
    h = root * 2  # no leaf: what autograd saved of it is another object each time
    outputs, last = rg.unroll(held(net), x, (h, h), schedule=rg.plan(11, 3))
    first, second = (gradients(outputs, last, [x, root]) for _ in range(2))
    assert_bitwise(first, second)
    outputs, last = loop(held(net), x, (h, h))
    assert_bitwise(first, gradients(outputs, last, [x, root]))


def test_random_states_that_are_kept_for_the_whole_call_are_in_the_budget():
    net = nn.Linear(3, 5, dtype=DOUBLE)

    def cell(a, h):
        h = torch.tanh(net(nn.functional.dropout(a, 0.3)) + h)
        return h, h

    x, h = torch.randn(9, 2, 3, dtype=DOUBLE), torch.randn(2, 5, dtype=DOUBLE)
    kept(cell, x, h, lambda outputs, last: [outputs], list(net.parameters()))


@pytest.mark.parametrize("length", [1, 5])
def test_the_trial_of_a_step_is_in_the_budget(length):
    """It holds copies of the buffers that the cell may change."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(50, 5, dtype=DOUBLE))

        def forward(self, a, h):
            h = torch.tanh(a + h)
            return h, h

    x = torch.randn(length, 2, 5, dtype=DOUBLE, requires_grad=True)
    h = torch.randn(2, 5, dtype=DOUBLE)
    kept(Cell(), x, h, lambda outputs, last: [outputs])


def test_an_input_that_no_gradient_reaches_takes_no_room():
    def cell(a, state):
        h, trace = state
        h = torch.tanh(a + h).detach()
        return h, (h, 0.9 * trace)

    x = torch.randn(24, 4, 30, dtype=DOUBLE, requires_grad=True)
    h = torch.randn(4, 30, dtype=DOUBLE, requires_grad=True)
    kept(cell, x, (h, h), lambda outputs, last: [last[1]])


@pytest.mark.quick(0)
def test_steps_that_no_gradient_goes_through_are_let_go_of():
    def cell(a, h):
        for _ in range(5):
            h = torch.sigmoid(h) * h + a.mean(-1, keepdim=True).tanh()
        return a.sum(), h

    x = torch.randn(63, 9, 7, dtype=DOUBLE, requires_grad=True)
    h = torch.randn(9, 7, dtype=DOUBLE, requires_grad=True)
    kept(cell, x, h, lambda outputs, last: [outputs])
