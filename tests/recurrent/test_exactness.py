"""Gradients, scanned and swept, against autograd on ``torch.nn``, 1 to 5000 steps, gain 0.1 to 2.2.

What "equal" can mean:

- Sums over T·B steps round. torch's own float32 gradients of weights are off by up to 1e-5 at
  T·B = 80 000, so the reference is float64 on the same weights, and where sums are long torch's
  own error against it is allowed on top.
- With a gain well above 1 a plain RNN is chaotic, and above 2 a wide GRU or LSTM: two trajectories
  that differ by one rounding part after a few dozen steps, and so do their gradients, whatever
  computes them. The gradient of the trajectory *that was run* is well defined all the same: there
  the reference is float64 autograd through the cell's equations at our own states (:func:`along`),
  and what float32 autograd at the same states is off by is allowed on top.
- A gradient that has grown by many orders of magnitude is ill-conditioned: torch's own is then off
  by anything from 2e-6 to 3e-4, in one sample more, in another less, and so is ours. There 1e-3 is
  held as a whole, and what is said above on the last steps.
- Gradients that explode further leave the type's range, in torch's pass as in ours. Then the same
  tensors have to be finite in both, and inputs' gradients equal at the steps before they overflow.
"""

import copy
import itertools
import warnings

import pytest
import torch

from oracles.networks import (
    CELLS,
    assert_close,
    call,
    gradients,
    pair,
    relative_error,
    seeds_for,
    state_of,
)
from retrograde.kernels.cells import Weights
from retrograde.recurrent.find_plan import find_plan
from retrograde.recurrent.forward import room_for, run
from retrograde.recurrent.spans import scan_lengths

pytestmark = pytest.mark.usefixtures("ours_however_short")

SIZES, LENGTHS, BATCHES = (1, 7, 20, 33, 64, 128), (1, 2, 3, 63, 64, 65, 1000, 5000), (1, 3, 16)
GAINS = (0.1, 0.9, 1.5, 2.2)
WAYS = {"sweep": {"memory": "100%"}, "scan": {"backward": "scan"}}
DTYPES = (torch.float64, torch.float32)

# (H, T, B, gain): every value, each length at several widths, the dearest combinations left out.
POINTS = [
    (128, 1, 16, 2.2),
    (1, 1, 1, 0.9),
    (33, 2, 3, 0.1),
    (64, 2, 16, 1.5),
    (7, 3, 1, 0.9),
    (20, 3, 16, 2.2),
    (20, 63, 16, 1.5),
    (64, 63, 1, 0.1),
    (128, 64, 3, 0.9),
    (20, 64, 1, 2.2),
    (1, 65, 16, 2.2),
    (33, 65, 3, 1.5),
    (7, 1000, 16, 0.9),
    (64, 1000, 3, 1.5),
    (1, 1000, 1, 0.1),
    (20, 1000, 3, 2.2),
    (20, 5000, 3, 0.1),
    (7, 5000, 16, 1.5),
]


def in_double(net, x, state, seeds):
    """torch's gradients in float64, on the same weights."""
    x, *state = [t.detach().double().requires_grad_() for t in (x, *state)]
    return gradients(copy.deepcopy(net).double(), x, state, [s.double() for s in seeds])


def trajectory(net, x, state, way):
    """Our states after each step: h, and an LSTM's c; in the pieces that a call runs, for where
    trajectories part a rounding is enough."""
    call = net._call_of(x, state if net.mode == "LSTM" else state[0])
    weights = Weights(net.mode, *(p.detach() for p in net.parameters()))
    now, found = tuple(s[0].detach() for s in state), []
    shape = x.shape[1], x.shape[2], weights.size, x.dtype, "cpu"
    block, _ = scan_lengths(net.mode, len(x), *shape)
    if way == "sweep":
        parts = find_plan(call, "100%").parts
        if not parts:  # torch's own module runs
            return None
        block = max(1, parts[0][0].block // x.shape[1])
    for part in x.detach().split(block):
        kept = room_for(weights, part)
        h, now = run(weights, part, now, kept)
        cells = [] if kept is None else [torch.cat([kept.cells[1:], now[1].unsqueeze(0)])]
        found.append([h, *cells])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def along(net, x, state, seeds, states, dtype):
    """Autograd through the cell's equations, each step's state replaced by a given one."""
    net = copy.deepcopy(net).to(dtype)
    x, *first = [t.detach().to(dtype).requires_grad_() for t in (x, *state)]
    driven, now, outputs = x @ net.weight_ih_l0.T + net.bias_ih_l0, [s[0] for s in first], []
    for from_input, *run_states in zip(driven, *(s.to(dtype) for s in states), strict=True):
        now = cell_step(net.mode, from_input, now[0] @ net.weight_hh_l0.T + net.bias_hh_l0, now)
        now = [s + (r - s).detach() for s, r in zip(now, run_states, strict=True)]
        outputs.append(now[0])
    names = [f"state {i}" for i in range(len(first))]
    wanted = {"x": x, **dict(zip(names, first, strict=True)), **dict(net.named_parameters())}
    roots = [torch.stack(outputs), *(s.unsqueeze(0) for s in now)]
    found = torch.autograd.grad(roots, list(wanted.values()), [s.to(dtype) for s in seeds])
    return dict(zip(wanted, found, strict=True))


def cell_step(mode, from_input, from_state, state):
    h = state[0]
    if mode.startswith("RNN"):
        total = from_input + from_state
        return [torch.tanh(total) if mode == "RNN_TANH" else torch.relu(total)]
    if mode == "LSTM":
        i, f, g, o = (from_input + from_state).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return [torch.sigmoid(o) * torch.tanh(c), c]
    (r, z, n), (hidden_r, hidden_z, m) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + hidden_r) * m)
    return [n + torch.sigmoid(z + hidden_z) * (h - n)]


