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

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020, sections 3.3,
3.4; algorithms 2 and 3 are the case of a 3×3 convolution, with positions that wrap around the edges
of the image in algorithm 3, which are none of its Jacobian's.
"""

from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from retrograde.errors import ScanError
from retrograde.jacobians.factor import (
    MOST_ENTRIES,
    Factor,
    Integers,
    Ints,
    from_arrays,
    merged,
)
from retrograde.jacobians.tensors import OnDevices

if TYPE_CHECKING:
    from retrograde.jacobians.product import Product

__all__ = ["Kind", "Pattern", "Union"]

Kind = Literal["diagonal", "full", "sparse"]
Union = tuple["Pattern", Integers, Integers]


class Pattern(OnDevices):
    """Which entries of a transposed Jacobian are no guaranteed zeros.

    Args:
        factors: whose Kronecker product it is.

    Attributes:
        keeps: patterns that are to live as long as this one.

    Example:
        >>> from retrograde.jacobians.factor import identity
        >>> relu = Pattern(identity(65_536))
        >>> relu.shape, relu.nnz, round(relu.sparsity, 5)
        ((65536, 65536), 65536, 0.99998)
    """

    def __init__(self, *factors: Factor) -> None:
        super().__init__()
        self.factors = factors
        self.keeps: tuple[Pattern, ...] = ()
        self._products: WeakKeyDictionary[Pattern, Product] = WeakKeyDictionary()
        self._scaled: WeakKeyDictionary[Pattern, Product] = WeakKeyDictionary()
        self._unions: WeakKeyDictionary[Pattern, Union] = WeakKeyDictionary()

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
            >>> from retrograde.jacobians.factor import full
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
            >>> from retrograde.jacobians.factor import full, identity
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
        scales = self.kind == "diagonal"
        known, other = (right._scaled, self) if scales else (self._products, right)
        found = known.get(other)
        if found is None:
            from retrograde.jacobians.product import Product

            found = known[other] = Product(self, right, most)
        return found

    def forget(self) -> None:
        """Let go of what is remembered; it is found anew where it is wanted."""
        for known in (self._products, self._scaled, self._unions):
            known.clear()  # type: ignore[attr-defined]

    def union(self, other: "Pattern") -> "Union":
        """Where either has an entry, found once and remembered as long as both exist.

        Args:
            other: of the same shape.

        Returns:
            The pattern, and the places in it of the entries of each.

        Raises:
            ScanError: the shapes differ.

        Example:
            >>> from retrograde.jacobians.factor import full, identity
            >>> both, ours, theirs = Pattern(identity(2)).union(Pattern(full(2, 2)))
            >>> both.nnz, ours.tolist(), theirs.tolist()
            (4, [0, 3], [0, 1, 2, 3])
        """
        if self.shape != other.shape:
            raise ScanError(
                f"patterns {self} and {other} cannot be added: expected paths from the same inputs "
                "to the same outputs"
            )
        if other not in self._unions:
            self._unions[other] = self._union(other)
        return self._unions[other]

    def _union(self, other: "Pattern") -> "Union":
        keys = [p.row_of * np.int64(p.shape[1]) + p.indices for p in (self, other)]
        both = np.union1d(*keys)
        rows, columns = np.divmod(both, self.shape[1])
        indptr = np.searchsorted(rows, np.arange(self.shape[0] + 1))
        found = Pattern(from_arrays(indptr, columns, self.shape))
        ours, theirs = (np.searchsorted(both, each) for each in keys)
        return found, ours, theirs

    def __reduce__(self) -> tuple[Any, ...]:
        # As factors, which are small where it is a Kronecker product; what it remembers stays.
        arrays = (f.arrays and tuple(map(torch.from_numpy, f.arrays)) for f in self.factors)
        told = ((f.rows, f.columns, f.kind, a) for f, a in zip(self.factors, arrays, strict=True))
        return _received, tuple(told)

    def __deepcopy__(self, memo: Any) -> "Pattern":
        return self  # it does not change

    def __str__(self) -> str:
        return f"{self.shape[0]:,}×{self.shape[1]:,}"

    def __repr__(self) -> str:
        return f"Pattern({self}, nnz={self.nnz:,})"


_RECEIVED: WeakValueDictionary[Any, Pattern] = WeakValueDictionary()


def _received(*factors: tuple[Any, ...]) -> Pattern:
    """A pattern that was pickled; one object for all that are equal, so that plans are found."""
    made = []
    for rows, columns, kind, tensors in factors:
        arrays = tensors and tuple(t.cpu().numpy().copy() for t in tensors)
        made.append(Factor(rows, columns, kind, arrays))
    digest = blake2b()
    for array in (array for f in made for array in f.arrays or ()):
        digest.update(array.tobytes())
    key = (*((f.rows, f.columns, f.kind, f.nnz) for f in made), digest.digest())
    return _RECEIVED.setdefault(key, Pattern(*made))
