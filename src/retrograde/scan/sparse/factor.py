"""Factors: small patterns of zeros and ones whose Kronecker products are large patterns.

A factor says how the inputs and outputs of a layer meet along one of their dimensions. Each meets
itself (``identity``), all meet all (``full``), or some meet some, as in the windows of a
convolution, a pooling or a padding. Only the last kind stores arrays; the others make them on use.
"""

from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScanError

Ints = NDArray[np.int32]
Integers = NDArray[np.integer[Any]]

MOST_ENTRIES = 2**31 - 1  # offsets have 32 bits


class TooManyEntriesError(ScanError):
    """A pattern has more entries than may be written out."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A matrix of zeros and ones, in compressed rows. ``arrays``, of a sparse factor only, are the
    offsets of the rows, and the columns, ascending in each row."""

    rows: int
    columns: int
    kind: Literal["identity", "full", "sparse"]
    arrays: tuple[Ints, Ints] | None = None

    @property
    def nnz(self) -> int:
        """The number of ones."""
        if self.kind == "identity":
            return self.rows
        return self.rows * self.columns if self.arrays is None else len(self.arrays[1])

    @cached_property
    def indptr(self) -> Ints:
        """The offset of each row's first entry, and the end of the last row."""
        if self.arrays is not None:
            return self.arrays[0]
        _check_entries(self.nnz, (self.rows, self.columns))
        return np.arange(self.rows + 1, dtype=np.int32) * np.int32(self.nnz // self.rows)

    @cached_property
    def indices(self) -> Ints:
        """The column of each entry."""
        if self.arrays is not None:
            return self.arrays[1]
        _check_entries(self.nnz, (self.rows, self.columns))
        columns = np.arange(self.columns, dtype=np.int32)
        return columns if self.kind == "identity" else np.tile(columns, self.rows)

    @cached_property
    def row_counts(self) -> Integers:
        """The number of ones in each row."""
        return np.diff(self.indptr)

    @cached_property
    def column_counts(self) -> Integers:
        """The number of ones in each column."""
        if self.arrays is None:
            return np.full(self.columns, self.nnz // self.columns)
        return np.bincount(self.arrays[1], minlength=self.columns)

    def split(self, size: int, *, at: Literal["rows", "columns"]) -> "tuple[Factor, Factor] | None":
        """Return two factors whose Kronecker product this is; None if there are none. The first has
        ``size`` rows or columns."""
        rest, left = divmod(getattr(self, at), size)
        if self.kind == "sparse" or left:
            return None
        if self.kind == "identity":
            return identity(size), identity(rest)
        if at == "rows":
            return full(size, self.columns), full(rest, 1)
        return full(self.rows, size), full(1, rest)


def identity(size: int) -> Factor:
    """Return the factor in which each input meets its own output."""
    return Factor(size, size, "identity")


def full(rows: int, columns: int) -> Factor:
    """Return the factor in which all inputs meet all outputs."""
    return Factor(rows, columns, "full")


def from_pairs(row_of: Integers, columns: Integers, shape: tuple[int, int]) -> Factor:
    """Make a factor from the pairs (row, column) of its ones. They are sorted by rows and then by
    columns, without duplicates. An identity or a full factor is recognized."""
    indptr = np.zeros(shape[0] + 1, np.int64)
    np.cumsum(np.bincount(row_of, minlength=shape[0]), out=indptr[1:])
    return from_arrays(indptr, np.asarray(columns), shape)


def from_arrays(indptr: Integers, indices: Integers, shape: tuple[int, int]) -> Factor:
    """Make a factor from compressed rows, with columns ascending in each."""
    rows, columns = shape
    if len(indices) == rows * columns:
        return full(rows, columns)
    square = rows == columns == len(indices)
    if square and np.array_equal(indices, np.arange(rows)) and np.all(np.diff(indptr) == 1):
        return identity(rows)
    return Factor(rows, columns, "sparse", (indptr.astype(np.int32), indices.astype(np.int32)))


def windows(reads: Integers, size: int) -> tuple[Factor, Ints]:
    """Return the factor, inputs × outputs, in which output o reads the inputs ``reads[o, k]``, and
    the k of each entry. What is not within 0 … size − 1 is padding, and no entry."""
    o, k = np.nonzero((reads >= 0) & (reads < size))
    inputs = reads[o, k]
    order = np.lexsort((o, inputs))
    factor = from_pairs(inputs[order], o[order], (size, len(reads)))
    return factor, k[order].astype(np.int32)


def band(
    size: int, outputs: int, kernel: int, stride: int, before: int, dilation: int
) -> tuple[Factor, Ints]:
    """Return the :func:`windows` in which output o reads the inputs o·stride − before + k·dilation,
    0 ≤ k < kernel."""
    starts = stride * np.arange(outputs) - before
    return windows(starts[:, None] + dilation * np.arange(kernel), size)


def adaptive(size: int, outputs: int) -> Factor:
    """Return the windows of adaptive pooling: [⌊o·size/outputs⌋, ⌈(o+1)·size/outputs⌉)."""
    o, i = np.arange(outputs)[:, None], np.arange(size)
    inside = (i >= o * size // outputs) & (i < -(-(o + 1) * size // outputs))
    return windows(np.where(inside, i, -1), size)[0]


def merged(factors: "tuple[Factor, ...]") -> Factor:
    """Return the Kronecker product of factors as one factor. Raises TooManyEntriesError."""
    return reduce(_kron, factors)


def _kron(left: Factor, right: Factor) -> Factor:
    shape = left.rows * right.rows, left.columns * right.columns
    if left.kind == right.kind == "identity":
        return identity(shape[0])
    if left.kind == right.kind == "full":
        return full(*shape)
    _check_entries(left.nnz * right.nnz, shape)
    arrays = combined((left.indptr, left.indices), (right.indptr, right.indices), right.columns)
    return Factor(*shape, "sparse", arrays)


def combined(left: tuple[Ints, Ints], right: tuple[Ints, Ints], scale: int) -> tuple[Ints, Ints]:
    """Return left·scale + right for each entry of a Kronecker product, in the order of its rows.
    Each side, and the result, is the offsets of its rows, and a number for each entry."""
    from retrograde.kernels.cpu.llvm.threads import ranges, share
    from retrograde.scan.sparse.cpu_loops import kron

    left_rows, counts = len(left[0]) - 1, np.outer(np.diff(left[0]), np.diff(right[0]))
    out = np.empty(len(left[1]) * len(right[1]), np.int32)
    share(kron, ranges(left_rows, left_rows), *left, *right, scale, out)
    return np.append(0, np.cumsum(counts)).astype(np.int32), out


def multiplied(left: Factor, right: Factor, most: int = MOST_ENTRIES) -> Factor:
    """Return the factor of left·right: the entries that may be non-zero, if no terms cancel. Raises
    TooManyEntriesError for more than ``most`` entries, which are counted before they are made."""
    if left.kind == "identity":
        return right
    if right.kind == "identity":
        return left
    if left.kind == right.kind == "full":
        return full(left.rows, right.columns)
    from retrograde.kernels.cpu.llvm.threads import ranges, share
    from retrograde.scan.sparse.cpu_loops import find_columns

    row_ranges = ranges(left.rows, left.rows)
    arrays = left.indptr, left.indices, right.indptr, right.indices, right.columns
    indptr, indices = np.zeros(left.rows + 1, np.int64), np.empty(0, np.int32)
    share(find_columns, row_ranges, *arrays, indptr, indices)
    np.cumsum(indptr, out=indptr)
    _check_entries(int(indptr[-1]), (left.rows, right.columns), most)
    indices = np.empty(indptr[-1], np.int32)
    share(find_columns, row_ranges, *arrays, indptr, indices)
    return from_arrays(indptr, indices, (left.rows, right.columns))


def _check_entries(entries: int, shape: tuple[int, int], most: int = MOST_ENTRIES) -> None:
    if entries > most:
        raise TooManyEntriesError(
            f"a pattern of {shape[0]:,}×{shape[1]:,} has {entries:,} entries: expected at most "
            f"{most:,}; use the linear scan, which needs no products, or give more memory"
        )
