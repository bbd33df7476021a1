"""Small patterns of zeros and ones, of which large ones are Kronecker products.

A factor says how the inputs and outputs of a layer meet along one of their dimensions: each with
itself (``identity``), all with all (``full``), or some with some (a band, as a convolution has it).
Only the last kind needs arrays at all; those of the others are made when they are asked for.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScanError

__all__ = [
    "MOST_ENTRIES",
    "Factor",
    "Integers",
    "Ints",
    "TooManyEntriesError",
    "combined",
    "from_arrays",
    "from_pairs",
    "full",
    "identity",
    "merged",
    "multiplied",
]

Ints = NDArray[np.int32]
Integers = NDArray[np.integer[Any]]

MOST_ENTRIES = 2**31 - 1  # offsets have 32 bits


class TooManyEntriesError(ScanError):
    """A pattern is larger than may be written out."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A matrix of zeros and ones, in compressed rows.

    Args:
        rows: how many.
        columns: how many.
        kind: ``"identity"``, ``"full"`` or ``"sparse"``.
        arrays: of a sparse one: offsets of the rows, and columns, ascending in each row.

    Example:
        >>> identity(3).indices.tolist(), full(2, 2).indices.tolist()
        ([0, 1, 2], [0, 1, 0, 1])
    """

    rows: int
    columns: int
    kind: Literal["identity", "full", "sparse"]
    arrays: tuple[Ints, Ints] | None = None

    @property
    def nnz(self) -> int:
        """Ones."""
        if self.kind == "identity":
            return self.rows
        return self.rows * self.columns if self.arrays is None else len(self.arrays[1])

    @cached_property
    def indptr(self) -> Ints:
        """Where each row begins among the entries, and where the last one ends."""
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
        """Ones in each row."""
        return np.diff(self.indptr)

    @cached_property
    def column_counts(self) -> Integers:
        """Ones in each column."""
        if self.arrays is None:
            return np.full(self.columns, self.nnz // self.columns)
        return np.bincount(self.arrays[1], minlength=self.columns)

    def split(self, size: int, *, at: Literal["rows", "columns"]) -> "tuple[Factor, Factor] | None":
        """Two factors, whose Kronecker product this is.

        Args:
            size: rows, or columns, of the first.
            at: which of them.

        Returns:
            The factors, or None where there are none.

        Example:
            >>> first, second = full(2, 6).split(3, at="columns")
            >>> (first.rows, first.columns), (second.rows, second.columns)
            ((2, 3), (1, 2))
        """
        rest, left = divmod(getattr(self, at), size)
        if self.kind == "sparse" or left:
            return None
        if self.kind == "identity":
            return identity(size), identity(rest)
        if at == "rows":
            return full(size, self.columns), full(rest, 1)
        return full(self.rows, size), full(1, rest)


def identity(size: int) -> Factor:
    """Each with itself.

    Args:
        size: rows and columns.

    Returns:
        The factor.
    """
    return Factor(size, size, "identity")


def full(rows: int, columns: int) -> Factor:
    """All with all.

    Args:
        rows: how many.
        columns: how many.

    Returns:
        The factor.
    """
    return Factor(rows, columns, "full")


def from_pairs(rows: Integers, columns: Integers, shape: tuple[int, int]) -> Factor:
    """Some with some.

    Args:
        rows: of each entry, in the order of rows and then of columns, no pair twice.
        columns: of each entry.
        shape: rows and columns in all.

    Returns:
        The factor; where it is an identity, or full, it says so.

    Example:
        >>> from_pairs(np.array([0, 1]), np.array([0, 1]), (2, 2)).kind
        'identity'
    """
    indptr = np.zeros(shape[0] + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=shape[0]), out=indptr[1:])
    return from_arrays(indptr, np.asarray(columns), shape)


def from_arrays(indptr: Integers, indices: Integers, shape: tuple[int, int]) -> Factor:
    """The same from compressed rows.

    Args:
        indptr: where each row begins, and the last one ends.
        indices: the columns, ascending in each row.
        shape: rows and columns in all.

    Returns:
        The factor; where it is an identity, or full, it says so.
    """
    rows, columns = shape
    if len(indices) == rows * columns:
        return full(rows, columns)
    square = rows == columns == len(indices)
    if square and np.array_equal(indices, np.arange(rows)) and np.all(np.diff(indptr) == 1):
        return identity(rows)
    return Factor(rows, columns, "sparse", (indptr.astype(np.int32), indices.astype(np.int32)))


def merged(factors: "tuple[Factor, ...]") -> Factor:
    """The Kronecker product of factors, written out.

    Args:
        factors: at least one.

    Returns:
        One factor.

    Raises:
        TooManyEntriesError: it has too many.

    Example:
        >>> merged((identity(2), full(1, 2))).indices.tolist()
        [0, 1, 2, 3]
    """
    first, *others = factors
    for other in others:
        first = _kron(first, other)
    return first


def multiplied(left: Factor, right: Factor, most: int = MOST_ENTRIES) -> Factor:
    """Where left·right may be non-zero, for non-zeros that do not cancel.

    Args:
        left: of as many columns as ``right`` has rows.
        right: see there.
        most: entries that are written out at most.

    Returns:
        The pattern of the product.

    Raises:
        TooManyEntriesError: there are more; they are counted first.

    Example:
        >>> multiplied(full(2, 3), identity(3)).kind
        'full'
    """
    if left.kind == "identity":
        return right
    if right.kind == "identity":
        return left
    if left.kind == right.kind == "full":
        return full(left.rows, right.columns)
    from retrograde.kernels.cpu_patterns import count_columns, fill_columns
    from retrograde.kernels.team import ranges, share

    parts = ranges(left.rows, left.rows)
    arrays = left.indptr, left.indices, right.indptr, right.indices

    def seen() -> Ints:
        return np.full(right.columns, -1, np.int32)

    counts = np.empty(left.rows, np.int64)
    share(lambda a, b: count_columns(a, b, *arrays, seen(), counts), parts)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    _check_entries(int(indptr[-1]), (left.rows, right.columns), most)
    indices = np.empty(indptr[-1], np.int32)
    share(lambda a, b: fill_columns(a, b, *arrays, seen(), indptr, indices), parts)
    return from_arrays(indptr, indices, (left.rows, right.columns))


def combined(left: "tuple[Ints, Ints]", right: "tuple[Ints, Ints]", scale: int) -> Ints:
    """left·scale + right, for each pair of entries that a Kronecker product makes one of.

    Args:
        left: offsets of the rows, and a number for each entry.
        right: likewise.
        scale: see above.

    Returns:
        A number for each entry of the Kronecker product, in the order of its rows.
    """
    from retrograde.kernels.cpu_patterns import kron
    from retrograde.kernels.team import ranges, share

    rows = len(left[0]) - 1
    out = np.empty(len(left[1]) * len(right[1]), np.int32)
    share(lambda a, b: kron(a, b, *left, *right, scale, out), ranges(rows, rows))
    return out


def _check_entries(entries: int, shape: tuple[int, int], most: int = MOST_ENTRIES) -> None:
    if entries > most:
        raise TooManyEntriesError(
            f"a pattern of {shape[0]:,}×{shape[1]:,} has {entries:,} entries: expected at most "
            f"{most:,}; use the linear scan, which needs no products, or give more memory"
        )


def _kron(left: Factor, right: Factor) -> Factor:
    shape = left.rows * right.rows, left.columns * right.columns
    if left.kind == right.kind == "identity":
        return identity(shape[0])
    if left.kind == right.kind == "full":
        return full(*shape)
    _check_entries(left.nnz * right.nnz, shape)
    counts = np.outer(left.row_counts, right.row_counts).ravel()
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = combined((left.indptr, left.indices), (right.indptr, right.indices), right.columns)
    return Factor(*shape, "sparse", (indptr.astype(np.int32), indices))
