"""The loops of :mod:`retrograde.kernels.cpu.sweep`: slopes from gates, the sweep, and the products
of chunks.

A row is one step of one sample. Other names are those of :mod:`retrograde.kernels.cells`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cpu import cells as cell
from retrograde.kernels.cpu.backward_loops import leave
from retrograde.kernels.cpu.forward_loops import enter, extent
from retrograde.kernels.cpu.llvm.barrier import Counts, meet
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Reals,
    compiled,
    copy,
    load,
    load_each,
    store,
    store_each,
)
from retrograde.kernels.cpu.llvm.panels import PANEL, whole_vectors
from retrograde.kernels.cpu.llvm.tiles import product


@compiled
def gru_slopes(
    inputs: Reals, hidden: Reals, before: Reals, keep: Reals, inner: Reals, top: int, bottom: int
) -> None:
    """Compute a GRU's slopes for rows top … bottom − 1. ``inputs`` and ``hidden`` are the two parts
    of the sums that enter the gates. ``hidden`` is overwritten by s_r, s_z and s_m. ``inner``
    receives s_n, and ``keep`` receives z."""
    size = before.shape[1]
    x, u, h = inputs.reshape(-1), hidden.reshape(-1), before.reshape(-1)
    kept, s_n = keep.reshape(-1), inner.reshape(-1)
    for row in range(top, bottom):
        for j in range(0, size, LANES):
            left, at, v = size - j, row * size + j, 3 * row * size + j
            r = load(x, v, left) + load(u, v, left)
            z = load(x, v + size, left) + load(u, v + size, left)
            m = load(u, v + 2 * size, left)
            r, z, n = cell.gru_gates(r, z, load(x, v + 2 * size, left), m)
            s_r, s_z, s_m, slope = cell.gru_slopes(r, z, n, m, load(h, at, left))
            store(u, v, s_r, left)
            store(u, v + size, s_z, left)
            store(u, v + 2 * size, s_m, left)
            store(s_n, at, slope, left)
            store(kept, at, z, left)


@compiled
def lstm_slopes(
    activated: bool, gates: Reals, after: Reals, c: Reals, keep: Reals, inner: Reals,
    starts: NDArray[np.bool_], entry: Reals, first: int, last: int,
) -> None:  # fmt: skip
    """Compute an LSTM's slopes for samples first … last − 1. ``gates`` are i, f, g, o if
    ``activated``, otherwise the sums that enter them. They are overwritten by s_i, s_f, s_g, s_o.
    ``inner`` receives e, and ``keep`` receives f. ``c`` (B, H), before the first step, is
    overwritten by that after the last. ``starts`` and ``entry`` are those of ``forward_loops``."""
    samples, size = c.shape
    flat, h, cells = gates.reshape(-1), after.reshape(-1), c.reshape(-1)
    kept, e = keep.reshape(-1), inner.reshape(-1)
    for t in range(gates.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, c, size, first, last)
        for b in range(first, last):
            for j in range(0, size, LANES):
                left, row = size - j, (t * samples + b) * size
                at, v, state = row + j, 4 * row + j, b * size + j
                i, f, g, o = load_each(flat, v, size, left, 4)
                if not activated:
                    i, f, g, o = cell.lstm_gates(i, f, g, o)
                c_now = load(cells, state, left)
                s_i, s_f, s_g, s_o, through = cell.lstm_slopes(i, f, g, o, c_now, load(h, at, left))
                store_each(flat, v, size, left, (s_i, s_f, s_g, s_o))
                store(e, at, through, left)
                store(kept, at, f, left)
                store(cells, state, f * c_now + i * g, left)


class SweepArrays(NamedTuple):
    """The arrays of :class:`retrograde.kernels.cells.Slopes`, the weights and the losses. With
    chunks they are (C, L, B, …). An array that is absent has no steps."""

    gates: Reals  # (L, B, K·H), overwritten by the gates' gradients
    keep: Reals  # (L, B, H)
    inner: Reals  # (L, B, H), a GRU's overwritten too
    losses: Reals  # (L, B, H)
    hidden: Reals  # (P, …), the columns of each part of the units, as ``product`` takes them
    starts: NDArray[np.bool_]  # (L, B), with ``to_entry`` as in the whole backward pass
    to_entry: Reals


def room_for_products(size: int, state_parts: int) -> int:
    """Return the size of a thread's ``room`` for products of Jacobians. A state has one part of H
    units, or two for (h, c)."""
    count = state_parts * size + 1
    matrices = state_parts * -(-size // PANEL) * size * PANEL
    return matrices + count * (int(whole_vectors(size)) + (2 * size if state_parts == 2 else 0))


@compiled
def sweep(
    of: SweepArrays, g: Reals, room: Reals, units: Counts, by_units: bool, meeting: Counts,
    first: int, last: int,
) -> None:  # fmt: skip
    """Sweep samples, or parts of the units, first … last − 1. ``g`` (B, n), the gradient after the
    last step, is overwritten by that before step 0. ``room`` (P, B, W) holds whole vectors of the
    units of a part."""
    gates, keep, losses, (samples, state) = of.gates, of.keep, of.losses, g.shape
    width = gates.shape[2]
    size = state // 2 if width == 2 * state else state  # an LSTM's state is (h, c)
    s, kept, inner = gates.reshape(-1), keep.reshape(-1), of.inner.reshape(-1)
    gradients, terms, before = g.reshape(-1), losses.reshape(-1), room.reshape(-1)
    mine = extent(by_units, units, samples, first, last)
    for t in range(gates.shape[0] - 1, -1, -1):
        for part in range(mine[0], mine[1]):
            left, right = units[part], units[part + 1]
            room[part, mine[2] : mine[3]] = 0
            for b in range(mine[2], mine[3]):
                row, to = (t * samples + b) * size, (part * samples + b) * room.shape[2] - left
                for j in range(left, right, LANES):
                    rest, at, v, of_h = right - j, row + j, row // size * width + j, b * state + j
                    x = load(gradients, of_h, rest)
                    if losses.shape[0]:
                        x = x + load(terms, at, rest)
                    if state == size:
                        for k in range(v, v - j + width, size):
                            store(s, k, x * load(s, k, rest), rest)
                        if keep.shape[0]:
                            store(before, to + j, x * load(kept, at, rest), rest)
                            store(inner, at, x * load(inner, at, rest), rest)
                    else:
                        d = load(gradients, of_h + size, rest) + x * load(inner, at, rest)
                        store(gradients, of_h + size, d * load(kept, at, rest), rest)
                        i, f, n, o = load_each(s, v, size, rest, 4)
                        store_each(s, v, size, rest, (d * i, d * f, d * n, x * o))
        if by_units and last - first < len(units) - 1:
            meet(meeting, gates.shape[0] - t)
        for part in range(mine[0], mine[1]):
            low, many, left = mine[2], mine[3] - mine[2], units[part]
            count, at = units[part + 1] - left, (t * samples + low) * width
            into, wide = room[part, low : mine[3]].reshape(-1), room.shape[2]
            product(s, at, width, 1, many, of.hidden[part], count, into, wide)
            for b in range(many):
                copy(into, b * wide, gradients, (low + b) * state + left, count)
        if of.starts.shape[0]:
            leave(of.starts[t], g, of.to_entry, first, last)


@compiled
def sweep_chunks(
    of: SweepArrays, after: Reals, units: Counts, meeting: Counts, rooms: Reals, number: int,
    first_chunk: int, last_chunk: int,
) -> None:  # fmt: skip
    """Sweep first_chunk … last_chunk − 1, each from the gradient ``after`` it (C, B, n). ``units``
    has one part, and each thread's of ``rooms`` (1, B, W) whole vectors."""
    for c in range(first_chunk, last_chunk):
        of_chunk = SweepArrays(
            of.gates[c], of.keep[c], of.inner[c], of.losses[c], of.hidden, of.starts, of.to_entry
        )
        sweep(of_chunk, after[c], rooms[number], units, False, meeting, 0, after.shape[1])