def taken_together(found, size):
    """With one hidden unit the gradient of a parameter, or of a sample's state, is one number, a
    sum that may cancel to nothing: then all but the inputs' are compared as one vector."""
    if size > 1:
        return found
    return {"x": found["x"], "rest": torch.cat([t.flatten() for n, t in found.items() if n != "x"])}


def is_finite(found):
    return {name: bool(t.isfinite().all()) for name, t in found.items()}


def overflow_free(found, largest):
    """The first step from which on no gradient of an input has left the range of the type."""
    fine = (found["x"].abs().flatten(1).amax(1) < largest).tolist()
    return len(fine) - len(list(itertools.takewhile(bool, reversed(fine))))


def grown(reference):
    """Whether the gradient gets so much larger on its way back that rounding does, too."""
    size = reference["x"].abs().flatten(1).amax(1)
    return bool(size.max() > 1000 * size[-1])


def last_steps(found):
    return {"x": found["x"][-30:]}


def check_single(found, theirs, reference, size, own_error_too):
    """2e-6, and float32 autograd's own error where sums are long or trajectories part."""
    found, theirs, reference = (taken_together(f, size) for f in (found, theirs, reference))
    if grown(reference):
        assert_close(found, reference, 1e-3)
        found, theirs, reference = map(last_steps, (found, theirs, reference))
    own = max(relative_error(theirs[name], reference[name]) for name in reference)
    assert_close(found, reference, 2e-6 + (4 * own if own_error_too else 0))


def check_exploded(found, theirs, dtype):
    assert is_finite(found) == is_finite(theirs)
    start = overflow_free(theirs, torch.finfo(dtype).max / 1e6)
    if start < len(found["x"]):  # else the forward pass itself overflowed
        tolerance = 1e-10 if dtype == torch.float64 else 1e-3
        assert relative_error(found["x"][start:], theirs["x"][start:]) <= tolerance


def check(cell, dtype, size, length, batch, gain):
    torch.manual_seed(3)
    x = torch.randn(length, batch, 5, dtype=dtype, requires_grad=True)
    theirs, _ = pair(cell, 5, size, gain=gain, dtype=dtype)
    state = state_of(theirs, batch, dtype=dtype)
    with torch.no_grad():
        outputs = call(theirs, x, state)
    seeds = seeds_for(outputs)
    steady = gain < (2 if cell in ("GRU", "LSTM") else 1)
    plain = gradients(theirs, x, state, seeds)
    for way in WAYS:
        reference = expected = plain
        _, ours = pair(cell, 5, size, gain=gain, dtype=dtype, **WAYS[way])
        states = trajectory(ours, x, state, way)
        if states and not steady and all(s.isfinite().all() for s in states):
            reference = along(theirs, x, state, seeds, states, torch.float64)
            expected = along(theirs, x, state, seeds, states, dtype)
        elif dtype == torch.float32:
            reference = in_double(theirs, x, state, seeds)
        healthy = all(is_finite(expected).values())
        with warnings.catch_warnings():
            if gain < 1:
                warnings.simplefilter("error")
            else:  # products that overflow are told of, as they should be
                warnings.filterwarnings("ignore", "products of Jacobians", RuntimeWarning)
            found = gradients(ours, x, state, seeds)
        if steady:
            for a, b in zip(call(ours, x, state), outputs, strict=True):
                assert relative_error(a, b) <= (1e-12 if dtype == torch.float64 else 2e-6)
        if not healthy:
            check_exploded(found, expected, dtype)
        elif dtype == torch.float64:
            assert_close(found, reference, 1e-10)
        else:
            long = length * batch > 3000
            check_single(found, expected, reference, size, long or not steady)


@pytest.mark.quick(2, every=48)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_gradients_are_autograds(cell, dtype, point):
    check(cell, dtype, *point)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_autograds_on_the_whole_grid(cell, dtype, gain, length, size):
    for batch in BATCHES:
        check(cell, dtype, size, length, batch, gain)


def test_the_points_cover_every_value():
    sizes, lengths, batches, gains = map(set, zip(*POINTS, strict=True))
    assert (sizes, lengths) == (set(SIZES), set(LENGTHS))
    assert (batches, gains) == (set(BATCHES), set(GAINS))


@pytest.mark.quick(1)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("way", WAYS)
def test_long_sums_in_single_precision_round_no_more_than_short_ones(cell, way):
    """80 000 terms: torch's own gradients are off by 3e-6 to 5e-6 here."""
    torch.manual_seed(3)
    x = torch.randn(5000, 16, 5, requires_grad=True)
    theirs, ours = pair(cell, 5, 7, gain=0.9, **WAYS[way])
    state = state_of(theirs, 16, dtype=torch.float32)
    with torch.no_grad():
        seeds = seeds_for(call(theirs, x, state))
    assert_close(gradients(ours, x, state, seeds), in_double(theirs, x, state, seeds), 2e-6)
