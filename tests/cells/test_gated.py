"""Cells as data: the plain loop over the same cell is the reference of the compiled loops."""

import copy
import pickle
import random
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import retrograde as rg
from oracles.hooks import CHANGES, Changed
from oracles.loops import assert_near, gradients, least, leaves_of, loop
from oracles.own_cells import LIF, MGU
from oracles.own_cells import PeepholeLSTM as Peephole
from retrograde.kernels.cpu import loops
from retrograde.recurrent.core import HeldLayers

DOUBLE = torch.float64


class LSTM(rg.GatedCell):
    gates, states = 4, 2

    @staticmethod
    def step(i, f, g, o, h, c):
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


@pytest.fixture(autouse=True)
def ranges(monkeypatch):
    """The ranges that compiled loops have backpropagated; a few steps may be planned without."""
    found, original = [], HeldLayers.backpropagate

    def backpropagate(self, tape, gradients):
        found.append((tape.start, tape.stop))
        original(self, tape, gradients)

    monkeypatch.setattr(HeldLayers, "backpropagate", backpropagate)
    return found


def data(cell, length, batch, wants=True):
    weight = cell.weight_ih
    x = torch.randn(length, batch, cell.input_size, dtype=weight.dtype, requires_grad=wants)
    state = tuple(torch.randn_like(t).requires_grad_() for t in leaves_of(cell.zeros(x[0])))
    return x, state if cell.states > 1 else state[0]


def results(run, cell, x, state):
    y, last = run(cell, x, state)
    wanted = [t for t in (x, *leaves_of(state), *cell.parameters()) if t.requires_grad]
    return [y.detach(), *map(torch.detach, leaves_of(last)), *gradients(y, last, wanted)]


def within(memory):
    return lambda cell, x, state: rg.unroll(cell, x, state, memory=memory)


def expression(names, drawn, depth):
    """A drawn elementwise expression of these names, of bounded values."""
    if not depth:
        return drawn.choice(names)
    a, b = (expression(names, drawn, depth - 1) for _ in range(2))
    forms = ["{a} + {b}", "{a} - 0.5 * {b}", "torch.tanh({a}) * {b}", "torch.sigmoid({a}) * {b}"]
    forms += ["torch.relu({a})", "-torch.tanh({b})", "{a} / (1.5 + torch.sigmoid({b}))", "1 - {a}"]
    forms += ["({a}).detach() * {b}", "{b} * torch.heaviside(({a}).detach(), ({b}).detach())"]
    return "(" + drawn.choice(forms).format(a=a, b=b) + ")"


def drawn_cell(seed):
    """A cell of drawn numbers and a drawn step."""
    drawn = random.Random(seed)
    gates, states, units = (drawn.randint(a, b) for a, b in ((1, 4), (1, 3), (0, 2)))
    split = drawn.randint(0, gates)
    names = [f"a{k}" for k in range(gates + split + states + units)]
    used = [f"{expression(names, drawn, 3)} + 0.1 * a0" for _ in range(states)]
    used[0] += " + 0.1 * (" + " + ".join(names) + ")"
    results = ", ".join(f"torch.tanh({one})" for one in used)
    scope = {"torch": torch}
    exec(f"def step({', '.join(names)}):\n    return {results}", scope)
    numbers = {"gates": gates, "states": states, "units": units, "split": split}
    kind = type("Drawn", (rg.GatedCell,), {**numbers, "step": staticmethod(scope["step"])})
    torch.manual_seed(seed)
    sizes = drawn.randint(1, 9), drawn.choice([1, 3, 16, 19, 37])
    cell = kind(*sizes, bias=drawn.random() < 0.8, dtype=DOUBLE)
    return cell, drawn.choice([1, 2, 7, 40]), drawn.choice([1, 2, 5, 8]), drawn.random() < 0.7


@pytest.mark.filterwarnings("error")
@pytest.mark.quick(1, every=3)
@pytest.mark.parametrize("seed", range(100))
def test_drawn_steps_have_the_gradients_of_the_plain_loop(ranges, seed):
    cell, *shape = drawn_cell(seed)
    x, state = data(cell, *shape)
    expected = results(loop, cell, x, state)
    lowest = least(lambda memory: rg.unroll(cell, x, state, memory=memory))
    for memory in (lowest, 2 * lowest, 4 * lowest, "1GiB"):
        ranges.clear()
        assert_near(results(within(memory), cell, x, state), expected, 1e-11)
    assert ranges[-1] == (0, len(x))


