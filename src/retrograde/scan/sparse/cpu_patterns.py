"""Compiled loops over sparsity patterns: Kronecker products, products, and lists of their terms.

Patterns are in compressed rows: row i has the columns ``indices[indptr[i] : indptr[i + 1]]``, in
ascending order. Loops with ``first`` and ``last`` take the rows first … last − 1, so that threads
can share them.
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
    """Write left·scale + right to ``out`` for the entries of a Kronecker product.

    The rows first … last − 1 are those of the left factor.
    """
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
    """Count the columns of each row of a product; ``seen`` starts with a −1 for each column."""
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
    """Write the columns of each row of a product to ``indices``, in ascending order.

    ``seen`` starts with a −1 for each column.
    """
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
    """List the terms of each entry of a product.

    A term is an entry of the left factor times one of the right factor. Their numbers go to
    ``lefts`` and ``rights``, ordered by the entry of the product. ``ends`` starts with zeros, one
    more than the product has entries; it receives the offsets of each entry's terms. ``place`` is
    scratch memory with a number for each column.
    """
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
