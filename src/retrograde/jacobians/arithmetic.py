"""Products with sparse transposed Jacobians, in plain torch, and which kernels do them faster.

Values are (nnz,) where all samples share them, or (samples, nnz). What lands where is known
(:class:`~retrograde.jacobians.product.Product`), so a product is gather, multiply, segmented sum:
no search, no merging of indices, which is most of what a general sparse product does (W20, sections
3.3 and 4.3).
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from retrograde.jacobians.blocks import multiply_blocks
from retrograde.jacobians.pattern import Pattern

__all__ = [
    "SparseKernels",
    "apply",
    "multiply",
    "plain",
    "sparse_kernels",
    "spread_out",
]


@dataclass(frozen=True)
class SparseKernels:
    """One implementation of what is done with sparse values.

    Attributes:
        name: "numba", "triton" or "torch".
        scale: as :func:`scale`.
        multiply: as :func:`multiply_sparse`.
        apply: as :func:`apply_sparse`.
        take: as :func:`take`.
        mark: as :func:`mark`.
    """

    name: str
    scale: Callable[[Pattern, Tensor, Tensor, bool], Tensor]
    multiply: Callable[[Pattern, Pattern, Tensor, Tensor], Tensor]
    apply: Callable[[Pattern, Tensor, Tensor], Tensor]
    take: Callable[[Tensor, Any], Tensor]
    mark: Callable[[Pattern, Tensor, Tensor], Tensor]


def multiply(left: Pattern, right: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """The values of a product.

    Args:
        left: of the earlier layer.
        right: of the later one.
        a: the values of ``left``, (nnz,) or (samples, nnz).
        b: those of ``right``.

    Returns:
        The values of ``left.product(right).result``; (nnz,) where both are shared.

    Example:
        >>> from retrograde.jacobians.factor import full, identity
        >>> two = torch.tensor([2.0, 3.0])
        >>> multiply(Pattern(identity(2)), Pattern(full(2, 2)), two, torch.ones(4)).tolist()
        [2.0, 2.0, 3.0, 3.0]
    """
    plan = left.product(right)
    kernels = sparse_kernels(a.device.type, a.dtype)
    if plan.way == "sparse":
        return kernels.multiply(left, right, a, b)
    if plan.way == "blocks":
        return multiply_blocks(plan, a, b)
    if plan.way == "dense":
        return (spread_out(left, a) @ spread_out(right, b)).flatten(-2)
    if left.kind == right.kind == "diagonal":
        return a * b
    return (
        kernels.scale(right, b, a, False)
        if left.kind == "diagonal"
        else kernels.scale(left, a, b, True)
    )


def apply(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    """A transposed Jacobian times a gradient.

    Args:
        pattern: of the Jacobian.
        values: (nnz,) or (samples, nnz).
        x: (columns,) or (samples, columns).

    Returns:
        (rows,) or (samples, rows).

    Example:
        >>> from retrograde.jacobians.factor import full
        >>> apply(Pattern(full(2, 3)), torch.ones(6), torch.ones(3)).tolist()
        [3.0, 3.0]
    """
    if pattern.kind == "diagonal":
        return values * x
    if pattern.kind == "full":
        matrix = values.reshape(*values.shape[:-1], *pattern.shape)
        return x @ matrix.T if values.ndim == 1 else (matrix @ x[..., None])[..., 0]
    return sparse_kernels(x.device.type, x.dtype).apply(pattern, values, x)


def spread_out(pattern: Pattern, values: Tensor) -> Tensor:
    """The matrix with its zeros.

    Args:
        pattern: of the matrix.
        values: (nnz,) or (samples, nnz).

    Returns:
        (rows, columns) or (samples, rows, columns).

    Example:
        >>> from retrograde.jacobians.factor import identity
        >>> spread_out(Pattern(identity(2)), torch.tensor([2.0, 3.0])).tolist()
        [[2.0, 0.0], [0.0, 3.0]]
    """
    if pattern.kind == "full":
        return values.reshape(*values.shape[:-1], *pattern.shape)
    rows, columns = pattern.shape
    whole = values.new_zeros(*values.shape[:-1], rows * columns)
    starts = pattern.tensor("row_of", values.device).long() * columns
    whole[..., starts + pattern.tensor("indices", values.device)] = values
    return whole.reshape(*values.shape[:-1], *pattern.shape)


def scale(pattern: Pattern, values: Tensor, diagonal: Tensor, by_column: bool) -> Tensor:
    """diag(d)·X, or X·diag(d).

    Args:
        pattern: of X.
        values: of X.
        diagonal: d.
        by_column: whether d stands on the right.

    Returns:
        The values of the product.
    """
    places = pattern.tensor("indices" if by_column else "row_of", values.device)
    return values * diagonal.index_select(-1, places)


def multiply_sparse(left: Pattern, right: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """A product of two, neither of which is diagonal: gather, multiply, segmented sum.

    Args:
        left: of the earlier layer.
        right: of the later one.
        a: the values of ``left``.
        b: those of ``right``.

    Returns:
        The values of the product.
    """
    plan = left.product(right)
    names = "ends", "lefts", "rights"
    ends, lefts, rights = (plan.landing.tensor(name, a.device) for name in names)
    terms = a.index_select(-1, lefts) * b.index_select(-1, rights)
    entries = torch.repeat_interleave(ends.diff())
    return a.new_zeros(*terms.shape[:-1], plan.result.nnz).index_add_(-1, entries, terms)


def apply_sparse(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    """A transposed Jacobian, neither diagonal nor full, times a gradient.

    Args:
        pattern: of the Jacobian.
        values: its values.
        x: (columns,) or (samples, columns).

    Returns:
        (rows,) or (samples, rows).
    """
    terms = values * x.index_select(-1, pattern.tensor("indices", x.device))
    rows = pattern.tensor("row_of", x.device)
    return x.new_zeros(*terms.shape[:-1], pattern.shape[0]).index_add_(-1, rows, terms)


def take(weights: Tensor, pattern: Any) -> Tensor:
    """The values of a pattern whose entries are weights.

    Args:
        weights: flat.
        pattern: its ``sources`` say which weight an entry is.

    Returns:
        (nnz,).
    """
    return weights.index_select(0, pattern.tensor("sources", weights.device))


def mark(pattern: Pattern, x: Tensor, chosen: Tensor) -> Tensor:
    """The values of a max-pooling: 1 where the input of an entry is its output's maximum.

    Args:
        pattern: of the pooling.
        x: its input, (samples, channels, …).
        chosen: by output, the place of the maximum in its channel, (samples, channels, …).

    Returns:
        (samples, nnz).
    """
    within = pattern.tensor("row_of", x.device) % prod(x.shape[2:])
    columns = pattern.tensor("indices", x.device)
    return (chosen.flatten(1).index_select(1, columns) == within).to(x.dtype)


plain = SparseKernels("torch", scale, multiply_sparse, apply_sparse, take, mark)


@cache
def sparse_kernels(device: str, dtype: torch.dtype) -> SparseKernels:
    """The fastest implementation for a device.

    Args:
        device: its type, such as "cpu" or "cuda".
        dtype: of the values.

    Returns:
        Compiled kernels where there are some, and else the plain ones.

    Example:
        >>> sparse_kernels("cpu", torch.float32).name
        'numba'
    """
    real = dtype in (torch.float32, torch.float64)
    if device == "cpu" and real:
        from retrograde.jacobians import cpu_products as cpu_sparse

        return SparseKernels(
            "numba", cpu_sparse.scale, cpu_sparse.multiply, cpu_sparse.apply, cpu_sparse.take,
            cpu_sparse.mark,
        )  # fmt: skip
    if device == "cuda" and real and importlib.util.find_spec("triton"):
        from retrograde.jacobians import cuda_products as cuda_sparse

        compiled = cuda_sparse.multiply, cuda_sparse.apply
        return SparseKernels("triton", scale, *compiled, take, mark)
    return plain
