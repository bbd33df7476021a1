"""Compiled loops over sparsity patterns: Kronecker products, products, and lists of their terms.

Patterns are in compressed rows: row i has the columns ``indices[indptr[i] : indptr[i + 1]]``, in
ascending order. Loops with ``first`` and ``last`` take the rows first … last − 1, so that threads
can share them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.lanes import compiled

__all__ = ["find_columns", "kron", "land"]

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
def find_columns(
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
    """Write the columns of each row i of a product to ``indices`` from ``ptr[i]`` on, ascending.

    If ``indices`` is empty, they are counted instead, into ``ptr[i + 1]``. ``seen`` starts with a
    −1 for each column.
    """
    counting = len(indices) == 0
    for i in range(first, last):
        begin = 0 if counting else ptr[i]
        at = begin
        for p in range(left_ptr[i], left_ptr[i + 1]):
            k = left[p]
            for q in range(right_ptr[k], right_ptr[k + 1]):
                j = right[q]
                if seen[j] != i:
                    seen[j] = i
                    if not counting:
                        indices[at] = j
                    at += 1
        if counting:
            ptr[i + 1] = at
        elif 8 * (at - begin) < len(seen):
            indices[begin:at].sort()
        else:
            at = begin
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
    ``lefts`` and ``rights``, ordered by the entry of the product. ``ends`` starts with zeros, two
    more than the product has entries; all but its last receive the offsets of each entry's terms.
    ``place`` is scratch memory with a number for each column.
    """
    for filling in range(2):
        for i in range(len(ptr) - 1):
            for q in range(ptr[i], ptr[i + 1]):
                place[indices[q]] = q
            for p in range(left_ptr[i], left_ptr[i + 1]):
                k = left[p]
                for q in range(right_ptr[k], right_ptr[k + 1]):
                    # Counted two ahead, an entry's end is found where its start was.
                    at = place[right[q]] + 2 - filling
                    if filling:
                        lefts[ends[at]], rights[ends[at]] = p, q
                    ends[at] += 1
        if not filling:
            ends[:] = np.cumsum(ends)
