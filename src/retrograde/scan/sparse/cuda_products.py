"""Products with sparse transposed Jacobians on a GPU, in Triton.

The references are the functions of :mod:`retrograde.scan.sparse.arithmetic`. Matrix products and
products with a gradient are the same sums: for each sample, entry e of the result is

    Σ a[lefts[t]] · b[rights[t]],    ends[e] ≤ t < ends[e + 1].

A program has a tile of entries × samples, whose sums stay in registers. The samples of an entry are
adjacent, so they share one look at the indices and are read as one piece of memory.
Sums are in the type of the values and without atomics, so the same call gives the same bits. A tile
takes as long as its longest entry.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants of a compilation are in capitals, as everywhere in Triton)

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrograde.scan.sparse.pattern import Pattern

_ENTRIES, _SAMPLES, _NUMBERS = 8, 32, 64  # least entries, most samples, least product of both

# ``samples`` is specialized: where it is a multiple of 16, one instruction reads several.
_compiled: Any = triton.jit(do_not_specialize=["entries"])
_inlined: Any = triton.jit


def multiply(left: Pattern, right: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`retrograde.scan.sparse.arithmetic.multiply_sparse`, on a GPU, in one launch."""
    landing = left.product(right).landing
    names = "ends", "lefts", "rights"
    ends, lefts, rights = (landing.tensor(name, a.device) for name in names)
    return _sums(ends, lefts, rights, a, b)


def apply(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    """As :func:`retrograde.scan.sparse.arithmetic.apply_sparse`, on a GPU, in one launch."""
    ends, rights = (pattern.tensor(name, x.device) for name in ("indptr", "indices"))
    return _sums(ends, None, rights, values, x)


def _sums(ends: Tensor, lefts: Tensor | None, rights: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the sums; without ``lefts``, each term has its own entry of ``a``."""
    batch = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    entries, samples = len(ends) - 1, batch.numel()
    out = a.new_empty(entries, samples)
    if out.numel():
        wide = min(_SAMPLES, 1 << (samples - 1).bit_length())
        tall = max(_ENTRIES, _NUMBERS // wide)
        with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
            sums[(-(-entries // tall), -(-samples // wide))](
                ends, rights if lefts is None else lefts, rights,
                a.movedim(-1, 0).contiguous(), b.movedim(-1, 0).contiguous(), out, entries, samples,
                OWN=lefts is None, A_SHARED=a.shape[:-1].numel() < samples,
                B_SHARED=b.shape[:-1].numel() < samples, ENTRIES=tall, SAMPLES=wide,
                num_warps=max(2, tall * wide // 64),
            )  # fmt: skip
    return out.T if batch else out[:, 0]


@_inlined
def _read(values, entry, sample, samples, inside, SHARED: tl.constexpr):
    """Load (ENTRIES, SAMPLES) numbers, or one for each entry that all samples share."""
    at = entry if SHARED else entry * samples + sample
    mask = inside if SHARED else inside & (sample < samples)
    return tl.load(values + at, mask=mask, other=0.0)


@_compiled
def sums(
    ends, lefts, rights, a, b, out, entries, samples, OWN: tl.constexpr, A_SHARED: tl.constexpr,
    B_SHARED: tl.constexpr, ENTRIES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Program (p, q) sums the tile of entries from p·ENTRIES on and samples from q·SAMPLES on.
    Both a and b are (their entries, samples), or (their entries,) where samples share them; out is
    (entries, samples). OWN: the left entry of term t is t."""
    # Entries are a column from the start. Triton 3.6 does not compile some tiles where a tensor of
    # one dimension is made a column later.
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)[:, None]
    sample = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)[None, :]
    real = entry < entries
    start = tl.load(ends + entry, mask=real, other=0).to(tl.int64)
    terms = (tl.load(ends + entry + 1, mask=real, other=0) - start).to(tl.int32)
    total = tl.zeros((ENTRIES, SAMPLES), out.dtype.element_ty)
    for i in range(tl.max(terms)):
        inside = i < terms
        left = start + i
        right = tl.load(rights + left, mask=inside, other=0).to(tl.int64)
        if not OWN:
            left = tl.load(lefts + left, mask=inside, other=0).to(tl.int64)
        x = _read(a, left, sample, samples, inside, A_SHARED)
        total += x * _read(b, right, sample, samples, inside, B_SHARED)
    tl.store(out + entry * samples + sample, total, mask=real & (sample < samples))
