"""The loops of :mod:`retrograde.kernels.cpu.layer` that do a layer's whole backward pass.

A thread takes its samples from the last step to the first, a few steps at a time. For these steps
it computes slopes, the recurrence, and the products with inputs, states and weights. So
intermediate results stay in the cache of one core. Each core passes on only its sums of the
weights' gradients.

:func:`backward` is compiled for each cell (:mod:`retrograde.kernels.cpu.loops`). In each copy the
names in capitals are the numbers of its cell, and ``_pull`` is its derivative.
"""

# ruff: noqa: RUF005 (numba adds tuples, but does not unpack them)

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cells import Formula
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Compiled,
    Reals,
    added,
    compiled,
    copy,
    inlined,
    load,
    load_each,
    store,
    store_each,
)
from retrograde.kernels.cpu.llvm.panels import PANEL, pack, whole_vectors
from retrograde.kernels.cpu.llvm.tiles import product

# The numbers of a copy's cell. Its gates may be computed again, or be kept, or neither.
GATES = WHOLE = SPLIT = OTHERS = ASIDE = UNITS = 0
AGAIN = KEEPS = False
_pull: Compiled = None
# Gate gradients are buffered per thread, in rows (one row is one step of one sample). The buffer is
# halved at four samples or fewer, where it would dominate.
_ROWS = 64
_ROWS_OF_FEW = 32
_FEW = 4


class BackwardArrays(NamedTuple):
    """What the backward pass of a block reads and writes. What a cell does not need has no steps.

    Gates that were not kept are recomputed, from transposed weights in panels. A buffered row has
    the gate gradients: those of whole gates, of h's part of split gates, and of x's part of them. A
    GRU's are those of r, z, m and n. Here m = U_n h + b_n, and n depends on r m. The first K are
    multiplied by ``hidden``. Then x's part takes the place of h's, and the first K are multiplied
    by ``inputs``. ``to_biases`` is in the order of a buffered row.
    """

    from_inputs: Reals  # the input weights (I, K·H), for gates that are recomputed
    from_states: Reals  # the hidden weights (H, K·H), likewise
    biases: Reals  # (2, K·H), likewise
    own: Reals  # (V, H), the numbers of each unit
    gates: Reals  # (L, B, K·H), kept gates; no steps if they are recomputed, or not needed
    cells: Reals  # (L, B, N H), what is kept beside them
    after: Reals  # (L, B, H), h after each step

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
    to_own: Reals  # (P, V, H)
    rooms: Reals  # scratch memory of each thread (:func:`room_for`)


@compiled
def row_length(numbers: int) -> int:
    """Return the distance from one row to the next, in numbers. One vector is added. Otherwise, if
    H is a power of two, all rows would compete for the same few lines of the cache."""
    return whole_vectors(numbers) + LANES


