"""Products with sparse transposed Jacobians in plain torch, and the choice of faster kernels.

Values are (nnz,) where all samples share them, or (samples, nnz); a gradient is (columns,) or
(samples, columns). A :class:`~retrograde.scan.sparse.pattern.Product` has the place of each result.
So a product is gather, multiply, segmented sum. It needs no search and no merging of indices, which
are most of the work of a general sparse product (W20, sections 3.3 and 4.3).
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from retrograde.kernels.fallback import Fallback
from retrograde.scan.sparse.pattern import Pattern


@dataclass(frozen=True)
class SparseKernels:
    """One implementation ("numba", "triton" or "torch") of the products. They are :func:`scale`,
    :func:`multiply_sparse`, :func:`apply_sparse` and :func:`take`."""

    name: str
    scale: Callable[[Pattern, Tensor, Tensor, bool], Tensor]
    multiply: Callable[[Pattern, Pattern, Tensor, Tensor], Tensor]
    apply: Callable[[Pattern, Tensor, Tensor], Tensor]
    take: Callable[[Tensor, Any], Tensor]


def multiply(left: Pattern, right: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """Return the values of ``left.product(right).result``. They are (nnz,) where both factors' are
    shared, else (samples, nnz)."""
    plan = left.product(right)
    kernels = sparse_kernels(a.device.type, a.dtype)
    if plan.method == "sparse":
        return kernels.multiply(left, right, a, b)
    if plan.method == "dense":
        return (spread_out(left, a) @ spread_out(right, b)).flatten(-2)
    if left.kind == right.kind == "diagonal":
        return a * b
    if left.kind == "diagonal":
        return kernels.scale(right, b, a, False)
    return kernels.scale(left, a, b, True)


def apply(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    """Return a transposed Jacobian times a gradient: (rows,) or (samples, rows)."""
    if pattern.kind == "diagonal":
        return values * x
    if pattern.kind == "full":
        matrix = spread_out(pattern, values)
        return x @ matrix.T if values.ndim == 1 else (matrix @ x[..., None])[..., 0]
    return sparse_kernels(x.device.type, x.dtype).apply(pattern, values, x)


def spread_out(pattern: Pattern, values: Tensor) -> Tensor:
    """Return the matrix with its zeros: (rows, columns) or (samples, rows, columns)."""
    if pattern.kind == "full":
        return values.reshape(*values.shape[:-1], *pattern.shape)
    rows, columns = pattern.shape
    whole = values.new_zeros(*values.shape[:-1], rows * columns)
    starts = pattern.tensor("row_of", values.device).long() * columns
    whole[..., starts + pattern.tensor("indices", values.device)] = values
    return whole.reshape(*values.shape[:-1], *pattern.shape)


def scale(pattern: Pattern, values: Tensor, diagonal: Tensor, by_column: bool) -> Tensor:
    """Return the values of X·diag(d) if ``by_column``, else of diag(d)·X; X is the pattern."""
    places = pattern.tensor("indices" if by_column else "row_of", values.device)
    return values * diagonal.index_select(-1, places)


def multiply_sparse(left: Pattern, right: Pattern, a: Tensor, b: Tensor) -> Tensor:
    """Return the values of a product without diagonal factors: gather, multiply, segmented sum."""
    plan = left.product(right)
    names = "ends", "lefts", "rights"
    ends, lefts, rights = (plan.landing.tensor(name, a.device) for name in names)
    terms = a.index_select(-1, lefts) * b.index_select(-1, rights)
    entries = torch.repeat_interleave(ends.diff())
    return a.new_zeros(*terms.shape[:-1], plan.result.nnz).index_add_(-1, entries, terms)


def apply_sparse(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    """Return a transposed Jacobian, neither diagonal nor full, times a gradient."""
    terms = values * x.index_select(-1, pattern.tensor("indices", x.device))
    row_of = pattern.tensor("row_of", x.device)
    return x.new_zeros(*terms.shape[:-1], pattern.shape[0]).index_add_(-1, row_of, terms)


def take(weights: Tensor, pattern: Any) -> Tensor:
    """Return the values of a pattern whose ``sources`` are indices into the flat weights."""
    return weights.index_select(0, pattern.tensor("sources", weights.device))


plain = SparseKernels("torch", scale, multiply_sparse, apply_sparse, take)


@cache
def sparse_kernels(device: str, dtype: torch.dtype) -> SparseKernels:
    """Return the fastest implementation for a type of device, such as "cpu" or "cuda"."""
    real = dtype in (torch.float32, torch.float64)
    if device == "cpu" and real:
        from retrograde.scan.sparse import cpu_products as cpu

        return SparseKernels("numba", cpu.scale, cpu.multiply, cpu.apply, cpu.take)
    if device == "cuda" and real and importlib.util.find_spec("triton"):
        from retrograde.scan.sparse import cuda_products as cuda

        either = Fallback()
        multiply = either.join(cuda.multiply, plain.multiply)
        return replace(
            plain, name="triton", multiply=multiply, apply=either.join(cuda.apply, plain.apply)
        )
    return plain
