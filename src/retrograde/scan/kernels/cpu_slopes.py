"""The loops of :mod:`retrograde.scan.kernels.cpu` that turn gates into slopes.

Between them torch's vectorised sigmoid and tanh are called. Rows are steps of samples; otherwise
the names are those of :mod:`retrograde.scan.recurrent`.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["gru_candidate", "gru_gates", "gru_slopes", "lstm_slopes"]

_Reals = NDArray[np.floating[Any]]

# Sums may be taken in any order, as every BLAS does; infinities and NaNs keep their meaning.
_MATH = {"contract", "reassoc", "nsz", "arcp"}
_compiled: Any = njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy")


@_compiled  # type: ignore[untyped-decorator]
def gru_gates(inputs: _Reals, hidden: _Reals, rz: _Reals, first: int, last: int) -> None:
    """What enters r and z."""
    for row in range(first, last):
        a, b, total = inputs[row], hidden[row], rz[row]
        for j in range(rz.shape[1]):
            total[j] = a[j] + b[j]


@_compiled  # type: ignore[untyped-decorator]
def gru_candidate(
    inputs: _Reals, hidden: _Reals, rz: _Reals, n: _Reals, first: int, last: int
) -> None:
    """What enters n, from r."""
    size = n.shape[1]
    for row in range(first, last):
        a, m, r, total = inputs[row, 2 * size :], hidden[row, 2 * size :], rz[row], n[row]
        for j in range(size):
            total[j] = a[j] + r[j] * m[j]


@_compiled  # type: ignore[untyped-decorator]
def gru_slopes(
    hidden: _Reals, before: _Reals, rz: _Reals, n: _Reals, keep: _Reals, first: int, last: int
) -> None:
    """hidden ← s_r, s_z, s_m; n ← s_n; keep ← z."""
    size, one = n.shape[1], n.dtype.type(1)  # a plain 1 would make everything float64
    for row in range(first, last):
        s_r, s_z, s_m = hidden[row, :size], hidden[row, size : 2 * size], hidden[row, 2 * size :]
        r, z, s_n, h, kept = rz[row, :size], rz[row, size:], n[row], before[row], keep[row]
        for j in range(size):
            candidate, m = s_n[j], s_m[j]
            slope = (one - z[j]) * (one - candidate * candidate)
            kept[j] = z[j]
            s_z[j] = (h[j] - candidate) * z[j] * (one - z[j])
            s_r[j] = slope * m * r[j] * (one - r[j])
            s_m[j] = slope * r[j]
            s_n[j] = slope


@_compiled  # type: ignore[untyped-decorator]
def lstm_slopes(
    gates: _Reals, g: _Reals, after: _Reals, keep: _Reals, c: _Reals, first: int, last: int
) -> None:
    """gates ← s_i, s_f, s_g, s_o; g ← e; keep ← f; c ← c after the last step."""
    size, one, tiny = c.shape[1], c.dtype.type(1), c.dtype.type(1e-37)
    for t in range(gates.shape[0]):
        for b in range(first, last):
            s_i, s_f = gates[t, b, :size], gates[t, b, size : 2 * size]
            s_g, s_o = gates[t, b, 2 * size : 3 * size], gates[t, b, 3 * size :]
            e, h, kept, state = g[t, b], after[t, b], keep[t, b], c[b]
            for j in range(size):
                i, f, n, o = s_i[j], s_f[j], e[j], s_o[j]
                tanh_c = h[j] / max(o, tiny)  # h = o tanh c; where o is 0, so are e and s_o
                kept[j] = f
                s_i[j] = n * i * (one - i)
                s_f[j] = state[j] * f * (one - f)
                s_g[j] = i * (one - n * n)
                s_o[j] = tanh_c * o * (one - o)
                e[j] = o * (one - tanh_c * tanh_c)
                state[j] = f * state[j] + i * n
