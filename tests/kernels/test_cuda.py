"""The Triton kernels do what the plain forms do: compiled on a GPU, and else by the interpreter."""

import gc
import warnings

import pytest
import torch

from oracles.cuda_kernels import COMPILED, DEVICE, load
from retrograde.kernels import cells as recurrent
from retrograde.kernels import kernels, launched, sweep
from retrograde.kernels.cells import Slopes, Weights
from retrograde.kernels.cpu import sweep as cpu

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
TOLERANCE = 2e-6

cuda = load("kernels.cuda.launch")
pytestmark = [pytest.mark.usefixtures("interpreter"), *([pytest.mark.gpu] if COMPILED else [])]
on_a_gpu = pytest.mark.skipif(not COMPILED, reason="needs a CUDA device")
# What is read where it should not be shows as a NaN; what a NaN is written over, as another number.
poisons = pytest.mark.parametrize("fences", [torch.nan, 7.0], indirect=True)


def problem(kind, length, samples, size, loss=True):
    """Slopes, weights, losses and a gradient, in float64 on the CPU, as float32 has them."""
    generator = torch.Generator().manual_seed(length + size)

    def uniform(low, high, *shape):
        return torch.empty(shape).uniform_(low, high, generator=generator).double()

    gated, gates = kind != "RNN", GATES[kind]
    n = size * (2 if kind == "LSTM" else 1)
    shape = (length, samples, size)
    steps = Slopes(
        uniform(-1, 1, length, samples, gates, size),
        uniform(0, 1, *shape) if gated else None,
        uniform(-1, 1, *shape) if gated else None,
    )
    hidden = uniform(-1, 1, gates * size, size) / size**0.5
    return (
        steps,
        hidden.float().double(),
        uniform(-1, 1, *shape) if loss else None,
        uniform(-1, 1, samples, n),
    )


def in_float64(t):
    return None if t is None else t.clone()


def in_float32(t):
    return None if t is None else t.float()


def results(function, place, given, *options):
    """All that a function returns or changes, on the CPU; what it may not change, checked."""
    steps, *inputs = given
    steps = Slopes(*(place(t) for t in vars(steps).values()))
    inputs = [place(t) for t in inputs]
    constant = [t for t in (*inputs, steps.keep) if t is not None]
    copies = [t.clone() for t in constant]
    before = function(steps, *inputs, *options)
    torch.testing.assert_close(constant, copies, rtol=0, atol=0, equal_nan=True)
    return [t.cpu() for t in (before, steps.gates, steps.inner) if t is not None]


def assert_close(ours, theirs, tolerance=TOLERANCE):
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm()


def assert_equal_to_the_plain_form(fences, ours, plain, given, *options):
    found = results(ours, fences.around, given, *options)
    assert_close(found, results(plain, in_float64, given, *options))
    assert_close(found, results(plain, in_float32, given, *options))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    ("length", "samples", "size", "loss"),
    [
        (1, 1, 1, True),
        (2, 3, 7, False),
        (5, 17, 20, True),
        (17, 3, 33, True),
        (33, 1, 20, True),
        (2, 1, 64, True),
        (2, 1, 128, True),
    ],
)
def test_sweep(fences, kind, length, samples, size, loss):
    given = problem(kind, length, samples, size, loss)
    assert_equal_to_the_plain_form(fences, cuda.sweep, sweep.sweep, given)


