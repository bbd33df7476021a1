"""The elements of a scan: vectors, transposed Jacobians, and the operator A ⊙ B = B·A.

Backpropagation is an exclusive scan over [∇x_n, J_nᵀ, …, J_1ᵀ] (W20, eqs. 3.1, 3.2). The gradient
is a ``Vector`` and a transposed Jacobian is ``Dense`` or ``Diagonal``. ``IDENTITY`` is symbolic:
it is moved, never multiplied. ``UNREAD`` may be the last element, which no result reads; no product
with it is made. Where every step has a loss term of its own, the element is the pair
``Affine(J_{t+1}ᵀ, d_t)``, which means g ↦ d_t + J_{t+1}ᵀ·g.

A product is as structured as its factors allow:

==================  ==========  ==========  ==========  ===========================
left · right        Vector      Dense       Diagonal    Affine(J, d)
==================  ==========  ==========  ==========  ===========================
Dense (m×k)         Vector      Dense       Dense       Affine(left·J, left·d)
Diagonal            Vector      Dense       Diagonal    Affine(left·J, left·d)
Affine(J, d)        Vector      Affine      Affine      Affine
==================  ==========  ==========  ==========  ===========================

*A further kind of element* is any class with ``__matmul__`` (it on the left) and ``__rmatmul__``
(it on the right). The kinds here return ``NotImplemented`` for types they do not know, so the new
kind alone defines its products with them. A report reads ``shape``, (…, rows, columns), and
``flops(other)`` of ``self @ other``; if that is None, it reads the other's ``rflops(self)``.

Shapes that do not match, and data of too few dimensions, raise ``ScanError``. Leading dimensions
are a batch, and broadcast. A dense product counts a multiplication and an addition for each term
(2·m·k·n FLOPs), and a diagonal one FLOP for each entry that it scales.

This module does not load torch: only its tensors do.

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020, section 3.1.
"""

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from retrograde.errors import ScanError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class _Symbol(Enum):
    """A symbol in an array that is never multiplied; each is one object, pickled or not."""

    IDENTITY = "I"
    UNREAD = "·"

    def __repr__(self) -> str:
        return self.name


IDENTITY: Final = _Symbol.IDENTITY
UNREAD: Final = _Symbol.UNREAD
Identity = Literal[_Symbol.IDENTITY]


