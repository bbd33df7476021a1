"""The loops of :mod:`retrograde.kernels.cpu` that run a layer forward.

They run the samples first … last − 1. Their arrays are:

- ``driven`` (L, B, K·H): the inputs' part of the gates, with the biases;
- ``bias`` (3 H): a GRU's bias_hh, which is not a part of ``driven``;
- ``hidden`` (H, K·H): the transposed hidden weights, in panels;
- ``h`` and ``c`` (B, H): the state before the first step, overwritten by that after the last;
- ``outputs`` (L, B, H): receives h after each step;
- ``sums``: scratch memory, a row of whole vectors for each sample.
"""

from retrograde.kernels.lanes import LANES, Reals, compiled, load, positive, sigmoid, store, tanh
from retrograde.kernels.tiles import product, whole_vectors

__all__ = ["run_gru", "run_lstm", "run_rnn"]


@compiled  # type: ignore[untyped-decorator]
def run_rnn(
    driven: Reals,
    hidden: Reals,
    h: Reals,
    outputs: Reals,
    relu: bool,
    sums: Reals,
    first: int,
    last: int,
) -> None:
    """Run an RNN with tanh or ReLU."""
    samples, size = h.shape
    width = whole_vectors(size)
    x, states, y = driven.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    sums = sums[first * width : last * width]
    for t in range(driven.shape[0]):
        sums[:] = 0
        product(states, first * size, size, last - first, hidden, width, sums)
        for b in range(first, last):
            at, row, z = (t * samples + b) * size, b * size, (b - first) * width
            for j in range(0, size, LANES):
                left = size - j
                total = load(sums, z + j, left) + load(x, at + j, left)
                state = positive(total) if relu else tanh(total)
                store(states, row + j, state, left)
                store(y, at + j, state, left)


@compiled  # type: ignore[untyped-decorator]
def run_gru(
    driven: Reals,
    bias: Reals,
    hidden: Reals,
    h: Reals,
    outputs: Reals,
    sums: Reals,
    first: int,
    last: int,
) -> None:
    """Run a GRU; ``bias`` (3 H) is added to U h."""
    samples, size = h.shape
    width = whole_vectors(3 * size)
    x, states, y = driven.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    sums = sums[first * width : last * width]
    for t in range(driven.shape[0]):
        for b in range(last - first):
            sums[b * width : b * width + 3 * size] = bias
        product(states, first * size, size, last - first, hidden, width, sums)
        for b in range(first, last):
            at, row, u = (t * samples + b) * size, b * size, (b - first) * width
            for j in range(0, size, LANES):
                left, v, w = size - j, 3 * at + j, u + j
                r = sigmoid(load(x, v, left) + load(sums, w, left))
                z = sigmoid(load(x, v + size, left) + load(sums, w + size, left))
                m = load(sums, w + 2 * size, left)
                n = tanh(load(x, v + 2 * size, left) + r * m)
                state = n + z * (load(states, row + j, left) - n)
                store(states, row + j, state, left)
                store(y, at + j, state, left)


@compiled  # type: ignore[untyped-decorator]
def run_lstm(
    driven: Reals,
    hidden: Reals,
    h: Reals,
    c: Reals,
    outputs: Reals,
    before: Reals,
    sums: Reals,
    first: int,
    last: int,
) -> None:
    """Run an LSTM.

    The gates i, f, g, o overwrite ``driven``. ``before`` (L, B, H) receives c before each step,
    unless it is empty.
    """
    samples, size = h.shape
    width = whole_vectors(4 * size)
    gates, states, y = driven.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    cells, cells_before = c.reshape(-1), before.reshape(-1)
    sums = sums[first * width : last * width]
    for t in range(driven.shape[0]):
        sums[:] = 0
        product(states, first * size, size, last - first, hidden, width, sums)
        for b in range(first, last):
            at, row, u = (t * samples + b) * size, b * size, (b - first) * width
            for j in range(0, size, LANES):
                left, v, w = size - j, 4 * at + j, u + j
                i = sigmoid(load(gates, v, left) + load(sums, w, left))
                f = sigmoid(load(gates, v + size, left) + load(sums, w + size, left))
                g = tanh(load(gates, v + 2 * size, left) + load(sums, w + 2 * size, left))
                o = sigmoid(load(gates, v + 3 * size, left) + load(sums, w + 3 * size, left))
                cell = load(cells, row + j, left)
                if before.shape[0]:
                    store(cells_before, at + j, cell, left)
                cell = f * cell + i * g
                state = o * tanh(cell)
                store(gates, v, i, left)
                store(gates, v + size, f, left)
                store(gates, v + 2 * size, g, left)
                store(gates, v + 3 * size, o, left)
                store(cells, row + j, cell, left)
                store(states, row + j, state, left)
                store(y, at + j, state, left)
