"""Triton kernels of the backward recurrence: products, carry and sweeps.

:mod:`retrograde.kernels.cuda.launch` launches them. The references have the same names in
:mod:`retrograde.kernels.sweep`. Arrays are contiguous, float32, and in the references' order of
dimensions. The n numbers of a state are H of h and, for an LSTM, H of c.

Chunks of L steps are counted from the end of the block, so the first chunk may be shorter. Tiles
are padded to a power of two P ≥ H, and nothing is read or written beyond H.

Each step of a sweep waits for the step before, so latency matters most. Each sample of a chunk has
its own program, which holds the weights in registers. It computes g U as elementwise products and
sums, of which a thread has all terms: threads exchange a vector at a step, and no partial sums.

The products of Jacobians are matrix products. A program takes a tile of rows through a chunk. It
forms the Jacobian of each step, Σ_k diag(s_k) U_k, when it needs it. The two products of an LSTM's
step use the same shared memory in turn, so the operands of the second are formed after the first.

A sweep overwrites its input, and several threads may read a number that one of them overwrites. So
a barrier separates the reads from the writes. The loads ahead have such a barrier. With one stage
there are no loads ahead, so the kernel has its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants of a compilation are in capitals, as everywhere in Triton)

from typing import Any

import torch
import triton
import triton.language as tl

from retrograde.kernels.sweep import CANCELLATION

# When a sample's products are trusted, as in ``sweep.trusted``.
LIMIT = tl.constexpr(CANCELLATION)
MOST = tl.constexpr(torch.finfo(torch.float32).max)

# Lengths and counts change from call to call, so the compiled code does not specialize on them.
_compiled: Any = triton.jit(do_not_specialize=["samples", "length", "chunks", "chunk", "apart"])
_inlined: Any = triton.jit


@_inlined
def _steps(chunk_index, length, chunks, chunk):
    """Return the first step of a chunk, and the first step after it."""
    end = length - (chunks - 1 - chunk_index) * chunk
    return tl.maximum(end - chunk, 0), end


@_inlined
def _weights(hidden, gate: tl.constexpr, H: tl.constexpr, P: tl.constexpr):
    """Load U of one gate, (P, P)."""
    i = tl.arange(0, P)[:, None]
    j = tl.arange(0, P)[None, :]
    return tl.load(hidden + (gate * H + i) * H + j, mask=(i < H) & (j < H), other=0.0)


@_inlined
def _numbers(array, start, H: tl.constexpr, P: tl.constexpr):
    """Load H numbers of an array from ``start`` on, padded with zeros, (P,)."""
    j = tl.arange(0, P)
    return tl.load(array + start + j, mask=j < H, other=0.0)


@_compiled
def products(
    gates, keep, inner, hidden, dy, maps, samples, length, chunks, chunk, K: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, LOSSES: tl.constexpr,
    TF32: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the products of Jacobians. Program (c·B + b, r) computes ROWS rows of the product of
    chunk c and sample b, from row r·ROWS on."""
    pair = tl.program_id(0).to(tl.int64)
    first_step, end = _steps(pair // samples, length, chunks, chunk)
    b = pair % samples
    n: tl.constexpr = 2 * H if K == 4 else H
    exact: tl.constexpr = "tf32x3" if TF32 else "ieee"
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, P)[None, :]
    h = tl.where((i == j) & (j < H), 1.0, 0.0)
    c = tl.where((i == j + H) & (j < H) & (K == 4), 1.0, 0.0)
    u0 = _weights(hidden, 0, H, P)
    u1 = u0
    u2 = u0
    u3 = u0
    if K > 1:
        u1 = _weights(hidden, 1, H, P)
        u2 = _weights(hidden, 2, H, P)
    if K > 3:
        u3 = _weights(hidden, 3, H, P)
    for back in tl.range(1, (end - first_step + 1).to(tl.int32), num_stages=STAGES):
        at = (end - back) * samples + b
        if LOSSES:
            h += tl.where(i == n, _numbers(dy, at * H, H, P)[None, :], 0.0)
        kept = tl.zeros((ROWS, P), tl.float32)
        if K == 3:
            kept = h * _numbers(keep, at * H, H, P)[None, :]
        if K == 4:
            through = _numbers(gates, (at * K + 3) * H, H, P)[:, None] * u3
            kept = tl.dot(h, through, input_precision=exact)
        jacobian = _numbers(gates, at * K * H, H, P)[:, None] * u0
        if K > 1:
            jacobian += _numbers(gates, (at * K + 1) * H, H, P)[:, None] * u1
            jacobian += _numbers(gates, (at * K + 2) * H, H, P)[:, None] * u2
        if K == 4:
            h = c + h * _numbers(inner, at * H, H, P)[None, :]
            c = h * _numbers(keep, at * H, H, P)[None, :]
        h = tl.dot(h, jacobian, kept, input_precision=exact)
    out = maps + (pair * (n + 1) + i) * n + j
    tl.store(out, h, mask=(i <= n) & (j < H))
    if K == 4:
        tl.store(out + H, c, mask=(i <= n) & (j < H))


