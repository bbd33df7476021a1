"""Transposed Jacobians in compressed sparse rows, as elements of a scan."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retrograde.errors import ScanError
from retrograde.scan.elements import Dense, Diagonal, Vector, check_product
from retrograde.scan.sparse.arithmetic import apply, multiply, spread_out
from retrograde.scan.sparse.factor import from_pairs, full, identity
from retrograde.scan.sparse.pattern import Pattern

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True, slots=True, eq=False)
class CSR:
    """A transposed Jacobian (∂y/∂x)ᵀ without its guaranteed zeros.

    All samples share the pattern. They share values too, where these depend on weights only.
    ``a @ b`` is a product, planned once for the two patterns; ``a + b`` is the sum of two paths.

    Args:
        pattern: (inputs, outputs) of one sample, flattened.
        data: (nnz,), or (samples, nnz); otherwise a ScanError is raised.

    Example:
        >>> jacobian = CSR.from_dense(torch.tensor([[1.0, 0.0], [2.0, 3.0]]))
        >>> jacobian.indptr.tolist(), jacobian.indices.tolist(), jacobian.data.tolist()
        ([0, 1, 3], [0, 0, 1], [1.0, 2.0, 3.0])
        >>> (jacobian @ Vector(torch.ones(2))).data.tolist()
        [1.0, 5.0]
    """

    pattern: Pattern
    data: Tensor

    def __post_init__(self) -> None:
        if self.data.ndim not in (1, 2) or self.data.shape[-1] != self.pattern.nnz:
            raise ScanError(
                f"values of shape {tuple(self.data.shape)} were given for a pattern of "
                f"{self.pattern.nnz:,} entries: expected ({self.pattern.nnz},) or (samples, "
                f"{self.pattern.nnz})"
            )

    @classmethod
    def from_dense(cls, matrix: Tensor) -> "CSR":
        """Take the entries of (inputs, outputs), or (samples, inputs, outputs), not zero in all
        samples. These values decide the pattern, so it is wrong for a layer whose zeros depend on
        its input."""
        present = matrix != 0 if matrix.ndim == 2 else (matrix != 0).any(0)
        row_of, columns = present.nonzero(as_tuple=True)
        shape = present.shape[0], present.shape[1]
        pattern = Pattern(from_pairs(row_of.cpu().numpy(), columns.cpu().numpy(), shape))
        return cls(pattern, matrix[..., present])

    @property
    def indptr(self) -> Tensor:
        """The offset of each row's first entry, and the end of the last row: (rows + 1,)."""
        return self.pattern.tensor("indptr", self.data.device)

    @property
    def indices(self) -> Tensor:
        """The column of each entry, ascending in each row: (nnz,)."""
        return self.pattern.tensor("indices", self.data.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """(inputs, outputs), or (samples, inputs, outputs)."""
        return (*self.data.shape[:-1], *self.pattern.shape)

    @property
    def nnz(self) -> int:
        """The number of entries of a sample."""
        return self.pattern.nnz

    def to_dense(self) -> Tensor:
        """Return the matrix with its zeros: a tensor of shape :attr:`shape`."""
        return spread_out(self.pattern, self.data)

    def to_scipy(self, sample: int = 0) -> "csr_array":
        """Return one sample's matrix as a ``scipy.sparse.csr_array``; needs scipy."""
        from scipy.sparse import csr_array

        values = self.data if self.data.ndim == 1 else self.data[sample]
        arrays = values.detach().cpu().numpy(), self.pattern.indices, self.pattern.indptr
        return csr_array(arrays, shape=self.pattern.shape)

    def samples(self, which: slice) -> "CSR":
        """Return the Jacobian of some samples; all of it where the samples share it."""
        return self if self.data.ndim == 1 else CSR(self.pattern, self.data[which])

    def __matmul__(self, other: object) -> Any:
        match other:
            case Vector(data):
                check_product(self, other)
                return Vector(apply(self.pattern, self.data, data))
            case CSR():
                check_product(self, other)
                plan = self.pattern.product(other.pattern)
                values = multiply(self.pattern, other.pattern, self.data, other.data)
                return CSR(plan.result, values)
            case Dense() | Diagonal():
                return self @ _sparse(other)
        return NotImplemented

    def __rmatmul__(self, other: object) -> Any:
        return _sparse(other) @ self if isinstance(other, Dense | Diagonal) else NotImplemented

    def __add__(self, other: "CSR") -> "CSR":
        both, ours, theirs = self.pattern.union(other.pattern)
        samples = self.data.shape[:-1] or other.data.shape[:-1]
        total = self.data.new_zeros(*samples, both.nnz)
        for places, values in ((ours, self.data), (theirs, other.data)):
            total[..., torch.from_numpy(places).to(total.device)] += values
        return CSR(both, total)

    def flops(self, other: object) -> int | None:
        match other:
            case Vector():
                return self.pattern.flops * prod(check_product(self, other))
            case CSR():
                samples = prod(check_product(self, other))
                return self.pattern.product(other.pattern).flops * samples
            case Dense() | Diagonal():
                return self.flops(_sparse(other))
        return None

    def rflops(self, other: object) -> int | None:
        return _sparse(other).flops(self) if isinstance(other, Dense | Diagonal) else None


def _sparse(element: Dense | Diagonal) -> CSR:
    if isinstance(element, Diagonal):
        return CSR(Pattern(identity(element.data.shape[-1])), element.data)
    return CSR(Pattern(full(*element.data.shape[-2:])), element.data.flatten(-2))


@dataclass(frozen=True, eq=False)
class LayerJacobian:
    """The transposed Jacobian of one layer at one input, whose values are not computed yet.

    Args:
        pattern: the pattern of its entries.
        shared: whether all samples have the same values.
        values: computes them: (nnz,) if shared, else (samples, nnz); None for a layer that
            only changes shapes.
        scratch: further bytes for each entry while they are computed.
    """

    pattern: Pattern
    shared: bool
    values: Callable[[], Tensor] | None
    scratch: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs of one sample."""
        return self.pattern.shape

    def pieces(self) -> "list[LayerJacobian]":
        """Return the single layers of a path, here this one."""
        return [self]

    def csr(self, like: Tensor) -> CSR:
        """Compute the values, of the type and on the device of ``like``."""
        if self.values is None:
            return CSR(self.pattern, like.new_ones(self.pattern.nnz))
        return CSR(self.pattern, self.values())
