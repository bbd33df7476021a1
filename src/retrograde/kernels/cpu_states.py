"""The loops of :mod:`retrograde.kernels.cpu_layer` that run a layer forward.

They run the samples first … last − 1. Their arrays are:

- ``driven`` (L, B, K·H): the inputs' part of the gates, with the biases;
- ``hidden``: the transposed hidden weights (H, K·H) in panels, or the weights (K·H, 1, H) as they
  lie;
- ``bias`` (3 H): a GRU's bias_hh, which is not a part of ``driven`` but of the states' part;
- ``h`` and ``c`` (B, H): the state before the first step, overwritten by that after the last;
- ``outputs`` (L, B, H): receives h after each step;
- ``starts`` (L, B): true before a step at which a sample begins anew, from its state ``entry``
  (B, n); no steps if none does;
- ``sums``: scratch memory, a row of whole vectors for each sample.
"""

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cpu_cells import gru_gates, lstm_gates, rnn_state
from retrograde.kernels.lanes import LANES, Reals, compiled, load, store, tanh
from retrograde.kernels.tiles import dots, product


@compiled  # type: ignore[untyped-decorator]
def _multiply(
    h: Reals, start: int, size: int, rows: int, hidden: Reals, width: int, out: Reals
) -> None:
    """Add U h to ``out``, for so many states from ``start`` on."""
    if hidden.shape[1] * hidden.shape[2] == size:
        dots(h, start, rows, hidden, width, out)
    else:
        product(h, start, size, 1, rows, hidden, width, out, width)


@compiled  # type: ignore[untyped-decorator]
def run_rnn(
    relu: bool, driven: Reals, outputs: Reals, hidden: Reals, h: Reals, starts: NDArray[np.bool_],
    entry: Reals, sums: Reals, first: int, last: int,
) -> None:  # fmt: skip
    """Run an RNN with tanh or ReLU."""
    samples, size = h.shape
    width, own = sums.shape[1], sums[first:last].reshape(-1)
    x, states, y = driven.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    for t in range(driven.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, h, 0, first, last)
        own[:] = 0
        _multiply(states, first * size, size, last - first, hidden, width, own)
        for b in range(first, last):
            at, row, z = (t * samples + b) * size, b * size, (b - first) * width
            for j in range(0, size, LANES):
                left = size - j
                state = rnn_state(load(own, z + j, left) + load(x, at + j, left), relu)
                store(states, row + j, state, left)
                store(y, at + j, state, left)


@compiled  # type: ignore[untyped-decorator]
def run_gru(
    driven: Reals, outputs: Reals, bias: Reals, hidden: Reals, h: Reals, starts: NDArray[np.bool_],
    entry: Reals, sums: Reals, first: int, last: int,
) -> None:  # fmt: skip
    """Run a GRU; ``bias`` (3 H) is added to U h."""
    samples, size = h.shape
    width, own = sums.shape[1], sums[first:last].reshape(-1)
    x, states, y = driven.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    for t in range(driven.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, h, 0, first, last)
        for b in range(last - first):
            own[b * width : b * width + 3 * size] = bias
        _multiply(states, first * size, size, last - first, hidden, width, own)
        for b in range(first, last):
            at, row, u = (t * samples + b) * size, b * size, (b - first) * width
            for j in range(0, size, LANES):
                left, v, w = size - j, 3 * at + j, u + j
                r = load(x, v, left) + load(own, w, left)
                z = load(x, v + size, left) + load(own, w + size, left)
                m = load(own, w + 2 * size, left)
                r, z, n = gru_gates(r, z, load(x, v + 2 * size, left), m)
                state = n + z * (load(states, row + j, left) - n)
                store(states, row + j, state, left)
                store(y, at + j, state, left)


@compiled  # type: ignore[untyped-decorator]
def run_lstm(
    driven: Reals, outputs: Reals, before: Reals, hidden: Reals, h: Reals, c: Reals,
    starts: NDArray[np.bool_], entry: Reals, sums: Reals, first: int, last: int,
) -> None:  # fmt: skip
    """Run an LSTM.

    The gates i, f, g, o overwrite ``driven``. ``before`` (L, B, H) receives c before each step,
    unless it is empty.
    """
    samples, size = c.shape
    width, own = sums.shape[1], sums[first:last].reshape(-1)
    gates, states, y = driven.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    cells, cells_before = c.reshape(-1), before.reshape(-1)
    for t in range(driven.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, c, size, first, last)
            enter(starts[t], entry, h, 0, first, last)
        own[:] = 0
        _multiply(states, first * size, size, last - first, hidden, width, own)
        for b in range(first, last):
            at, row, u = (t * samples + b) * size, b * size, (b - first) * width
            for j in range(0, size, LANES):
                left, v, w = size - j, 4 * at + j, u + j
                i, f = load(gates, v, left), load(gates, v + size, left)
                g, o = load(gates, v + 2 * size, left), load(gates, v + 3 * size, left)
                i, f = i + load(own, w, left), f + load(own, w + size, left)
                g, o = g + load(own, w + 2 * size, left), o + load(own, w + 3 * size, left)
                i, f, g, o = lstm_gates(i, f, g, o)
                cell = load(cells, row + j, left)
                if before.shape[0]:
                    store(cells_before, at + j, cell, left)
                cell = f * cell + i * g
                store(gates, v, i, left)
                store(gates, v + size, f, left)
                store(gates, v + 2 * size, g, left)
                store(gates, v + 3 * size, o, left)
                state = o * tanh(cell)
                store(cells, row + j, cell, left)
                store(states, row + j, state, left)
                store(y, at + j, state, left)


@compiled  # type: ignore[untyped-decorator]
def run_cells(
    gates: Reals, before: Reals, c: Reals, starts: NDArray[np.bool_], entry: Reals, first: int,
    last: int,
) -> None:  # fmt: skip
    """Run an LSTM's c alone. ``gates`` are all that enters the gates, overwritten by i, f, g, o."""
    samples, size = c.shape
    flat, cells, cells_before = gates.reshape(-1), c.reshape(-1), before.reshape(-1)
    for t in range(gates.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, c, size, first, last)
        for b in range(first, last):
            for j in range(0, size, LANES):
                left, at, row = size - j, (t * samples + b) * size + j, b * size + j
                v = 4 * (at - j) + j
                i, f = load(flat, v, left), load(flat, v + size, left)
                g, o = load(flat, v + 2 * size, left), load(flat, v + 3 * size, left)
                i, f, g, o = lstm_gates(i, f, g, o)
                cell = load(cells, row, left)
                store(cells_before, at, cell, left)
                store(flat, v, i, left)
                store(flat, v + size, f, left)
                store(flat, v + 2 * size, g, left)
                store(flat, v + 3 * size, o, left)
                store(cells, row, f * cell + i * g, left)


@compiled  # type: ignore[untyped-decorator]
def enter(
    starts: NDArray[np.bool_], entry: Reals, state: Reals, column: int, first: int, last: int
) -> None:
    """Overwrite the rows of ``state`` (B, H) that begin anew by ``entry``, from a column on."""
    for b in range(first, last):
        if starts[b]:
            state[b] = entry[b, column : column + state.shape[1]]
