"""Dropout by a hash: the compiled loop of :mod:`retrograde.recurrent.dropout` on a CPU."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from retrograde.kernels.team import ranges, share

_GAMMA, _MIX_1, _MIX_2 = (
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SPREAD, _SHORT_1, _SHORT_2 = (np.uint32(v) for v in (0x9E3779B9, 0x7FEB352D, 0x846CA68B))
_ROW_WORK = 2**16  # the numbers for which one more thread pays


def drop(x: Tensor, seed: int, p: float, start: int) -> Tensor:
    """Return x (L, B, W) after dropout with probability p.

    ``x`` must be contiguous, and float32 or float64. ``seed`` belongs to the call and the layer,
    and ``start`` is the number of the first step.
    """
    out = x.new_empty(x.shape)
    samples, width = x.shape[1:]
    rows = len(x) * samples
    limit = np.uint32(min(round(p * 2**32), 2**32 - 1))
    flat = x.view(rows, width).numpy(), out.view(rows, width).numpy()
    keep = flat[0].dtype.type(1 - p)
    of_call = np.uint64(seed % 2**64), keep, limit, np.uint64(start), np.uint64(samples)
    share(_drop, ranges(rows, 1 + x.numel() // _ROW_WORK), *flat, *of_call)
    return out


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _mixed(z: Any) -> Any:
    """Return 64 bits, each of which depends on all bits of z (splitmix64)."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _drop(
    x: NDArray[Any], out: NDArray[Any], seed: Any, keep: Any, limit: Any, start: Any, samples:
    Any, first: int, last: int,
) -> None:  # fmt: skip
    zero = x.dtype.type(0)
    for row in range(first, last):
        number = np.uint64(row)
        step, sample = start + number // samples, number % samples
        z = _mixed(_mixed(seed + _GAMMA * step) + _GAMMA * sample)
        low, high = np.uint32(z & np.uint64(0xFFFFFFFF)), np.uint32(z >> np.uint64(32))
        given, left = x[row], out[row]
        for j in range(x.shape[1]):
            v = np.uint32(low + np.uint32(np.uint32(j) * _SPREAD))
            v = np.uint32(v ^ (v >> np.uint32(16)))
            v = np.uint32(np.uint32(v * _SHORT_1) + high)
            v = np.uint32(v ^ (v >> np.uint32(15)))
            v = np.uint32(v * _SHORT_2)
            v = np.uint32(v ^ (v >> np.uint32(16)))
            # The reference compares signed numbers. Unsigned ones are in the same order after the
            # sign bit is flipped.
            left[j] = given[j] / keep if (v ^ np.uint32(0x80000000)) >= limit else zero
