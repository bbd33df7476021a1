"""The patterns of transposed Jacobians and their products, known before any number is.

The zeros that a layer guarantees follow from its shape alone (W20, section 3.3). Along each
dimension of an image, inputs and outputs meet in a small pattern of their own. The layer's pattern
is the Kronecker product of those:

    convolution      channels ⊗ band of rows ⊗ band of columns
    pooling          identity of channels ⊗ windows of rows ⊗ windows of columns
    linear           identity of leading dimensions ⊗ all with all
    elementwise      identity

Since (A ⊗ B)·(C ⊗ D) = (A·C) ⊗ (B·D), products have this form too. So entries and multiplications
are counted from factors with a few dozen entries, and only the arrays of real products are made.
The pattern of a pruned layer is no Kronecker product: it is written out, as one factor.

A product is planned once for a pair of patterns. One of three methods computes its numbers:

``diagonal``  one factor is diagonal: entries are scaled, the pattern stays
``dense``     both factors are full, or nearly so: a matrix product
``sparse``    anything else: gather, multiply, segmented sum

A product is stored as a full matrix if at least half of it is entries, or if a factor is full.

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020, sections 3.3,
3.4; algorithms 2 and 3 are a 3×3 convolution. Algorithm 3 also has positions that wrap around the
edges of the image, which are not entries of the Jacobian.
"""

from functools import cached_property
from math import prod
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from retrograde.errors import ScanError
from retrograde.scan.sparse.factor import (
    MOST_ENTRIES,
    Factor,
    Integers,
    Ints,
    TooManyEntriesError,
    from_arrays,
    full,
    identity,
    merged,
    multiplied,
)

_DENSE = 0.5  # share of entries above which a product is stored as a full matrix
_GEMM = 0.125  # share above which a sparse factor of a dense product is spread out

Kind = Literal["diagonal", "full", "sparse"]
Union = tuple["Pattern", Integers, Integers]


class OnDevices:
    """Provides integer arrays as tensors, copied to each device once. A scan uses them in every
    iteration, and copying takes longer than computing with them."""

    def __init__(self, **arrays: Integers) -> None:
        vars(self).update(arrays)
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """Return an array attribute as a read-only tensor; on the CPU it shares the memory."""
        tensor = self._tensors.get((name, device))
        if tensor is None:
            # A later training could not use a tensor made in inference mode.
            with torch.inference_mode(False):
                tensor = torch.from_numpy(getattr(self, name)).to(device)
            self._tensors[name, device] = tensor
        return tensor


class Pattern(OnDevices):
    """The entries of a transposed Jacobian that are not guaranteed zeros, as a Kronecker product of
    factors."""

    def __init__(self, *factors: Factor) -> None:
        super().__init__()
        self.factors = factors
        self._products: WeakKeyDictionary[Pattern, Product] = WeakKeyDictionary()
        self._scaled: WeakKeyDictionary[Pattern, Product] = WeakKeyDictionary()
        self._unions: WeakKeyDictionary[Pattern, Union] = WeakKeyDictionary()

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs of the layer."""
        return prod(f.rows for f in self.factors), prod(f.columns for f in self.factors)

    @cached_property
    def nnz(self) -> int:
        """The number of entries."""
        return prod(f.nnz for f in self.factors)

    @property
    def sparsity(self) -> float:
        """The share of guaranteed zeros (W20, table 3.1)."""
        return 1 - self.density

    @property
    def density(self) -> float:
        return self.nnz / prod(self.shape)

    @cached_property
    def kind(self) -> Kind:
        """``"diagonal"``, ``"full"`` or ``"sparse"``."""
        kinds = {f.kind for f in self.factors}
        if kinds == {"identity"}:
            return "diagonal"
        return "full" if self.nnz == prod(self.shape) else "sparse"

    @property
    def flops(self) -> int:
        """The floating-point operations of a product with a vector, for one sample."""
        return self.nnz if self.kind == "diagonal" else 2 * self.nnz

    @cached_property
    def _whole(self) -> Factor:
        return merged(self.factors)

    @property
    def indptr(self) -> Ints:
        """The offset of each row's first entry, and the end of the last row: (rows + 1,)."""
        return self._whole.indptr

    @property
    def indices(self) -> Ints:
        """The column of each entry, ascending in each row: (nnz,)."""
        return self._whole.indices

    @cached_property
    def row_of(self) -> Ints:
        """The row of each entry: (nnz,)."""
        return np.repeat(np.arange(self.shape[0], dtype=np.int32), np.diff(self.indptr))

    @property
    def index_bytes(self) -> int:
        """The bytes of the pattern's arrays, once they are written out."""
        return 0 if self.kind != "sparse" else 4 * (self.nnz + self.shape[0] + 1)

    def product(self, right: "Pattern", most: int = MOST_ENTRIES) -> "Product":
        """Return the plan of ``self``·``right``, made once and kept while both exist. Raises
        ScanError if the shapes do not match, or if a written-out factor of the product has more
        than ``most`` entries."""
        if self.shape[1] != right.shape[0]:
            raise ScanError(
                f"patterns {self} and {right} cannot be multiplied: expected {self.shape[1]:,} "
                "rows of the second; give transposed Jacobians, (inputs, outputs) of the step"
            )
        # The factor that may be the result keeps the plan, so nothing outlives both factors.
        scales = self.kind == "diagonal"
        plans, other = (right._scaled, self) if scales else (self._products, right)
        plan = plans.get(other)
        if plan is None:
            plan = plans[other] = Product(self, right, most)
        return plan

    def union(self, other: "Pattern") -> "Union":
        """Return the entries of either, and the places of the entries of each; kept while both
        exist. Raises ScanError if the shapes differ."""
        if self.shape != other.shape:
            raise ScanError(
                f"patterns {self} and {other} cannot be added: expected paths from the same inputs "
                "to the same outputs"
            )
        if other not in self._unions:
            starts = self.shape[1] * np.arange(self.shape[0] + 1)
            # The position of each entry in the full matrix, row after row.
            ours, theirs = (starts[p.row_of] + p.indices for p in (self, other))
            both = np.union1d(ours, theirs)
            arrays = np.searchsorted(both, starts), both % self.shape[1]
            places = np.searchsorted(both, ours), np.searchsorted(both, theirs)
            self._unions[other] = Pattern(from_arrays(*arrays, self.shape)), *places
        return self._unions[other]

    def forget(self) -> None:
        """Drop the kept products and unions; they are made again on use."""
        for cache in (self._products, self._scaled, self._unions):
            cache.clear()  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return Pattern, self.factors  # plans are not sent

    def __deepcopy__(self, memo: object) -> "Pattern":
        return self  # patterns are immutable

    def __str__(self) -> str:
        return f"{self.shape[0]:,}×{self.shape[1]:,}"

    def __repr__(self) -> str:
        return f"Pattern({self}, nnz={self.nnz:,})"