@pytest.mark.quick(2, every=3)
@pytest.mark.parametrize("kind", [Peephole, MGU, LIF, LSTM])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_known_cells(ranges, kind, dtype):
    torch.manual_seed(0)
    cell = kind(5, 19, dtype=dtype)
    x, state = data(cell, 90, 7)
    expected = results(loop, cell, x, state)
    for memory in ("100%", "20%", "12%"):
        ranges.clear()
        tolerance = 1e-12 if dtype == DOUBLE else 1e-5
        assert_near(results(within(memory), cell, x, state), expected, tolerance)
        assert ranges


def test_an_lstm_is_torchs():
    torch.manual_seed(0)
    net, cell = nn.LSTM(5, 19, dtype=DOUBLE), LSTM(5, 19, dtype=DOUBLE)
    for own, theirs in zip(cell.parameters(), net.parameters(), strict=True):
        own.data.copy_(theirs)
    x = torch.randn(40, 3, 5, dtype=DOUBLE, requires_grad=True)
    found = []
    for module in (net, rg.Recurrent(cell, memory="30%")):
        y, (h, c) = module(x)
        loss = y.square().sum() + h.sum() + c.exp().sum()
        found.append([y, *torch.autograd.grad(loss, [x, *module.parameters()])])
    assert_near(*found)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", [Peephole, MGU])
def test_the_peak_is_within_the_budget(ranges, kind, threads):
    torch.manual_seed(0)
    cell = kind(8, 32)
    x, state = data(cell, 200, 8)
    wanted = [x, *leaves_of(state), *cell.parameters()]
    fixed = sum(t.nbytes for t in wanted) + 200 * 8 * 32 * 4  # their gradients, and the outputs
    seeds = [torch.randn(200, 8, 32), *map(torch.ones_like, leaves_of(state))]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for share in ("8%", "15%", "30%", "60%"):
            fit = rg.Recurrent(cell, memory=share).fit(x, state)

            def train(share=share):
                y, last = rg.unroll(cell, x, state, memory=share)
                return torch.autograd.grad([y, *leaves_of(last)], wanted, seeds)

            train()
            assert rg.measure(train).peak_bytes - fixed <= fit.budget_bytes
    finally:
        torch.set_num_threads(before)
    assert ranges


@pytest.mark.parametrize("memory", ["100%", "30%", 1], ids=str)
@pytest.mark.parametrize(("length", "batch"), [(1, 19), (7, 12), (130, 3)], ids=str)
def test_a_state_of_zeros_that_nobody_gave_counts(length, batch, memory):
    cell, x = Peephole(5, 33), torch.randn(length, batch, 5)
    net, seed = rg.Recurrent(cell, memory=memory), torch.ones(length, batch, 33)
    try:
        net.fit(x)
    except rg.BudgetError as refused:
        net.memory = refused.minimum_bytes
    budget = net.fit(x).budget_bytes

    def train():
        y, last = net(x)
        y.backward(seed)
        return y, last

    train()
    cell.zero_grad()
    assert rg.measure(train).working_bytes <= budget


def test_the_least_budget_works_and_one_byte_less_is_refused():
    torch.manual_seed(0)
    cell = MGU(5, 19, dtype=DOUBLE)
    x, state = data(cell, 60, 7)
    lowest = least(lambda memory: rg.unroll(cell, x, state, memory=memory))
    rg.unroll(cell, x, state, memory=lowest)[0].sum().backward()
    with pytest.raises(rg.BudgetError, match=f"need at least {lowest} bytes"):
        rg.unroll(cell, x, state, memory=lowest - 1)


