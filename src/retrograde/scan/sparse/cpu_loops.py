"""The compiled loops over sparse matrices: products of values, and of patterns.

A sparse matrix is given by the offsets of its rows, the columns of its entries, and their values.
The values are a flat array, (nnz, S), in which an entry's numbers for all S samples are adjacent.
They are (nnz,) if all samples share them. The parameters ``…wide`` are S or 1 accordingly.

The loops ``…_lanes`` compute eight samples at a time, as one vector. Of the samples from ``at`` on,
``left`` exist. The loops ``…_one`` are for one sample, and compute one number at a time.

The loops ``kron``, ``find_columns`` and ``land`` are over patterns alone. Row i has the columns
``indices[indptr[i] : indptr[i + 1]]``, ascending. Loops with ``top`` and ``bottom`` take the rows
top … bottom − 1, so that threads can share them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cpu.llvm.lanes import LANES, Reals, compiled, like, load, spread, store

_Ints = NDArray[np.int32]
_Indices = NDArray[np.signedinteger[Any]]


@compiled  # type: ignore[untyped-decorator]
def multiply_lanes(
    a_ptr: _Ints, a_of: _Ints, a: Reals, a_wide: int, b_ptr: _Ints, b_of: _Ints, b: Reals,
    b_wide: int, c_ptr: _Ints, c_of: _Ints, c: Reals, samples: int, columns: int, top: int,
    bottom: int,
) -> None:  # fmt: skip
    """Write rows top … bottom − 1 of a·b to ``c``, whose pattern is known. If ``c_ptr`` is empty,
    ``c`` is a full matrix."""
    sums = np.empty(columns * LANES, c.dtype)
    zero = like(load(sums, 0, LANES), 0)
    whole = len(c_ptr) == 0
    for at in range(0, samples, LANES):
        left = samples - at
        for i in range(top, bottom):
            if a_ptr[i + 1] == a_ptr[i] + 1 and not whole:  # a row of b, scaled
                p = a_ptr[i]
                x = load(a, p * a_wide + at, left) if a_wide > 1 else spread(a, p)
                to = c_ptr[i] - b_ptr[a_of[p]]
                for q in range(b_ptr[a_of[p]], b_ptr[a_of[p] + 1]):
                    y = load(b, q * b_wide + at, left) if b_wide > 1 else spread(b, q)
                    store(c, (to + q) * samples + at, x * y, left)
                continue
            begin, end = (0, columns) if whole else (c_ptr[i], c_ptr[i + 1])
            for q in range(begin, end):
                store(sums, (q if whole else c_of[q]) * LANES, zero, LANES)
            for p in range(a_ptr[i], a_ptr[i + 1]):
                x = load(a, p * a_wide + at, left) if a_wide > 1 else spread(a, p)
                k = a_of[p]
                if b_wide > 1:
                    for q in range(b_ptr[k], b_ptr[k + 1]):
                        j = b_of[q] * LANES
                        y = load(b, q * b_wide + at, left)
                        store(sums, j, load(sums, j, LANES) + x * y, LANES)
                else:
                    for q in range(b_ptr[k], b_ptr[k + 1]):
                        j = b_of[q] * LANES
                        store(sums, j, load(sums, j, LANES) + x * spread(b, q), LANES)
            for q in range(begin, end):
                total = load(sums, (q if whole else c_of[q]) * LANES, LANES)
                store(c, (i * columns + q if whole else q) * samples + at, total, left)


@compiled  # type: ignore[untyped-decorator]
def multiply_one(
    a_ptr: _Ints, a_of: _Ints, a: Reals, b_ptr: _Ints, b_of: _Ints, b: Reals, c_ptr: _Ints,
    c_of: _Ints, c: Reals, columns: int, top: int, bottom: int,
) -> None:  # fmt: skip
    """Write rows of a·b to ``c`` for one sample."""
    sums, whole = np.empty(columns, c.dtype), len(c_ptr) == 0
    for i in range(top, bottom):
        if a_ptr[i + 1] == a_ptr[i] + 1 and not whole:  # a row of b, scaled
            p = a_ptr[i]
            to = c_ptr[i] - b_ptr[a_of[p]]
            for q in range(b_ptr[a_of[p]], b_ptr[a_of[p] + 1]):
                c[to + q] = a[p] * b[q]
            continue
        into = c[i * columns : (i + 1) * columns] if whole else sums
        if whole:
            into[:] = 0
        else:
            for q in range(c_ptr[i], c_ptr[i + 1]):
                sums[c_of[q]] = 0
        for p in range(a_ptr[i], a_ptr[i + 1]):
            x, k = a[p], a_of[p]
            for q in range(b_ptr[k], b_ptr[k + 1]):
                into[b_of[q]] += x * b[q]
        if not whole:
            for q in range(c_ptr[i], c_ptr[i + 1]):
                c[q] = sums[c_of[q]]


@compiled  # type: ignore[untyped-decorator]
def sparse_times_full(
    ptr: _Ints, of: _Ints, a: Reals, b: Reals, out: Reals, rows: int, columns: int, top: int,
    bottom: int,
) -> None:  # fmt: skip
    """Write rows of a·b to ``out`` (S, rows · columns), where ``b`` is full. The rows of all
    samples are numbered consecutively. ``a`` (S, nnz) and ``b`` have one row if all samples share
    it. The columns take the place of samples."""
    for row in range(top, bottom):
        i, sample_row = row // rows, row % rows
        x, y = a[i % len(a)], b[i % len(b)]
        apply_lanes(ptr, of, x, 1, y, columns, out[i], sample_row, sample_row + 1)


@compiled  # type: ignore[untyped-decorator]
def full_times_sparse(
    ptr: _Ints, of: _Ints, a: Reals, b: Reals, out: Reals, rows: int, columns: int, top: int,
    bottom: int,
) -> None:  # fmt: skip
    """Do the same where ``a`` is full. The rows take the place of samples, each of one row."""
    inner = len(ptr) - 1
    ends, each = np.zeros(2, np.int32), np.arange(inner).astype(np.int32)
    ends[1], none = inner, ends[:0]
    while top < bottom:
        i, row = top // rows, top % rows
        end = min(rows, row + bottom - top)
        part = a[i % len(a)].reshape(rows, inner)[row:end]
        turned = np.ascontiguousarray(part.T).reshape(-1)
        product = np.empty((columns, end - row), out.dtype)
        multiply_lanes(
            ends, each, turned, end - row, ptr, of, b[i % len(b)], 1, none, none,
            product.reshape(-1), end - row, columns, 0, 1,
        )  # fmt: skip
        out[i].reshape(rows, columns)[row:end] = product.T
        top += end - row


@compiled  # type: ignore[untyped-decorator]
def scale_lanes(
    ptr: _Ints, of: _Ints, x: Reals, x_wide: int, d: Reals, d_wide: int, by_column: bool, c: Reals,
    samples: int, top: int, bottom: int,
) -> None:  # fmt: skip
    """Write diag(d)·x, or x·diag(d) if ``by_column``, to ``c`` for rows top … bottom − 1."""
    for i in range(top, bottom):
        for p in range(ptr[i], ptr[i + 1]):
            k = of[p] if by_column else i
            for at in range(0, samples, LANES):
                left = samples - at
                u = load(x, p * samples + at, left) if x_wide > 1 else spread(x, p)
                v = load(d, k * samples + at, left) if d_wide > 1 else spread(d, k)
                store(c, p * samples + at, u * v, left)


@compiled  # type: ignore[untyped-decorator]
def scale_one(
    ptr: _Ints, of: _Ints, x: Reals, d: Reals, by_column: bool, c: Reals, top: int, bottom: int
) -> None:
    """Write diag(d)·x, or x·diag(d) if ``by_column``, to ``c`` for one sample."""
    for i in range(top, bottom):
        for p in range(ptr[i], ptr[i + 1]):
            c[p] = x[p] * d[of[p] if by_column else i]


@compiled  # type: ignore[untyped-decorator]
def apply_lanes(
    ptr: _Ints, of: _Ints, a: Reals, a_wide: int, x: Reals, samples: int, out: Reals, top: int,
    bottom: int,
) -> None:  # fmt: skip
    """Write rows of a·x to ``out`` (rows, S), for x (columns, S)."""
    for i in range(top, bottom):
        for at in range(0, samples, LANES):
            left = samples - at
            total = like(load(out, i * samples + at, left), 0)
            if a_wide > 1:
                for p in range(ptr[i], ptr[i + 1]):
                    y = load(x, of[p] * samples + at, left)
                    total = total + load(a, p * samples + at, left) * y
            else:
                for p in range(ptr[i], ptr[i + 1]):
                    total = total + spread(a, p) * load(x, of[p] * samples + at, left)
            store(out, i * samples + at, total, left)


@compiled  # type: ignore[untyped-decorator]
def apply_one(ptr: _Ints, of: _Ints, a: Reals, x: Reals, out: Reals, top: int, bottom: int) -> None:
    """Write rows of a·x to ``out`` for one sample."""
    for i in range(top, bottom):
        total = out.dtype.type(0)
        for p in range(ptr[i], ptr[i + 1]):
            total += a[p] * x[of[p]]
        out[i] = total


@compiled  # type: ignore[untyped-decorator]
def take(x: Reals, places: _Ints, out: Reals, first_entry: int, last_entry: int) -> None:
    """Write x at ``places`` to ``out``."""
    for p in range(first_entry, last_entry):
        out[p] = x[places[p]]


@compiled  # type: ignore[untyped-decorator]
def kron(
    left_ptr: _Indices, left: _Indices, right_ptr: _Indices, right: _Indices, scale: int,
    out: _Indices, top: int, bottom: int,
) -> None:  # fmt: skip
    """Write left·scale + right to ``out`` for the entries of a Kronecker product. The rows top …
    bottom − 1 are those of the left factor."""
    right_rows, total = len(right_ptr) - 1, right_ptr[-1]
    for i in range(top, bottom):
        at = left_ptr[i] * total
        for j in range(right_rows):
            for p in range(left_ptr[i], left_ptr[i + 1]):
                base = left[p] * scale
                for q in range(right_ptr[j], right_ptr[j + 1]):
                    out[at] = base + right[q]
                    at += 1


@compiled  # type: ignore[untyped-decorator]
def find_columns(
    left_ptr: _Indices, left: _Indices, right_ptr: _Indices, right: _Indices, columns: int,
    ptr: _Indices, indices: _Indices, top: int, bottom: int,
) -> None:  # fmt: skip
    """Write the columns of each row i of a product to ``indices`` from ``ptr[i]`` on, ascending. If
    ``indices`` is empty, they are counted instead, into ``ptr[i + 1]``."""
    counting, seen = len(indices) == 0, np.full(columns, -1, np.int32)
    for i in range(top, bottom):
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
    left_ptr: _Indices, left: _Indices, right_ptr: _Indices, right: _Indices, ptr: _Indices,
    indices: _Indices, place: _Indices, ends: _Indices, lefts: _Indices, rights: _Indices,
) -> None:  # fmt: skip
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