@compiled
def products(
    of: SweepArrays, maps: Reals, rooms: Reals, number: int, first_chunk: int, last_chunk: int
) -> None:
    """Write the products P, and d, of first_chunk … last_chunk − 1 to ``maps`` (C, B, n + 1, n). An
    LSTM's Jacobian has two factors: d = g_c + g_h e; g_h ← d a + g_h (s_o U_o); g_c ← d f."""
    (_, length, samples, width), hidden, room = of.gates.shape, of.hidden, rooms[number]
    state, (panel_count, _, panel) = maps.shape[3], hidden.shape
    is_lstm, count = width == 2 * state, state + 1
    size = state // 2 if is_lstm else state
    wide, whole, both = whole_vectors(size), panel_count * size * panel, count * is_lstm
    a = room[:whole].reshape(panel_count, size, panel)
    through = room[whole * is_lstm :][:whole].reshape(panel_count, size, panel)
    rest = room[whole + whole * is_lstm :]
    d = rest[: both * size].reshape(both, size)
    h = rest[both * size : 2 * both * size].reshape(both, size)
    new = rest[2 * both * size :][: count * wide]
    for c in range(first_chunk, last_chunk):
        for b in range(samples):
            matrix = maps[c, b]
            matrix[:] = 0
            for j in range(state):
                matrix[j, j] = 1
            for t in range(length - 1, -1, -1):
                if of.losses.shape[1]:
                    for j in range(size):
                        matrix[state, j] += of.losses[c, t, b, j]
                _sum_scaled(of.gates[c, t, b], hidden, 0, 3 if is_lstm else width // size, a)
                new[:] = 0
                if is_lstm:
                    _sum_scaled(of.gates[c, t, b], hidden, 3, 4, through)
                    for i in range(count):
                        for j in range(size):
                            h[i, j] = matrix[i, j]
                            d[i, j] = matrix[i, size + j] + matrix[i, j] * of.inner[c, t, b, j]
                            matrix[i, size + j] = d[i, j] * of.keep[c, t, b, j]
                    product(d.reshape(-1), 0, size, 1, count, a, wide, new, wide)
                    product(h.reshape(-1), 0, size, 1, count, through, wide, new, wide)
                else:
                    for j in range(size if of.keep.shape[1] else 0):
                        a[j // panel, j, j % panel] += of.keep[c, t, b, j]
                    product(matrix.reshape(-1), 0, size, 1, count, a, wide, new, wide)
                for i in range(count):
                    copy(new, i * wide, matrix.reshape(-1), i * state, size)


@compiled
def _sum_scaled(gates: Reals, hidden: Reals, first_gate: int, last_gate: int, out: Reals) -> None:
    """Write Σ_k diag(gates_k) U_k to ``out``, for first_gate … last_gate − 1 of ``gates`` (K·H,).
    All matrices are in panels."""
    size = out.shape[1]
    out[:] = 0
    for p in range(out.shape[0]):
        for k in range(first_gate * size, last_gate * size, size):
            for i in range(size):
                scale, u, total = gates[k + i], hidden[p, k + i], out[p, i]
                for j in range(out.shape[2]):
                    total[j] += scale * u[j]
