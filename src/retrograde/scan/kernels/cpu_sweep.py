"""The loops of :mod:`retrograde.scan.kernels.cpu` that follow the steps: sweeps, chunks' products.

Arrays in place of tensors, and otherwise the names of :mod:`retrograde.scan.recurrent`: ``gates``
(L, B, K·H), ``keep`` and ``inner`` (L, B, H), ``hidden`` (K·H, H), ``losses`` (L, B, H); with
chunks, (C, L, B, …). An array that is absent has no entries.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = [
    "local",
    "products_lstm",
    "products_state",
    "sweep_lstm",
    "sweep_state",
]

_Reals = NDArray[np.floating[Any]]

# Sums may be taken in any order, as every BLAS does; infinities and NaNs keep their meaning.
_MATH = {"contract", "reassoc", "nsz", "arcp"}
_compiled: Any = njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy")


@_compiled  # type: ignore[untyped-decorator]
def _add_product(a: _Reals, u: _Reals, out: _Reals) -> None:
    """out += a @ u, for a few samples: a (S, N), u (N, H), out (S, H)."""
    samples, rows = a.shape
    size, whole = u.shape[1], rows - rows % 8
    for b in range(0, samples - 1, 2):
        x, y, p, q = a[b], a[b + 1], out[b], out[b + 1]
        for i in range(0, whole, 8):
            x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
            x4, x5, x6, x7 = x[i + 4], x[i + 5], x[i + 6], x[i + 7]
            y0, y1, y2, y3 = y[i], y[i + 1], y[i + 2], y[i + 3]
            y4, y5, y6, y7 = y[i + 4], y[i + 5], y[i + 6], y[i + 7]
            u0, u1, u2, u3 = u[i], u[i + 1], u[i + 2], u[i + 3]
            u4, u5, u6, u7 = u[i + 4], u[i + 5], u[i + 6], u[i + 7]
            for j in range(size):
                first = x0 * u0[j] + x1 * u1[j] + x2 * u2[j] + x3 * u3[j]
                p[j] += first + (x4 * u4[j] + x5 * u5[j] + x6 * u6[j] + x7 * u7[j])
                first = y0 * u0[j] + y1 * u1[j] + y2 * u2[j] + y3 * u3[j]
                q[j] += first + (y4 * u4[j] + y5 * u5[j] + y6 * u6[j] + y7 * u7[j])
        if rows - whole >= 4:
            i = whole
            x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
            y0, y1, y2, y3 = y[i], y[i + 1], y[i + 2], y[i + 3]
            u0, u1, u2, u3 = u[i], u[i + 1], u[i + 2], u[i + 3]
            for j in range(size):
                p[j] += x0 * u0[j] + x1 * u1[j] + x2 * u2[j] + x3 * u3[j]
                q[j] += y0 * u0[j] + y1 * u1[j] + y2 * u2[j] + y3 * u3[j]
        for i in range(rows - rows % 4, rows):
            x0, y0, u0 = x[i], y[i], u[i]
            for j in range(size):
                p[j] += x0 * u0[j]
                q[j] += y0 * u0[j]
    if samples % 2:
        x, p = a[samples - 1], out[samples - 1]
        whole = rows - rows % 4
        for i in range(0, whole, 4):
            x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
            u0, u1, u2, u3 = u[i], u[i + 1], u[i + 2], u[i + 3]
            for j in range(size):
                p[j] += x0 * u0[j] + x1 * u1[j] + x2 * u2[j] + x3 * u3[j]
        for i in range(whole, rows):
            x0, u0 = x[i], u[i]
            for j in range(size):
                p[j] += x0 * u0[j]


@_compiled  # type: ignore[untyped-decorator]
def sweep_state(
    gates: _Reals,
    keep: _Reals,
    inner: _Reals,
    hidden: _Reals,
    losses: _Reals,
    g: _Reals,
    first: int,
    last: int,
) -> None:
    """RNN and GRU, samples first … last − 1; g (B, H) goes from after the last to before step 0."""
    size, width = g.shape[1], gates.shape[2]
    before = np.empty((last - first, size), g.dtype)
    for t in range(gates.shape[0] - 1, -1, -1):
        for b in range(first, last):
            if losses.shape[0]:
                for j in range(size):
                    g[b, j] += losses[t, b, j]
            for k in range(0, width, size):
                for j in range(size):
                    gates[t, b, k + j] *= g[b, j]
            if keep.shape[0]:
                for j in range(size):
                    before[b - first, j] = keep[t, b, j] * g[b, j]
                for j in range(size):
                    inner[t, b, j] *= g[b, j]
            else:
                before[b - first] = 0
        _add_product(gates[t, first:last], hidden, before)
        g[first:last] = before


@_compiled  # type: ignore[untyped-decorator]
def sweep_lstm(
    gates: _Reals,
    keep: _Reals,
    inner: _Reals,
    hidden: _Reals,
    losses: _Reals,
    g: _Reals,
    first: int,
    last: int,
) -> None:
    """LSTM, samples first … last − 1; g (B, 2 H) goes from after the last to before step 0."""
    size = hidden.shape[1]
    before = np.empty((last - first, size), g.dtype)
    by = np.empty(4 * size, g.dtype)  # what the gates are multiplied by: d, d, d, g_h
    for t in range(gates.shape[0] - 1, -1, -1):
        for b in range(first, last):
            if losses.shape[0]:
                for j in range(size):
                    g[b, j] += losses[t, b, j]
            for j in range(size):
                d = g[b, size + j] + g[b, j] * inner[t, b, j]
                by[j] = by[size + j] = by[2 * size + j] = d
                by[3 * size + j] = g[b, j]
            for j in range(size):
                g[b, size + j] = by[j] * keep[t, b, j]
            for j in range(4 * size):
                gates[t, b, j] *= by[j]
        before[:] = 0
        _add_product(gates[t, first:last], hidden, before)
        g[first:last, :size] = before


@_compiled  # type: ignore[untyped-decorator]
def local(
    gates: _Reals,
    keep: _Reals,
    inner: _Reals,
    hidden: _Reals,
    losses: _Reals,
    after: _Reals,
    first: int,
    last: int,
) -> None:
    """Chunks first … last − 1, each swept from the gradient after it (C, B, n)."""
    for c in range(first, last):
        kept, more = (keep[c], inner[c]) if keep.shape[0] else (keep[:, 0], inner[:, 0])
        terms = losses[c] if losses.shape[0] else losses[:, 0]
        samples = gates.shape[2]
        if after.shape[-1] > hidden.shape[1]:
            sweep_lstm(gates[c], kept, more, hidden, terms, after[c], 0, samples)
        else:
            sweep_state(gates[c], kept, more, hidden, terms, after[c], 0, samples)


@_compiled  # type: ignore[untyped-decorator]
def products_state(
    gates: _Reals,
    keep: _Reals,
    inner: _Reals,
    hidden: _Reals,
    losses: _Reals,
    rows: _Reals,
    first: int,
    last: int,
) -> None:
    """RNN and GRU, chunks first … last − 1: rows (C, B, H + 1, H) ← the products P, and d."""
    size = hidden.shape[1]
    jacobian = np.empty((size, size), gates.dtype)
    new = np.empty((size + 1, size), gates.dtype)
    for c in range(first, last):
        for b in range(gates.shape[2]):
            row = rows[c, b]
            _identity(row)
            for t in range(gates.shape[1] - 1, -1, -1):
                if losses.shape[0]:
                    for j in range(size):
                        row[size, j] += losses[c, t, b, j]
                _sum_scaled(gates[c, t, b], hidden, jacobian)
                if keep.shape[0]:
                    for j in range(size):
                        jacobian[j, j] += keep[c, t, b, j]
                new[:] = 0
                _add_product(row, jacobian, new)
                row[:] = new


@_compiled  # type: ignore[untyped-decorator]
def products_lstm(
    gates: _Reals,
    keep: _Reals,
    inner: _Reals,
    hidden: _Reals,
    losses: _Reals,
    rows: _Reals,
    first: int,
    last: int,
) -> None:
    """LSTM, chunks first … last − 1: rows (C, B, 2 H + 1, 2 H) ← the products P, and d.

    By the two factors of the Jacobian: d = g_c + g_h e; g_h ← d a + g_h (s_o U_o); g_c ← d f.
    """
    size = hidden.shape[1]
    a, through = np.empty((size, size), gates.dtype), np.empty((size, size), gates.dtype)
    d = np.empty((2 * size + 1, size), gates.dtype)
    h, new = np.empty_like(d), np.empty_like(d)
    for c in range(first, last):
        for b in range(gates.shape[2]):
            row = rows[c, b]
            _identity(row)
            for t in range(gates.shape[1] - 1, -1, -1):
                if losses.shape[0]:
                    for j in range(size):
                        row[2 * size, j] += losses[c, t, b, j]
                _sum_scaled(gates[c, t, b, : 3 * size], hidden[: 3 * size], a)
                _sum_scaled(gates[c, t, b, 3 * size :], hidden[3 * size :], through)
                for i in range(2 * size + 1):
                    for j in range(size):
                        h[i, j] = row[i, j]
                        d[i, j] = row[i, size + j] + row[i, j] * inner[c, t, b, j]
                        row[i, size + j] = d[i, j] * keep[c, t, b, j]
                new[:] = 0
                _add_product(d, a, new)
                _add_product(h, through, new)
                row[:, :size] = new


@_compiled  # type: ignore[untyped-decorator]
def _identity(row: _Reals) -> None:
    row[:] = 0
    for j in range(row.shape[1]):
        row[j, j] = 1


@_compiled  # type: ignore[untyped-decorator]
def _sum_scaled(gates: _Reals, hidden: _Reals, out: _Reals) -> None:
    """out ← Σ_k diag(gates_k) U_k, for gates (K·H,), hidden (K·H, H)."""
    size = out.shape[0]
    for i in range(size):
        for j in range(size):
            out[i, j] = gates[i] * hidden[i, j]
    for k in range(size, gates.shape[0], size):
        for i in range(size):
            for j in range(size):
                out[i, j] += gates[k + i] * hidden[k + i, j]
