"""Held layers near their least budgets, where they run in ranges of steps: exact, and within."""

import random

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.networks import relative_error
from oracles.strangers import watched
from retrograde.recurrent.forward import LayerForward
from retrograde.recurrent.plan import HeldPlan

pytestmark = pytest.mark.usefixtures("ours_however_short")


def drawn(dice):
    """A module of ours, torch's own with the same weights, and an input."""
    kind, layers = dice.choice(["LSTM", "LSTM", "GRU", "RNN"]), dice.choice([1, 1, 2, 3])
    batch, size = dice.choice([1, 2, 3, 8, 16]), dice.choice([1, 7, 16, 32, 63, 128])
    width, steps = dice.choice([1, 8, 40]), dice.choice([30, 60])
    dtype = dice.choice([torch.float64, torch.float32])
    ours = getattr(rg, kind)(width, size, layers, memory=1, dtype=dtype)
    theirs = getattr(nn, kind)(width, size, layers, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(steps, batch, width, dtype=dtype)
    return ours, theirs, x.requires_grad_(dice.random() < 0.6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(12))
def test_ranges_keep_to_the_budget_and_are_exact(seed):
    torch.manual_seed(seed)
    ours, theirs, x = drawn(random.Random(seed))
    with pytest.raises(rg.BudgetError) as caught:
        ours.fit(x)
    least = caught.value.minimum_bytes
    y = theirs(x)[0]
    dy = torch.randn_like(y)
    needs = [x] * x.requires_grad
    expected = torch.autograd.grad(y, [*theirs.parameters(), *needs], dy)
    for share in (1.0, 1.05, 1.4, 2.0, 4.0):
        ours.memory = int(least * share)
        ours(x)

        def call():
            found = ours(x)[0]
            return found.detach(), torch.autograd.grad(found, [*ours.parameters(), *needs], dy)

        (_, gradients), taken = watched(call)
        assert taken.working_bytes() <= ours.fit(x).peak_bytes <= ours.memory
        bound = 1e-10 if x.dtype == torch.float64 else 2e-3
        for a, b in zip(gradients, expected, strict=True):
            assert relative_error(a, b) <= bound


def test_what_runs_again_follows_the_outputs(monkeypatch):
    lstm, x = rg.LSTM(8, 16, memory=1), torch.randn(200, 4, 8)
    with pytest.raises(rg.BudgetError) as caught:
        lstm.fit(x)
    lstm.memory = 2 * caught.value.minimum_bytes
    assert lstm.fit(x).forward_steps > 400  # more than once, and again for the gates
    steps, run = [], LayerForward.__call__

    def counted(self, x, *others):
        steps.append(len(x))
        run(self, x, *others)

    monkeypatch.setattr(LayerForward, "__call__", counted)
    y = lstm(x)[0]
    assert sum(steps) == 200
    y.sum().backward()
    assert sum(steps) == 200  # no step was run by itself again


@pytest.mark.parametrize(
    ("kind", "options", "near", "far"),
    [
        ("RNN", {}, True, True),
        ("GRU", {}, True, True),
        ("LSTM", {}, False, True),
        ("GRU", {"num_layers": 2}, False, True),
        ("RNN", {"backward": "scan"}, False, True),
    ],
)
@pytest.mark.quick(5)
def test_how_often_held_layers_run_a_step(kind, options, near, far):
    """Whether twice is enough at the least budget, and at six times as much."""
    net, x = getattr(rg, kind)(8, 8, memory=1, **options), torch.randn(300, 4, 8)
    with pytest.raises(rg.BudgetError) as caught:
        net.fit(x)
    for share, twice in ((1, near), (6, far)):
        net.memory = share * caught.value.minimum_bytes
        assert (net.fit(x).forward_steps <= 2 * 300 * net.num_layers) == twice


def plan_of(module, x):
    """The plan of held layers that a module's first call finds."""
    module(x)
    known = [one.result for one in module._fits._found.values()]
    (plan,) = (one.parts[0][0] for one in known if getattr(one, "parts", ()))
    assert isinstance(plan, HeldPlan)
    return plan


def test_pieces_are_not_cut_short_to_lay_out_weights():
    x = torch.randn(200, 4, 64)
    plan = plan_of(rg.GRU(64, 512, memory="20%"), x)
    assert plan.backward_by == ("in place",)
    assert plan.block >= 32
    assert plan_of(rg.GRU(64, 512, memory="50%"), x).backward_by == ()


def test_loops_go_through_all_steps_at_once_where_all_gates_are_kept():
    x = torch.randn(100, 64, 32)
    plan = plan_of(rg.LSTM(32, 64, memory="50%"), x)
    assert plan == HeldPlan(100 * 64, kept=100)
