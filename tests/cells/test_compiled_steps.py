"""Cells whose steps are compiled, in blocks: ``rg.unroll(compile=True)``."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.hooks import CHANGES, Changed
from oracles.loops import assert_near, least, leaves_of, loop

DOUBLE = torch.float64
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class Spiking(nn.Module):
    """A few operations on a state of two parts."""

    def __init__(self, inputs, size):
        super().__init__()
        self.net = nn.Linear(inputs, size, dtype=DOUBLE)

    def forward(self, x, state):
        v, i = state
        i = 0.9 * i + self.net(x)
        z = torch.sigmoid(4 * (0.95 * v + i - 1))
        return z, (v - z, i)


class Nested(nn.Module):
    """Inputs, outputs and state of several tensors each."""

    def __init__(self, inputs, size):
        super().__init__()
        self.net, self.size = nn.Linear(inputs + size, size, dtype=DOUBLE), size

    def forward(self, x, state):
        a = torch.tanh(self.net(torch.cat([x["u"], state["a"]], -1)))
        b = 0.9 * state["b"][0] + a * x["v"]
        return {"y": a * b, "none": None, "z": [b]}, {"a": a, "b": [b]}


class Gated(nn.Module):
    """torch's cell, whose output is its state."""

    def __init__(self, inputs, size):
        super().__init__()
        self.cell = nn.GRUCell(inputs, size, dtype=DOUBLE)

    def forward(self, x, h):
        h = self.cell(x, h)
        return h, h


def case(kind, length, batch=2, size=5):
    """A cell, its inputs and its initial state, all of which are to get a gradient."""
    torch.manual_seed(length)

    def tensor(*shape):
        return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)

    x, s = tensor(length, batch, 3), tensor(batch, size)
    if kind is Spiking:
        return Spiking(3, size), x, (s, tensor(batch, size))
    if kind is Nested:
        return Nested(3, size), {"u": x, "v": tensor(length, batch, size)}, {"a": s, "b": [s]}
    return Gated(3, size), x, s


def results(run, cell, x, state):
    """Outputs, the last state, and all gradients of a loss of both."""
    outputs = leaves_of(run(cell, x, state))
    wanted = [*{id(t): t for t in leaves_of((x, state))}.values(), *cell.parameters()]
    loss = sum(
        (t * torch.linspace(1, 2, t.numel(), dtype=DOUBLE).view_as(t)).sum() for t in outputs
    )
    return [*outputs, *torch.autograd.grad(loss, wanted)]


def compiled(memory):
    return lambda cell, x, state: rg.unroll(cell, x, state, memory=memory, compile=True)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", [Gated, Spiking, Nested])
@pytest.mark.parametrize("length", [9, 1, 7, 8, 67])
def test_results_are_the_loops_at_any_length_and_budget(kind, length):
    cell, x, state = case(kind, length)
    expected = results(loop, cell, x, state)
    smallest = least(lambda memory: results(compiled(memory), cell, x, state))
    for memory in (None, "100%", smallest, 2 * smallest):
        assert_near(results(compiled(memory), cell, x, state), expected)


@pytest.mark.parametrize("memory", ["100%", "50%"])
def test_a_first_state_that_requires_no_gradient(memory):
    cell, x, state = case(Gated, 67)
    found = [compiled(memory), loop]
    for k, run in enumerate(found):
        y, last = run(cell, x.detach(), state.detach())
        found[k] = [y, last, *torch.autograd.grad((y * y).sum(), [*cell.parameters()])]
    assert_near(*found)


@pytest.mark.quick(0, every=1)
@pytest.mark.parametrize("kind", [Gated, Spiking, Nested])
def test_budgets_are_kept_and_the_least_is_named(kind):
    cell, x, state = case(kind, 163)

    def call(memory):
        return results(compiled(memory), cell, x, state)

    smallest = least(call)
    with pytest.raises(rg.BudgetError, match="blocks of 8 steps"):
        call(smallest - 1)
    for memory in (smallest, smallest + 2000, 2 * smallest, 5 * smallest):
        call(memory)
        outputs = leaves_of(compiled(memory)(cell, x, state))
        ours = 2 * sum(t.nbytes for t in outputs)  # the loss's factors and products are the test's
        assert rg.measure(lambda m=memory: call(m)).working_bytes <= memory + ours
        found = rg.fit(cell, x, state, memory=memory, compile=True)
        assert found.peak_bytes <= memory
        assert found.minimum_bytes == smallest
        assert found.schedule.length == 21


