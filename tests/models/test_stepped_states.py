"""Models that call their layers step by step, where layers leave states that the next step finds.

So do spiking networks, streaming convolutions, and layers that keep a table after their first call.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

import retrograde as rg

WIDTH, BATCH, STEPS = 64, 32, 12


class Leaky(nn.Module):
    """A neuron whose potential is a buffer that each call replaces, as snnTorch's is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("potential", torch.zeros(0), persistent=False)
        self.register_buffer("fired", None, persistent=False)

    def begin(self):
        self.potential = torch.zeros_like(self.potential)

    def forward(self, x):
        before = self.potential if self.potential.shape == x.shape else torch.zeros_like(x)
        self.fired = (before.detach() > 0.5).to(x.dtype)
        self.potential = 0.9 * before + x - 0.5 * self.fired
        return torch.sigmoid(4 * self.potential)


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        wide = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        layers = ((nn.Sequential(*copy.deepcopy(wide)), Leaky()) for _ in range(3))
        self.layers = nn.ModuleList(layer for both in layers for layer in both)

    def forward(self, x):
        for layer in self.layers[1::2]:
            layer.begin()
        outputs = []
        for step in x:
            for layer in self.layers:
                step = layer(step)
            outputs.append(step)
        return torch.stack(outputs)


class Gridded(nn.Module):
    """A layer that makes a table in its first call."""

    def __init__(self):
        super().__init__()
        self.inner, self.grid = nn.Linear(WIDTH + 8, WIDTH), None

    def forward(self, x):
        if self.grid is None:
            self.grid = torch.linspace(0, 1, 8).expand(*x.shape[:-1], 8).contiguous()
        return torch.tanh(self.inner(torch.cat([x, self.grid], -1)))


def steps_of(model, x, count=4, casts=False):
    """All that some training steps compute and leave."""
    left = []
    for seed in range(count):
        torch.manual_seed(seed)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = (model(x) * torch.randn(WIDTH)).square().mean()
        loss.backward()
        left += [p.grad.clone() for p in model.parameters()]
        left += [b.clone() for b in model.buffers() if b is not None]
    return left


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.quick(2)
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("share", ["least", "80%"])
def test_steps_through_layers_with_states(share, casts):
    """What is told is what they take, the first step and later ones are known from the sample, and
    results that are stacked count once."""
    torch.manual_seed(0)
    model, x = Spiking(), torch.randn(STEPS, BATCH, WIDTH)
    plain = copy.deepcopy(model)
    expected = steps_of(plain, x, casts=casts)
    true = rg.measure(lambda: steps_of(plain, x, 1, casts)).working_bytes
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        try:
            division = rg.budget(model, 1 if share == "least" else share, x)
        except rg.BudgetError as refusal:
            division = rg.budget(model, refusal.minimum_bytes, x)
    beside = 3 * x.nbytes  # what is stacked, its gradient, and what the loss keeps
    of_weights = sum(p.nbytes for p in model.parameters())
    if not casts:  # those of weights count for each call
        assert true - beside <= division.ordinary_bytes <= true + of_weights
    assert division.minimum_bytes < 0.9 * division.ordinary_bytes
    row = model.layers[1].__dict__["forward"].places[0][0]
    known = {**row.plans.kinds._found}
    for kind in (entry.result for entry in known.values()):
        for unit, size in zip(kind.units, kind.raw, strict=True):
            held = [way.held_bytes for way in size.ways if way.dropped]
            assert not unit.surroundings.moving or min(held) >= size.noted_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(steps_of(model, x, casts=casts), expected)
    assert row.plans.kinds._found.keys() == known.keys()
    allowed = division.total_bytes + division.elsewhere_bytes + beside
    assert rg.measure(lambda: steps_of(model, x, 1, casts)).working_bytes <= allowed


def test_the_least_budget_of_layers_that_keep_a_table_is_one_for_every_pass():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Gridded() for _ in range(5))), torch.randn(BATCH, STEPS, WIDTH)
    expected = steps_of(copy.deepcopy(model), x)
    with pytest.raises(rg.BudgetError) as refused:
        rg.budget(model, 1, x)
    rg.budget(model, refused.value.minimum_bytes, x)
    assert same(steps_of(model, x), expected)


class Emptying(nn.Linear):
    """A layer that releases what it is given, as reversible ones do."""

    def forward(self, x):
        y = super().forward(x)
        x.untyped_storage().resize_(0)
        return y


def test_a_model_that_releases_the_memory_of_its_sample_is_told_so():
    model = nn.Sequential(Emptying(4, 4, bias=False), nn.Linear(4, 4))
    with torch.no_grad(), pytest.raises(rg.NotExactError, match="released the memory of its sampl"):
        rg.budget(model, "50%", torch.randn(3, 4))
