"""Zeros and ones that layers hand on, as spiking neurons do, are held as bits."""

import warnings

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.kernels.cpu.masks import packed_spikes, unpack_into

WIDTH, ROWS = 128, 512


class Fire(torch.autograd.Function):
    """A spike where a neuron is above its threshold, with a smooth gradient."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (v,) = ctx.saved_tensors
        return gradient / (1 + v.abs()) ** 2


class Spiking(nn.Module):
    """Neurons that fire, each with a height that is one at first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("height", torch.ones(()))

    def forward(self, x):
        return Fire.apply(self.linear(x)) * self.height


def nets(layers=8):
    torch.manual_seed(0)
    ours = nn.Sequential(*(Spiking() for _ in range(layers)))
    plain = nn.Sequential(*(Spiking() for _ in range(layers)))
    plain.load_state_dict(ours.state_dict())
    return ours, plain, torch.randn(ROWS, WIDTH)


def step(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def working(model, x):
    step(model, x)
    return rg.measure(lambda: step(model, x)).working_bytes


def test_spikes_take_a_bit_each_while_they_wait():
    ours, plain, x = nets()
    with pytest.raises(rg.BudgetError) as refused:
        rg.budget(ours, 1, x)
    least = refused.value.minimum_bytes
    assert least < 6 * x.nbytes  # where eight inputs would wait, if they were whole or in one group
    division = rg.budget(ours, 6 * x.nbytes, x)
    assert all(map(torch.equal, step(ours, x), step(plain, x)))
    assert working(ours, x) <= division.total_bytes + x.nbytes  # of the output


class Neurons(nn.Module):
    """Neurons over steps: each keeps a part of its potential, and loses what it fires."""

    runs = 0

    def forward(self, inputs):
        Neurons.runs += 1
        potential, spikes = 0, []
        for x in inputs.chunk(8):
            potential = 0.5 * potential + x
            spikes.append(Fire.apply(potential))
            potential = (potential - spikes[-1]).exp().log()
        return torch.cat(spikes)


def test_what_a_layer_makes_of_bits_goes_back_beside_bits():
    """The spikes that a linear layer is given are bits again while the neurons after it go back."""
    torch.manual_seed(0)
    ours, plain = (
        nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), Neurons())))
        for _ in range(2)
    )
    plain.load_state_dict(ours.state_dict())
    x = (torch.rand(ROWS, WIDTH) > 0.5).float()
    with pytest.raises(rg.BudgetError) as refused:
        rg.budget(ours, 1, x)
    budget = refused.value.minimum_bytes + x.nbytes // 4
    division = rg.budget(ours, budget, x)
    step(ours, x)
    Neurons.runs = 0
    ours_are = step(ours, x)
    assert Neurons.runs <= 12  # each once more
    assert all(map(torch.equal, ours_are, step(plain, x)))
    assert working(ours, x) <= division.total_bytes + x.nbytes


@pytest.mark.parametrize("kind", [rg.budget, rg.Sequential])
def test_other_numbers_than_the_samples_are_told_once_and_then_planned(kind):
    ours, plain, x = nets()
    memory = 9 * x.nbytes
    if kind is rg.Sequential:
        ours = rg.Sequential(*ours, memory=memory)
        step(ours, x)
    else:
        rg.budget(ours, memory, x)
    for layer in (*ours, *plain):
        layer.height.fill_(0.5)
    with pytest.warns(UserWarning, match="takes more for these data"):
        assert all(map(torch.equal, step(ours, x), step(plain, x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(ours, x)
        assert working(ours, x) <= memory + x.nbytes
    assert all(map(torch.equal, step(ours, x), step(plain, x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 8192, 20001])
def test_bits_are_the_numbers(dtype, size):
    t = (torch.rand(size) > 0.7).to(dtype)
    assert torch.equal(unpack_into(packed_spikes(t), torch.empty_like(t)), t)
    for other in (-0.0, -1.0, 0.5, 2.0, torch.nan):
        there = t.clone()
        there[-1] = other
        assert packed_spikes(there) is None
