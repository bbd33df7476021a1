"""The backward recurrence, plain, chunked and compiled, against autograd and one another."""

import functools
import warnings

import numpy as np
import pytest
import torch

from oracles.jacobians import jacobians
from retrograde.kernels import kernels
from retrograde.kernels.cells import GATES, Slopes, Weights, slopes
from retrograde.kernels.cpu import sweep as cpu
from retrograde.kernels.cpu.llvm import barrier as meeting
from retrograde.kernels.cpu.llvm import threads as team
from retrograde.kernels.cpu.llvm.lanes import compiled
from retrograde.kernels.cpu.llvm.threads import share
from retrograde.kernels.sweep import carry, products, safe_chunk, scan, sweep, trusted
from retrograde.scan.blelloch import blelloch, chunked, gradients, hybrid, linear
from retrograde.scan.elements import Dense

KINDS = list(GATES)
EVERY_CELL = pytest.mark.parametrize("kind", KINDS)
CHUNKS = [1, 2, 7, 16, 64]


def in_place_sweep(steps, hidden, dy, g):
    """The sweep that makes no copy of the weights."""
    use = kernels("cpu", hidden.dtype, hidden.shape[1]).in_place
    return use.sweep_with(hidden, len(g))(steps, dy, g)


WAYS = {"plain": sweep, "compiled": cpu.sweep, "in place": in_place_sweep}
WAYS |= {f"chunks of {n}": functools.partial(scan, chunk=n) for n in CHUNKS}


def compiled_scan(steps, hidden, dy, g, chunk):
    """The scan that a call on a CPU uses."""
    return kernels("cpu", hidden.dtype, hidden.shape[1]).scan(steps, hidden, dy, g, chunk)


WAYS |= {f"compiled chunks of {n}": functools.partial(compiled_scan, chunk=n) for n in CHUNKS}
MODULES = {
    "RNN_TANH": torch.nn.RNN,
    "RNN_RELU": functools.partial(torch.nn.RNN, nonlinearity="relu"),
    "GRU": torch.nn.GRU,
    "LSTM": torch.nn.LSTM,
}


class Problem:
    """A layer's states and slopes, a loss's gradients, and what autograd makes of them."""

    def __init__(self, kind, length=33, samples=3, size=7, dtype=torch.float64, dy=True):
        torch.manual_seed(0)
        net = MODULES[kind](3, size, dtype=dtype)
        self.kind, self.size = kind, size
        self.x = torch.randn(length, samples, 3, dtype=dtype, requires_grad=True)
        parts = 2 if kind == "LSTM" else 1
        first = [
            torch.randn(1, samples, size, dtype=dtype, requires_grad=True) for _ in range(parts)
        ]
        y, final = net(self.x, tuple(first) if kind == "LSTM" else first[0])
        final = final if kind == "LSTM" else (final,)
        self.dy = torch.randn_like(y) if dy else None
        after = [torch.randn_like(s) for s in final]
        self.g = torch.cat([s[0] for s in after], -1)
        roots, seeds = [*final, *([y] if dy else [])], [*after, *([self.dy] if dy else [])]
        dx, dw, *before = torch.autograd.grad(roots, [self.x, net.weight_hh_l0, *first], seeds)
        self.expected = [dx, dw, torch.cat([s[0] for s in before], -1)]
        self.weights = Weights(kind, *(p.detach() for p in net.parameters()))
        h = torch.cat([first[0], y]).detach()
        self.before, self.after = h[:-1], h[1:]
        self.c = first[1][0].detach() if kind == "LSTM" else None

    @property
    def hidden(self):
        return self.weights.hidden

    def slopes(self):
        return slopes(self.weights, self.x.detach(), self.before, self.after, self.c)

    def solve(self, way):
        """[gradient of x, of weight_hh, of the first state], by one of the ways."""
        steps, g = self.slopes(), self.g.clone()
        first = way(steps, self.hidden, self.dy, g)
        assert torch.equal(g, self.g), "the gradient that was given is the caller's"
        dw = steps.gates.flatten(2).flatten(0, 1).t() @ self.before.flatten(0, 1)
        if self.kind == "GRU":
            steps.gates[:, :, 2] = steps.inner
        return [steps.gates.flatten(2) @ self.weights.inputs, dw, first]