@pytest.mark.quick(8)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN_TANH", "RNN_RELU"])
@pytest.mark.parametrize("size", [20, 1, 63, 65, 128])
def test_forward(fences, kind, size, bias):
    """Beside torch's own layer, and beside the plain form; two calls carry the state on."""
    torch.manual_seed(size)
    name, *rest = kind.split("_")
    options = {"nonlinearity": rest[0].lower()} if rest else {}
    net = getattr(torch.nn, name)(5, size, bias=bias, **options).requires_grad_(False)
    weights = Weights.of(kind, [*map(fences.around, net._flat_weights)])
    x, samples = torch.randn(7, 3, 5), 3
    before = [torch.randn(1, samples, size) for _ in range(2 if kind == "LSTM" else 1)]
    theirs, after = net(x, tuple(before) if kind == "LSTM" else before[0])
    expected = [theirs, *(after if kind == "LSTM" else [after])]
    for run in (cuda.forward, launched.forward):
        state = [fences.around(s[0]) for s in before]
        y = fences.empty((len(x), samples, size), torch.float32, torch.device(DEVICE))
        for part in (slice(0, 3), slice(3, 7)):
            forward = launched.LaunchedForward(run, weights, samples)
            room = forward.room(part.stop - part.start)
            forward(x[part].to(DEVICE), state, y[part], room)
        assert_close([y.cpu(), *(s[None].cpu() for s in state)], expected, 1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    ("length", "samples", "size", "loss"),
    [(1, 1, 129, True), (2, 17, 130, False), (2, 1, 257, True)],
)
def test_wide_sweep(fences, kind, length, samples, size, loss):
    given = problem(kind, length, samples, size, loss)
    assert_equal_to_the_plain_form(fences, cuda.sweep, sweep.sweep, given)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("loss", [True, False])
def test_launches_of_a_wide_sweep_are_recorded_once_and_serve_other_blocks(
    fences, monkeypatch, kind, loss
):
    """Blocks of 5 and 7 steps, recorded by 4: the last launches of a block have no step to do.

    Those of the second block are recorded.
    """
    steps, hidden, dy, g = problem(kind, 24, 3, 7, loss)
    recordings = []
    monkeypatch.setattr(cuda, "_RECORDED", 4)
    monkeypatch.setattr(
        cuda, "recorded", lambda launch, _: recordings.append(1) or (lambda: launch())
    )

    def in_blocks(steps, hidden, dy, g):
        wide = cuda.wide_sweep(hidden)
        for a, b in ((19, 24), (12, 19), (5, 12), (4, 5), (0, 4)):
            g = wide(steps.at(slice(a, b)), None if dy is None else dy[a:b], g)
        return g

    assert_equal_to_the_plain_form(fences, in_blocks, sweep.sweep, (steps, hidden, dy, g))
    assert len(recordings) == 1


def test_a_layer_records_its_launches_once_in_all_its_passes(monkeypatch):
    recordings = []
    monkeypatch.setattr(cuda, "_RECORDED", 4)
    monkeypatch.setattr(
        cuda, "recorded", lambda launch, _: recordings.append(1) or (lambda: launch())
    )
    monkeypatch.setattr(cuda, "_WIDE", {})
    weights, expected = {}, []
    for layer in (0, 1, 0, 1, 0):
        given = problem("GRU", 9, 2, 7)
        steps, hidden, dy, g = given
        hidden = weights.setdefault(layer, (hidden.float() * (1 + layer)).to(DEVICE))
        place = lambda t: t.float().to(DEVICE)  # noqa: E731
        run = lambda steps, _, dy, g, hidden=hidden: cuda.wide_sweep(hidden)(steps, dy, g)  # noqa: E731
        found = results(run, place, given)
        plain = (steps, hidden.cpu().double(), dy, g)
        expected = results(sweep.sweep, in_float64, plain)
        assert_close(found, expected)
        assert len(recordings) == len(weights)


