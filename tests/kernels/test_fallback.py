"""Where Triton cannot launch kernels, torch's operations run instead, and one warning says so."""

import subprocess
import warnings

import pytest
import torch

import retrograde as rg
from oracles.compiled_code import LAUNCHED
from oracles.cuda_kernels import load
from retrograde import kernels as house
from retrograde.kernels import cells, fallback, sweep
from retrograde.kernels.cells import Slopes
from retrograde.recurrent import backward, core, forward
from retrograde.scan.sparse import arithmetic
from retrograde.scan.sparse.factor import full, identity
from retrograde.scan.sparse.pattern import Pattern

cuda = load("kernels.cuda.launch")
cuda_sparse = load("scan.sparse.cuda_products")
pytestmark = pytest.mark.usefixtures("interpreter")


# As triton.runtime.errors has it.
OutOfResources = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
# Made anew at each launch: an error that is raised holds the frames that it went through.
REFUSALS = {
    "room": lambda: OutOfResources("out of resource: shared memory, Required: 167424"),
    "no compiler": lambda: RuntimeError("Failed to find C compiler. Please specify via CC"),
    "no headers": lambda: subprocess.CalledProcessError(1, "gcc"),
    "no such compiler": lambda: FileNotFoundError("/usr/bin/cc-9"),
}


class Refusing:
    """A kernel that cannot be launched; counts how often it was tried."""

    def __init__(self, error):
        self.error, self.tries = error, 0

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **options):
        self.tries += 1
        raise self.error()


@pytest.fixture
def refusing(monkeypatch):
    """Make every launch raise an error; what was cached before and after is forgotten."""

    def forget():
        house.kernels.cache_clear()
        arithmetic.sparse_kernels.cache_clear()
        fallback._warn.cache_clear()

    def refuse(error):
        forget()
        kernel = Refusing(error)
        for module, names in LAUNCHED.items():
            for name in names:
                monkeypatch.setattr(getattr(cuda, module), name, kernel)
        monkeypatch.setattr(cuda_sparse, "sums", kernel)
        return kernel

    yield refuse
    forget()


def problem(gates, length=5, samples=3, size=7):
    torch.manual_seed(0)
    state = size * (2 if gates == 4 else 1)
    shape = (length, samples, size)
    gated = None if gates == 1 else torch.rand(shape)
    slopes = Slopes(torch.rand(length, samples, gates, size) - 0.5, gated, gated)
    hidden = torch.rand(gates * size, size) - 0.5
    return slopes, hidden, torch.rand(shape), torch.rand(samples, state)


@pytest.mark.parametrize("way", ["sweep", "scan"])
@pytest.mark.parametrize("error", REFUSALS.values(), ids=REFUSALS)
def test_the_plain_form_runs_and_one_warning_says_so(refusing, way, error):
    kernel = refusing(error)
    chunk = () if way == "sweep" else (2,)

    def run(size):
        slopes, *given = problem(3, size=size)
        theirs = slopes.map(torch.clone)
        use = house.kernels("cuda", torch.float32, size)
        found = getattr(use, way)(slopes, *given, *chunk)
        assert torch.equal(found, getattr(sweep, way)(theirs, *given, *chunk))
        assert torch.equal(slopes.gates, theirs.gates)

    with pytest.warns(RuntimeWarning, match="Triton cannot launch a kernel here"):
        run(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(7)
        run(9)  # by kernels of its own
    assert kernel.tries == 2  # once for a size


def test_wide_layers_go_on_too(refusing):
    kernel = refusing(REFUSALS["no compiler"])
    use = house.kernels("cuda", torch.float32, 129)
    slopes, hidden, dy, g = problem(4, size=129)
    theirs, swept = slopes.map(torch.clone), use.sweep_with(hidden, len(g))
    with pytest.warns(RuntimeWarning, match="Failed to find C compiler"):
        g = swept(slopes.at(slice(3, None)), dy[3:], g)
    g = swept(slopes.at(slice(0, 3)), dy[:3], g)
    assert torch.equal(g, sweep.sweep(theirs, hidden, dy, problem(4, size=129)[3]))
    assert torch.equal(slopes.gates, theirs.gates)
    assert kernel.tries == 1


def test_slopes_and_sparse_products_go_on_too(refusing):
    refusing(REFUSALS["room"])
    pattern = Pattern(identity(2), full(2, 2))
    values = torch.rand(3, pattern.nnz)
    ours, plain = arithmetic.sparse_kernels("cuda", torch.float32), arithmetic.plain
    with pytest.warns(RuntimeWarning, match="Required: 167424"):
        found = ours.multiply(pattern, pattern, values[0], values)
    assert torch.equal(found, plain.multiply(pattern, pattern, values[0], values))
    given = pattern, values, values[:, :4]
    assert torch.equal(ours.apply(*given), plain.apply(*given))
    steps, gates = torch.rand(4, 2, 7), torch.rand(4, 2, 28)
    gru, lstm = house.kernels("cuda", torch.float32, 7).gates
    for kernel, theirs in ((gru, cells.gru_slopes), (lstm, cells.lstm_slopes)):
        three = gates[..., :21] if kernel is gru else gates
        given = (three.clone(), steps) if kernel is gru else (steps, steps[0])
        given_again = (three.clone(), steps) if kernel is gru else (steps, steps[0])
        found, expected = kernel(three.clone(), *given), theirs(three.clone(), *given_again)
        assert torch.equal(found.gates, expected.gates)


def test_any_other_error_is_raised(refusing):
    refusing(lambda: RuntimeError("CUDA error: an illegal memory access was encountered"))
    use = house.kernels("cuda", torch.float32, 7)
    for _ in range(2):  # nothing takes over
        with pytest.raises(RuntimeError, match="illegal memory access"):
            use.sweep(*problem(1))


@pytest.mark.parametrize("cell", [rg.GRU, rg.LSTM])
@pytest.mark.parametrize("asked", [{"memory": "60%"}, {"backward": "scan"}], ids=str)
def test_modules_go_on(refusing, monkeypatch, cell, asked):
    refusing(REFUSALS["room"])
    for module in (backward, core, forward):
        monkeypatch.setattr(module, "kernels", lambda _, *of: house.kernels("cuda", *of))
    net = cell(3, 5, **asked)
    x = torch.randn(400, 2, 3, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="Triton cannot launch"):
        net(x)[0].sum().backward()
    ours = x.grad.clone()
    x.grad = None
    plain = getattr(torch.nn, cell.__name__)(3, 5)
    plain.load_state_dict(net.state_dict())
    plain(x)[0].sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-4, atol=1e-6)