@_inlined
def _quadrant(
    maps, pair, top: tl.constexpr, left: tl.constexpr, n: tl.constexpr, H: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """Load H rows and H columns of a product, from row ``top`` and column ``left`` on, (P, P)."""
    i = tl.arange(0, P)[:, None]
    j = tl.arange(0, P)[None, :]
    at = (pair * (n + 1) + top + i) * n + left + j
    return tl.load(maps + at, mask=(i < H) & (j < H), other=0.0)


@_inlined
def _worst(worst, terms):
    """Return the larger number, where a NaN counts as infinity."""
    return tl.maximum(worst, tl.where(terms == terms, terms, float("inf")))


@_compiled
def carry(
    maps, g, after, sizes, samples, chunks, LSTM: tl.constexpr, H: tl.constexpr,
    P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Carry the gradient from the last chunk to the first; program b has sample b. ``sizes`` (2, B)
    receives what tells whether products are trusted. The first row has the largest sum of terms'
    magnitudes, infinite after a NaN. The second has the largest gradient's magnitude."""
    b = tl.program_id(0).to(tl.int64)
    n: tl.constexpr = 2 * H if LSTM else H
    j = tl.arange(0, P)
    h = _numbers(g, b * n, H, P)
    c = _numbers(g, b * n + H, H, P) if LSTM else h
    terms = tl.zeros((P,), tl.float32)
    largest = tl.zeros((P,), tl.float32)
    for back in tl.range(1, chunks + 1, num_stages=STAGES):
        pair = (chunks - back) * samples + b
        tl.store(after + pair * n + j, h, mask=j < H)
        loss = (pair * (n + 1) + n) * n
        loss_of_h = _numbers(maps, loss, H, P)
        product = h[:, None] * _quadrant(maps, pair, 0, 0, n, H, P)
        size = tl.sum(tl.abs(product), 0)
        largest = tl.maximum(largest, tl.maximum(tl.abs(h), tl.abs(loss_of_h)))
        if LSTM:
            tl.store(after + pair * n + H + j, c, mask=j < H)
            down = c[:, None] * _quadrant(maps, pair, H, 0, n, H, P)
            terms = _worst(terms, size + tl.sum(tl.abs(down), 0))
            product += down
            across = h[:, None] * _quadrant(maps, pair, 0, H, n, H, P)
            below = c[:, None] * _quadrant(maps, pair, H, H, n, H, P)
            terms = _worst(terms, tl.sum(tl.abs(across) + tl.abs(below), 0))
            loss_of_c = _numbers(maps, loss + H, H, P)
            largest = tl.maximum(largest, tl.maximum(tl.abs(c), tl.abs(loss_of_c)))
            c = tl.sum(across + below, 0) + loss_of_c
        else:
            terms = _worst(terms, size)
        h = tl.sum(product, 0) + loss_of_h
    terms = _worst(terms, tl.where(h == h, 0.0, float("inf")))
    if LSTM:
        terms = _worst(terms, tl.where(c == c, 0.0, float("inf")))
    tl.store(sizes + b, tl.max(terms, 0))
    tl.store(sizes + samples + b, tl.max(largest, 0))


@_inlined
def _by_terms(
    hidden, term, unit, K: tl.constexpr, S: tl.constexpr, H: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Load U of all gates, (terms, gates, units), so that a thread has all terms of its sums. The
    strides of terms and units are not constants. Else the compiler would see which lie side by
    side, and divide these among threads."""
    i = tl.arange(0, P)[:, None, None]
    k = tl.arange(0, S)[None, :, None]
    j = tl.arange(0, P)[None, None, :]
    mask = (k < K) & (i < H) & (j < H)
    return tl.load(hidden + k * H * H + i * term + j * unit, mask=mask, other=0.0)


@_compiled
def sweep(
    gates, keep, inner, hidden, dy, after, before, sizes, distrusted, samples, length, chunks,
    chunk, apart, K: tl.constexpr, S: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    LOSSES: tl.constexpr, CHECKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sweep every chunk; program c·B + b has chunk c of sample b. Gradients of the gates overwrite
    the slopes. If ``sizes`` are checked and a sample's products cannot be trusted, the program of
    its first chunk sweeps all steps, and the others none. ``apart`` is one: see ``_by_terms``."""
    pair = tl.program_id(0).to(tl.int64)
    first_step, end = _steps(pair // samples, length, chunks, chunk)
    b = pair % samples
    start = pair
    if CHECKED:
        terms = tl.load(sizes + b)
        largest = tl.load(sizes + samples + b)
        trusted = (terms <= largest * LIMIT) & (terms <= MOST)
        start = tl.where(trusted, pair, (chunks - 1) * samples + b)
        first_step = tl.where(trusted, first_step, 0)
        end = tl.where(trusted, end, tl.where(pair < samples, length, 0))
        tl.store(distrusted, 1, mask=trusted == 0)
    n: tl.constexpr = 2 * H if K == 4 else H
    j = tl.arange(0, P)
    fits = j < H
    k = tl.arange(0, S)[:, None]
    gate = k * H + j[None, :]
    real = (k < K) & fits[None, :]
    h = _numbers(after, start * n, H, P)
    c = _numbers(after, start * n + H, H, P) if K == 4 else h
    u = _by_terms(hidden, H * apart, apart, K, S, H, P)
    for back in tl.range(1, (end - first_step + 1).to(tl.int32), num_stages=STAGES):
        at = (end - back) * samples + b
        if LOSSES:
            h += _numbers(dy, at * H, H, P)
        slopes = tl.load(gates + at * K * H + gate, mask=real, other=0.0)
        inner_slope = h
        kept = h
        if K > 1:
            inner_slope = _numbers(inner, at * H, H, P)
            kept = _numbers(keep, at * H, H, P)
        if STAGES == 1:  # several threads may read a number that one overwrites
            tl.debug_barrier()
        if K == 4:
            d = c + h * inner_slope
            c = d * kept
            a = tl.where(k == 3, h[None, :], d[None, :]) * slopes
        else:
            a = tl.sum((h[None, :] * slopes)[None], 0)  # else each thread would compute all of a
        tl.store(gates + at * K * H + gate, a, mask=real)
        new = tl.sum(tl.sum(tl.trans(a)[:, :, None] * u, 0), 0)
        if K == 3:
            tl.store(inner + at * H + j, h * inner_slope, mask=fits)
            new += h * kept
        h = new
    if tl.program_id(0) < samples:
        tl.store(before + b * n + j, h, mask=fits)
        if K == 4:
            tl.store(before + b * n + H + j, c, mask=fits)
