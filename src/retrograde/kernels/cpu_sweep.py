"""The loops of :mod:`retrograde.kernels.cpu` for the sweep, and for the products of chunks.

The names are those of :mod:`retrograde.kernels.cells`, but of arrays instead of tensors:

- ``gates`` (L, B, K·H), ``keep``, ``inner`` and ``losses`` (L, B, H); with chunks, (C, L, B, …).
  An array that is absent has no steps;
- ``hidden`` (K·H, H), in panels;
- ``room``: scratch memory (:func:`room_to_sweep`, :func:`room_for_products`).
"""

from retrograde.kernels.lanes import LANES, Reals, compiled, load, store
from retrograde.kernels.tiles import PANEL, product, whole_vectors

__all__ = [
    "products_lstm",
    "products_state",
    "room_for_products",
    "room_to_sweep",
    "sweep_chunks",
    "sweep_lstm",
    "sweep_state",
]


def room_to_sweep(samples: int, size: int) -> int:
    """Return the size of a thread's ``room`` for sweeping some samples of H units."""
    return samples * int(whole_vectors(size))


def room_for_products(size: int, parts: int) -> int:
    """Return the size of a thread's ``room`` for products of Jacobians.

    A state has one part of H units, or two for (h, c).
    """
    rows = parts * size + 1
    matrices = parts * -(-size // PANEL) * size * PANEL
    return matrices + rows * (int(whole_vectors(size)) + (2 * size if parts == 2 else 0))


@compiled  # type: ignore[untyped-decorator]
def sweep_state(
    gates: Reals,
    keep: Reals,
    inner: Reals,
    hidden: Reals,
    losses: Reals,
    g: Reals,
    room: Reals,
    first: int,
    last: int,
) -> None:
    """Sweep samples first … last − 1 of an RNN or GRU.

    ``g`` (B, H), the gradient after the last step, is overwritten by that before step 0.
    """
    size, width = g.shape[1], gates.shape[2]
    wide, samples = whole_vectors(size), gates.shape[1]
    before = room[: (last - first) * wide]
    s, kept, s_n, known = gates.reshape(-1), keep.reshape(-1), inner.reshape(-1), g.reshape(-1)
    terms = losses.reshape(-1)
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
        product(s, (t * samples + first) * width, width, last - first, hidden, wide, before)
        for b in range(first, last):
            g[b] = before[(b - first) * wide : (b - first) * wide + size]


@compiled  # type: ignore[untyped-decorator]
def sweep_lstm(
    gates: Reals,
    keep: Reals,
    inner: Reals,
    hidden: Reals,
    losses: Reals,
    g: Reals,
    room: Reals,
    first: int,
    last: int,
) -> None:
    """Sweep samples first … last − 1 of an LSTM.

    ``g`` (B, 2 H), the gradient after the last step, is overwritten by that before step 0.
    """
    size, samples = g.shape[1] // 2, gates.shape[1]
    wide = whole_vectors(size)
    before = room[: (last - first) * wide]
    s, f, e, known = gates.reshape(-1), keep.reshape(-1), inner.reshape(-1), g.reshape(-1)
    terms = losses.reshape(-1)
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
        product(s, (t * samples + first) * 4 * size, 4 * size, last - first, hidden, wide, before)
        for b in range(first, last):
            g[b, :size] = before[(b - first) * wide : (b - first) * wide + size]


@compiled  # type: ignore[untyped-decorator]
def sweep_chunks(
    gates: Reals,
    keep: Reals,
    inner: Reals,
    hidden: Reals,
    losses: Reals,
    after: Reals,
    room: Reals,
    first: int,
    last: int,
) -> None:
    """Sweep chunks first … last − 1, each from the gradient ``after`` it (C, B, n)."""
    samples = gates.shape[2]
    for c in range(first, last):
        arrays = gates[c], keep[c], inner[c], hidden, losses[c], after[c], room, 0, samples
        if 2 * after.shape[-1] == gates.shape[-1]:  # four gates, and a state of two parts
            sweep_lstm(*arrays)
        else:
            sweep_state(*arrays)


@compiled  # type: ignore[untyped-decorator]
def products_state(
    gates: Reals,
    keep: Reals,
    inner: Reals,
    hidden: Reals,
    losses: Reals,
    rows: Reals,
    room: Reals,
    first: int,
    last: int,
) -> None:
    """Write the products P, and d, of chunks first … last − 1 to ``rows`` (C, B, H + 1, H).

    This is for RNN and GRU.
    """
    size = rows.shape[-1]
    wide = whole_vectors(size)
    panel, whole = hidden.shape[2], hidden.shape[0] * size * hidden.shape[2]
    jacobian = room[:whole].reshape(hidden.shape[0], size, panel)
    new = room[whole : whole + (size + 1) * wide]
    for c in range(first, last):
        for b in range(gates.shape[2]):
            row = rows[c, b]
            _identity(row)
            for t in range(gates.shape[1] - 1, -1, -1):
                if losses.shape[1]:
                    for j in range(size):
                        row[size, j] += losses[c, t, b, j]
                _sum_scaled(gates[c, t, b], hidden, 0, gates.shape[-1] // size, jacobian)
                if keep.shape[1]:
                    for j in range(size):
                        jacobian[j // panel, j, j % panel] += keep[c, t, b, j]
                new[:] = 0
                product(row.reshape(-1), 0, size, size + 1, jacobian, wide, new)
                row[:] = new.reshape(size + 1, wide)[:, :size]


@compiled  # type: ignore[untyped-decorator]
def products_lstm(
    gates: Reals,
    keep: Reals,
    inner: Reals,
    hidden: Reals,
    losses: Reals,
    rows: Reals,
    room: Reals,
    first: int,
    last: int,
) -> None:
    """Write the products P, and d, of an LSTM's chunks to ``rows`` (C, B, 2 H + 1, 2 H).

    The chunks are first … last − 1. A step multiplies by the two factors of the Jacobian:
    d = g_c + g_h e; g_h ← d a + g_h (s_o U_o); g_c ← d f.
    """
    size = rows.shape[-1] // 2
    wide = whole_vectors(size)
    whole, count = hidden.shape[0] * size * hidden.shape[2], 2 * size + 1
    a = room[:whole].reshape(hidden.shape[0], size, hidden.shape[2])
    through = room[whole : 2 * whole].reshape(hidden.shape[0], size, hidden.shape[2])
    rest = room[2 * whole :]
    d = rest[: count * size].reshape(count, size)
    h = rest[count * size : 2 * count * size].reshape(count, size)
    new = rest[2 * count * size : count * (2 * size + wide)]
    for c in range(first, last):
        for b in range(gates.shape[2]):
            row = rows[c, b]
            _identity(row)
            for t in range(gates.shape[1] - 1, -1, -1):
                if losses.shape[1]:
                    for j in range(size):
                        row[2 * size, j] += losses[c, t, b, j]
                _sum_scaled(gates[c, t, b], hidden, 0, 3, a)
                _sum_scaled(gates[c, t, b], hidden, 3, 4, through)
                for i in range(2 * size + 1):
                    for j in range(size):
                        h[i, j] = row[i, j]
                        d[i, j] = row[i, size + j] + row[i, j] * inner[c, t, b, j]
                        row[i, size + j] = d[i, j] * keep[c, t, b, j]
                new[:] = 0
                product(d.reshape(-1), 0, size, 2 * size + 1, a, wide, new)
                product(h.reshape(-1), 0, size, 2 * size + 1, through, wide, new)
                row[:, :size] = new.reshape(2 * size + 1, wide)[:, :size]


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
