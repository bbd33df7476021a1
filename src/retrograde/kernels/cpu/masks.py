"""Masks of dropout on a CPU: by a hash, for :mod:`retrograde.recurrent.dropout`, and as bits."""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrograde.compiler import compiled
from retrograde.kernels.cpu.llvm.lanes import Reals
from retrograde.kernels.cpu.llvm.threads import ranges, share

_GAMMA, _MIX_1, _MIX_2 = (
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SPREAD, _SHORT_1, _SHORT_2 = (np.uint32(v) for v in (0x9E3779B9, 0x7FEB352D, 0x846CA68B))
_ROW_WORK = 2**16  # the numbers for which one more thread pays
_CHUNK = 8192  # numbers at a time, so that NumPy takes little memory
_compiled = partial(compiled, nogil=True)


def drop(x: Tensor, seed: int, p: float, start: int, sample: int = 0) -> Tensor:
    """Return x (L, B, W) after dropout with probability p. ``x`` must be contiguous, and float32 or
    float64. ``seed`` belongs to the call and the layer, and ``start`` and ``sample`` are the
    numbers of the first step and sample."""
    out = x.new_empty(x.shape)
    samples, width = x.shape[1:]
    count = len(x) * samples
    limit = np.uint32(min(round(p * 2**32), 2**32 - 1))
    flat = x.view(count, width).numpy(), out.view(count, width).numpy()
    keep = flat[0].dtype.type(1 - p)
    of_call = np.uint64(seed % 2**64), keep, limit, *map(np.uint64, (start, samples, sample))
    share(_drop, ranges(count, 1 + x.numel() // _ROW_WORK), *flat, *of_call)
    return out


@_compiled
def _mixed(z: np.uint64) -> np.uint64:
    """Return 64 bits, each of which depends on all bits of z (splitmix64)."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@_compiled
def _drop(
    x: Reals, out: Reals, seed: np.uint64, keep: np.floating[Any], limit: np.uint32,
    start: np.uint64, samples: np.uint64, begin: np.uint64, top: int, bottom: int,
) -> None:  # fmt: skip
    zero = x.dtype.type(0)
    for row in range(top, bottom):
        number = np.uint64(row)
        step, sample = start + number // samples, begin + number % samples
        z = _mixed(_mixed(seed + _GAMMA * step) + _GAMMA * sample)
        low, high = np.uint32(z & np.uint64(0xFFFFFFFF)), np.uint32(z >> np.uint64(32))
        inputs, left = x[row], out[row]
        for j in range(x.shape[1]):
            v = np.uint32(low + np.uint32(np.uint32(j) * _SPREAD))
            v = np.uint32(v ^ (v >> np.uint32(16)))
            v = np.uint32(np.uint32(v * _SHORT_1) + high)
            v = np.uint32(v ^ (v >> np.uint32(15)))
            v = np.uint32(v * _SHORT_2)
            v = np.uint32(v ^ (v >> np.uint32(16)))
            # The reference compares signed numbers. Unsigned ones are in the same order after the
            # sign bit is flipped.
            left[j] = inputs[j] / keep if (v ^ np.uint32(0x80000000)) >= limit else zero


def packed(zeros_and_ones: Tensor) -> Tensor:
    """Return a tensor of zeros and other numbers on a CPU as bits, in a tensor of bytes."""
    flat = _whole_numbers(zeros_and_ones.detach().contiguous())
    bits = torch.empty(-(-len(flat) // 8), dtype=torch.uint8, device="cpu")
    for at in range(0, len(flat), _CHUNK):
        some = np.packbits(flat[at : at + _CHUNK] != 0)
        bits.numpy()[at // 8 :][: len(some)] = some
    return bits


def packed_spikes(t: Tensor) -> Tensor | None:
    """Return a contiguous tensor of zeros and ones as bits; None if it has other numbers."""
    flat, one = _whole_numbers(t.detach()), _one(t.dtype)
    chunks = (flat[at : at + _CHUNK] for at in range(0, len(flat), _CHUNK))
    is_so = all(np.count_nonzero(some) == np.count_nonzero(some == one) for some in chunks)
    return packed(t) if is_so else None


def unpack_into(bits: Tensor, target: Tensor) -> Tensor:
    """Write the bits as zeros and ones into a contiguous tensor, and return it."""
    flat, one, packed_bits = _whole_numbers(target), _one(target.dtype), bits.numpy()
    for at in range(0, len(flat), _CHUNK):
        some = flat[at : at + _CHUNK]
        np.multiply(np.unpackbits(packed_bits[at // 8 :], count=len(some)), one, out=some)
    return target


@cache
def _one(dtype: torch.dtype) -> NDArray[Any]:
    return _whole_numbers(torch.ones(1, dtype=dtype, device="cpu"))


def _whole_numbers(t: Tensor) -> NDArray[Any]:
    """Return a contiguous tensor's numbers as whole numbers of NumPy's that have their bits."""
    dtype = (torch.uint8, torch.int16, torch.int32, torch.int64)[t.itemsize.bit_length() - 1]
    return t.view(-1).view(dtype).numpy()
