"""Where transposed Jacobians may be non-zero, known before any number is.

The zeros that a layer guarantees follow from its shape alone (W20, section 3.3). Along each
dimension of an image, inputs and outputs meet in a small pattern of their own; the layer's is the
Kronecker product of those:

    convolution      channels ⊗ band of rows ⊗ band of columns
    pooling          identity of channels ⊗ windows of rows ⊗ windows of columns
    linear           identity of leading dimensions ⊗ all with all
    elementwise      identity

and since (A ⊗ B)·(C ⊗ D) = (A·C) ⊗ (B·D), so are products. So the entries of a product, and the
multiplications it takes, are counted from factors with a few dozen entries, however large it is;
arrays are made only of what is multiplied. A pruned layer's pattern is no Kronecker product: it is
written out, as one factor.

*Dense*: a product of which a half or more is no guaranteed zero is kept as if all of it were.

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020, sections 3.3,
3.4; algorithms 2 and 3 are the case of a 3×3 convolution, with positions that wrap around the edges
of the image in algorithm 3, which are none of its Jacobian's.
"""

from functools import cached_property
from math import prod
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScanError
from retrograde.scan.sparse.factor import (
    MOST_ENTRIES,
    Factor,
    Integers,
    Ints,
    from_arrays,
    full,
    identity,
    merged,
    multiplied,
)

__all__ = ["Kind", "Landing", "Pattern", "Product", "aligned"]

Kind = Literal["diagonal", "full", "sparse"]

_DENSE = 0.5  # share of entries from which on a product is kept whole
_GEMM = 0.125  # share from which on a sparse factor of a dense product is spread out for BLAS


