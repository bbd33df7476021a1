"""A training step leaves behind what ordinary training leaves: random states, buffers, statistics.

Bit for bit, after one step and after several, within every budget (rules 2 and 3).
"""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import retrograde as rg
from oracles.loops import WAYS, assert_bitwise, both, least, loop

DOUBLE = torch.float64


def seed(n):
    torch.manual_seed(n)
    random.seed(n)
    np.random.seed(n)


def drawn():
    """Where every global generator stands."""
    name, key, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (name, key.tolist(), *rest)


class Largest(nn.Module):
    """Written to at every step, though the first one, being small, changes nothing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("value", torch.ones(4, dtype=DOUBLE))

    def forward(self, h):
        self.value.copy_(torch.maximum(self.value, h.detach().amax(0)))


class Noisy(nn.Module):
    """Dropout, noise from three generators, and every kind of buffer that a step may change."""

    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(3, 4, bias=False, dtype=DOUBLE)
        # Used twice in a step, its weights would be summed in another order: they do not train.
        across = nn.Linear(4, 4, dtype=DOUBLE).requires_grad_(False)
        self.across = parametrizations.spectral_norm(across)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(4, dtype=DOUBLE),
                nn.BatchNorm1d(4, momentum=None, affine=False, dtype=DOUBLE),
            ]
        )
        self.drop = nn.Dropout(0.3)
        self.register_buffer("steps", torch.tensor(0))
        self.largest = Largest()
        self.register_buffer("unchanged", torch.ones(4, dtype=DOUBLE))

    def forward(self, x, h):
        first, second = self.norms
        h = torch.tanh(first(self.inward(x)) + second(self.across(self.drop(h))))
        h = h * (random.random() + np.random.rand()) + 0.1 * torch.randn_like(h) * self.unchanged
        if self.training:
            self.steps += 1
            self.largest(h)
        return h, h


def batches(count, length):
    generator = torch.Generator().manual_seed(2)
    found = torch.randn(count, length, 5, 3, generator=generator, dtype=DOUBLE)
    found[:, 0] = 0  # batch normalization's mean of the first step stays as it is
    return found


def train(cell, run, data):
    """Steps of SGD, and what is left after each of them."""
    trained = [p for p in cell.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    left = []
    for x in data:
        x = x.clone().requires_grad_()
        h = torch.zeros(5, 4, dtype=DOUBLE, requires_grad=True)
        y, last = run(cell, x, h)
        torch.rand(3), random.random()  # what comes between is not drawn again
        optimizer.zero_grad()
        (y.square().sum() + last.sum()).backward()
        optimizer.step()
        left.append(([b.clone() for b in cell.buffers()], drawn(), [x.grad, h.grad]))
    return left


def assert_same_traces(ours, theirs):
    for (buffers, random_, grads), (their_buffers, their_random, their_grads) in zip(
        ours, theirs, strict=True
    ):
        assert_bitwise(buffers, their_buffers)
        assert random_ == their_random
        assert_bitwise(grads, their_grads)


@pytest.mark.parametrize("length", [1, 2, 21])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_what_a_cell_leaves_behind(length, training):
    seed(0)
    cell, data = Noisy().train(training), batches(4, length)
    x, h = data[0].clone().requires_grad_(), data.new_zeros(5, 4).requires_grad_()
    smallest = least(lambda memory: rg.unroll(copy.deepcopy(cell), x, h, memory=memory))
    theirs = copy.deepcopy(cell)
    seed(1)
    expected = train(theirs, loop, data)
    for memory in (smallest, 2 * smallest, 5 * smallest, "1GiB", None):
        ours = copy.deepcopy(cell)
        seed(1)
        found = train(ours, lambda *a, m=memory: rg.unroll(*a, memory=m), data)
        assert_same_traces(found, expected)
        assert_bitwise(list(ours.parameters()), list(theirs.parameters()))


def test_masks_are_the_same_within_every_budget():
    drop = nn.Dropout(0.5)

    def cell(x, h):
        mask = drop(torch.ones_like(h))
        h = torch.tanh(x + h * mask)
        return (h, mask), h

    x = torch.randn(63, 5, 4, dtype=DOUBLE).requires_grad_()
    h = torch.zeros(5, 4, dtype=DOUBLE)
    found = []
    for schedule in (rg.plan(63, m, policy=p) for p in ("hsm", "ism") for m in (1, 2, 7, 63)):
        torch.manual_seed(3)
        (y, mask), _ = rg.unroll(cell, x, h, schedule=schedule)
        found.append([y, mask, *torch.autograd.grad(y.square().sum(), x)])
    for other in found[1:]:
        assert_bitwise(other, found[0])


def test_a_second_backward_pass_leaves_no_trace_either():
    seed(0)
    cell, x = Noisy(), batches(1, 21)[0].requires_grad_()
    y, _ = rg.unroll(cell, x, x.new_zeros(5, 4), schedule=rg.plan(21, 3))
    before, buffers = drawn(), [b.clone() for b in cell.buffers()]
    found = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(3)]
    assert_bitwise(found[1], found[0])
    assert_bitwise(found[2], found[0])
    assert drawn() == before
    assert_bitwise(list(cell.buffers()), buffers)


def test_two_recurrences_in_one_step_draw_one_after_the_other():
    """The one's recomputation comes after the other's forward pass, and changes nothing for it."""
    found = []
    for run in (loop, lambda *a: rg.unroll(*a, schedule=rg.plan(21, 3))):
        seed(0)
        cell, x = Noisy(), batches(1, 21)[0].requires_grad_()
        seed(1)
        y, h = run(cell, x, x.new_zeros(5, 4))
        z, _ = run(cell, y[..., :3], h)
        trained = [p for p in cell.parameters() if p.requires_grad]
        grads = torch.autograd.grad(z.square().sum() + y.sum(), [x, *trained])
        found.append(([*cell.buffers()], drawn(), grads))
    assert_bitwise(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    for a, b in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_draws_and_counts_as_the_loop_does(mode):
    found = []
    for run in (loop, lambda *a: rg.unroll(*a, memory="10%")):
        seed(0)
        cell, x = Noisy(), batches(1, 21)[0]
        seed(1)
        with mode():
            y, _ = run(cell, x, x.new_zeros(5, 4))
        found.append(([y.clone(), *cell.buffers()], drawn()))
    assert_bitwise(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [1, 3])
def test_networks_leave_the_generators_where_torchs_leave_them(way, steps):
    stands = []
    for net in both(way):
        drop = nn.Dropout(0.5)
        seed(5)
        for _ in range(steps):
            x = torch.randn(65, 3, 5, dtype=DOUBLE)
            drop(net(x)[0]).square().sum().backward()
        stands.append(drawn())
    assert stands[0] == stands[1]
