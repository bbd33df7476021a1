"""Loops over sparsity patterns, compiled: Kronecker products, products, and what lands where.

Patterns are in compressed rows: row i has the columns ``indices[indptr[i] : indptr[i + 1]]``, in
ascending order. Each loop takes the rows ``first`` to ``last``, so that threads can share them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.lanes import compiled

__all__ = ["count_columns", "fill_columns", "kron", "land"]

_Ints = NDArray[np.signedinteger[Any]]


@compiled  # type: ignore[untyped-decorator]
def kron(
    first: int,
    last: int,
    left_ptr: _Ints,
    left: _Ints,
    right_ptr: _Ints,
    right: _Ints,
    scale: int,
    out: _Ints,
) -> None:
    """out ← left·scale + right for the entries of a Kronecker product, rows of the left factor."""
    rows, total = len(right_ptr) - 1, right_ptr[-1]
    for i in range(first, last):
        at = left_ptr[i] * total
        for j in range(rows):
            for p in range(left_ptr[i], left_ptr[i + 1]):
                base = left[p] * scale
                for q in range(right_ptr[j], right_ptr[j + 1]):
                    out[at] = base + right[q]
                    at += 1


@compiled  # type: ignore[untyped-decorator]
def count_columns(
    first: int,
    last: int,
    left_ptr: _Ints,
    left: _Ints,
    right_ptr: _Ints,
    right: _Ints,
    seen: _Ints,
    counts: _Ints,
) -> None:
    """How many columns each row of a product has; ``seen`` has a −1 for each column."""
    for i in range(first, last):
        found = 0
        for p in range(left_ptr[i], left_ptr[i + 1]):
            k = left[p]
            for q in range(right_ptr[k], right_ptr[k + 1]):
                if seen[right[q]] != i:
                    seen[right[q]] = i
                    found += 1
        counts[i] = found


@compiled  # type: ignore[untyped-decorator]
def fill_columns(
    first: int,
    last: int,
    left_ptr: _Ints,
    left: _Ints,
    right_ptr: _Ints,
    right: _Ints,
    seen: _Ints,
    ptr: _Ints,
    indices: _Ints,
) -> None:
    """The columns of each row of a product, in ascending order; ``seen`` as for counting."""
    for i in range(first, last):
        at = ptr[i]
        for p in range(left_ptr[i], left_ptr[i + 1]):
            k = left[p]
            for q in range(right_ptr[k], right_ptr[k + 1]):
                j = right[q]
                if seen[j] != i:
                    seen[j] = i
                    indices[at] = j
                    at += 1
        if 8 * (at - ptr[i]) < len(seen):
            indices[ptr[i] : at].sort()
        else:
            at = ptr[i]
            for j in range(len(seen)):
                if seen[j] == i:
                    indices[at] = j
                    at += 1


@compiled  # type: ignore[untyped-decorator]
def land(
    left_ptr: _Ints,
    left: _Ints,
    right_ptr: _Ints,
    right: _Ints,
    ptr: _Ints,
    indices: _Ints,
    place: _Ints,
    ends: _Ints,
    lefts: _Ints,
    rights: _Ints,
) -> None:
    """List which entries are multiplied, ordered by the entry of the product that they land in.
    ``place`` has a number for each column. ``ends``, zeros, one for each entry of the product and
    one more, becomes the offsets of their terms in ``lefts`` and ``rights``."""
    rows = len(ptr) - 1
    for once in range(2):
        for i in range(rows):
            for q in range(ptr[i], ptr[i + 1]):
                place[indices[q]] = q
            for p in range(left_ptr[i], left_ptr[i + 1]):
                k = left[p]
                for q in range(right_ptr[k], right_ptr[k + 1]):
                    entry = place[right[q]]
                    if once:
                        lefts[ends[entry]], rights[ends[entry]] = p, q
                    ends[entry] += 1
        if not once:
            total = 0
            for entry in range(len(ends)):
                count = ends[entry]
                ends[entry] = total
                total += count
    for entry in range(len(ends) - 1, 0, -1):
        ends[entry] = ends[entry - 1]
    ends[0] = 0
