"""Cells of other libraries give the plain loop's bits within a budget; absent ones are skipped."""

import pytest
import torch

import retrograde as rg
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
