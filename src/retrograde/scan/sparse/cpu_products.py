"""Products with sparse transposed Jacobians on CPUs, by numba.

The references are the functions of :mod:`retrograde.scan.sparse.arithmetic`. A row of a product is
summed in a dense buffer, one number a column, and its known entries are gathered from there.
The samples of an entry are adjacent, so one look at the indices serves eight samples, by one
instruction.
"""

import ctypes
import functools
import mmap
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrograde.kernels.cpu.llvm.threads import Range, share
from retrograde.scan.sparse import cpu_loops as loops
from retrograde.scan.sparse.pattern import Pattern

_Reals = NDArray[np.floating[Any]]
_PIECES = 8  # pieces for each thread, so that uneven rows leave no thread idle
_LEAST_WORK = 2**24  # multiplications; with fewer, waking another thread (some ms) does not pay
_NONE = np.empty(0, np.int32)
_LARGE = 2**22  # bytes above which numpy asks for large pages; torch's allocator never does
_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14)


def multiply(left: Pattern, right: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`retrograde.scan.sparse.arithmetic.multiply_sparse`."""
    if "full" in (left.kind, right.kind):
        return _multiply_full(left, right, a, b)
    result = left.product(right).result
    samples, product = _room(result.nnz, a, b)
    of = (_NONE, _NONE) if result.kind == "full" else (result.indptr, result.indices)
    (ours, ours_wide), (theirs, theirs_wide) = _side_by_side(a), _side_by_side(b)
    (out, _), columns = _side_by_side(product), result.shape[1]
    first_of, then_of = (left.indptr, left.indices), (right.indptr, right.indices)
    pieces = _pieces(left.shape[0], left.product(right).terms * samples)
    if samples == 1:
        share(loops.multiply_one, pieces, *first_of, ours, *then_of, theirs, *of, out, columns)
    else:
        factors = *first_of, ours, ours_wide, *then_of, theirs, theirs_wide
        share(loops.multiply_lanes, pieces, *factors, *of, out, samples, columns)
    return product


def scale(pattern: Pattern, values: Tensor, diagonal: Tensor, by_column: bool) -> Tensor:
    """As :func:`retrograde.scan.sparse.arithmetic.scale`."""
    if pattern.kind == "full":
        whole = values.reshape(*values.shape[:-1], *pattern.shape)
        return (whole * (diagonal[..., None, :] if by_column else diagonal[..., None])).flatten(-2)
    samples, product = _room(pattern.nnz, values, diagonal)
    x, d, (out, _) = _side_by_side(values), _side_by_side(diagonal), _side_by_side(product)
    arrays = pattern.indptr, pattern.indices
    pieces = _pieces(pattern.shape[0], pattern.nnz * samples)
    if samples == 1:
        share(loops.scale_one, pieces, *arrays, x[0], d[0], by_column, out)
    else:
        share(loops.scale_lanes, pieces, *arrays, *x, *d, by_column, out, samples)
    return product


def apply(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    """As :func:`retrograde.scan.sparse.arithmetic.apply_sparse`."""
    samples, product = _room(pattern.shape[0], values, x)
    vectors = x.expand(samples, -1) if samples > 1 else x
    (a, wide), (vector, _), (out, _) = map(_side_by_side, (values, vectors, product))
    arrays = pattern.indptr, pattern.indices
    pieces = _pieces(pattern.shape[0], pattern.nnz * samples)
    if samples == 1:
        share(loops.apply_one, pieces, *arrays, a, vector, out)
    else:
        share(loops.apply_lanes, pieces, *arrays, a, wide, vector, samples, out)
    return product


def take(weights: Tensor, pattern: Any) -> Tensor:
    """As :func:`retrograde.scan.sparse.arithmetic.take`."""
    taken = _in_large_pages(weights.new_empty(pattern.nnz))
    x, out, places = weights.numpy(), taken.numpy(), pattern.sources
    pieces = _pieces(pattern.nnz, pattern.nnz)
    share(loops.take, pieces, x, places, out)
    return taken


def _multiply_full(left: Pattern, right: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """Multiply where one factor is full. The values of a sample are stored as a matrix."""
    rows, columns = left.shape[0], right.shape[1]
    samples, product = _room(rows * columns, a, b, one_by_one=True)
    ours, theirs = (torch.atleast_2d(x.detach().contiguous()).numpy() for x in (a, b))
    pieces = _pieces(samples * rows, left.product(right).terms * samples)
    loop = loops.full_times_sparse if left.kind == "full" else loops.sparse_times_full
    of = right if left.kind == "full" else left
    into = product.view(samples, -1).numpy()
    share(loop, pieces, of.indptr, of.indices, ours, theirs, into, rows, columns)
    return product


def _room(size: int, a: Tensor, b: Tensor, *, one_by_one: bool = False) -> tuple[int, Tensor]:
    """Return the number of samples, and an empty result for them, or for values that all share."""
    samples = max((len(x) for x in (a, b) if x.ndim == 2), default=0)
    if not samples:
        return 1, _in_large_pages(a.new_empty(size))
    if one_by_one:
        return samples, _in_large_pages(a.new_empty(samples, size))
    return samples, _in_large_pages(a.new_empty(size, samples)).T


def _side_by_side(values: Tensor) -> tuple[_Reals, int]:
    """Return the numbers of all samples, entry after entry, and the stride of entries."""
    turned = values.detach().T if values.ndim == 2 else values.detach()
    array: _Reals = turned.contiguous().view(-1).numpy()
    return array, len(values) if values.ndim == 2 else 1


def _pieces(rows: int, work: int) -> list[Range]:
    """Return ranges of rows, several for each thread; one where two are not worth it."""
    if work < _LEAST_WORK:
        return [(0, rows)]
    count = max(1, min(rows // 4, _PIECES * torch.get_num_threads()))
    bounds = np.linspace(0, rows, count + 1).astype(int).tolist()
    return list(pairwise(bounds))


def _in_large_pages(fresh: Tensor) -> Tensor:
    """Ask for large pages behind a contiguous tensor not yet written; return the tensor. In pages
    of 4 KiB, the system takes longer to provide the memory than a product takes to fill it."""
    advise = _advise() if fresh.nbytes >= _LARGE else None
    if advise is not None:
        start = -(-fresh.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (fresh.data_ptr() + fresh.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, size, _HUGE)
    return fresh


@functools.cache
def _advise() -> Any:
    """Return the C library's ``madvise``, or None."""
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