@dataclass(frozen=True, slots=True)
class Operand:
    """The type's name and the shape of an element; the shape is empty if it has none."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, element: object) -> "Operand":
        return cls(type(element).__name__, tuple(getattr(element, "shape", ())))

    def __str__(self) -> str:
        return f"{self.kind} {'×'.join(map(str, self.shape))}".rstrip()


def combine(a: Any, b: Any) -> Any:
    """Return the operator of the scan, a ⊙ b = b·a (W20, section 3.1).

    It is associative, not commutative. a is the earlier element of the array; b is anything with
    ``@``. ``IDENTITY`` gives the other operand itself, and a later ``UNREAD`` gives ``UNREAD``.

    Example:
        >>> import torch
        >>> gradient = Vector(torch.tensor([1.0, 2.0]))
        >>> combine(gradient, Diagonal(torch.tensor([3.0, 4.0]))).data
        tensor([3., 8.])
    """
    if a is IDENTITY:
        return b
    if b is IDENTITY:
        return a
    return UNREAD if b is UNREAD else b @ a


def flops(a: object, b: object) -> int:
    """Return the FLOPs of a ⊙ b = b·a, all of the batch; 0 with ``IDENTITY``, or if unknown.

    Example:
        >>> import torch
        >>> flops(Vector(torch.ones(16, 5)), Dense(torch.ones(3, 5)))
        480
    """
    if a is IDENTITY or b is IDENTITY:
        return 0
    count: int | None = b.flops(a) if hasattr(b, "flops") else None
    if count is None and hasattr(a, "rflops"):
        count = a.rflops(b)
    return count or 0


def check_product(left: Any, right: Any) -> Shape:
    """Return the batch of left·right: left is (…, m, k), right is (…, k, n) or a vector (…, k).
    ScanError if the inner sizes differ, or the batches do not broadcast."""
    dimensions = 1 if isinstance(right, Vector) else 2
    columns, rows = left.shape[-1], right.shape[-dimensions]
    if columns != rows:
        raise ScanError(
            f"{Operand.of(left)} cannot be applied to {Operand.of(right)}: expected {columns} "
            f"rows, not {rows}; give transposed Jacobians, (…, inputs, outputs) of the step, the "
            "last step's first"
        )
    return _broadcast(left, right, left.shape[:-2], right.shape[:-dimensions])


@dataclass(frozen=True, slots=True, eq=False)
class _OfTensor:
    """An element that is one tensor, whose leading dimensions are a batch."""

    data: "Tensor"

    def __post_init__(self) -> None:
        least, expected = (2, "(…, m, k)") if isinstance(self, Dense) else (1, "(…, n)")
        if self.data.ndim < least:
            raise ScanError(
                f"{type(self).__name__} was given a tensor of shape {tuple(self.data.shape)}: "
                f"expected {expected}; add the missing dimension"
            )

    @property
    def shape(self) -> Shape:
        """The shape of the matrix or of the vector, with its batch."""
        return tuple(self.data.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Vector(_OfTensor):
    """A gradient, of data (…, n). It is the first element of the array.

    Example:
        >>> import torch
        >>> Vector(torch.ones(16, 5)).shape
        (16, 5)
    """

    def __add__(self, other: "Vector") -> "Vector":
        if self.shape[-1] != other.shape[-1]:
            raise ScanError(
                f"{Operand.of(self)} cannot be added to {Operand.of(other)}: expected a loss term "
                "of the size of the step's gradient"
            )
        _broadcast(self, other, self.shape[:-1], other.shape[:-1])
        return Vector(self.data + other.data)

    def __matmul__(self, other: object) -> Any:
        raise ScanError(
            f"{Operand.of(self)} cannot be applied to {Operand.of(other)}: expected the only "
            "Vector at the first position, and operators after it"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Dense(_OfTensor):
    """A transposed Jacobian, of data (…, m, k), from gradients of size k to gradients of size m.

    Example:
        >>> import torch
        >>> (Dense(torch.ones(3, 5)) @ Dense(torch.ones(16, 5, 2))).shape
        (16, 3, 2)
    """

    def __matmul__(self, other: object) -> Any:
        if not isinstance(other, _TENSORS):
            return NotImplemented
        check_product(self, other)
        if isinstance(other, Vector):
            return Vector((self.data @ other.data[..., None])[..., 0])
        if isinstance(other, Dense):
            return Dense(self.data @ other.data)
        return Dense(self.data * other.data[..., None, :])

    def flops(self, other: object) -> int | None:
        if not isinstance(other, _TENSORS):
            return None
        once = 1 if isinstance(other, Diagonal) else 2 * _columns(other)
        return once * prod(self.shape[-2:]) * prod(check_product(self, other))


@dataclass(frozen=True, slots=True, eq=False)
class Diagonal(_OfTensor):
    """The transposed Jacobian of an elementwise step: its diagonal, of data (…, n).

    Example:
        >>> import torch
        >>> (Diagonal(torch.ones(16, 5)) @ Diagonal(torch.ones(5))).shape
        (16, 5, 5)
    """

    @property
    def shape(self) -> Shape:
        """(…, n, n)."""
        return (*self.data.shape, self.data.shape[-1])

    def __matmul__(self, other: object) -> Any:
        if not isinstance(other, _TENSORS):
            return NotImplemented
        check_product(self, other)
        if isinstance(other, Dense):
            return Dense(self.data[..., None] * other.data)
        return type(other)(self.data * other.data)

    def flops(self, other: object) -> int | None:
        if not isinstance(other, _TENSORS):
            return None
        return _columns(other) * self.shape[-1] * prod(check_product(self, other))


_TENSORS = Vector, Dense, Diagonal


def _columns(element: Vector | Dense | Diagonal) -> int:
    """Return the columns of a dense element; 1 for a vector or a diagonal."""
    return element.shape[-1] if isinstance(element, Dense) else 1


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """One step with its own loss term: g ↦ d + Jᵀ·g.

    Two make one: (J_Bᵀ, d_B)·(J_Aᵀ, d_A) = (J_Bᵀ·J_Aᵀ, d_B + J_Bᵀ·d_A).

    Args:
        jacobian: Jᵀ, any linear element, or ``IDENTITY``.
        offset: d, the gradient of the step's own loss term.

    Raises:
        ScanError: the Jacobian and the loss term have different sizes.

    Example:
        >>> import torch
        >>> step = Affine(Dense(torch.ones(3, 5)), Vector(torch.ones(3)))
        >>> (step @ Vector(torch.ones(5))).data
        tensor([6., 6., 6.])
    """

    jacobian: Any
    offset: Vector

    def __post_init__(self) -> None:
        if self.shape[-2:-1] != self.offset.shape[-1:]:
            raise ScanError(
                f"{Operand.of(self.jacobian)} and the loss term {Operand.of(self.offset)} were "
                "given for one step: expected both of the size of its input"
            )

    @property
    def shape(self) -> Shape:
        """(…, m, k) of the Jacobian."""
        if self.jacobian is IDENTITY:
            return (*self.offset.shape, self.offset.shape[-1])
        shape: Shape = self.jacobian.shape
        return shape

    def __matmul__(self, other: object) -> Any:
        match other:
            case Vector():
                return self.offset + combine(other, self.jacobian)
            case Affine(jacobian, offset):
                return Affine(combine(jacobian, self.jacobian), self @ offset)
        return Affine(combine(other, self.jacobian), self.offset)

    def __rmatmul__(self, other: object) -> Any:
        return Affine(combine(self.jacobian, other), combine(self.offset, other))

    def flops(self, other: object) -> int:
        match other:
            case Vector():
                batches = self.offset.shape[:-1], self.shape[:-2], other.shape[:-1]
                additions = self.offset.shape[-1] * prod(np.broadcast_shapes(*batches))
                return flops(other, self.jacobian) + additions
            case Affine(jacobian, offset):
                return flops(jacobian, self.jacobian) + self.flops(offset)
        return flops(other, self.jacobian)

    def rflops(self, other: object) -> int:
        return flops(self.jacobian, other) + flops(self.offset, other)


def _broadcast(left: object, right: object, left_batch: Shape, right_batch: Shape) -> Shape:
    # A shortcut for equal batches, since this runs for every product.
    if left_batch == right_batch or not right_batch:
        return left_batch
    try:
        return np.broadcast_shapes(left_batch, right_batch)
    except ValueError:
        raise ScanError(
            f"{Operand.of(left)} and {Operand.of(right)} have the batches {left_batch} and "
            f"{right_batch}: expected leading dimensions that broadcast"
        ) from None
