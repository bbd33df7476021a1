"""The loops of :mod:`retrograde.scan.kernels.cpu` that find slopes and sweep them in one go.

A thread takes its samples from the last step of a block to the first. Slopes are made where they
are used and never stored, so a core neither writes them nor fetches what another one wrote. Arrays
are those of ``cpu_sweep`` and ``cpu_slopes``; what comes out, the gradients of the gates, goes to
``out`` (L, B, K·H). ``g`` goes from the gradient of the state after the block to that before it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrograde.scan.kernels.lanes import (
    LANES,
    compiled,
    like,
    load,
    one_above,
    quotient,
    sigmoid,
    store,
    tanh,
)
from retrograde.scan.kernels.tiles import product, whole_vectors

__all__ = ["sweep_gru", "sweep_lstm", "sweep_rnn"]

_Reals = NDArray[np.floating[Any]]


@compiled  # type: ignore[untyped-decorator]
def sweep_rnn(
    after: _Reals,
    hidden: _Reals,
    losses: _Reals,
    g: _Reals,
    out: _Reals,
    relu: bool,
    first: int,
    last: int,
) -> None:
    """RNN, with tanh or ReLU."""
    samples, size = g.shape
    wide = whole_vectors(size)
    before = np.empty((last - first) * wide, g.dtype)
    h, terms, known, s = after.reshape(-1), losses.reshape(-1), g.reshape(-1), out.reshape(-1)
    for t in range(after.shape[0] - 1, -1, -1):
        for b in range(first, last):
            row = (t * samples + b) * size
            for j in range(0, size, LANES):
                left, at = size - j, row + j
                x = load(known, b * size + j, left)
                if losses.shape[0]:
                    x = x + load(terms, at, left)
                state = load(h, at, left)
                slope = one_above(state) if relu else like(x, 1) - state * state
                store(s, at, x * slope, left)
        before[:] = 0
        product(s, (t * samples + first) * size, last - first, hidden, wide, before)
        for b in range(first, last):
            g[b] = before[(b - first) * wide : (b - first) * wide + size]


@compiled  # type: ignore[untyped-decorator]
def sweep_gru(
    inputs: _Reals,
    driven: _Reals,
    states: _Reals,
    inner: _Reals,
    hidden: _Reals,
    losses: _Reals,
    g: _Reals,
    first: int,
    last: int,
) -> None:
    """GRU; ``driven``, what the states bring to the gates, becomes the gates' gradients.

    ``inner`` takes those of the third gate as the input weights see it.
    """
    samples, size = g.shape
    wide = whole_vectors(size)
    before = np.empty((last - first) * wide, g.dtype)
    x, u, h = inputs.reshape(-1), driven.reshape(-1), states.reshape(-1)
    s_n, terms, known = inner.reshape(-1), losses.reshape(-1), g.reshape(-1)
    for t in range(states.shape[0] - 1, -1, -1):
        for b in range(first, last):
            row, to = (t * samples + b) * size, (b - first) * wide
            for j in range(0, size, LANES):
                left, at, v = size - j, row + j, 3 * row + j
                r = sigmoid(load(x, v, left) + load(u, v, left))
                z = sigmoid(load(x, v + size, left) + load(u, v + size, left))
                m = load(u, v + 2 * size, left)
                n = tanh(load(x, v + 2 * size, left) + r * m)
                d, one = load(known, b * size + j, left), like(r, 1)
                if losses.shape[0]:
                    d = d + load(terms, at, left)
                slope = d * (one - z) * (one - n * n)
                store(u, v, slope * m * r * (one - r), left)
                store(u, v + size, d * (load(h, at, left) - n) * z * (one - z), left)
                store(u, v + 2 * size, slope * r, left)
                store(s_n, at, slope, left)
                store(before, to + j, d * z, LANES)
        product(u, (t * samples + first) * 3 * size, last - first, hidden, wide, before)
        for b in range(first, last):
            g[b] = before[(b - first) * wide : (b - first) * wide + size]


@compiled  # type: ignore[untyped-decorator]
def sweep_lstm(
    gates: _Reals,
    after: _Reals,
    cells: _Reals,
    hidden: _Reals,
    losses: _Reals,
    g: _Reals,
    out: _Reals,
    first: int,
    last: int,
) -> None:
    """LSTM, from its gates i, f, g, o (L, B, 4 H), h after and c before each step (L, B, H)."""
    samples, size = g.shape[0], g.shape[1] // 2
    wide = whole_vectors(size)
    before = np.empty((last - first) * wide, g.dtype)
    given, h, c, s = gates.reshape(-1), after.reshape(-1), cells.reshape(-1), out.reshape(-1)
    terms, known = losses.reshape(-1), g.reshape(-1)
    for t in range(gates.shape[0] - 1, -1, -1):
        for b in range(first, last):
            row, of_h = (t * samples + b) * size, 2 * b * size
            of_c = of_h + size
            for j in range(0, size, LANES):
                left, at, v = size - j, row + j, 4 * row + j
                i, f = load(given, v, left), load(given, v + size, left)
                n, o = load(given, v + 2 * size, left), load(given, v + 3 * size, left)
                x, one = load(known, of_h + j, left), like(i, 1)
                if losses.shape[0]:
                    x = x + load(terms, at, left)
                tanh_c = quotient(load(h, at, left), o)  # h = o tanh c; o = 0 makes all below 0
                d = load(known, of_c + j, left) + x * o * (one - tanh_c * tanh_c)
                store(known, of_c + j, d * f, left)
                store(s, v, d * n * i * (one - i), left)
                store(s, v + size, d * load(c, at, left) * f * (one - f), left)
                store(s, v + 2 * size, d * i * (one - n * n), left)
                store(s, v + 3 * size, x * tanh_c * o * (one - o), left)
        before[:] = 0
        product(s, (t * samples + first) * 4 * size, last - first, hidden, wide, before)
        for b in range(first, last):
            g[b, :size] = before[(b - first) * wide : (b - first) * wide + size]