class Product:
    """The plan of a product of two patterns. ``result`` is its pattern and ``method`` the way to
    compute its numbers. ``terms`` counts multiplications, without those by guaranteed zeros."""

    def __init__(self, left: Pattern, right: Pattern, most: int = MOST_ENTRIES) -> None:
        kinds = {left.kind, right.kind}
        self._factors = left.factors, right.factors
        self._multiplied = left.shape[0] * left.shape[1] * right.shape[1]
        self.method: Literal["diagonal", "dense", "sparse"] = "sparse"
        if "diagonal" in kinds:
            self.method = "diagonal"
            self.result = right if left.kind == "diagonal" else left
            self.terms = self.result.nnz
            return
        pairs = aligned(*self._factors)
        if "full" in kinds and min(left.density, right.density) >= _GEMM:
            self.method = "dense"
        self.terms = prod(
            int(np.dot(a.column_counts.astype(np.int64), b.row_counts)) for a, b in pairs
        )
        whole = full(left.shape[0], right.shape[1])
        factors = (whole,) if "full" in kinds else tuple(multiplied(a, b, most) for a, b in pairs)
        self.result = Pattern(*factors)
        if self.result.kind == "sparse" and self.result.density >= _DENSE:
            self.result = Pattern(whole)

    @property
    def flops(self) -> int:
        """The FLOPs for one sample: one for each term where a diagonal scales, else two. A dense
        product counts terms with guaranteed zeros, too."""
        if self.method == "diagonal":
            return self.terms
        return 2 * (self._multiplied if self.method == "dense" else self.terms)

    def check_terms(self) -> None:
        """Raise TooManyEntriesError if there are too many terms to list them."""
        if self.terms > MOST_ENTRIES:
            raise TooManyEntriesError(
                f"a product of {self.result} has {self.terms:,} terms: expected at most "
                f"{MOST_ENTRIES:,} on this device, where they are listed; use the linear scan, "
                "which needs no products"
            )

    @cached_property
    def landing(self) -> OnDevices:
        """The terms of the product, in the order of the entries that they add to. The terms of
        entry e are ``ends[e]`` … ``ends[e + 1] − 1``; ``lefts`` and ``rights`` are each term's
        entries of the factors."""
        from retrograde.scan.sparse.cpu_loops import land

        self.check_terms()
        a, b = map(merged, self._factors)
        lefts, rights = np.empty((2, self.terms), np.int32)
        ends = np.zeros(self.result.nnz + 2, np.int64)
        place = np.zeros(self.result.shape[1], np.int32)
        arrays = a.indptr, a.indices, b.indptr, b.indices
        land(*arrays, self.result.indptr, self.result.indices, place, ends, lefts, rights)
        return OnDevices(ends=ends[:-1], lefts=lefts, rights=rights)


def aligned(left: tuple[Factor, ...], right: tuple[Factor, ...]) -> list[tuple[Factor, Factor]]:
    """Return the factors of two patterns in pairs (a, b), a with as many columns as b has rows.
    Identity and full factors are split to match the other side's dimensions. Otherwise the other
    side's factors are merged."""
    if not left and not right:
        return []
    a, *ours = left or (identity(1),)
    b, *theirs = right or (identity(1),)
    if a.columns == b.rows:
        return [(a, b), *aligned((*ours,), (*theirs,))]
    if a.columns == 1:
        return [(a, identity(1)), *aligned((*ours,), right)]
    if b.rows == 1:
        return [(identity(1), b), *aligned(left, (*theirs,))]
    if a.columns > b.rows:
        factors = a.split(b.rows, at="columns")
        if factors:
            return aligned((*factors, *ours), right)
        return aligned(left, (merged((b, theirs[0])), *theirs[1:]))
    factors = b.split(a.columns, at="rows")
    if factors:
        return aligned(left, (*factors, *theirs))
    return aligned((merged((a, ours[0])), *ours[1:]), right)