def assert_close(found, expected, tolerance=1e-10):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= tolerance * b.norm()


@EVERY_CELL
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_every_way_gives_autograds_gradient(kind, way, length):
    problem = Problem(kind, length)
    assert_close(problem.solve(WAYS[way]), problem.expected)


@EVERY_CELL
@pytest.mark.parametrize("samples", [1, 2, 3, 16, 17])
@pytest.mark.parametrize("size", [1, 7, 20, 33])
def test_every_way_at_every_width(kind, samples, size):
    problem = Problem(kind, 20, samples, size)
    for way in WAYS.values():
        assert_close(problem.solve(way), problem.expected)


@EVERY_CELL
@pytest.mark.parametrize("way", WAYS)
def test_no_loss_at_the_outputs_is_a_loss_of_zero_there(kind, way):
    problem = Problem(kind, dy=False)
    found = problem.solve(WAYS[way])
    assert_close(found, problem.expected)
    problem.dy = torch.zeros(33, 3, 7, dtype=torch.float64)
    assert_close(problem.solve(WAYS[way]), found, 1e-15)


@EVERY_CELL
@pytest.mark.parametrize("way", WAYS)
def test_in_single_precision(kind, way):
    problem = Problem(kind, 65, 17, 20, dtype=torch.float32)
    assert_close(problem.solve(WAYS[way]), problem.expected, 2e-6)


