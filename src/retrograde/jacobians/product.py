"""Products of patterns: what they are, what they take, and which terms land where.

All of this is found once for a pair of patterns, before any number is there (W20, section 3.3), and
used in every iteration. The numbers are then found in one of four ways:

``diagonal``  one factor is: entries are scaled, the pattern stays
``dense``     both factors are full, or nearly so: a matrix product
``blocks``    all channels meet on both sides: a matrix product for each pair of places
``sparse``    anything else, such as a pruned layer: gather, multiply, segmented sum

A product of which a half or more is no guaranteed zero is kept as if all of it were, and so is any
with a full factor.
"""

from functools import cached_property
from math import prod
from typing import Literal

import numpy as np

from retrograde.jacobians.factor import (
    MOST_ENTRIES,
    Factor,
    Integers,
    Ints,
    full,
    identity,
    merged,
    multiplied,
)
from retrograde.jacobians.pattern import Pattern
from retrograde.jacobians.tensors import OnDevices

__all__ = ["Landing", "Places", "Product", "aligned"]

_DENSE = 0.5  # share of entries from which on a product is kept whole
_GEMM = 0.125  # share from which on a sparse factor of a dense product is spread out
_BLOCK = 2**17  # multiplications from which on a block is worth a call


class Landing(OnDevices):
    """The terms of a product, in the order of the entries that they land in.

    Args:
        ends: (nnz + 1,), where the terms of each entry begin, and the last ones end.
        lefts: (terms,), the left factor's entry of each.
        rights: (terms,), the right factor's.
    """

    def __init__(self, ends: Integers, lefts: Ints, rights: Ints) -> None:
        super().__init__()
        self.ends, self.lefts, self.rights = ends, lefts, rights


class Places:
    """A product of Jacobians in which all channels meet.

    Args:
        channels: before the left one, between, and after the right one.
        left: which places meet in the left one.
        right: likewise in the right one.
    """

    def __init__(self, channels: tuple[int, int, int], left: Factor, right: Factor) -> None:
        self.channels = channels
        self.left, self.right = Pattern(left), Pattern(right)
        self.product = self.left.product(self.right)


class Product:
    """A product of two patterns.

    Args:
        left: of the earlier layer.
        right: of the later one.
        most: entries that the product may have where it is no Kronecker product.

    Attributes:
        result: the pattern of the product.
        terms: multiplications, those with guaranteed zeros left out.
        way: how the numbers are found.
    """

    def __init__(self, left: Pattern, right: Pattern, most: int = MOST_ENTRIES) -> None:
        kinds = {left.kind, right.kind}
        self._factors = left.factors, right.factors
        self._multiplied = left.shape[0] * left.shape[1] * right.shape[1]
        self.way: Literal["diagonal", "dense", "blocks", "sparse"] = "sparse"
        if "diagonal" in kinds:
            self.way = "diagonal"
            self.result = right if left.kind == "diagonal" else left
            self.terms = self.result.nnz
            return
        pairs = aligned(*self._factors)
        first, then = pairs[0]
        if "full" in kinds and min(left.density, right.density) >= _GEMM:
            self.way = "dense"
        elif first.kind == then.kind == "full" and _size(first, then) >= _BLOCK:
            self.way = "blocks"
        self.terms = prod(int(np.dot(_columns(a), _rows(b))) for a, b in pairs)
        whole = full(left.shape[0], right.shape[1])
        factors = (whole,) if "full" in kinds else tuple(multiplied(a, b, most) for a, b in pairs)
        self.result = Pattern(*factors)
        if self.result.kind == "sparse" and self.result.density >= _DENSE:
            self.result = Pattern(whole)

    @cached_property
    def exact(self) -> Pattern:
        """The pattern of the product, its zeros left out even where it is kept whole."""
        if self.way == "diagonal":
            return self.result
        found = Pattern(*(multiplied(a, b) for a, b in aligned(*self._factors)))
        return self.result if found.nnz == self.result.nnz else found

    @property
    def flops(self) -> int:
        """Floating-point operations for one sample: one a term where a diagonal scales, else two.

        Of a dense product all terms are counted, those with guaranteed zeros too.
        """
        if self.way == "diagonal":
            return self.terms
        return 2 * (self._multiplied if self.way == "dense" else self.terms)

    @cached_property
    def landing(self) -> Landing:
        """Which entries are multiplied, and where each product lands: written out."""
        from retrograde.kernels.cpu_patterns import land

        a, b = map(merged, self._factors)
        lefts, rights = np.empty((2, self.terms), np.int32)
        ends = np.zeros(self.result.nnz + 1, np.int64)
        place = np.zeros(self.result.shape[1], np.int32)
        arrays = a.indptr, a.indices, b.indptr, b.indices
        land(*arrays, self.result.indptr, self.result.indices, place, ends, lefts, rights)
        return Landing(ends, lefts, rights)

    @cached_property
    def places(self) -> Places:
        """Channels and places of a product by ``blocks``."""
        (first, then), *rest = aligned(*self._factors)
        left = merged((identity(1), *(a for a, _ in rest)))
        right = merged((identity(1), *(b for _, b in rest)))
        return Places((first.rows, first.columns, then.columns), left, right)


def aligned(left: tuple[Factor, ...], right: tuple[Factor, ...]) -> list[tuple[Factor, Factor]]:
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


def _size(first: Factor, then: Factor) -> int:
    return first.rows * first.columns * then.columns
