"""Triton kernels of the backward recurrence of wide layers, whose weights do not fit one program.

:mod:`retrograde.kernels.cuda.launch` launches them: ``begin`` once for a block, ``step`` once for
each step, and ``finish`` once. The reference is :func:`retrograde.kernels.sweep.sweep`. Arrays are
contiguous, float32, and in the reference's order of dimensions.

A step is a matrix product of the gates' gradients (B, K·H) with the hidden weights. Each program
computes a tile of the product, and forms the operand that it needs from slopes and states. No
kernel reads what another program of the same launch writes. For this, each step's states have a row
of their own. ``finish`` turns all slopes into gradients of the gates afterwards.

Launches can be recorded once and replayed for other blocks. So a step reads the addresses of its
arrays, and its own number, from a table on the card. ``begin`` writes the table.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants of a compilation are in capitals, as everywhere in Triton)

from typing import Any

import triton
import triton.language as tl

_compiled: Any = triton.jit(do_not_specialize=["back", "length", "numbers", "samples"])
_inlined: Any = triton.jit


@_compiled
def begin(table, gates, keep, inner, dy, states, length):
    """Write the addresses of a block's arrays, and the number of its steps."""
    tl.store(table, gates.to(tl.int64))
    tl.store(table + 1, keep.to(tl.int64))
    tl.store(table + 2, inner.to(tl.int64))
    tl.store(table + 3, dy.to(tl.int64))
    tl.store(table + 4, states.to(tl.int64))
    tl.store(table + 5, length.to(tl.int64))


@_inlined
def _address(table, row: tl.constexpr):
    return tl.load(table + row).to(tl.pointer_type(tl.float32))


@_compiled
def step(
    table, hidden, samples, back, K: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
    DEPTH: tl.constexpr, LOSSES: tl.constexpr, TF32: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backpropagate one step, ``back`` steps before the number in the table. Program (r, c)
    computes TILE samples and TILE units of the state before the step. A step before the first one
    does nothing."""
    t = tl.load(table + 5) - back
    if t >= 0:
        gates = _address(table, 0)
        keep = _address(table, 1)
        inner = _address(table, 2)
        dy = _address(table, 3)
        n: tl.constexpr = 2 * H if K == 4 else H
        exact: tl.constexpr = "tf32x3" if TF32 else "ieee"
        b = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
        j = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
        at = t * samples + b
        before = _address(table, 4) + at * n
        after = before + samples.to(tl.int64) * n
        real = (b < samples) & (j < H)
        total = tl.zeros((TILE, TILE), tl.float32)
        c = total
        if K > 1:
            gradient = tl.load(after + j, mask=real, other=0.0)
            if LOSSES:
                gradient += tl.load(dy + at * H + j, mask=real, other=0.0)
            kept = tl.load(keep + at * H + j, mask=real, other=0.0)
            if K == 3:
                total = gradient * kept
            if K == 4:
                c = tl.load(after + H + j, mask=real, other=0.0)
                c = (c + gradient * tl.load(inner + at * H + j, mask=real, other=0.0)) * kept
        for start in tl.range(0, H, DEPTH, num_stages=STAGES):
            i = start + tl.arange(0, DEPTH)[None, :]
            down = start + tl.arange(0, DEPTH)[:, None]
            inside = (b < samples) & (i < H)
            h = tl.load(after + i, mask=inside, other=0.0)
            if LOSSES:
                h += tl.load(dy + at * H + i, mask=inside, other=0.0)
            d = h
            if K == 4:
                d = tl.load(after + H + i, mask=inside, other=0.0)
                d += h * tl.load(inner + at * H + i, mask=inside, other=0.0)
            for k in tl.static_range(K):
                a = tl.load(gates + (at * K + k) * H + i, mask=inside, other=0.0)
                a *= h if k == 3 else d
                u = tl.load(hidden + (k * H + down) * H + j, mask=(down < H) & (j < H), other=0.0)
                total = tl.dot(a, u, total, input_precision=exact)
        tl.store(before + j, total, mask=real)
        if K == 4:
            tl.store(before + H + j, c, mask=real)


@_compiled
def finish(
    gates, inner, dy, states, numbers, samples, K: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, LOSSES: tl.constexpr,
):  # fmt: skip
    """Turn slopes into gradients of the gates, for BLOCK of the L·B·H numbers of a block."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = e < numbers
    n: tl.constexpr = 2 * H if K == 4 else H
    row, j = e // H, e % H
    after = states + (row + samples) * n + j
    h = tl.load(after, mask=real, other=0.0)
    if LOSSES:
        h += tl.load(dy + e, mask=real, other=0.0)
    d = h
    if K > 1:
        inner_slope = tl.load(inner + e, mask=real, other=0.0)
    if K == 4:
        d = tl.load(after + H, mask=real, other=0.0) + h * inner_slope
    for k in tl.static_range(K):
        at = gates + (row * K + k) * H + j
        a = tl.load(at, mask=real, other=0.0) * (h if k == 3 else d)
        tl.debug_barrier()
        tl.store(at, a, mask=real)
    if K == 3:
        tl.store(inner + e, h * inner_slope, mask=real)
