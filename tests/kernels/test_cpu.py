"""The CPU's passes of a whole layer, against torch's kernels and the plain slopes and sweep."""

import inspect

import pytest
import torch

from oracles.networks import relative_error
from retrograde.kernels import sweep as plain
from retrograde.kernels.cells import GATES, Block, Kept, Weights, slopes
from retrograde.kernels.cpu import backward_loops, forward_loops, sweep_loops
from retrograde.kernels.cpu import layer as cpu_layer
from retrograde.kernels.cpu.llvm import threads as team
from retrograde.recurrent.forward import run, run_by_torch

EVERY_CELL = pytest.mark.parametrize("kind", GATES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# (L, B, I, H): odd sizes, one of everything, whole vectors, several panels, work for two threads.
SIZES = [
    (1, 1, 1, 1),
    (2, 3, 5, 7),
    (63, 2, 1, 33),
    (200, 5, 24, 8),
    (130, 4, 25, 24),
    (40, 9, 30, 64),
    (300, 17, 24, 20),
    (150, 1, 16, 40),
    (70, 3, 72, 80),
]


class Layer:
    def __init__(self, kind, sizes, dtype, bias=True):
        torch.manual_seed(1)
        length, samples, width, size = sizes
        rows = GATES[kind] * size
        shapes = [(rows, width), (rows, size), *([(rows,), (rows,)] if bias else [None, None])]
        scale = 1 / size**0.5
        given = [None if s is None else scale * torch.randn(s, dtype=dtype) for s in shapes]
        self.weights = Weights(kind, *given)
        self.x = torch.randn(length, samples, width, dtype=dtype)
        parts = 2 if kind == "LSTM" else 1
        self.state = tuple(torch.randn(samples, size, dtype=dtype) for _ in range(parts))
        self.dy = torch.randn(length, samples, size, dtype=dtype)
        self.g = torch.randn(samples, parts * size, dtype=dtype)
        self.kept = None
        if kind == "LSTM":
            self.kept = Kept(*(self.x.new_empty(length, samples, k * size) for k in (4, 1)))

    def zeros(self):
        return {name: torch.zeros_like(w) for name, w in self.weights.tensors().items()}

    def block(self):
        outputs, after = run(self.weights, self.x, self.state, self.kept)
        before = torch.cat([self.state[0].unsqueeze(0), outputs[:-1]])
        c = self.state[1] if self.kept else None
        return outputs, after, Block(self.x, before, outputs, c, self.kept)


def go_back(layer, block, dy, g, dx, totals, at_once=False):
    loops = cpu_layer.Backward(layer.weights, totals, g.shape[0], len(block.x), at_once=at_once)
    first = loops.add(block, dy, g, dx)
    loops.finish()
    return first


@EVERY_CELL
@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_forward_pass_is_torchs(kind, dtype, sizes, bias):
    layer = Layer(kind, sizes, dtype, bias)
    given = [s.clone() for s in layer.state]
    outputs, after, _ = layer.block()
    expected, last = torch.empty_like(outputs), [s.clone() for s in layer.state]
    run_by_torch(layer.weights, layer.x, last, expected)
    for a, b in zip((outputs, *after), (expected, *last), strict=True):
        assert relative_error(a, b) <= 50 * torch.finfo(dtype).eps
    assert all(torch.equal(a, b) for a, b in zip(given, layer.state, strict=True))
    again, _ = run(layer.weights, layer.x, layer.state)
    assert torch.equal(again, outputs)  # whether or not gates are kept


@EVERY_CELL
def test_a_sample_does_not_depend_on_the_batch(kind):
    """Its states are the same alone as among others, bit for bit."""
    layer = Layer(kind, (130, 7, 5, 33), torch.float32)
    whole, _ = run(layer.weights, layer.x, layer.state)
    for b in (0, 3, 6):
        one = slice(b, b + 1)
        alone, _ = run(layer.weights, layer.x[:, one], tuple(s[one] for s in layer.state))
        assert torch.equal(alone, whole[:, one])


@EVERY_CELL
@pytest.mark.parametrize("length", [9, 200])
def test_biases_may_lie_apart(kind, length):
    """Their numbers are not neighbours, as those of a column of a matrix."""
    layer = Layer(kind, (length, 2, 3, 7), torch.float32)
    expected, _ = run(layer.weights, layer.x, layer.state)
    w = layer.weights
    apart = [torch.stack([b, b + 9], 1)[:, 0] for b in (w.bias_inputs, w.bias_hidden)]
    for strided in ([apart[0], None], [None, apart[1]], apart):
        given = Weights(kind, w.inputs, w.hidden, *strided)
        straight = [None if b is None else b.contiguous() for b in strided]
        found, _ = run(given, layer.x, layer.state)
        assert torch.equal(
            found, run(Weights(kind, w.inputs, w.hidden, *straight), layer.x, layer.state)[0]
        )
    assert torch.equal(found, expected)


def test_what_an_lstm_keeps_are_its_gates_and_its_cells_before_each_step():
    layer = Layer("LSTM", (50, 3, 5, 7), torch.float64)
    outputs, after, _ = layer.block()
    i, f, g, o = layer.kept.gates.chunk(4, -1)
    c = torch.cat([layer.kept.cells[1:], after[1].unsqueeze(0)])
    assert torch.equal(layer.kept.cells[0], layer.state[1])
    assert relative_error(f * layer.kept.cells + i * g, c) <= 1e-15
    assert relative_error(o * c.tanh(), outputs) <= 1e-15


@EVERY_CELL
@DTYPES
@pytest.mark.parametrize(
    "options", ["", "no bias", "no inputs' gradient", "no loss at steps", "at once"]
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_backward_pass_is_that_of_plain_slopes_and_sweep(kind, dtype, sizes, options):
    layer = Layer(kind, sizes, dtype, bias=options != "no bias")
    _, _, block = layer.block()
    dy = None if options == "no loss at steps" else layer.dy
    dx = None if options == "no inputs' gradient" else torch.full_like(layer.x, 7)
    g = layer.g.clone()
    found = layer.zeros()
    first = go_back(layer, block, dy, g, dx, found, options == "at once")
    assert torch.equal(g, layer.g)

    steps = slopes(layer.weights, block.x, block.before, block.after, block.c)
    expected = {"first": plain.sweep(steps, layer.weights.hidden, dy, layer.g)}
    of_state = steps.gates.flatten(2).flatten(0, 1)
    of_input = of_state.clone().unflatten(1, (-1, layer.weights.size))
    if kind == "GRU":
        of_input[:, 2] = steps.inner.flatten(0, 1)
    of_input = of_input.flatten(1)
    expected["x"] = (of_input @ layer.weights.inputs).view(layer.x.shape)
    expected["inputs"] = of_input.t() @ block.x.flatten(0, 1)
    expected["hidden"] = of_state.t() @ block.before.flatten(0, 1)
    expected["bias_inputs"], expected["bias_hidden"] = of_input.sum(0), of_state.sum(0)

    assert set(found) == set(layer.weights.tensors())
    tolerance = 3e-6 if dtype == torch.float32 else 1e-13
    for name, t in {"first": first, **found, **({} if dx is None else {"x": dx})}.items():
        fading = expected[name].abs().amax() < 1e-23  # through many steps, each of which rounds
        assert fading or relative_error(t, expected[name]) <= tolerance, name


@EVERY_CELL
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("at_once", [True, False])
def test_threads_share_the_samples(kind, threads, at_once, monkeypatch):
    monkeypatch.setattr(team, "THREAD_WORK", 1)
    layer = Layer(kind, (40, 7, 8, 16) if at_once else (40, 7, 5, 9), torch.float64)
    _, _, block = layer.block()
    taken = []
    for number in (threads, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        dx = torch.empty_like(layer.x)
        sums = layer.zeros()
        first = go_back(layer, block, layer.dy, layer.g, dx, sums, at_once)
        taken.append((first, sums, dx))
    (first, found, dx), (alone, expected, dx_alone) = taken
    assert torch.equal(first, alone)
    assert torch.equal(dx, dx_alone)
    for name, t in found.items():
        assert relative_error(t, expected[name]) <= 1e-14, name


@EVERY_CELL
@DTYPES
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("sizes", [(90, 1, 8, 16), (61, 5, 3, 24), (60, 11, 16, 9)], ids=str)
def test_blocks_are_added_to_one_another_and_to_the_totals(kind, dtype, sizes, at_once):
    layer = Layer(kind, sizes, dtype)
    _, _, block = layer.block()
    expected, whole = layer.zeros(), torch.empty_like(layer.x)
    first = go_back(layer, block, layer.dy, layer.g, whole, expected)
    found, dx, g = layer.zeros(), torch.empty_like(layer.x), layer.g
    for rounds in (1, 2):  # what is finished is not added again
        loops, g = cpu_layer.Backward(layer.weights, found, sizes[1], 50, at_once=at_once), layer.g
        for start, stop in ((43, sizes[0]), (42, 43), (0, 42)):
            steps = slice(start, stop)
            kept = layer.kept and layer.kept.at(steps)
            part = Block(layer.x[steps], block.before[steps], block.after[steps], None, kept)
            g = loops.add(part, layer.dy[steps], g, dx[steps])
            if start == 42:
                loops.finish()
        loops.finish()
        tolerance = 3e-6 if dtype == torch.float32 else 1e-13
        assert relative_error(g, first) <= tolerance
        assert relative_error(dx, whole) <= tolerance
        for name, t in found.items():
            assert relative_error(t, rounds * expected[name]) <= tolerance, name


@pytest.mark.parametrize("module", [backward_loops, forward_loops, sweep_loops])
def test_no_loop_takes_memory_behind_torchs_back(module):
    """What numba's own arrays took would be missed by a budget."""
    source = inspect.getsource(module)
    assert "@compiled" in source
    for call in ("np.empty", "np.zeros", "np.ones", ".copy()", "empty_like"):
        assert call not in source
