"""The examples run, and do what they say."""

import importlib.util
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

import retrograde as rg
from oracles.loops import assert_bitwise, assert_near, gradients, leaves_of, loop

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_memory_cell_trains_within_5_percent(capsys):
    load("memory_cell").main(["--steps", "1"])
    *losses, ordinary, budget, peak = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in losses] == ["step   0"]
    assert ordinary.startswith("ordinary backpropagation takes")
    assert budget.startswith("the budget is")
    assert float(peak.split()[-1].rstrip("%")) <= 5.0


def test_a_memory_cells_gradient_is_that_of_the_loop():
    torch.manual_seed(0)
    example = load("memory_cell")
    cell = example.MemoryCell(4, 3, rows=5, width=4, hidden=7).double()
    x, _ = example.copy_task(12, 2, 3)
    x = x.double().requires_grad_()
    state = pytree.tree_map(lambda t: t.double().requires_grad_(), cell.initial_state(2))
    arguments = [x, *leaves_of(state)]
    wanted = [*arguments, *cell.parameters()]
    expected = gradients(*loop(cell, x, state), wanted)
    found = gradients(*rg.unroll(cell, x, state, memory="20%"), wanted)
    assert_bitwise(found[: len(arguments)], expected[: len(arguments)])
    assert_near(found, expected)
