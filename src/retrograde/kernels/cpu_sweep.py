"""The loops of :mod:`retrograde.kernels.cpu` for the sweep, and for the products of chunks."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cpu_backward import leave
from retrograde.kernels.lanes import LANES, Reals, compiled, load, store
from retrograde.kernels.tiles import PANEL, product, whole_vectors


class SweepArrays(NamedTuple):
    """The arrays of :class:`retrograde.kernels.cells.Slopes`, the weights and the losses.

    With chunks they are (C, L, B, …). An array that is absent has no steps.
    """

    gates: Reals  # (L, B, K·H), overwritten by the gates' gradients
    keep: Reals  # (L, B, H)
    inner: Reals  # (L, B, H), a GRU's overwritten too
    losses: Reals  # (L, B, H)
    hidden: Reals  # (K·H, H), in panels, or (1, K·H, H) as they lie
    starts: NDArray[np.bool_]  # (L, B), with ``to_entry`` as in the whole backward pass
    to_entry: Reals


def room_for_products(size: int, parts: int) -> int:
    """Return the size of a thread's ``room`` for products of Jacobians.

    A state has one part of H units, or two for (h, c).
    """
    rows = parts * size + 1
    matrices = parts * -(-size // PANEL) * size * PANEL
    return matrices + rows * (int(whole_vectors(size)) + (2 * size if parts == 2 else 0))


@compiled  # type: ignore[untyped-decorator]
def sweep_state(of: SweepArrays, g: Reals, room: Reals, first: int, last: int) -> None:
    """Sweep samples first … last − 1 of an RNN or GRU.

    ``g`` (B, H), the gradient after the last step, is overwritten by that before step 0. ``room``
    (B, W ≥ H) holds whole vectors.
    """
    gates, keep, losses, hidden = of.gates, of.keep, of.losses, of.hidden
    starts, to_entry = of.starts, of.to_entry
    samples, size, width, wide = *g.shape, gates.shape[2], room.shape[1]
    s, kept, s_n = gates.reshape(-1), keep.reshape(-1), of.inner.reshape(-1)
    known, terms, before = g.reshape(-1), losses.reshape(-1), room[first:last].reshape(-1)
    for t in range(gates.shape[0] - 1, -1, -1):
        before[:] = 0
        for b in range(first, last):
            row, u, to = (t * samples + b) * size, (t * samples + b) * width, (b - first) * wide
            for j in range(0, size, LANES):
                left, at = size - j, row + j
                x = load(known, b * size + j, left)
                if losses.shape[0]:
                    x = x + load(terms, at, left)
                for k in range(u + j, u + width, size):
                    store(s, k, x * load(s, k, left), left)
                if keep.shape[0]:
                    store(before, to + j, x * load(kept, at, left), left)
                    store(s_n, at, x * load(s_n, at, left), left)
        to = (t * samples + first) * width
        product(s, to, width, 1, last - first, hidden, wide, before, wide)
        for b in range(last - first):
            g[first + b] = before[b * wide : b * wide + size]
        if starts.shape[0]:
            leave(starts[t], g, to_entry, first, last)


@compiled  # type: ignore[untyped-decorator]
def sweep_lstm(of: SweepArrays, g: Reals, room: Reals, first: int, last: int) -> None:
    """Sweep samples first … last − 1 of an LSTM.

    ``g`` (B, 2 H), the gradient after the last step, is overwritten by that before step 0. ``room``
    (B, W ≥ H) holds whole vectors.
    """
    gates, losses, hidden = of.gates, of.losses, of.hidden
    starts, to_entry = of.starts, of.to_entry
    samples, size, wide = g.shape[0], g.shape[1] // 2, room.shape[1]
    s, f, e, known = gates.reshape(-1), of.keep.reshape(-1), of.inner.reshape(-1), g.reshape(-1)
    terms, before = losses.reshape(-1), room[first:last].reshape(-1)
    for t in range(gates.shape[0] - 1, -1, -1):
        for b in range(first, last):
            row, of_h = (t * samples + b) * size, 2 * b * size
            of_c = of_h + size
            for j in range(0, size, LANES):
                left, at, v = size - j, row + j, 4 * row + j
                x = load(known, of_h + j, left)
                if losses.shape[0]:
                    x = x + load(terms, at, left)
                d = load(known, of_c + j, left) + x * load(e, at, left)
                store(known, of_c + j, d * load(f, at, left), left)
                store(s, v, d * load(s, v, left), left)
                store(s, v + size, d * load(s, v + size, left), left)
                store(s, v + 2 * size, d * load(s, v + 2 * size, left), left)
                store(s, v + 3 * size, x * load(s, v + 3 * size, left), left)
        before[:] = 0
        at = (t * samples + first) * 4 * size
        product(s, at, 4 * size, 1, last - first, hidden, wide, before, wide)
        for b in range(last - first):
            g[first + b, :size] = before[b * wide : b * wide + size]
        if starts.shape[0]:
            leave(starts[t], g, to_entry, first, last)


@compiled  # type: ignore[untyped-decorator]
def sweep_chunks(of: SweepArrays, after: Reals, room: Reals, first: int, last: int) -> None:
    """Sweep chunks first … last − 1, each from the gradient ``after`` it (C, B, n).

    ``room`` (B, W) has whole vectors.
    """
    for c in range(first, last):
        own = SweepArrays(
            of.gates[c], of.keep[c], of.inner[c], of.losses[c], of.hidden, of.starts, of.to_entry
        )
        if 2 * after.shape[2] == of.gates.shape[3]:  # four gates, and a state of two parts
            sweep_lstm(own, after[c], room, 0, after.shape[1])
        else:
            sweep_state(own, after[c], room, 0, after.shape[1])


@compiled  # type: ignore[untyped-decorator]
def products_state(of: SweepArrays, rows: Reals, room: Reals, first: int, last: int) -> None:
    """Write the products P, and d, of chunks first … last − 1 to ``rows`` (C, B, H + 1, H).

    This is for RNN and GRU.
    """
    size, hidden = rows.shape[3], of.hidden
    wide = whole_vectors(size)
    panel, whole = hidden.shape[2], hidden.shape[0] * size * hidden.shape[2]
    jacobian = room[:whole].reshape(hidden.shape[0], size, panel)
    new = room[whole : whole + (size + 1) * wide]
    for c in range(first, last):
        for b in range(of.gates.shape[2]):
            row = rows[c, b]
            _identity(row)
            for t in range(of.gates.shape[1] - 1, -1, -1):
                if of.losses.shape[1]:
                    for j in range(size):
                        row[size, j] += of.losses[c, t, b, j]
                _sum_scaled(of.gates[c, t, b], hidden, 0, of.gates.shape[3] // size, jacobian)
                if of.keep.shape[1]:
                    for j in range(size):
                        jacobian[j // panel, j, j % panel] += of.keep[c, t, b, j]
                new[:] = 0
                product(row.reshape(-1), 0, size, 1, size + 1, jacobian, wide, new, wide)
                row[:] = new.reshape(size + 1, wide)[:, :size]


@compiled  # type: ignore[untyped-decorator]
def products_lstm(of: SweepArrays, rows: Reals, room: Reals, first: int, last: int) -> None:
    """Write the products P, and d, of an LSTM's chunks to ``rows`` (C, B, 2 H + 1, 2 H).

    The chunks are first … last − 1. A step multiplies by the two factors of the Jacobian:
    d = g_c + g_h e; g_h ← d a + g_h (s_o U_o); g_c ← d f.
    """
    size, hidden = rows.shape[3] // 2, of.hidden
    wide = whole_vectors(size)
    whole, count = hidden.shape[0] * size * hidden.shape[2], 2 * size + 1
    a = room[:whole].reshape(hidden.shape[0], size, hidden.shape[2])
    through = room[whole : 2 * whole].reshape(hidden.shape[0], size, hidden.shape[2])
    rest = room[2 * whole :]
    d = rest[: count * size].reshape(count, size)
    h = rest[count * size : 2 * count * size].reshape(count, size)
    new = rest[2 * count * size : count * (2 * size + wide)]
    for c in range(first, last):
        for b in range(of.gates.shape[2]):
            row = rows[c, b]
            _identity(row)
            for t in range(of.gates.shape[1] - 1, -1, -1):
                if of.losses.shape[1]:
                    for j in range(size):
                        row[2 * size, j] += of.losses[c, t, b, j]
                _sum_scaled(of.gates[c, t, b], hidden, 0, 3, a)
                _sum_scaled(of.gates[c, t, b], hidden, 3, 4, through)
                for i in range(count):
                    for j in range(size):
                        h[i, j] = row[i, j]
                        d[i, j] = row[i, size + j] + row[i, j] * of.inner[c, t, b, j]
                        row[i, size + j] = d[i, j] * of.keep[c, t, b, j]
                new[:] = 0
                product(d.reshape(-1), 0, size, 1, count, a, wide, new, wide)
                product(h.reshape(-1), 0, size, 1, count, through, wide, new, wide)
                row[:, :size] = new.reshape(count, wide)[:, :size]


@compiled  # type: ignore[untyped-decorator]
def _identity(row: Reals) -> None:
    row[:] = 0
    for j in range(row.shape[1]):
        row[j, j] = 1


@compiled  # type: ignore[untyped-decorator]
def _sum_scaled(gates: Reals, hidden: Reals, first: int, last: int, out: Reals) -> None:
    """Write Σ_k diag(gates_k) U_k to ``out``, for gates first … last − 1 of ``gates`` (K·H,).

    All matrices are in panels.
    """
    size = out.shape[1]
    out[:] = 0
    for p in range(out.shape[0]):
        for k in range(first * size, last * size, size):
            for i in range(size):
                scale, u, total = gates[k + i], hidden[p, k + i], out[p, i]
                for j in range(out.shape[2]):
                    total[j] += scale * u[j]