@compiled
def steps_at_once(samples: int, length: int) -> int:
    """Return the number of steps whose gate gradients a thread buffers at a time."""
    most = _ROWS_OF_FEW if samples <= _FEW else _ROWS
    return max(1, min(most // samples, length))


def room_for(
    form: Formula, length: int, samples: int, inputs: int, size: int, *, again: bool
) -> int:
    """Return the size of a thread's ``room``, for ``length`` steps of its samples, I and H. It may
    compute gates ``again``."""
    buffered = int(steps_at_once(samples, length)) * samples
    fixed = buffered * int(row_length(form.row * size)) + samples * int(whole_vectors(size))
    if again:
        fixed += 2 * samples * int(whole_vectors(form.gates * size))
    return fixed + buffered * PANEL * -(-max(inputs, size) // PANEL)  # also holds rows of dx


@compiled
def _divided(room: Reals, count: int, next_count: int) -> tuple[Reals, Reals, Reals]:
    """Return ``count`` and ``next_count`` numbers, set to zero, and the rest."""
    room[: count + next_count] = 0
    return room[:count], room[count : count + next_count], room[count + next_count :]


def backward(of: BackwardArrays, number: int, first: int, last: int) -> None:
    """Backpropagate samples first … last − 1."""
    g, hidden, (length, samples, size) = of.g, of.hidden, of.before.shape
    state, each, wide = g.shape[1], last - first, whole_vectors(size)
    stride, steps = row_length((GATES + SPLIT) * size), steps_at_once(each, length)
    width, again = of.x.shape[2], whole_vectors(GATES * size)
    if not AGAIN or of.gates.shape[0]:
        again = 0
    s, into, rest = _divided(of.rooms[number], steps * each * stride, each * wide)
    driven, recurrent, rest = _divided(rest, each * again, each * again)
    x, h, y, c = of.x.reshape(-1), of.before.reshape(-1), of.after.reshape(-1), of.cells.reshape(-1)
    kept_gates, terms, gradients = of.gates.reshape(-1), of.losses.reshape(-1), g.reshape(-1)
    p, to_own, biases = of.own.reshape(-1), of.to_own[number].reshape(-1), of.biases.reshape(-1)
    for stop in range(length, 0, -steps):
        start = max(0, stop - steps)
        for t in range(stop - 1, start - 1, -1):
            row, top = t * samples + first, (t - start) * each * stride
            into[:] = 0
            if again:
                for b in range(each):
                    copy(biases, 0, driven, b * again, GATES * size)
                    copy(biases, GATES * size, recurrent, b * again, GATES * size)
                product(x, row * width, width, 1, each, of.from_inputs, again, driven, again)
                product(h, row * size, size, 1, each, of.from_states, again, recurrent, again)
            for b in range(each):
                place, of_h, u = (row + b) * size, (first + b) * state, b * again
                for j in range(0, size, LANES):
                    left, at, w, v = size - j, place + j, top + b * stride + j, u + j
                    d = load(gradients, of_h + j, left)
                    if of.losses.shape[0]:
                        d = d + load(terms, at, left)
                    aside, split = ASIDE * place + j, v + WHOLE * size
                    if AGAIN and (again or not KEEPS):
                        whole = load_each(driven, v, size, left, WHOLE)
                        gates = added(whole, load_each(recurrent, v, size, left, WHOLE))
                        gates = gates + load_each(driven, split, size, left, SPLIT)
                        gates = gates + load_each(recurrent, split, size, left, SPLIT)
                    else:
                        gates = load_each(kept_gates, GATES * place + j, size, left, GATES)
                        gates = gates + load_each(c, aside + OTHERS * size, size, left, SPLIT)
                    before = (load(h, at, left),) + load_each(c, aside, size, left, OTHERS)
                    units = load_each(p, j, size, left, UNITS)
                    after = (d,) + load_each(gradients, of_h + size + j, size, left, OTHERS)
                    of_gates, of_state, of_others, of_units = _pull(
                        gates, before, load(y, at, left), units, after
                    )
                    store_each(s, w, size, left, of_gates)
                    store_each(into, b * wide + j, 0, LANES, of_state)
                    store_each(gradients, of_h + size + j, size, left, of_others)
                    if UNITS:
                        of_units = added(load_each(to_own, j, size, left, UNITS), of_units)
                        store_each(to_own, j, size, left, of_units)
            product(s, top, stride, 1, each, hidden, wide, into, wide)
            for b in range(each):
                copy(into, b * wide, gradients, (first + b) * state, size)
            if of.starts.shape[0]:
                leave(of.starts[t], g, of.to_entry, first, last)
        _add_products(of, SPLIT * size, s, stride, start, stop, rest, number, first, last)


@compiled
def leave(starts: NDArray[np.bool_], g: Reals, to_entry: Reals, first: int, last: int) -> None:
    """Move the gradients of those samples that begin anew from ``g`` to ``to_entry`` (B, n)."""
    total, flat, size = to_entry.reshape(-1), g.reshape(-1), g.shape[1]
    for b in range(first, last):
        if starts[b]:
            for j in range(0, size, LANES):
                at, left = b * size + j, size - j
                store(total, at, load(total, at, left) + load(flat, at, left), left)
            g[b] = 0


@compiled
def _add_products(
    of: BackwardArrays, split: int, s: Reals, stride: int, start: int, stop: int, room: Reals,
    number: int, first: int, last: int,
) -> None:  # fmt: skip
    """Add what the buffered rows of steps start … stop − 1 give to the weights, and write dx."""
    count = (stop - start) * (last - first)
    _add_bias(s, stride, count, of.to_biases[number])
    weights, inputs = _of(of.to_hidden, number), _of(of.to_inputs, number)
    _add_weights(s, stride, of.before[start:stop], weights, room, first, last)
    for row in range(count if split else 0):
        end = row * stride + weights.shape[0]
        copy(s, end, s, end - split, split)
    _add_weights(s, stride, of.x[start:stop], inputs, room, first, last)
    if of.dx.shape[0]:
        _to_inputs(s, stride, of.inputs, of.dx[start:stop], room, first, last)


@inlined
def _of(sums: tuple[Reals, Reals], number: int) -> Reals:
    count = len(sums[0])
    total: Reals = sums[0][number] if number < count else sums[1][number - count]
    return total


@compiled
def _add_bias(s: Reals, stride: int, count: int, total: Reals) -> None:
    """Add the sum of ``count`` rows to ``total``."""
    size = total.shape[0]
    for j in range(0, size, LANES):
        left = size - j
        part = load(s, j, left)
        for row in range(1, count):
            part = part + load(s, row * stride + j, left)
        store(total, j, load(total, j, left) + part, left)


@compiled
def _add_weights(
    s: Reals, stride: int, by: Reals, total: Reals, room: Reals, first: int, last: int
) -> None:
    """Add sᵀ by to ``total``, for samples first … last − 1 of ``by`` (L, B, N)."""
    (length, samples, size), each, flat = by.shape, last - first, by.reshape(-1)
    count, depth = -(-size // PANEL), length * each
    packed = room[: count * depth * PANEL].reshape(count, depth, PANEL)
    for p in range(count):
        panel = packed[p].reshape(-1)
        for t in range(length):
            at, into = (t * samples + first) * size + p * PANEL, panel[t * each * PANEL :]
            pack(flat, at, size, False, each, size - p * PANEL, into)
    product(s, 0, 1, stride, total.shape[0], packed, size, total.reshape(-1), total.shape[1])


@compiled
def _to_inputs(
    s: Reals, stride: int, inputs: Reals, dx: Reals, room: Reals, first: int, last: int
) -> None:
    """Write s W to the rows of ``dx`` (L, B, I) of samples first … last − 1."""
    size, samples, flat = dx.shape[2], dx.shape[1], dx.reshape(-1)
    width, each = whole_vectors(size), last - first
    count = dx.shape[0] * each
    padded = room[: count * width]
    padded[:] = 0
    product(s, 0, stride, 1, count, inputs, width, padded, width)
    for row in range(count):
        at = (row // each * samples + first + row % each) * size
        for j in range(0, size, LANES):
            store(flat, at + j, load(padded, row * width + j, LANES), size - j)
