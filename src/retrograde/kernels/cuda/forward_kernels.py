"""The Triton kernel of the forward recurrence of a layer of up to 128 units.

:mod:`retrograde.kernels.cuda.launch` launches it. The reference is
:func:`retrograde.kernels.launched.forward`. Arrays are contiguous and float32.

Each sample has its own program, which holds the weights in registers as a sweep does. The inputs'
part of the gates is given, so nothing else is allocated: the vendor's kernels need a workspace of
several megabytes for every call.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants of a compilation are in capitals, as everywhere in Triton)

from typing import Any

import triton
import triton.language as tl

from retrograde.kernels.cuda.slope_kernels import _sigmoid, _tanh
from retrograde.kernels.cuda.sweep_kernels import _by_terms, _numbers

_compiled: Any = triton.jit(do_not_specialize=["samples", "length", "apart"])
_inlined: Any = triton.jit


@_inlined
def _gates(sums, P: tl.constexpr):
    """Return the four rows of a tile (4, P)."""
    left, right = tl.split(tl.reshape(tl.trans(sums), (P, 2, 2)))
    first, third = tl.split(left)
    second, fourth = tl.split(right)
    return first, second, third, fourth


@_compiled
def forward(
    gates, hidden, bias, y, h_state, c_state, samples, length, apart, K: tl.constexpr,
    S: tl.constexpr, H: tl.constexpr, P: tl.constexpr, RELU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run sample b of program b through all steps, and move its state from before them to after.
    ``gates`` (L, B, K·H) are the inputs' part, and ``bias`` (H,) is added to U h of a GRU's new
    gate. ``apart`` is one: see ``_by_terms``."""
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, P)
    fits = j < H
    u = _by_terms(hidden, apart, H * apart, K, S, H, P)
    h = tl.load(h_state + b * H + j, mask=fits, other=0.0)
    c = tl.load(c_state + b * H + j, mask=fits, other=0.0) if K == 4 else h
    of_split = tl.load(bias + j, mask=fits, other=0.0) if K == 3 else h
    for t in tl.range(0, length, num_stages=STAGES):
        at = (t + tl.zeros((), tl.int64)) * samples + b
        first = gates + at * K * H
        sums = tl.sum(h[:, None, None] * u, 0)
        if K == 1:
            v = _numbers(first, 0, H, P) + tl.sum(sums, 0)
            h = tl.where(v <= 0, 0.0, v) if RELU else _tanh(v)  # a NaN stays
        else:
            a0, a1, a2, a3 = _gates(sums, P)
            a0 = _sigmoid(a0 + _numbers(first, 0, H, P))
            a1 = _sigmoid(a1 + _numbers(first, H, H, P))
            new = _numbers(first, 2 * H, H, P)
            if K == 3:
                n = _tanh(new + a0 * (a2 + of_split))
                h = n + a1 * (h - n)
            else:
                c = a1 * c + a0 * _tanh(a2 + new)
                h = _sigmoid(a3 + _numbers(first, 3 * H, H, P)) * _tanh(c)
        h = tl.sum(h[None, :], 0)  # else each thread would compute all of h
        tl.store(y + at * H + j, h, mask=fits)
    tl.debug_barrier()  # several threads may have read what one overwrites
    tl.store(h_state + b * H + j, h, mask=fits)
    if K == 4:
        tl.store(c_state + b * H + j, c, mask=fits)
