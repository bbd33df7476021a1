"""The loops of :mod:`retrograde.kernels.cpu` that do a layer's whole backward pass.

A thread takes its samples from the last step to the first, a few steps at a time. For these steps
it computes slopes, the recurrence, and the products with inputs, states and weights. So
intermediate results stay in the cache of one core. Each core passes on only its sums of the
weights' gradients.

Array names are those of ``cpu_sweep`` and ``cpu_slopes``, and these:

- ``x`` and ``dx`` (L, B, I): inputs and their gradients; ``dx`` may have no steps;
- ``before`` and ``after`` (L, B, H): h before and after each step;
- ``inputs`` and ``hidden``: the input weights (K·H, I) and the hidden weights (K·H, H), in panels
  or, if small, with one dimension more (1, K·H, …);
- ``g``: the gradient of the state after all steps, overwritten by that before them;
- ``to_inputs`` (K·H, W), ``to_hidden`` (K·H, W') and ``to_biases`` (N,): receive the sums;
- ``room``: scratch memory (:func:`room_for`).

Arrays are single parameters, since numba takes 0.4 µs longer for each array in a tuple.
"""

from typing import Any

from retrograde.kernels.lanes import (
    LANES,
    Reals,
    compiled,
    like,
    load,
    one_above,
    quotient,
    sigmoid,
    store,
    tanh,
)
from retrograde.kernels.tiles import PANEL, add_outer, product, whole_vectors

__all__ = ["backward_gru", "backward_lstm", "backward_rnn", "room_for"]

# Gate gradients are buffered per thread, in rows (one row is one step of one sample). The buffer is
# halved at four samples or fewer, where it would dominate.
_ROWS = 64
_ROWS_OF_FEW = 32
_FEW = 4


@compiled  # type: ignore[untyped-decorator]
def row_length(numbers: int) -> Any:
    """Return the distance from one row to the next, in numbers.

    One vector is added. Otherwise, if H is a power of two, all rows would compete for the same few
    lines of the cache.
    """
    return whole_vectors(numbers) + LANES


