"""The loops of :mod:`retrograde.kernels.cpu.layer` that run a layer forward."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cpu.cells import gru_gates, lstm_gates, rnn_state
from retrograde.kernels.cpu.llvm.barrier import Counts, meet
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Reals,
    compiled,
    load,
    load_each,
    store,
    store_each,
    tanh,
)
from retrograde.kernels.cpu.llvm.tiles import dots, product


class ForwardArrays(NamedTuple):
    """What a layer's forward pass reads and writes. What a cell does not need is empty."""

    driven: Reals  # (L, B, K·H), x W and biases; an LSTM's are overwritten by i, f, g, o
    outputs: Reals  # (L, B, H), receives h after each step
    before: Reals  # (L, B, H), receives an LSTM's c before each step, if it is to be kept
    bias: Reals  # (3 H), a GRU's bias_hh, which ``driven`` does not include
    # The transposed hidden weights (H, K·H) in panels for each part of the units, or (1, K·H, 1, H)
    # as they lie.
    hidden: Reals
    h: Reals  # (B, H), the state before the first step, overwritten by that after the last
    c: Reals  # (B, H), likewise for an LSTM
    starts: NDArray[np.bool_]  # (L, B), true before a step at which a sample begins anew
    entry: Reals  # (B, n), the states with which they do
    sums: Reals  # scratch memory, a row of whole vectors for each part and sample


@compiled
def extent(
    by_units: bool, units: Counts, samples: int, first: int, last: int
) -> tuple[int, int, int, int]:
    """Return the parts of the units, and the samples, that a thread runs."""
    return (first, last, 0, samples) if by_units else (0, len(units) - 1, first, last)


@compiled
def _multiply(
    gates: int, h: Reals, at: int, size: int, rows: int, weights: Reals, left: int, right: int,
    own: Reals, width: int,
) -> None:  # fmt: skip
    """Write U h to ``own`` for all gates of the units left … right − 1.

    ``h`` is flat, and the state of the first sample begins ``at`` a place.
    """
    own[:] = 0
    if weights.shape[1] == 1 and weights.shape[2] == size:  # as they lie
        for k in range(gates):
            lying, into = weights[k * size + left : k * size + right], own[k * (right - left) :]
            dots(h, at, rows, lying, width, into)
    else:
        product(h, at, size, 1, rows, weights, gates * (right - left), own, width)


@compiled
def run(
    gates: int, relu: bool, of: ForwardArrays, units: Counts, by_units: bool, meeting: Counts,
    first: int, last: int,
) -> None:  # fmt: skip
    """Run samples, or parts of the units, first … last − 1.

    ``gates`` is one for an RNN (with tanh or ReLU), three for a GRU and four for an LSTM.
    """
    driven, outputs, before, bias, hidden, h, c, starts, entry, sums = of
    samples, size = h.shape
    x, y, states, numbers = driven.reshape(-1), outputs.reshape(-1), h.reshape(-1), samples * size
    cells, cells_before, width = c.reshape(-1), before.reshape(-1), sums.shape[2]
    one, many, low, high = extent(by_units, units, samples, first, last)
    # Weights as they lie are all in one part.
    u, weights, rows = sums[one, low:high].reshape(-1), hidden[one % len(hidden)], high - low
    for t in range(driven.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, h, 0, first, last)
            if gates == 4:
                enter(starts[t], entry, c, size, first, last)
        for part in range(one, many):
            left, right = units[part], units[part + 1]
            each = right - left
            if many - one > 1:
                u, weights = sums[part, low:high].reshape(-1), hidden[part % len(hidden)]
            if by_units and t:  # other threads may still read h after this step
                at = (t - 1) * numbers
                _multiply(gates, y, at, size, rows, weights, left, right, u, width)
            else:
                at = low * size
                _multiply(gates, states, at, size, rows, weights, left, right, u, width)
            for b in range(low, high):
                row, own = b * size, (b - low) * width - left
                at = t * numbers + row
                for j in range(left, right, LANES):
                    rest, v, w = right - j, gates * at + j, own + j
                    if gates == 1:
                        state = rnn_state(load(u, w, rest) + load(x, v, rest), relu)
                    elif gates == 3:
                        r = load(x, v, rest) + (load(u, w, rest) + load(bias, j, rest))
                        z = load(u, w + each, rest) + load(bias, size + j, rest)
                        m = load(u, w + 2 * each, rest) + load(bias, 2 * size + j, rest)
                        z, driven_n = load(x, v + size, rest) + z, load(x, v + 2 * size, rest)
                        r, z, n = gru_gates(r, z, driven_n, m)
                        if by_units and t:
                            state = n + z * (load(y, at - numbers + j, rest) - n)
                        else:
                            state = n + z * (load(states, row + j, rest) - n)
                    else:
                        i, f, g, o = load_each(x, v, size, rest, 4)
                        u_i, u_f, u_g, u_o = load_each(u, w, each, rest, 4)
                        i, f, g, o = lstm_gates(i + u_i, f + u_f, g + u_g, o + u_o)
                        cell = load(cells, row + j, rest)
                        if before.shape[0]:
                            store(cells_before, at + j, cell, rest)
                        cell = f * cell + i * g
                        store_each(x, v, size, rest, (i, f, g, o))
                        store(cells, row + j, cell, rest)
                        state = o * tanh(cell)
                    store(y, at + j, state, rest)
        if by_units and last - first < len(units) - 1:
            meet(meeting, t + 1)
        elif not by_units:
            for j in range(low * size, high * size, LANES):
                rest = high * size - j
                store(states, j, load(y, t * numbers + j, rest), rest)
    if by_units:
        left, right = units[first], units[last]
        h[:, left:right] = outputs[outputs.shape[0] - 1, :, left:right]


@compiled
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
                i, f, g, o = load_each(flat, v, size, left, 4)
                i, f, g, o = lstm_gates(i, f, g, o)
                cell = load(cells, row, left)
                store(cells_before, at, cell, left)
                store_each(flat, v, size, left, (i, f, g, o))
                store(cells, row, f * cell + i * g, left)


@compiled
def enter(
    starts: NDArray[np.bool_], entry: Reals, state: Reals, column: int, first: int, last: int
) -> None:
    """Overwrite the rows of ``state`` (B, H) that begin anew by ``entry``, from a column on."""
    for b in range(first, last):
        if starts[b]:
            state[b] = entry[b, column : column + state.shape[1]]