@pytest.mark.quick(0)
def test_other_batches_closures_and_modes_are_as_the_loop():
    for batch in (3, 4, 1, 6):  # torch.compile makes a variant of its own for some
        cell, x, state = case(Gated, 43, batch)
        expected = results(loop, cell, x, state)
        assert_near(results(compiled(None), cell, x, state), expected)
        assert_near(results(compiled("100%"), cell, x, state), expected)
        with torch.no_grad():
            outputs = leaves_of(compiled(None)(cell, x, state))
        assert_near(outputs, expected[: len(outputs)])
    for scale in (0.5, 2.0):  # a function made anew, with other values
        factor = torch.tensor(scale, dtype=DOUBLE, requires_grad=True)

        def step(x, h, cell=cell, factor=factor):
            h = factor * cell(x, h)[0]
            return h, h

        found, expected = (
            torch.autograd.grad(run(step, x, state)[0].sum(), [factor, x])
            for run in (compiled("60%"), loop)
        )
        assert_near(found, expected)


@pytest.mark.quick(0)
def test_a_module_around_a_cell_with_samples_of_several_lengths():
    torch.manual_seed(1)
    cell = nn.GRUCell(3, 5, dtype=DOUBLE)
    x = torch.randn(4, 61, 3, dtype=DOUBLE, requires_grad=True)
    lengths = torch.tensor([61, 40, 8, 59])
    found = []
    for asked in ({"compile": True, "memory": "70%"}, {"compile": True}, {}):
        net = rg.Recurrent(cell, batch_first=True, **asked)
        y, last = net(x, lengths=lengths)
        wanted = [x, *net.parameters()]
        found.append([y, *leaves_of(last), *torch.autograd.grad(y.square().sum(), wanted)])
    assert "compile=True" in repr(rg.Recurrent(cell, compile=True))
    assert_near(found[0], found[2])
    assert_near(found[1], found[2])


@pytest.mark.quick(0)
def test_two_backward_passes():
    cell, x, state = case(Spiking, 75)
    y, _ = compiled("50%")(cell, x, state)
    once = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_near(torch.autograd.grad(y.sum(), x), once)


class Drawing(Gated):
    def forward(self, x, h):
        return super().forward(torch.nn.functional.dropout(x, 0.5), h)


class Counting(Gated):
    count = 0

    def forward(self, x, h):
        self.count += 1
        return super().forward(x, h)


class Branching(Gated):
    def forward(self, x, h):
        return super().forward(x, 2 * h if h.sum() > 0 else h)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Drawing, "draws random numbers"),
        (Counting, "the cell changes its buffers or attributes"),
        (Branching, "cannot make one graph"),
    ],
)
def test_a_cell_that_cannot_be_compiled_is_refused(kind, message):
    _, x, state = case(Gated, 16)
    with pytest.raises(rg.CellError, match=message):
        rg.unroll(kind(3, 5), x, state, compile=True)


def test_what_goes_by_single_steps_is_refused_beside_blocks():
    cell, x, state = case(Gated, 16)
    with pytest.raises(rg.CellError, match="compile=True together with schedule="):
        rg.unroll(cell, x, state, schedule=rg.plan(16, 3), compile=True)
    with pytest.raises(rg.CellError, match="compile=True together with stateful="):
        rg.unroll(cell, x, state, stateful=[cell], compile=True)
    with pytest.raises(rg.CellError, match="compile=True together with schedule="):
        rg.Recurrent(cell, schedule=rg.plan(16, 3), compile=True)


@pytest.mark.quick(0)
def test_a_missing_compiler_is_said(tmp_path):
    code = (
        "import torch, retrograde as rg\n"
        "step = lambda x, h: (x + h, x + h)\n"
        "rg.unroll(step, torch.ones(16, 2), torch.zeros(2, requires_grad=True), compile=True)\n"
    )
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CXX": "no-such-compiler"}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **folder}, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "CellError: torch.compile cannot" in run.stderr
    assert "a C++ compiler; leave compile=True out" in run.stderr


@pytest.mark.parametrize("change", [name for name in CHANGES if "hook" in name])
def test_hooks_of_a_cell_are_refused(change):
    """A block that was compiled before a hook was registered would not call it."""
    cell = nn.GRUCell(3, 5)
    with Changed(change, cell), pytest.raises(rg.CellError, match=f"the cell has a {change}"):
        rg.unroll(lambda x, h: (cell(x, h),) * 2, torch.ones(9, 2, 3), torch.zeros(2, 5),
                  memory="60%", compile=True)  # fmt: skip