def test_what_loops_cannot_run_the_plain_loop_runs(ranges):
    torch.manual_seed(0)
    cell = Peephole(5, 6)
    x, state = data(cell, 60, 8)
    expected = results(loop, cell, x, state)
    assert_near(results(lambda *a: rg.unroll(*a), cell, x, state), expected, 0)
    schedule = rg.plan(60, 3)
    assert_near(results(lambda *a: rg.unroll(*a, schedule=schedule), cell, x, state), expected, 0)
    lengths = torch.tensor([60, 3, 7, 1, 60, 9, 8, 7])
    rg.Recurrent(cell, memory="60%")(x, state, lengths)[0].sum().backward()
    half = copy.deepcopy(cell).bfloat16()
    rg.Recurrent(half, memory="60%")(x.bfloat16())[0].sum().backward()
    with torch.autocast("cpu"):
        rg.unroll(cell, x, state, memory="60%")[0].sum().backward()
    handle = cell.register_forward_hook(lambda *_: None)
    assert_near(results(within("60%"), cell, x, state), expected, 0)
    handle.remove()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        rg.unroll(cell, x[..., :4], state, memory="60%")
    with torch.no_grad():
        assert rg.unroll(cell, x, state, memory="60%")[0].equal(expected[0])
    assert not ranges
    rg.unroll(cell, x, state, memory="60%")[0].sum().backward()
    assert ranges


def test_a_step_that_cannot_be_compiled_is_told_once_and_runs():
    class Softer(rg.GatedCell):
        @staticmethod
        def step(i, h):
            return nn.functional.softsign(i)

    torch.manual_seed(0)
    cell = Softer(5, 6)
    x, state = data(cell, 60, 8)
    expected = results(loop, cell, x, state)
    with pytest.warns(
        RuntimeWarning, match=r"Softer.step cannot be compiled .* nn, which is neither"
    ):
        found = results(within("60%"), cell, x, state)
    assert_near(found, expected, 0)

    class Unknown(rg.GatedCell):
        @staticmethod
        def step(i, h):
            return torch.erf(i)

    cell = Unknown(5, 6)
    with pytest.warns(RuntimeWarning, match=r"Unknown.step cannot be compiled"):
        assert_near(results(within("60%"), cell, x, state), results(loop, cell, x, state), 0)


FACTOR = 0.5


def test_a_number_that_a_step_reads_may_change():
    class Leaky(rg.GatedCell):
        @staticmethod
        def step(i, h):
            return FACTOR * h + torch.tanh(i)

    global FACTOR
    torch.manual_seed(0)
    cell = Leaky(5, 6, dtype=DOUBLE)
    x, state = data(cell, 60, 8)
    found = []

    def compare():
        found.append(results(loop, cell, x, state))
        assert_near(results(within("60%"), cell, x, state), found[-1])
        return loops._compiled.cache_info().misses

    compiled, FACTOR = [compare()], 0.25
    with pytest.warns(RuntimeWarning, match="a number that it reads has changed"):
        compiled.append(compare())
    FACTOR = 0.2
    assert {*compiled, compare()} == {compiled[0]}  # nothing is compiled anew
    FACTOR = 0.5
    assert not found[0][0].allclose(found[1][0])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda i, h: torch.softmax(i, -1), "mixes units or samples"),
        (lambda i, h: i - i.mean(0), "mixes units or samples"),
        (lambda i, h: i + torch.rand_like(i), "draws random numbers"),
        (lambda i, h: (i, h), "returns 2 tensors: expected 1 results"),
        (lambda i, h: i.sum(-1), "another shape"),
    ],
)
def test_what_is_no_elementwise_function_is_refused(step, message):
    kind = type("Cell", (rg.GatedCell,), {"step": staticmethod(step)})
    with pytest.raises(rg.CellError, match=message):
        kind(3, 5)


def test_a_cell_without_a_static_step_is_refused():
    with pytest.raises(rg.CellError, match="has no static method step"):
        rg.GatedCell(3, 5)
    kind = type("Cell", (rg.GatedCell,), {"step": lambda self, i, h: i})
    with pytest.raises(rg.CellError, match="has no static method step"):
        kind(3, 5)


def test_what_a_fit_tells_is_what_runs():
    cell = Peephole(5, 6)
    x, _ = data(cell, 200, 8)
    told = rg.fit(cell, x, memory="20%")
    assert told.seconds > 0
    for fit in (told, rg.fit(rg.Recurrent(cell), x, memory="20%")):
        assert fit.schedule == rg.Recurrent(cell, memory="20%").fit(x).schedule