class Pattern:
    """Which entries of a transposed Jacobian are no guaranteed zeros.

    Args:
        factors: whose Kronecker product it is.

    Example:
        >>> relu = Pattern(identity(65_536))
        >>> relu.shape, relu.nnz, round(relu.sparsity, 5)
        ((65536, 65536), 65536, 0.99998)
    """

    def __init__(self, *factors: Factor) -> None:
        self.factors = factors
        self._products: WeakKeyDictionary[Pattern, Product] = WeakKeyDictionary()

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs of the layer."""
        return prod(f.rows for f in self.factors), prod(f.columns for f in self.factors)

    @cached_property
    def nnz(self) -> int:
        """Entries."""
        return prod(f.nnz for f in self.factors)

    @property
    def sparsity(self) -> float:
        """The share of guaranteed zeros (W20, table 3.1)."""
        return 1 - self.density

    @property
    def density(self) -> float:
        """The share of entries."""
        return self.nnz / prod(self.shape)

    @cached_property
    def kind(self) -> Kind:
        """``"diagonal"``, ``"full"`` or ``"sparse"``."""
        kinds = {f.kind for f in self.factors}
        if kinds == {"identity"}:
            return "diagonal"
        return "full" if self.nnz == prod(self.shape) else "sparse"

    @cached_property
    def _whole(self) -> Factor:
        return merged(self.factors)

    @property
    def indptr(self) -> Ints:
        """Where each row begins among the entries, and where the last one ends: (rows + 1,)."""
        return self._whole.indptr

    @property
    def indices(self) -> Ints:
        """The column of each entry, ascending in each row: (nnz,)."""
        return self._whole.indices

    @cached_property
    def row_of(self) -> Ints:
        """The row of each entry: (nnz,)."""
        rows = np.arange(self.shape[0], dtype=np.int32)
        return np.repeat(rows, np.diff(self.indptr))

    @property
    def index_bytes(self) -> int:
        """What the arrays of the pattern take, once they are written out."""
        return 0 if self.kind != "sparse" else 4 * (self.nnz + self.shape[0] + 1)

    def restricted(self, keep: NDArray[np.bool_]) -> "Pattern":
        """The pattern with some entries only.

        Args:
            keep: (nnz,), which of them.

        Returns:
            A pattern, written out.

        Example:
            >>> Pattern(full(2, 2)).restricted(np.array([True, False, True, True])).nnz
            3
        """
        sums = np.concatenate([[0], np.cumsum(keep)])
        return Pattern(from_arrays(sums[self.indptr], self.indices[keep], self.shape))

    def product(self, right: "Pattern", most: int = MOST_ENTRIES) -> "Product":
        """What ``self``·``right`` is, found once and remembered as long as both exist.

        Args:
            right: of as many rows as this has columns.
            most: entries that a product which is no Kronecker product may have.

        Returns:
            The plan.

        Raises:
            ScanError: the shapes do not fit, or there are more entries.

        Example:
            >>> plan = Pattern(full(2, 3)).product(Pattern(identity(3)))
            >>> plan.terms, plan.flops, plan.result.kind
            (6, 6, 'full')
        """
        if self.shape[1] != right.shape[0]:
            raise ScanError(
                f"patterns {self} and {right} cannot be multiplied: expected {self.shape[1]:,} "
                "rows of the second; give transposed Jacobians, (inputs, outputs) of the step"
            )
        # Remembered by the factor that the result may be, so that nothing outlives both of them.
        keeper, other = (right, self) if self.kind == "diagonal" else (self, right)
        found = keeper._products.get(other)
        if found is None:
            found = keeper._products[other] = Product(self, right, most)
        return found

    def union(self, other: "Pattern") -> "tuple[Pattern, Integers, Integers]":
        """Where either has an entry.

        Args:
            other: of the same shape.

        Returns:
            The pattern, and the places in it of the entries of each.

        Raises:
            ScanError: the shapes differ.

        Example:
            >>> both, ours, theirs = Pattern(identity(2)).union(Pattern(full(2, 2)))
            >>> both.nnz, ours.tolist(), theirs.tolist()
            (4, [0, 3], [0, 1, 2, 3])
        """
        if self.shape != other.shape:
            raise ScanError(
                f"patterns {self} and {other} cannot be added: expected paths from the same inputs "
                "to the same outputs"
            )
        keys = [p.row_of * np.int64(p.shape[1]) + p.indices for p in (self, other)]
        both = np.union1d(*keys)
        rows, columns = np.divmod(both, self.shape[1])
        indptr = np.searchsorted(rows, np.arange(self.shape[0] + 1))
        found = Pattern(from_arrays(indptr, columns, self.shape))
        ours, theirs = (np.searchsorted(both, each) for each in keys)
        return found, ours, theirs

    def __str__(self) -> str:
        return f"{self.shape[0]:,}×{self.shape[1]:,}"

    def __repr__(self) -> str:
        return f"Pattern({self}, nnz={self.nnz:,})"


class Product:
    """A product of two patterns: what it is, what it takes, and which terms land where.

    Args:
        left: of the earlier layer.
        right: of the later one.
        most: entries that the product may have where it is no Kronecker product.

    Attributes:
        result: the pattern of the product; all of it, where half or more is.
        terms: multiplications.
        way: how the numbers are found: ``"diagonal"`` where one factor is, ``"dense"`` by BLAS, or
            ``"sparse"``.
    """

    def __init__(self, left: Pattern, right: Pattern, most: int = MOST_ENTRIES) -> None:
        kinds = {left.kind, right.kind}
        self._factors = left.factors, right.factors
        self._multiplied = left.shape[0] * left.shape[1] * right.shape[1]
        self.way: Literal["diagonal", "dense", "sparse"] = "sparse"
        if "diagonal" in kinds:
            self.way = "diagonal"
            self.result = right if left.kind == "diagonal" else left
            self.terms = self.result.nnz
            return
        if "full" in kinds and min(left.density, right.density) >= _GEMM:
            self.way = "dense"
        pairs = aligned(*self._factors)
        self.terms = prod(int(np.dot(_columns(a), _rows(b))) for a, b in pairs)
        result = None if "full" in kinds else Pattern(
            *(multiplied(a, b, most) for a, b in pairs)
        )
        if result is None or (result.kind == "sparse" and result.density >= _DENSE):
            result = Pattern(full(left.shape[0], right.shape[1]))
        self.result = result

    @property
    def flops(self) -> int:
        """Floating-point operations for one sample: one a term where a diagonal scales, else two.

        Of a dense product all terms are counted, those with guaranteed zeros too.
        """
        if self.way == "diagonal":
            return self.terms
        return 2 * (self._multiplied if self.way == "dense" else self.terms)

    @cached_property
    def landing(self) -> "Landing":
        """Which entries are multiplied, and where each product lands: written out."""
        from retrograde.scan.kernels.cpu_patterns import land

        a, b = map(merged, self._factors)
        lefts, rights = np.empty((2, self.terms), np.int32)
        ends = np.zeros(self.result.nnz + 1, np.int64)
        place = np.zeros(self.result.shape[1], np.int32)
        arrays = a.indptr, a.indices, b.indptr, b.indices
        land(*arrays, self.result.indptr, self.result.indices, place, ends, lefts, rights)
        return Landing(ends, lefts, rights)


class Landing:
    """The terms of a product, in the order of the entries that they land in.

    Args:
        ends: (nnz + 1,), where the terms of each entry begin, and the last ones end.
        lefts: (terms,), the left factor's entry of each.
        rights: (terms,), the right factor's.
    """

    def __init__(self, ends: Integers, lefts: Ints, rights: Ints) -> None:
        self.ends, self.lefts, self.rights = ends, lefts, rights


def aligned(
    left: tuple[Factor, ...], right: tuple[Factor, ...]
) -> list[tuple[Factor, Factor]]:
    """The factors of two patterns, so that those that meet can be multiplied.

    An identity, or a full one, is split where the other side's dimensions need it; what cannot be
    split makes the other side's factors one.

    Args:
        left: of as many columns in all as ``right`` has rows.
        right: see there.

    Returns:
        Pairs (a, b), a with as many columns as b has rows.

    Example:
        >>> pairs = aligned((full(5, 6),), (identity(2), full(3, 4)))
        >>> [(a.columns, b.rows) for a, b in pairs]
        [(2, 2), (3, 3)]
    """
    pairs: list[tuple[Factor, Factor]] = []
    ours, theirs = list(left), list(right)
    while ours or theirs:
        a = ours.pop(0) if ours else identity(1)
        b = theirs.pop(0) if theirs else identity(1)
        if a.columns == b.rows:
            pairs.append((a, b))
        elif a.columns == 1 or b.rows == 1:
            first = a.columns == 1
            pairs.append((a, identity(1)) if first else (identity(1), b))
            (theirs if first else ours).insert(0, b if first else a)
        elif a.columns > b.rows:
            _split(a, b.rows, "columns", ours, theirs, b)
        else:
            _split(b, a.columns, "rows", theirs, ours, a)
    return pairs


def _split(
    large: Factor,
    size: int,
    at: Literal["rows", "columns"],
    same: list[Factor],
    other: list[Factor],
    small: Factor,
) -> None:
    """Put back the larger factor in two parts, or else the smaller one together with its next."""
    parts = large.split(size, at=at)
    if parts is None:
        same.insert(0, large)
        other.insert(0, merged((small, other.pop(0))))
    else:
        same[:0] = parts
        other.insert(0, small)


def _columns(factor: Factor) -> Integers:
    return factor.column_counts.astype(np.int64)


def _rows(factor: Factor) -> Integers:
    return factor.row_counts.astype(np.int64)
