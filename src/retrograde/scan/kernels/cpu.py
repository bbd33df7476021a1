"""The sequential sweep on a CPU, compiled: one pass over the steps, samples shared among threads.

A step of the backward recurrence is a few products of elements and one product of a short vector
with the hidden weights. torch spends microseconds on calling each; here a step of a sample is a
loop. Samples do not depend on one another, so each thread takes some of them through all the
steps. Two samples and eight rows of the weights are taken at a time, so that a loaded weight is
used twice and a loaded sum eight times; the compiler vectorises over the units. The slopes take a
pass of their own, but that torch's vectorised tanh and sigmoid are called.

The reference is :func:`retrograde.scan.sweep.sweep`. Gates and the rest are those of
:mod:`retrograde.scan.recurrent`, arrays in place of tensors: ``gates`` (L, B, K·H).
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from retrograde.scan import sweep as reference
from retrograde.scan.recurrent import Slopes

__all__ = ["gru_slopes", "lstm_slopes", "scan", "sweep"]

_Reals = NDArray[np.floating[Any]]

# Sums may be taken in any order, as every BLAS does; infinities and NaNs keep their meaning.
_MATH = {"contract", "reassoc", "nsz", "arcp"}
_compiled: Any = njit(cache=True, nogil=True, fastmath=_MATH, error_model="numpy")

# Multiplications that are worth a thread of their own: about half a millisecond.
_THREAD_WORK = 4_000_000
_ELEMENT_WORK = 40  # of a row of slopes, in the same unit


def sweep(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor) -> Tensor:
    """As :func:`retrograde.scan.sweep.sweep`, for float32 and float64 on a CPU."""
    samples, size = slopes.gates.shape[1], slopes.gates.shape[3]
    gates = slopes.gates.flatten(-2).numpy()
    absent = np.empty((0, 0, 0), gates.dtype)
    keep, inner, losses = (
        absent if t is None else t.numpy() for t in (slopes.keep, slopes.inner, dy)
    )
    weights, g = hidden.contiguous().numpy(), g.clone(memory_format=torch.contiguous_format)
    kernel = _sweep_lstm if g.shape[-1] == 2 * size else _sweep_state
    _share(
        functools.partial(kernel, gates, keep, inner, weights, losses, g.numpy()),
        samples,
        slopes.gates.numel() * size,
    )
    return g


def scan(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor, chunk: int) -> Tensor:
    """As :func:`retrograde.scan.sweep.scan`, for float32 and float64 on a CPU."""
    length, samples, _, size = slopes.gates.shape
    rest = length % chunk
    if length // chunk < 2:
        return sweep(slopes, hidden, dy, g)
    chunks, losses = reference.in_chunks(slopes.at(slice(rest, None)), dy, rest, chunk)
    count, n = len(chunks.gates), g.shape[-1]
    absent = np.empty((0, 0, 0, 0), hidden.numpy().dtype)
    keep, inner, terms = (
        absent if t is None else t.numpy() for t in (chunks.keep, chunks.inner, losses)
    )
    gates, weights = chunks.gates.flatten(-2).numpy(), hidden.contiguous().numpy()
    rows = g.new_empty(count, samples, n + 1, n)
    kernel = _products_lstm if n == 2 * size else _products_state
    arrays = gates, keep, inner, weights, terms
    work = chunks.gates.numel() * size * n // samples
    _share(functools.partial(kernel, *arrays, rows.numpy()), count, work * samples)
    after, before = reference.carry(rows, g)
    if not reference.trusted(rows, after):
        return sweep(slopes, hidden, dy, g)
    local = _local_lstm if n == 2 * size else _local_state
    _share(functools.partial(local, *arrays, after.numpy()), count, chunks.gates.numel() * size)
    return sweep(slopes.at(slice(0, rest)), hidden, None if dy is None else dy[:rest], before)


def gru_slopes(inputs: Tensor, hidden: Tensor, before: Tensor) -> Slopes:
    """As :func:`retrograde.scan.recurrent.gru_slopes`, for float32 and float64 on a CPU."""
    length, samples, size = before.shape
    rows = length * samples
    rz, n, keep = (before.new_empty(rows, width) for width in (2 * size, size, size))
    arrays = [t.view(rows, -1).numpy() for t in (inputs, hidden, before.contiguous(), rz, n, keep)]
    work = rows * _ELEMENT_WORK
    _share(functools.partial(_gru_gates, *arrays[:2], arrays[3]), rows, work)
    rz.sigmoid_()
    _share(functools.partial(_gru_candidate, *arrays[:2], *arrays[3:5]), rows, work)
    n.tanh_()
    _share(functools.partial(_gru_slopes, *arrays[1:]), rows, work)
    shape = before.shape
    return Slopes(hidden.unflatten(-1, (3, size)), keep.view(shape), n.view(shape))


def lstm_slopes(gates: Tensor, after: Tensor, c: Tensor) -> Slopes:
    """As :func:`retrograde.scan.recurrent.lstm_slopes`, for float32 and float64 on a CPU."""
    length, samples, size = after.shape
    part = gates[..., 2 * size : 3 * size]
    g = part.clone(memory_format=torch.contiguous_format).tanh_()
    gates.sigmoid_()  # the third gate too: one pass over all is quicker than two over parts
    keep = torch.empty_like(g)
    arrays = [t.numpy() for t in (gates, g, after.contiguous(), keep, c.clone())]
    work = length * samples * _ELEMENT_WORK
    _share(functools.partial(_lstm_slopes, *arrays), samples, work)
    return Slopes(gates.unflatten(-1, (4, size)), keep, g)


def _share(kernel: Callable[[int, int], None], samples: int, work: int) -> None:
    """Call a kernel on ranges of samples, on as many threads as torch uses and the work pays."""
    threads = min(torch.get_num_threads(), (samples + 1) // 2, 1 + work // _THREAD_WORK)
    if threads < 2:
        kernel(0, samples)
        return
    bounds = [2 * round(i * samples / threads / 2) for i in range(threads)] + [samples]
    others = [_pool(threads - 1).submit(kernel, a, b) for a, b in pairwise(bounds[1:])]
    kernel(bounds[0], bounds[1])
    for other in others:
        other.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="retrograde")


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
def _sweep_state(
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
def _sweep_lstm(
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
def _local_state(
    gates: _Reals,
    keep: _Reals,
    inner: _Reals,
    hidden: _Reals,
    losses: _Reals,
    after: _Reals,
    first: int,
    last: int,
) -> None:
    """Chunks first … last − 1, each swept from the gradient after it (C, B, H)."""
    for c in range(first, last):
        kept, candidate = (keep[c], inner[c]) if keep.shape[0] else (keep[:, 0], inner[:, 0])
        terms = losses[c] if losses.shape[0] else losses[:, 0]
        _sweep_state(gates[c], kept, candidate, hidden, terms, after[c], 0, gates.shape[2])


@_compiled  # type: ignore[untyped-decorator]
def _local_lstm(
    gates: _Reals,
    keep: _Reals,
    inner: _Reals,
    hidden: _Reals,
    losses: _Reals,
    after: _Reals,
    first: int,
    last: int,
) -> None:
    """Chunks first … last − 1, each swept from the gradient after it (C, B, 2 H)."""
    for c in range(first, last):
        terms = losses[c] if losses.shape[0] else losses[:, 0]
        _sweep_lstm(gates[c], keep[c], inner[c], hidden, terms, after[c], 0, gates.shape[2])


@_compiled  # type: ignore[untyped-decorator]
def _products_state(
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
def _products_lstm(
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


@_compiled  # type: ignore[untyped-decorator]
def _gru_gates(inputs: _Reals, hidden: _Reals, rz: _Reals, first: int, last: int) -> None:
    """What enters r and z."""
    for row in range(first, last):
        a, b, total = inputs[row], hidden[row], rz[row]
        for j in range(rz.shape[1]):
            total[j] = a[j] + b[j]


@_compiled  # type: ignore[untyped-decorator]
def _gru_candidate(
    inputs: _Reals, hidden: _Reals, rz: _Reals, n: _Reals, first: int, last: int
) -> None:
    """What enters n, from r."""
    size = n.shape[1]
    for row in range(first, last):
        a, m, r, total = inputs[row, 2 * size :], hidden[row, 2 * size :], rz[row], n[row]
        for j in range(size):
            total[j] = a[j] + r[j] * m[j]


@_compiled  # type: ignore[untyped-decorator]
def _gru_slopes(
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
def _lstm_slopes(
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