def test_weights_that_are_frozen_computed_or_overwritten():
    torch.manual_seed(0)
    cell = Peephole(5, 6, dtype=DOUBLE)
    parametrizations.weight_norm(cell, "weight_hh")
    cell.weight_units.requires_grad_(False)
    cell.bias_ih.requires_grad_(False)
    x, state = data(cell, 60, 8)
    assert_near(results(within("60%"), cell, x, state), results(loop, cell, x, state))
    y, _ = rg.unroll(cell, x, state, memory="60%")
    with torch.no_grad():
        cell.weight_ih.mul_(2)
    with pytest.raises(rg.RetrogradeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, _ = rg.unroll(cell, x, state, memory="60%")
    total = y.sum()
    y.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_gradients_of_some_results_and_second_passes():
    torch.manual_seed(0)
    cell = Peephole(3, 5, dtype=DOUBLE)
    x, state = data(cell, 60, 8)
    found = []
    for run in (loop, within("100%")):
        y, (h, c) = run(cell, x, state)
        found.append(torch.autograd.grad(c.sum(), [x, state[1], cell.weight_hh], retain_graph=True))
        found[-1] += torch.autograd.grad(y[3:5].sum(), [x, cell.weight_ih], retain_graph=True)
        found[-1] += torch.autograd.grad(h.sum(), [cell.weight_units])
    assert_near(found[1], found[0])


def test_layouts_of_inputs_and_gradients(ranges):
    torch.manual_seed(0)
    cell = Peephole(4, 6, dtype=DOUBLE)
    x = torch.randn(4, 5, 90, dtype=DOUBLE, requires_grad=True)
    one = rg.Recurrent(cell, memory="50%")
    found = []
    for run in (one, lambda x: loop(cell, x, cell.zeros(x[0]))):
        y, _ = run(x.permute(2, 1, 0))
        loss = y.permute(1, 0, 2).reshape(-1) @ torch.linspace(-1, 1, y.numel(), dtype=DOUBLE)
        found.append([y, *torch.autograd.grad(loss, [x, *cell.parameters()])])
    assert_near(*found)
    assert ranges
    assert one.fit(x.permute(2, 1, 0)).forward_steps <= 180  # no step is recomputed twice


def test_copies_and_states_on_disk():
    torch.manual_seed(0)
    net = rg.Recurrent(Peephole(3, 5), memory="60%", batch_first=True)
    x = torch.randn(2, 8, 3)
    y, _ = net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other(x)[0].equal(y)
        assert [*other.state_dict()] == [*net.state_dict()]
        assert "cell.weight_units" in other.state_dict()


CELL = """
import torch, retrograde as rg
class Leaky(rg.GatedCell):
    @staticmethod
    def step(i, h):
        return 0.54321 * h + torch.tanh(i)
y, _ = rg.unroll(Leaky(5, 6), torch.randn(60, 8, 5), memory="60%")
y.sum().backward()
"""


def test_code_on_disk_outlives_the_module_of_a_step(tmp_path):
    """The same step in another module, after the first one is gone."""
    for name in ("first", "second"):
        module = tmp_path / f"{name}.py"
        module.write_text(CELL)
        subprocess.run([sys.executable, "-c", f"import {name}"], check=True, cwd=tmp_path)
        module.unlink()


def test_threads_compile_and_run_at_once():
    torch.manual_seed(0)
    cell, found = MGU(3, 5, dtype=DOUBLE), []
    x, state = data(cell, 90, 6, wants=False)
    expected = results(loop, cell, x, state)

    def work():
        found.append(results(within("80%"), cell, x, state))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 3
    for one in found:
        assert_near(one, expected)


@pytest.mark.parametrize("change", CHANGES)
def test_a_cell_whose_call_does_more_than_its_forward_runs_by_its_calls(change):
    """The loops stand in for a plain call only; there is no warning that it runs step by step."""
    cells, x = [MGU(3, 5), MGU(3, 5)], torch.randn(30, 2, 3, requires_grad=True)
    cells[1].load_state_dict(cells[0].state_dict())
    found = []
    for run, cell in zip((loop, unrolled), cells, strict=True):
        with Changed(change, cell):
            y = run(cell, x, torch.zeros(2, 5))[0]
            y.square().sum().backward()
        found.append((y.detach(), x.grad, *(p.grad for p in cell.parameters())))
        x.grad = None
    torch.testing.assert_close(*found)


def unrolled(cell, x, state):
    return rg.unroll(cell, x, state, memory="60%")
