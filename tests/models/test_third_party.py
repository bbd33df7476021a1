"""Cells and models of other libraries give what they give without a budget; absent ones are
skipped."""

import copy

import pytest
import torch

import retrograde as rg
from oracles import library_models
from oracles.loops import assert_bitwise, assert_near
from oracles.third_party import CASES, INPUTS, build


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_cell_of_another_library(name):
    case = build(name, 4)
    if case is None:
        pytest.skip(f"{name}: its library is not installed")
    x = torch.randn(24, 4, INPUTS, requires_grad=True)
    parameters = [p for p in case.module.parameters() if p.requires_grad]

    def results(run, **asked):
        torch.manual_seed(1)
        y = run(x, **asked)
        return [
            y.detach(),
            *torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True),
        ]

    expected = results(case.plain)
    for memory in ("100%", "60%", "30%"):
        try:
            found = results(case.ours, memory=memory)
        except rg.BudgetError as refusal:
            found = results(case.ours, memory=refusal.minimum_bytes)
        assert_bitwise(found[:2], expected[:2])
        assert_near(found, expected, tolerance=1e-4)


@pytest.mark.quick(0)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", library_models.MODELS)
def test_a_model_of_another_library(name):
    case = library_models.build(name)
    if case is None:
        pytest.skip(f"{name}: its library is not installed")

    def results(model):
        model.zero_grad()
        torch.manual_seed(1)
        loss = case.loss(model)
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [loss.detach(), *found, *(b.double() for b in model.buffers())]

    with pytest.raises(rg.BudgetError) as caught:
        rg.budget(copy.deepcopy(case.model), 1, case.sample)
    least = caught.value.minimum_bytes
    for memory in (least, 3 * least // 2):
        ours, theirs = copy.deepcopy(case.model), copy.deepcopy(case.model)
        rg.budget(ours, memory, case.sample)
        for _ in range(2):
            found, expected = results(ours), results(theirs)
            assert_bitwise(found[:1], expected[:1])
            assert_near(found, expected, tolerance=1e-5)
