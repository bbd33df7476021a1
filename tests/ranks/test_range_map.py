"""The affine map of a section of steps, against autograd row by row."""

import pytest
import torch

from retrograde.kernels import kernels
from retrograde.kernels.cells import Weights
from retrograde.kernels.sweep import products
from retrograde.ranks import range_map as module
from retrograde.ranks.range_map import range_map

KINDS = {"RNN_TANH": torch.nn.RNN, "RNN_RELU": torch.nn.RNN, "GRU": torch.nn.GRU}
KINDS["LSTM"] = torch.nn.LSTM


def make(kind, layers=1, size=4, dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    more = {"nonlinearity": kind[4:].lower()} if kind.startswith("RNN") else {}
    net = KINDS[kind](3, size, layers, bias=bias, dtype=dtype, **more)
    with torch.no_grad():  # so that what is far away still counts
        for w in net.parameters():
            w.mul_(1.5)
    flat = [p.detach() for p in net._flat_weights]
    each = len(flat) // layers
    return net, [Weights.of(kind, flat[k : k + each]) for k in range(0, len(flat), each)]


def given(net, length, samples=2):
    torch.manual_seed(length)
    dtype = net.weight_hh_l0.dtype
    x = torch.randn(length, samples, 3, dtype=dtype)
    shape = (net.num_layers, samples, net.hidden_size)
    state = tuple(torch.randn(shape, dtype=dtype) for _ in range(2 if net.mode == "LSTM" else 1))
    return x, state, torch.randn(length, samples, net.hidden_size, dtype=dtype)


def flat(state):
    return torch.cat([s.transpose(0, 1).flatten(1) for s in state], 1)


def by_rows(net, x, state, dy):
    """P and d, each row of P by a backward pass of torch's own."""
    state = tuple(s.clone().requires_grad_() for s in state)
    y, after = net(x, state if net.mode == "LSTM" else state[0])
    after = after if isinstance(after, tuple) else (after,)

    def back(roots, seeds):
        found = torch.autograd.grad(roots, state, seeds, retain_graph=True, allow_unused=True)
        pairs = zip(found, state, strict=True)
        return flat([torch.zeros_like(s) if g is None else g for g, s in pairs])

    samples, n = flat(state).shape
    rows = []
    for row in torch.eye(n, dtype=x.dtype):
        parts = row.expand(samples, n).split([s.shape[0] * s.shape[-1] for s in state], 1)
        ends = [
            p.unflatten(1, (net.num_layers, net.hidden_size)).transpose(0, 1).contiguous()
            for p in parts
        ]
        rows.append(back(after, ends))
    zero = torch.zeros(samples, n, dtype=x.dtype)
    return torch.stack(rows, 1), zero if dy is None else back([y], [dy])


def check(found, expected, tolerance=1e-11):
    for a, b in zip((found[:, :-1], found[:, -1]), expected, strict=True):
        scale = max(b.abs().amax().item(), 1e-300)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("chunks", [None, 1, 3, 40])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_autograds(kind, layers, chunks):
    net, weights = make(kind, layers)
    for length in (1, 2, 7, 29):
        x, state, dy = given(net, length)
        for losses in (dy, None):
            found = range_map(weights, x, state, losses, chunks)
            check(found, by_rows(net, x, state, losses))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_length(kind, layers, monkeypatch):
    net, weights = make(kind, layers, bias=False)
    x, state, dy = given(net, 23)
    expected = by_rows(net, x, state, dy)
    for size in (1, 3000, 9000):  # one step, and some
        monkeypatch.setattr(module, "_BLOCK_BYTES", size)
        for chunks in (None, 1, 2):
            check(range_map(weights, x, state, dy, chunks), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision(kind):
    net, weights = make(kind, 2, dtype=torch.float32)
    x, state, dy = given(net, 12)
    check(range_map(weights, x, state, dy), by_rows(net, x, state, dy), 2e-5)


@pytest.mark.parametrize("size", [1, 4, 9, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_products_are_the_plain_ones(kind, size):
    torch.manual_seed(1)
    net, (weights,) = make(kind, size=size)
    x, state, dy = given(net, 12, 3)
    block, losses = next(module._blocks([weights], x, state, dy, 12))
    chunks, losses = module.in_chunks(block[0], losses, 0, 4)
    compiled = kernels("cpu", torch.float64, size).products
    assert compiled is not products
    for terms in (losses, None):
        expected = products(chunks, weights.hidden, terms)
        found = compiled(chunks, weights.hidden, terms)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
