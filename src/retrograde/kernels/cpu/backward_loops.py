"""The loops of :mod:`retrograde.kernels.cpu.layer` that do a layer's whole backward pass.

A thread takes its samples from the last step to the first, a few steps at a time. For these steps
it computes slopes, the recurrence, and the products with inputs, states and weights. So
intermediate results stay in the cache of one core. Each core passes on only its sums of the
weights' gradients. Array names are those of ``sweep_loops`` and ``slope_loops``, and those of
:class:`BackwardArrays`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cells import Kind
from retrograde.kernels.cpu import cells as cell
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Reals,
    compiled,
    inlined,
    load,
    load_each,
    store,
    store_each,
)
from retrograde.kernels.cpu.llvm.tiles import PANEL, pack, product, whole_vectors

# The gate gradients of a row, in multiples of H. A GRU has those of m = U_n h + b, r, z and n.
ROW: dict[Kind, int] = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 4, "LSTM": 4}
# Gate gradients are buffered per thread, in rows (one row is one step of one sample). The buffer is
# halved at four samples or fewer, where it would dominate.
_ROWS = 64
_ROWS_OF_FEW = 32
_FEW = 4


class BackwardArrays(NamedTuple):
    """What the backward pass of a block reads and writes. What a cell does not need has no steps.

    A GRU's gates are recomputed, from transposed weights in panels. A buffered row has the gate
    gradients; a GRU's has those of m, r, z and n, in this order. Here m = U_n h + b_n, and n
    depends on r m. The first three are multiplied by ``hidden``, whose rows are in the order n, r,
    z. The last three are multiplied by ``inputs``. The rows of ``to_hidden`` and ``to_inputs`` are
    in the same orders, and ``to_biases`` is in the order of a buffered row.
    """

    from_inputs: Reals  # a GRU's input weights (I, 3 H)
    from_states: Reals  # a GRU's hidden weights (H, 3 H)
    biases: Reals  # a GRU's (2, 3 H)
    gates: Reals  # (L, B, 4 H), an LSTM's i, f, g, o
    after: Reals  # (L, B, H), h after each step; for a GRU absent
    cells: Reals  # (L, B, H), an LSTM's c before each step

    x: Reals  # (L, B, I), the inputs
    before: Reals  # (L, B, H), h before each step
    inputs: Reals  # the input weights (K·H, I), in panels or, if small, (1, K·H, I)
    hidden: Reals  # the hidden weights (K·H, H), likewise
    losses: Reals  # (L, B, H), the loss's gradients of the outputs; no steps for zero
    g: Reals  # (B, n), the gradient after all steps, overwritten by that before them
    starts: NDArray[np.bool_]  # (L, B), true before a step at which a sample begins anew
    to_entry: Reals  # (B, n), receives the sums of the gradients of the states it begins with
    dx: Reals  # (L, B, I), receives the gradients of the inputs; no steps if not wanted
    # What receives the weights' gradients, for each thread. The second array follows the first.
    to_inputs: tuple[Reals, Reals]  # (P, K·H, W)
    to_hidden: tuple[Reals, Reals]  # (P, K·H, W')
    to_biases: Reals  # (P, N)
    rooms: Reals  # scratch memory of each thread (:func:`room_for`)


@compiled
def row_length(numbers: int) -> int:
    """Return the distance from one row to the next, in numbers.

    One vector is added. Otherwise, if H is a power of two, all rows would compete for the same few
    lines of the cache.
    """
    return whole_vectors(numbers) + LANES


@compiled
def steps_at_once(samples: int, length: int) -> int:
    """Return the number of steps whose gate gradients a thread buffers at a time."""
    rows = _ROWS_OF_FEW if samples <= _FEW else _ROWS
    return max(1, min(rows // samples, length))


def room_for(kind: Kind, length: int, samples: int, inputs: int, size: int) -> int:
    """Return the size of a thread's ``room``, for ``length`` steps of its samples, I and H."""
    rows = int(steps_at_once(samples, length)) * samples
    fixed = rows * int(row_length(ROW[kind] * size)) + samples * int(whole_vectors(size))
    if kind == "GRU":
        fixed += 2 * samples * int(whole_vectors(3 * size))
    return fixed + rows * PANEL * -(-max(inputs, size) // PANEL)  # also holds rows of dx


@compiled
def _divided(room: Reals, first: int, second: int) -> tuple[Reals, Reals, Reals]:
    """Return two parts of given lengths, set to zero, and the rest."""
    room[: first + second] = 0
    return room[:first], room[first : first + second], room[first + second :]


@compiled
def backward(kind: int, relu: bool, of: BackwardArrays, number: int, first: int, last: int) -> None:
    """Backpropagate samples first … last − 1.

    ``kind`` is the number of gates: of an RNN (with tanh or ReLU), a GRU or an LSTM.
    """
    g, hidden, (length, samples, size) = of.g, of.hidden, of.before.shape
    is_gru, state, each, wide = kind == 3, g.shape[1], last - first, whole_vectors(size)
    stride, steps = row_length((4 if is_gru else kind) * size), steps_at_once(each, length)
    width, three = of.x.shape[2], whole_vectors(3 * size) if is_gru else 0
    s, into, rest = _divided(of.rooms[number], steps * each * stride, each * wide)
    driven, recurrent, rest = _divided(rest, each * three, each * three)
    x, h, y, c = of.x.reshape(-1), of.before.reshape(-1), of.after.reshape(-1), of.cells.reshape(-1)
    given, terms, known = of.gates.reshape(-1), of.losses.reshape(-1), g.reshape(-1)
    for stop in range(length, 0, -steps):
        start = max(0, stop - steps)
        for t in range(stop - 1, start - 1, -1):
            row, top = t * samples + first, (t - start) * each * stride
            into[:] = 0
            if is_gru:
                for b in range(each):
                    driven[b * three : b * three + 3 * size] = of.biases[0]
                    recurrent[b * three : b * three + 3 * size] = of.biases[1]
                product(x, row * width, width, 1, each, of.from_inputs, three, driven, three)
                product(h, row * size, size, 1, each, of.from_states, three, recurrent, three)
            for b in range(each):
                own, of_h, u = (row + b) * size, (first + b) * state, b * three
                for j in range(0, size, LANES):
                    left, at, w, v = size - j, own + j, top + b * stride + j, u + j
                    d = load(known, of_h + j, left)
                    if of.losses.shape[0]:
                        d = d + load(terms, at, left)
                    if kind == 1:
                        store(s, w, d * cell.rnn_slope(load(y, at, left), relu), left)
                    elif is_gru:
                        r = load(driven, v, left) + load(recurrent, v, left)
                        z = load(driven, v + size, left) + load(recurrent, v + size, left)
                        m = load(recurrent, v + 2 * size, left)
                        r, z, n = cell.gru_gates(r, z, load(driven, v + 2 * size, left), m)
                        s_r, s_z, s_m, s_n = cell.gru_slopes(r, z, n, m, load(h, at, left))
                        store_each(s, w, size, left, (d * s_m, d * s_r, d * s_z, d * s_n))
                        store(into, b * wide + j, d * z, LANES)
                    else:
                        i, f, n, o = load_each(given, 4 * own + j, size, left, 4)
                        s_i, s_f, s_g, s_o, e = cell.lstm_slopes(
                            i, f, n, o, load(c, at, left), load(y, at, left)
                        )
                        dc = load(known, of_h + size + j, left) + d * e
                        store(known, of_h + size + j, dc * f, left)
                        store_each(s, w, size, left, (dc * s_i, dc * s_f, dc * s_g, d * s_o))
            product(s, top, stride, 1, each, hidden, wide, into, wide)
            for b in range(each):
                g[first + b, :size] = into[b * wide : b * wide + size]
            if of.starts.shape[0]:
                leave(of.starts[t], g, of.to_entry, first, last)
        to_inputs = s[size:] if is_gru else s
        _add_products(of, s, to_inputs, stride, start, stop, rest, number, first, last)


@compiled
def leave(starts: NDArray[np.bool_], g: Reals, to_entry: Reals, first: int, last: int) -> None:
    """Move the gradients of those samples that begin anew from ``g`` to ``to_entry`` (B, n)."""
    for b in range(first, last):
        if starts[b]:
            to_entry[b] += g[b]
            g[b] = 0


@compiled
def _add_products(
    of: BackwardArrays, to_states: Reals, to_inputs: Reals, stride: int, start: int, stop: int,
    room: Reals, number: int, first: int, last: int,
) -> None:  # fmt: skip
    """Add what the buffered rows of steps start … stop − 1 give to the weights, and write dx."""
    _add_bias(to_states, stride, (stop - start) * (last - first), of.to_biases[number])
    weights, inputs = _of(of.to_hidden, number), _of(of.to_inputs, number)
    _add_weights(to_states, stride, of.before[start:stop], weights, room, first, last)
    _add_weights(to_inputs, stride, of.x[start:stop], inputs, room, first, last)
    if of.dx.shape[0]:
        _to_inputs(to_inputs, stride, of.inputs, of.dx[start:stop], room, first, last)


@inlined
def _of(sums: tuple[Reals, Reals], number: int) -> Reals:
    count = len(sums[0])
    own: Reals = sums[0][number] if number < count else sums[1][number - count]
    return own


@compiled
def _add_bias(s: Reals, stride: int, rows: int, total: Reals) -> None:
    """Add the sum of ``rows`` rows to ``total``."""
    size = total.shape[0]
    for j in range(0, size, LANES):
        left = size - j
        part = load(s, j, left)
        for row in range(1, rows):
            part = part + load(s, row * stride + j, left)
        store(total, j, load(total, j, left) + part, left)


@compiled
def _add_weights(
    s: Reals, stride: int, by: Reals, total: Reals, room: Reals, first: int, last: int
) -> None:
    """Add sᵀ by to ``total``, for samples first … last − 1 of ``by`` (L, B, N)."""
    (length, samples, size), each, flat = by.shape, last - first, by.reshape(-1)
    count, rows = -(-size // PANEL), length * each
    packed = room[: count * rows * PANEL].reshape(count, rows, PANEL)
    for p in range(count):
        panel = packed[p].reshape(-1)
        for t in range(length):
            at, own = (t * samples + first) * size + p * PANEL, panel[t * each * PANEL :]
            pack(flat, at, size, False, each, size - p * PANEL, own)
    product(s, 0, 1, stride, total.shape[0], packed, size, total.reshape(-1), total.shape[1])


@compiled
def _to_inputs(
    s: Reals, stride: int, inputs: Reals, dx: Reals, room: Reals, first: int, last: int
) -> None:
    """Write s W to the rows of ``dx`` (L, B, I) of samples first … last − 1."""
    size, samples, flat = dx.shape[2], dx.shape[1], dx.reshape(-1)
    width, each = whole_vectors(size), last - first
    rows = dx.shape[0] * each
    found = room[: rows * width]
    found[:] = 0
    product(s, 0, stride, 1, rows, inputs, width, found, width)
    for row in range(rows):
        at = (row // each * samples + first + row % each) * size
        for j in range(0, size, LANES):
            store(flat, at + j, load(found, row * width + j, LANES), size - j)
