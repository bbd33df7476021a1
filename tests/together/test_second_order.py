"""Second derivatives are torch's without a budget, and refused within one."""

import pytest
import torch
from torch import nn

import retrograde as rg

REFUSED = r"cannot itself be differentiated: expected create_graph=False.*memory=None"


def first(call, x):
    return torch.autograd.grad(call(x).square().sum(), x, create_graph=True)[0]


def step(cell):
    def run(x, h):
        h = cell(x, h)
        return h, h

    return run


ASKED = [{"memory": "70%"}, {"memory": "70%", "compile": True}, {"schedule": rg.plan(40, 3)}]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_of_any_cell_they_are_refused_within_a_budget(asked):
    cell, h = nn.GRUCell(3, 5), torch.zeros(3, 5)
    x = torch.randn(40, 3, 3, requires_grad=True)
    with pytest.raises(rg.RetrogradeError, match=REFUSED):
        first(lambda x: rg.unroll(step(cell), x, h, **asked)[0], x)


@pytest.mark.parametrize("memory", [None, "100%"])
def test_of_any_cell_they_are_torchs_without_one(memory):
    cell, h = nn.GRUCell(3, 5), torch.zeros(3, 5)
    x, found = torch.randn(40, 3, 3, requires_grad=True), []
    for asked in ({}, {"memory": memory}):
        g = first(lambda x, asked=asked: rg.unroll(step(cell), x, h, **asked)[0], x)
        found.append(torch.autograd.grad(g.square().sum(), [x, *cell.parameters()]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("asked", [{"memory": "70%"}, {"backward": "scan"}], ids=str)
def test_of_recurrent_modules_they_are_refused_within_a_budget(kind, asked):
    theirs, ours = (getattr(rg, kind)(3, 5, **options) for options in ({}, asked))
    x = torch.randn(40, 3, 3, requires_grad=True)
    with pytest.raises(rg.RetrogradeError, match=REFUSED):
        first(lambda x: ours(x)[0], x)
    first(lambda x: theirs(x)[0], x).sum().backward()
    assert theirs.weight_hh_l0.grad is not None