@EVERY_CELL
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("way", ["compiled chunks of 2", "compiled chunks of 7"])
def test_threads_share_a_scans_chunks(kind, threads, way, monkeypatch):
    monkeypatch.setattr(team, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    problem = Problem(kind, 65, 3)
    assert_close(problem.solve(WAYS[way]), problem.expected)


@EVERY_CELL
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("samples", [1, 2, 3, 16, 17])
def test_threads_share_the_samples(kind, threads, samples, monkeypatch):
    """The number of threads is only asked for here: setting it would slow every later test."""
    monkeypatch.setattr(team, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    ranges, share = [], meeting.share

    def spy(kernel, parts, *args):
        ranges.extend(parts)
        share(kernel, parts, *args)

    monkeypatch.setattr(meeting, "share", spy)
    problem = Problem(kind, 20, samples)
    assert_close(problem.solve(cpu.sweep), problem.expected)
    assert len(ranges) > 1 or threads == 1 or samples < 4
    taken = [b for first, last in ranges for b in range(first, last)]
    assert sorted(taken) == list(range(samples))


def test_threads_of_torchs_own_number():
    problem = Problem("LSTM", 300, 16, 33)  # 21 million multiplications: several threads' worth
    assert problem.slopes().gates.numel() * 33 > 2 * team.THREAD_WORK
    steps, alone = problem.slopes(), problem.slopes()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = cpu.sweep(steps, problem.hidden, problem.dy, problem.g)
    finally:
        torch.set_num_threads(before)
    assert_close([first], problem.expected[2:])
    assert torch.equal(first, cpu.sweep(alone, problem.hidden, problem.dy, problem.g))
    assert torch.equal(steps.gates, alone.gates)


def test_a_threads_error_is_the_callers(monkeypatch):
    """Work that was not done must not pass for a gradient, when memory gives out, for one."""
    monkeypatch.setattr(team, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    for parts in (team.parts_for(4, 10), [(0, 4)]):
        with pytest.raises(RuntimeError, match="refuse_to_end failed on a thread"):
            share(refuse_to_end, parts, np.zeros(2))


@compiled
def refuse_to_end(array, first, last):
    if last == 4:
        array.reshape(3)


def amid(tensor, poison):
    """The same numbers in the middle of a larger buffer that is filled with something else."""
    if tensor is None:
        return None, None
    buffer = torch.full((len(tensor) + 4, *tensor.shape[1:]), poison, dtype=tensor.dtype)
    buffer[2:-2] = tensor
    return buffer[2:-2], buffer


def untouched(buffer, poison):
    around = torch.cat([buffer[:2], buffer[-2:]])
    return bool((around.isnan() if poison != poison else around == poison).all())


@EVERY_CELL
@pytest.mark.parametrize(("samples", "size"), [(1, 1), (2, 7), (3, 33), (17, 20)])
@pytest.mark.parametrize("poison", [float("nan"), 7.0])
@pytest.mark.parametrize(
    "way", ["compiled", "in place", "compiled chunks of 2", "compiled chunks of 16"]
)
def test_compiled_code_reads_and_writes_nothing_beside_its_arrays(kind, samples, size, poison, way):
    problem = Problem(kind, 9, samples, size)
    steps = problem.slopes()
    pairs = [amid(t, poison) for t in (steps.gates, steps.keep, steps.inner)]
    problem.slopes = lambda: Slopes(*(view for view, _ in pairs))
    problem.dy, losses = amid(problem.dy, poison)
    problem.g, g = amid(problem.g, poison)
    hidden, weights = amid(problem.hidden, poison)
    found = problem.solve(lambda steps, _, dy, g: WAYS[way](steps, hidden, dy, g))
    assert_close(found, problem.expected)
    for buffer in [*(b for _, b in pairs if b is not None), losses, g, weights]:
        assert untouched(buffer, poison)


def test_hidden_weights_may_lie_in_any_order():
    problem = Problem("GRU")
    turned = problem.hidden.t().contiguous().t()
    assert not turned.is_contiguous()
    for way in WAYS.values():
        found = problem.solve(lambda steps, _, dy, g, way=way: way(steps, turned, dy, g))
        assert_close(found, problem.expected)


ALGORITHMS = {
    "linear": linear,
    "blelloch": blelloch,
    "hybrid": functools.partial(hybrid, levels=2),
    "chunked": functools.partial(chunked, chunk=5),
    "chunked blelloch": functools.partial(chunked, chunk=4, algorithm=blelloch),
}


def states_gradients(problem, algorithm):
    """The gradient of every state, first to last, by a scan over dense transposed Jacobians."""
    dense = jacobians(problem.slopes(), problem.hidden)
    terms: list = [torch.zeros_like(problem.g) for _ in range(len(dense))]
    if problem.dy is not None:
        for term, d in zip(terms, problem.dy, strict=True):
            term[:, : problem.size] += d
    else:
        terms = [None] * len(dense)
    last = problem.g if terms[-1] is None else problem.g + terms[-1]
    losses = [last, *reversed(terms[:-1]), None]
    elements = [Dense(j) for j in reversed(dense)]
    return gradients(elements, losses, algorithm=algorithm)[::-1]


@EVERY_CELL
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dy", [True, False], ids=["a loss at each step", "at the last"])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_a_scan_over_dense_jacobians_gives_the_same(kind, algorithm, dy, length):
    """W20's scan over the elements that the sweeps never form: both halves of the package agree."""
    problem = Problem(kind, length, dy=dy)
    found = states_gradients(problem, ALGORITHMS[algorithm])
    assert_close([found[0]], problem.expected[2:])
    steps = problem.slopes()
    swept = problem.slopes()
    assert_close([sweep(swept, problem.hidden, problem.dy, problem.g)], [found[0]])
    rows = torch.stack(found[1:])
    size = problem.size
    if kind == "LSTM":
        d = rows[..., size:] + rows[..., :size] * steps.inner
        rows = torch.stack([d, d, d, rows[..., :size]], -2)
    else:
        rows = rows.unsqueeze(-2)
    assert_close([steps.gates * rows], [swept.gates])


@EVERY_CELL
@pytest.mark.parametrize("dy", [True, False])
def test_a_chunks_product_is_that_of_its_jacobians(kind, dy):
    problem = Problem(kind, 12, dy=dy)
    steps = problem.slopes()
    chunks = Slopes(*(None if t is None else t.unflatten(0, (3, 4)) for t in vars(steps).values()))
    losses = problem.dy.unflatten(0, (3, 4)) if dy else None
    rows = products(chunks, problem.hidden, losses)
    n = problem.g.shape[-1]
    assert rows.shape == (3, 3, n + 1, n)
    dense = jacobians(steps, problem.hidden).unflatten(0, (3, 4)).mT
    expected = dense[:, 3] @ dense[:, 2] @ dense[:, 1] @ dense[:, 0]
    assert_close([rows[..., :n, :]], [expected])
    if not dy:
        assert not rows[..., n, :].any()
    after, before = carry(rows, problem.g)
    assert torch.equal(after[-1], problem.g)
    assert_close([before], problem.expected[2:])


def test_growing_products_are_distrusted_and_said_to_be():
    rows = torch.zeros(1, 1, 3, 2, dtype=torch.float64)
    after = torch.ones(1, 1, 2, dtype=torch.float64)
    rows[..., 0, 0] = 100
    assert trusted(rows, after)
    rows[..., 0, 0] = 101
    with pytest.warns(RuntimeWarning, match="swept step by step"):
        assert not trusted(rows, after)
    for bad in (float("nan"), float("inf")):
        rows[..., 0, 0] = bad
        with pytest.warns(RuntimeWarning, match="swept step by step"):
            assert not trusted(rows, after)


def test_a_distrusted_product_leaves_the_exact_gradient():
    """Weights under which all products overflow, in a layer whose gradient meets only its zeros."""
    problem = Problem("RNN_RELU", 64, 2, 4, dtype=torch.float32)
    ones = torch.ones(64, 2, 1, 4)
    problem.weights = Weights(
        "RNN_RELU", torch.eye(4)[:, :3].contiguous(), torch.zeros(4, 4), None, None
    )
    problem.hidden[2:, 2:] = 50
    problem.hidden[:2, :2] = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    problem.slopes = lambda: Slopes(ones.clone(), None, None)
    problem.dy[..., 2:], problem.g[:, 2:] = 0, 0
    expected = problem.solve(sweep)
    assert all(t.isfinite().all() for t in expected)
    assert_close(problem.solve(functools.partial(scan, chunk=16)), expected, 1e-6)  # up to 1e32
    for chunk in (21, 32):
        for way in (scan, compiled_scan):
            with pytest.warns(RuntimeWarning, match="swept step by step"):
                found = problem.solve(functools.partial(way, chunk=chunk))
            assert_close(found, expected, 0 if way is scan else 1e-6)


@EVERY_CELL
def test_healthy_products_are_not_warned_of(kind):
    problem = Problem(kind, 130)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem.solve(functools.partial(scan, chunk=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 30.0, 1e4, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_no_product_of_a_safe_chunk_can_overflow(kind, scale, dtype):
    torch.manual_seed(0)
    size = 5
    hidden = scale * torch.randn(GATES[kind] * size, size, dtype=dtype)
    chunk = safe_chunk(hidden, 64)
    assert 1 <= chunk <= 64
    gates = torch.rand(chunk, 2, GATES[kind], size, dtype=dtype)
    keep = inner = torch.rand(chunk, 2, size, dtype=dtype)
    gated = kind in ("GRU", "LSTM")
    steps = Slopes(gates, keep if gated else None, inner if gated else None)
    rows = products(
        Slopes(*(None if t is None else t[None] for t in vars(steps).values())), hidden, None
    )
    assert rows.isfinite().all()


def test_a_safe_chunk_is_as_long_as_asked_where_products_cannot_grow():
    assert safe_chunk(torch.eye(4), 10**6) == 10**6
    assert safe_chunk(2 * torch.eye(4), 10**6) == 80  # (1 + 2)ⁿ reaches 3.4e38 after 80.7
    assert safe_chunk((2 * torch.eye(4)).double(), 10**6) == 646
    for bad in (float("nan"), float("inf")):
        assert safe_chunk(torch.full((4, 4), bad), 64) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("cpu", torch.float32, "numba"),
        ("cpu", torch.float64, "numba"),
        ("cpu", torch.bfloat16, "torch"),
        ("meta", torch.float32, "torch"),
        ("cuda", torch.float64, "torch"),
    ],
)
def test_kernels_are_compiled_where_they_can_be(device, dtype, name):
    assert kernels(device, dtype, 20).name == name
