"""Triton kernels of the backward recurrence of wide layers, whose weights do not fit one program.

:mod:`retrograde.kernels.cuda.launch` launches them: ``begin`` once for a block of L steps, and
``step`` L + 1 times. The reference is :func:`retrograde.kernels.sweep.sweep`. Arrays are
contiguous, float32, and in the reference's order of dimensions.

A launch is a plain matrix product: the gates' gradients of one step (B, K·H) with the hidden
weights. The program that computes a tile of the product has the gradients of these units of h. So
it turns their slopes at the step before into gradients of the gates, which the next launch
multiplies. No kernel reads what another program of the same launch writes.

Launches can be recorded once and replayed for other blocks. So a step reads the addresses of its
arrays, and its own number, from a table on the card. ``begin`` writes the table.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants of a compilation are in capitals, as everywhere in Triton)

from typing import Any

import triton
import triton.language as tl

_compiled: Any = triton.jit(do_not_specialize=["back", "length", "samples"])
_inlined: Any = triton.jit


@_compiled
def begin(table, gates, keep, inner, dy, state, length):
    """Write the addresses of a block's arrays, and the number of its steps, twice."""
    tl.store(table, gates.to(tl.int64))
    tl.store(table + 1, keep.to(tl.int64))
    tl.store(table + 2, inner.to(tl.int64))
    tl.store(table + 3, dy.to(tl.int64))
    tl.store(table + 4, state.to(tl.int64))
    tl.store(table + 5, length.to(tl.int64))
    tl.store(table + 6, length.to(tl.int64))


@_inlined
def _address(table, row: tl.constexpr):
    return tl.load(table + row).to(tl.pointer_type(tl.float32))


@_compiled
def step(
    table, hidden, samples, back, K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, LOSSES: tl.constexpr, TF32: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backpropagate step t, ``back`` steps before the counter in the table, and form the gates'
    gradients of step t − 1. Program (r, c) has TILE samples and TILE units. ``state`` (B, n) is the
    gradient after the block, and becomes the one before it. Until then it holds what bypasses the
    gates: g z of a GRU, and an LSTM's c. At t = L there is no product, and below 0 there is nothing
    to do."""
    t = tl.load(table + 6) - back
    if t >= 0:
        gates = _address(table, 0)
        keep = _address(table, 1)
        inner = _address(table, 2)
        dy = _address(table, 3)
        is_first = t == tl.load(table + 5)
        n: tl.constexpr = 2 * H if K == 4 else H
        exact: tl.constexpr = "tf32" if TF32 else "ieee"
        b = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
        j = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
        real = (b < samples) & (j < H)
        state = _address(table, 4) + b.to(tl.int64) * n
        row = gates + (t * samples + b) * (K * H)
        total = tl.zeros((TILE, TILE), tl.float32)
        for start in tl.range(0, tl.where(is_first, 0, K * H), DEPTH, num_stages=STAGES):
            i = start + tl.arange(0, DEPTH)[None, :]
            down = start + tl.arange(0, DEPTH)[:, None]
            a = tl.load(row + i, mask=(b < samples) & (i < K * H), other=0.0)
            u = tl.load(hidden + down * H + j, mask=(down < K * H) & (j < H), other=0.0)
            total = tl.dot(a, u, total, input_precision=exact)
        h = total + tl.load(state + j, mask=real & ((K == 3) | is_first), other=0.0)
        before = state + j
        if t > 0:
            at = (t - 1) * samples + b
            if LOSSES:
                h += tl.load(dy + at * H + j, mask=real, other=0.0)
            d = h
            if K > 1:
                inner_slope = tl.load(inner + at * H + j, mask=real, other=0.0)
                kept = tl.load(keep + at * H + j, mask=real, other=0.0)
            if K == 4:
                before = state + H + j
                d = h * inner_slope + tl.load(before, mask=real, other=0.0)
            tl.debug_barrier()  # several threads may read a number that one overwrites
            for k in tl.static_range(K):
                slope = gates + at * (K * H) + k * H + j
                a = tl.load(slope, mask=real, other=0.0) * (h if k == 3 else d)
                tl.debug_barrier()
                tl.store(slope, a, mask=real)
            if K == 3:
                tl.store(inner + at * H + j, h * inner_slope, mask=real)
            if K > 1:
                tl.store(before, d * kept, mask=real)
        else:
            tl.debug_barrier()
            tl.store(before, h, mask=real)