def test_nothing_keeps_the_weights_of_a_layer_that_is_gone(monkeypatch):
    monkeypatch.setattr(cuda, "_WIDE", {})
    for _ in range(3):
        steps, hidden, dy, g = problem("GRU", 40, 2, 7)
        place = lambda t: t.float().to(DEVICE)  # noqa: E731
        steps = Slopes(*map(place, vars(steps).values()))
        hidden = place(hidden)
        for _ in range(3):
            cuda.wide_sweep(hidden)(steps, place(dy), place(g))
        del hidden
    gc.collect()  # of cycles
    cuda.wide_sweep(torch.zeros(21, 7, device=DEVICE))
    assert len(cuda._WIDE) == 1


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    ("length", "samples", "size", "loss", "chunk"),
    [
        (2, 1, 1, True, 1),
        (5, 3, 7, True, 1),
        (5, 17, 7, False, 2),
        (17, 3, 20, True, 4),  # a short first chunk
        (33, 1, 33, True, 8),
        (7, 2, 16, True, 3),  # one row more than tiles of 16
        (3, 1, 64, True, 1),
        (2, 1, 128, True, 1),
        (7, 3, 20, True, 4),  # too short for two chunks
    ],
)
@pytest.mark.quick(1, every=9)
def test_scan(fences, kind, length, samples, size, loss, chunk):
    given = problem(kind, length, samples, size, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal_to_the_plain_form(fences, cuda.scan, sweep.scan, given, chunk)


@pytest.mark.parametrize("loss", [True, False])
def test_what_is_read_need_not_be_contiguous(fences, loss):
    steps, hidden, dy, g = problem("GRU", 9, 3, 7)
    given = steps, hidden, dy[0].expand(9, 3, 7) if loss else None, g[:1].expand(3, 7)
    expected = results(sweep.sweep, in_float64, given)

    def strided(steps, hidden, dy, g):
        hidden, g = hidden.t().contiguous().t(), g[:1].expand(3, 7)
        dy = None if dy is None else dy[:1].expand(9, 3, 7)
        assert not hidden.is_contiguous()
        return cuda.scan(steps, hidden, dy, g, 4)

    assert_close(results(strided, fences.around, given), expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", GATES)
def test_the_carry_measures_what_trust_depends_on(fences, monkeypatch, kind):
    steps, hidden, dy, g = problem(kind, 12, 3, 7)
    seen, swept = [], cuda._sweep_chunks
    monkeypatch.setattr(
        cuda, "_sweep_chunks", lambda *a: seen.append(a[-1][0].cpu().clone()) or swept(*a)
    )
    results(cuda.scan, fences.around, (steps, hidden, dy, g), 4)
    chunks = Slopes(
        *(None if t is None else t.unflatten(0, (3, 4)) for t in vars(steps).values()),
    )
    rows = sweep.products(chunks, hidden, dy.unflatten(0, (3, 4)))
    after, _ = sweep.carry(rows, g)
    terms = after.abs().unsqueeze(-2) @ rows[..., :-1, :].abs()
    largest = torch.maximum(after.abs().amax((0, 2)), rows[..., -1, :].abs().amax((0, 2)))
    assert_close([seen[0]], [torch.stack([terms.amax((0, 2, 3)), largest])])


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("trouble", ["overflow", "nan", "inf", "nan at the start"])
def test_products_that_cannot_be_trusted_are_not_used(fences, kind, trouble):
    steps, hidden, dy, g = problem(kind, 17, 3, 7)
    match trouble:
        case "overflow":  # of the products, not of the gradient, which is 0
            steps.gates[:, 1] = 1e20
            dy[:, 1] = g[1] = 0
        case "nan":
            steps.gates[6, 1, 0, 3] = torch.nan
        case "inf":
            steps.gates[11, 1, 0, 3] = torch.inf
        case "nan at the start":
            dy[0, 1, 2] = torch.nan
    given = steps, hidden, dy, g
    cuda._verdicts.cache_clear()

    def scan(*given):
        found = cuda.scan(*given)
        if COMPILED:
            torch.cuda.synchronize()
        cuda._verdicts().add(torch.zeros(1, device=DEVICE))  # as a later call, which finds it there
        return found

    with pytest.warns(RuntimeWarning, match="this call is swept step by step"):
        found = results(scan, fences.around, given, 4)
    expected = results(sweep.sweep, in_float32, given)
    for dim, a, b in zip((0, 1, 1), found, expected, strict=False):
        for sample in (0, 1, 2) if trouble == "overflow" else (0, 2):
            assert_close([a.select(dim, sample)], [b.select(dim, sample)])
    assert trouble == "overflow" or not found[0][1].isfinite().all()


def states(kind, length, samples, size, scale):
    """A cell's weights, inputs, and states before and after each step, in float64."""
    torch.manual_seed(0)
    net = getattr(torch.nn, kind)(3, size, dtype=torch.float64)
    weights = Weights(kind, net.weight_ih_l0, net.weight_hh_l0, net.bias_ih_l0, net.bias_hh_l0)
    x = scale * torch.randn(length, samples, 3, dtype=torch.float64)
    c = torch.randn(samples, size, dtype=torch.float64)
    first = torch.randn(samples, size, dtype=torch.float64)
    state = (first[None], c[None]) if kind == "LSTM" else first[None]
    with torch.no_grad():
        after = net(x, state)[0]
    return weights, x, torch.cat([first[None], after[:-1]]), after, c


def assert_slopes_close(ours, theirs):
    for a, b in zip(vars(ours).values(), vars(theirs).values(), strict=True):
        assert a.shape == b.shape
        assert (a.cpu() - b).abs().amax() <= TOLERANCE


@poisons
@pytest.mark.parametrize("scale", [0.1, 1, 30])
@pytest.mark.parametrize(("length", "samples", "size"), [(1, 1, 1), (5, 3, 7), (16, 16, 2)])
def test_gru_slopes(fences, length, samples, size, scale):
    weights, x, before, after, _ = states("GRU", length, samples, size, scale)
    with torch.no_grad():
        gates = torch.nn.functional.linear(x, weights.inputs, weights.bias_inputs)
        hidden = torch.nn.functional.linear(before, weights.hidden, weights.bias_hidden)
    found = cuda.gru_slopes(*(fences.around(t) for t in (gates, hidden, before)))
    assert_slopes_close(found, recurrent.slopes(weights, x, before, after))


@poisons
@pytest.mark.parametrize("scale", [0.1, 1, 30])
@pytest.mark.parametrize(("length", "samples", "size"), [(2, 1, 1), (5, 3, 7), (17, 1, 20)])
def test_lstm_slopes(fences, monkeypatch, length, samples, size, scale):
    monkeypatch.setattr(cuda, "_TIME", 8)
    weights, x, before, after, c = states("LSTM", length, samples, size, scale)
    with torch.no_grad():
        gates = torch.nn.functional.linear(x, weights.inputs, weights.bias_inputs)
        gates += torch.nn.functional.linear(before, weights.hidden, weights.bias_hidden)
    found = cuda.lstm_slopes(*(fences.around(t) for t in (gates, after, c)))
    assert_slopes_close(found, recurrent.slopes(weights, x, before, after, c))


@pytest.mark.parametrize("kind", GATES)
def test_a_card_with_little_shared_memory_sweeps_where_the_scan_has_no_room(
    fences, monkeypatch, kind
):
    monkeypatch.setattr(cuda, "_limit", lambda t: 65_536)
    launched = []
    for name in ("products", "sweep"):
        kernel = getattr(cuda.sweep_kernels, name)
        seen = Noted(kernel, lambda options, name=name: launched.append(name))
        monkeypatch.setattr(cuda.sweep_kernels, name, seen)
    for size, expected in ((20, ["products", "sweep"]), (65, ["sweep"])):
        given = problem(kind, 2, 1, size)
        assert_equal_to_the_plain_form(fences, cuda.scan, sweep.scan, given, 1)
        assert launched == expected
        launched.clear()


class Noted:
    """A kernel whose launches are noted."""

    def __init__(self, kernel, note):
        self.kernel, self.note = kernel, note

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.note(options)
            return self.kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize("allowed", [True, False])
def test_products_use_tf32_where_torchs_recurrent_kernels_may(monkeypatch, allowed):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    launched = []
    monkeypatch.setattr(
        cuda.sweep_kernels, "products", Noted(cuda.sweep_kernels.products, launched.append)
    )
    for size in (7, 65):
        given = problem("RNN", 2, 1, size)
        results(cuda.scan, lambda t: t if t is None else t.float().to(DEVICE), given, 1)
    assert [options["TF32"] for options in launched] == [allowed, False]


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", GATES)
def test_three_products_in_tf32_are_as_exact_as_float32_on_a_gpu(monkeypatch, kind):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for size in (20, 64):
        given = problem(kind, 300, 5, size)
        expected = results(cpu.sweep, in_float64, given)
        found = results(cuda.scan, lambda t: t if t is None else t.float().to(DEVICE), given, 12)
        assert_close(found, expected, 1e-5)


def test_what_is_supported():
    assert kernels("cuda", torch.float32, 1).name == "triton"
    assert kernels("cuda", torch.float32, 128).name == "triton"
    wide = kernels("cuda", torch.float32, 129)
    assert (wide.name, wide.scan) == ("triton", sweep.scan)
    assert kernels("cuda", torch.float64, 20).name == "torch"


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    ("length", "samples", "size", "chunk"),
    [(70_000, 1, 20, 187), (1034, 16, 20, 23), (300, 5, 64, 12), (200, 16, 128, 10)],
)
def test_long_and_wide_on_a_gpu(kind, length, samples, size, chunk):
    given = problem(kind, length, samples, size)
    expected = results(cpu.sweep, in_float64, given)

    def on_the_gpu(t):
        return None if t is None else t.to(DEVICE, torch.float32)

    swept = results(cuda.sweep, on_the_gpu, given)
    assert_close(swept, expected, 1e-5)
    assert all(map(torch.equal, results(cuda.sweep, on_the_gpu, given), swept))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(results(cuda.scan, on_the_gpu, given, chunk), expected, 1e-5)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(
    ("length", "samples", "size"), [(1000, 1, 129), (400, 64, 256), (100, 200, 515), (70, 3, 1024)]
)
def test_wide_layers_on_a_gpu(monkeypatch, kind, allowed, length, samples, size):
    """Recorded and replayed, in one block and in two, with and without TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    given = problem(kind, length, samples, size)
    expected = results(cpu.sweep, in_float64, given)

    def in_blocks(steps, hidden, dy, g):
        wide, edge = cuda.wide_sweep(hidden), length // 3
        g = wide(steps.at(slice(edge, None)), dy[edge:], g)
        return wide(steps.at(slice(0, edge)), dy[:edge], g)

    def on_the_gpu(t):
        return None if t is None else t.to(DEVICE, torch.float32)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swept = results(cuda.sweep, on_the_gpu, given)
        assert_close(swept, expected, 3e-3 if allowed else 1e-5)
        assert all(map(torch.equal, results(in_blocks, on_the_gpu, given), swept))


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_states_of_long_sequences_on_a_gpu(kind):
    weights, x, before, after, c = states(kind, 70_000, 2, 20, 1)
    with torch.no_grad():
        gates = torch.nn.functional.linear(x, weights.inputs, weights.bias_inputs)
        hidden = torch.nn.functional.linear(before, weights.hidden, weights.bias_hidden)
    if kind == "GRU":
        found = cuda.gru_slopes(*(t.to(DEVICE, torch.float32) for t in (gates, hidden, before)))
    else:
        given = gates + hidden, after, c
        found = cuda.lstm_slopes(*(t.to(DEVICE, torch.float32) for t in given))
    assert_slopes_close(found, recurrent.slopes(weights, x, before, after, c))


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("way", ["sweep", "scan"])
def test_more_numbers_than_32_bits_count_on_a_gpu(way):
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB")
    length, samples, size = 512, 16_384, 96
    shape = (length, samples, size)
    steps = Slopes(
        torch.rand(length, samples, 3, size, device=DEVICE) - 0.5,
        1 - torch.rand(shape, device=DEVICE) / length,  # else nothing is left of the gradient
        torch.rand(shape, device=DEVICE),
    )
    assert steps.gates.numel() > 2**31
    hidden = torch.rand(3 * size, size, device=DEVICE) / size - 0.5 / size
    g = torch.rand(samples, size, device=DEVICE)
    some = torch.tensor([0, samples // 2, samples - 1], device=DEVICE)
    part = Slopes(*(t[:, some].cpu().double() for t in vars(steps).values()))
    expected = results(
        cpu.sweep, in_float64, (part, hidden.cpu().double(), None, g[some].cpu().double())
    )
    options = [] if way == "sweep" else [256]
    before = getattr(cuda, way)(steps, hidden, None, g, *options)
    found = [before[some].cpu(), steps.gates[:, some].cpu(), steps.inner[:, some].cpu()]
    assert_close([found[0]], [expected[0]], 1e-4)
    assert_close(found[1:], expected[1:], 1e-5)