@compiled  # type: ignore[untyped-decorator]
def steps_at_once(samples: int, length: int) -> Any:
    """Return the number of steps whose gate gradients a thread buffers at a time."""
    rows = _ROWS_OF_FEW if samples <= _FEW else _ROWS
    return max(1, min(rows // samples, length))


def room_for(kind: str, length: int, samples: int, inputs: int, size: int) -> int:
    """Return the size of a thread's ``room``, for ``length`` steps of its samples, I and H."""
    rows = int(steps_at_once(samples, length)) * samples
    gates = 1 if kind.startswith("RNN") else 4
    fixed = rows * int(row_length(gates * size)) + samples * int(whole_vectors(size))
    if kind == "GRU":
        fixed += 2 * samples * int(whole_vectors(3 * size))
    return fixed + rows * PANEL * -(-max(inputs, size) // PANEL)  # also holds rows of dx


@compiled  # type: ignore[untyped-decorator]
def _divided(room: Reals, first: int, second: int) -> tuple[Reals, Reals, Reals]:
    """Return two parts of given lengths, set to zero, and the rest."""
    room[: first + second] = 0
    return room[:first], room[first : first + second], room[first + second :]


@compiled  # type: ignore[untyped-decorator]
def backward_rnn(
    relu: bool,
    after: Reals,
    x: Reals,
    before: Reals,
    inputs: Reals,
    hidden: Reals,
    losses: Reals,
    g: Reals,
    dx: Reals,
    to_inputs: Reals,
    to_hidden: Reals,
    to_biases: Reals,
    room: Reals,
    first: int,
    last: int,
) -> None:
    """Backpropagate an RNN with tanh or ReLU, for samples first … last − 1."""
    samples, size = g.shape
    stride, wide = row_length(size), whole_vectors(size)
    steps = steps_at_once(last - first, before.shape[0])
    s, into, rest = _divided(room, steps * (last - first) * stride, (last - first) * wide)
    h, terms, known = after.reshape(-1), losses.reshape(-1), g.reshape(-1)
    for stop in range(after.shape[0], 0, -steps):
        start = max(0, stop - steps)
        for t in range(stop - 1, start - 1, -1):
            top = (t - start) * (last - first) * stride
            for b in range(first, last):
                row, v = (t * samples + b) * size, top + (b - first) * stride
                for j in range(0, size, LANES):
                    left = size - j
                    d = load(known, b * size + j, left)
                    if losses.shape[0]:
                        d = d + load(terms, row + j, left)
                    state = load(h, row + j, left)
                    slope = one_above(state) if relu else like(state, 1) - state * state
                    store(s, v + j, d * slope, left)
            into[:] = 0
            product(s, top, stride, last - first, hidden, wide, into)
            for b in range(first, last):
                g[b] = into[(b - first) * wide : (b - first) * wide + size]
        rows = (stop - start) * (last - first)
        _add_bias(s, stride, rows, to_biases)
        _add_weights(s, stride, before[start:stop], to_hidden, rest, first, last)
        _add_weights(s, stride, x[start:stop], to_inputs, rest, first, last)
        if dx.shape[0]:
            _to_inputs(s, stride, inputs, dx[start:stop], rest, first, last)


@compiled  # type: ignore[untyped-decorator]
def backward_lstm(
    gates: Reals,
    after: Reals,
    cells: Reals,
    x: Reals,
    before: Reals,
    inputs: Reals,
    hidden: Reals,
    losses: Reals,
    g: Reals,
    dx: Reals,
    to_inputs: Reals,
    to_hidden: Reals,
    to_biases: Reals,
    room: Reals,
    first: int,
    last: int,
) -> None:
    """Backpropagate an LSTM, for samples first … last − 1.

    ``gates`` are i, f, g, o (L, B, 4 H), ``cells`` is c before each step (L, B, H).
    """
    samples, size = g.shape[0], g.shape[1] // 2
    stride, wide = row_length(4 * size), whole_vectors(size)
    steps = steps_at_once(last - first, before.shape[0])
    s, into, rest = _divided(room, steps * (last - first) * stride, (last - first) * wide)
    given, h, c = gates.reshape(-1), after.reshape(-1), cells.reshape(-1)
    terms, known = losses.reshape(-1), g.reshape(-1)
    for stop in range(after.shape[0], 0, -steps):
        start = max(0, stop - steps)
        for t in range(stop - 1, start - 1, -1):
            top = (t - start) * (last - first) * stride
            for b in range(first, last):
                row, v, of_h = (t * samples + b) * size, top + (b - first) * stride, 2 * b * size
                for j in range(0, size, LANES):
                    left, at, u, w = size - j, row + j, 4 * row + j, v + j
                    i, f = load(given, u, left), load(given, u + size, left)
                    n, o = load(given, u + 2 * size, left), load(given, u + 3 * size, left)
                    dh, one = load(known, of_h + j, left), like(i, 1)
                    if losses.shape[0]:
                        dh = dh + load(terms, at, left)
                    tanh_c = quotient(load(h, at, left), o)  # h = o tanh c; 0 if o is 0
                    dc = load(known, of_h + size + j, left) + dh * o * (one - tanh_c * tanh_c)
                    store(known, of_h + size + j, dc * f, left)
                    store(s, w, dc * n * i * (one - i), left)
                    store(s, w + size, dc * load(c, at, left) * f * (one - f), left)
                    store(s, w + 2 * size, dc * i * (one - n * n), left)
                    store(s, w + 3 * size, dh * tanh_c * o * (one - o), left)
            into[:] = 0
            product(s, top, stride, last - first, hidden, wide, into)
            for b in range(first, last):
                g[b, :size] = into[(b - first) * wide : (b - first) * wide + size]
        rows = (stop - start) * (last - first)
        _add_bias(s, stride, rows, to_biases)
        _add_weights(s, stride, before[start:stop], to_hidden, rest, first, last)
        _add_weights(s, stride, x[start:stop], to_inputs, rest, first, last)
        if dx.shape[0]:
            _to_inputs(s, stride, inputs, dx[start:stop], rest, first, last)


@compiled  # type: ignore[untyped-decorator]
def backward_gru(
    from_inputs: Reals,
    from_states: Reals,
    biases: Reals,
    x: Reals,
    before: Reals,
    inputs: Reals,
    hidden: Reals,
    losses: Reals,
    g: Reals,
    dx: Reals,
    to_inputs: Reals,
    to_hidden: Reals,
    to_biases: Reals,
    room: Reals,
    first: int,
    last: int,
) -> None:
    """Backpropagate a GRU, for samples first … last − 1.

    Its gates are recomputed from transposed weights in panels, ``from_inputs`` (I, 3 H) and
    ``from_states`` (H, 3 H), and ``biases`` (2, 3 H).

    A buffered row has the gradients of m, r, z and n, in this order. Here m = U_n h + b_n, and n
    depends on r m. The first three are multiplied by ``hidden``, whose rows are in the order n, r,
    z. The last three are multiplied by ``inputs``. The rows of ``to_hidden`` and ``to_inputs`` are
    in the same orders, and ``to_biases`` is in the order of a buffered row.
    """
    samples, size = g.shape
    stride, wide, each = row_length(4 * size), whole_vectors(size), last - first
    width, three = x.shape[2], whole_vectors(3 * size)
    steps = steps_at_once(each, before.shape[0])
    s, into, rest = _divided(room, steps * each * stride, each * wide)
    driven, recurrent, rest = _divided(rest, each * three, each * three)
    read, h, terms, known = x.reshape(-1), before.reshape(-1), losses.reshape(-1), g.reshape(-1)
    for stop in range(before.shape[0], 0, -steps):
        start = max(0, stop - steps)
        for t in range(stop - 1, start - 1, -1):
            at, top = t * samples + first, (t - start) * each * stride
            for b in range(each):
                driven[b * three : b * three + 3 * size] = biases[0]
                recurrent[b * three : b * three + 3 * size] = biases[1]
            product(read, at * width, width, each, from_inputs, three, driven)
            product(h, at * size, size, each, from_states, three, recurrent)
            for b in range(each):
                row, v, of_b, u = (at + b) * size, top + b * stride, (first + b) * size, b * three
                for j in range(0, size, LANES):
                    left, w = size - j, v + j
                    r = load(driven, u + j, left) + load(recurrent, u + j, left)
                    z = load(driven, u + size + j, left) + load(recurrent, u + size + j, left)
                    r, z, m = sigmoid(r), sigmoid(z), load(recurrent, u + 2 * size + j, left)
                    n = tanh(load(driven, u + 2 * size + j, left) + r * m)
                    d, one = load(known, of_b + j, left), like(r, 1)
                    if losses.shape[0]:
                        d = d + load(terms, row + j, left)
                    dn, state = d * (one - z) * (one - n * n), load(h, row + j, left)
                    store(s, w, dn * r, left)
                    store(s, w + size, dn * m * r * (one - r), left)
                    store(s, w + 2 * size, d * (state - n) * z * (one - z), left)
                    store(s, w + 3 * size, dn, left)
                    store(into, b * wide + j, d * z, LANES)
            product(s, top, stride, each, hidden, wide, into)
            for b in range(each):
                g[first + b] = into[b * wide : b * wide + size]
        _add_bias(s, stride, (stop - start) * each, to_biases)
        _add_weights(s, stride, before[start:stop], to_hidden, rest, first, last)
        _add_weights(s[size:], stride, x[start:stop], to_inputs, rest, first, last)
        if dx.shape[0]:
            _to_inputs(s[size:], stride, inputs, dx[start:stop], rest, first, last)


@compiled  # type: ignore[untyped-decorator]
def _add_bias(s: Reals, stride: int, rows: int, total: Reals) -> None:
    """Add the sum of ``rows`` rows to ``total``."""
    size = total.shape[0]
    for j in range(0, size, LANES):
        left = size - j
        part = load(s, j, left)
        for row in range(1, rows):
            part = part + load(s, row * stride + j, left)
        store(total, j, load(total, j, left) + part, left)


@compiled  # type: ignore[untyped-decorator]
def _add_weights(
    s: Reals, stride: int, by: Reals, total: Reals, room: Reals, first: int, last: int
) -> None:
    """Add sᵀ by to ``total``, for samples first … last − 1 of ``by`` (L, B, N)."""
    size, samples, flat = by.shape[2], by.shape[1], by.reshape(-1)
    count = -(-size // PANEL)
    rows = by.shape[0] * (last - first)
    packed = room[: count * rows * PANEL].reshape(count, rows, PANEL)
    packed[:] = 0
    for p in range(count):
        panel = packed[p].reshape(-1)
        for t in range(by.shape[0]):
            for b in range(first, last):
                row = t * (last - first) + b - first
                for j in range(0, min(PANEL, size - p * PANEL), LANES):
                    at = (t * samples + b) * size + p * PANEL + j
                    value = load(flat, at, size - p * PANEL - j)
                    store(panel, row * PANEL + j, value, LANES)
    add_outer(s, 0, stride, packed, total)


@compiled  # type: ignore[untyped-decorator]
def _to_inputs(
    s: Reals, stride: int, inputs: Reals, dx: Reals, room: Reals, first: int, last: int
) -> None:
    """Write s W to the rows of ``dx`` (L, B, I) of samples first … last − 1."""
    size, samples, flat = dx.shape[2], dx.shape[1], dx.reshape(-1)
    width, each = whole_vectors(size), last - first
    rows = dx.shape[0] * each
    found = room[: rows * width]
    found[:] = 0
    product(s, 0, stride, rows, inputs, width, found)
    for row in range(rows):
        at = (row // each * samples + first + row % each) * size
        for j in range(0, size, LANES):
            store(flat, at + j, load(found, row * width + j, LANES), size - j)
