"""Sparse Jacobians as plain dense matrices: patterns, products, and the zeros that a layer has."""

import math

import numpy as np
import torch
from hypothesis import strategies as st

from retrograde.scan.sparse.factor import from_pairs, full, identity
from retrograde.scan.sparse.pattern import Pattern

__all__ = [
    "bumps",
    "dense",
    "drawn_factors",
    "factor_of",
    "factors",
    "guaranteed",
    "jacobians",
    "kron",
    "matching",
]


def factor_of(matrix):
    """A factor with the ones of a matrix."""
    rows, columns = np.nonzero(matrix)
    return from_pairs(rows, columns, matrix.shape)


def dense(pattern):
    """A pattern or a factor as a boolean matrix, from its compressed rows."""
    rows, columns = (
        pattern.shape if isinstance(pattern, Pattern) else (pattern.rows, pattern.columns)
    )
    found = np.zeros((rows, columns), bool)
    assert len(pattern.indptr) == rows + 1
    assert pattern.indptr[0] == 0
    assert pattern.indptr[-1] == len(pattern.indices) == pattern.nnz
    for i in range(rows):
        row = pattern.indices[pattern.indptr[i] : pattern.indptr[i + 1]]
        assert np.all(np.diff(row) > 0)  # ascending, none twice
        found[i, row] = True
    return found


def kron(*matrices):
    """The Kronecker product of boolean matrices."""
    found = np.ones((1, 1), bool)
    for matrix in matrices:
        found = np.kron(found, matrix)
    return found


@st.composite
def factors(draw, rows, columns):
    """A factor of this shape, of any kind; rows and columns may be empty."""
    kinds = ["full", "sparse", "sparse"] + (["identity"] * 2 if rows == columns else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "identity":
        return identity(rows)
    if kind == "full":
        return full(rows, columns)
    seed, share = draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 0.1, 0.3, 0.6]))
    return factor_of(np.random.default_rng(seed).random((rows, columns)) < share)


def drawn_factors(most=3, largest=5):
    """One to ``most`` factors of small shapes."""
    size = st.integers(1, largest)
    one = st.tuples(size, size).flatmap(lambda shape: factors(*shape))
    return st.lists(one, min_size=1, max_size=most).map(tuple)


def _cut(draw, size, most=3):
    """Numbers whose product is ``size``, in some order."""
    parts = []
    while size > 1 and len(parts) < most - 1:
        divisor = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        parts.append(divisor)
        size //= divisor
    return [*parts, size]


@st.composite
def matching(draw):
    """Two patterns that can be multiplied; what meets may be cut into factors differently."""
    size = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    ours, theirs = _cut(draw, size), _cut(draw, size)
    side = st.integers(1, 3)

    def other(n):
        return n if draw(st.booleans()) else draw(side)

    left = Pattern(*(draw(factors(other(n), n)) for n in ours))
    right = Pattern(*(draw(factors(n, other(n))) for n in theirs))
    return left, right


def jacobians(layer, x):
    """(samples, inputs, outputs) by autograd, for samples that do not meet."""
    found = torch.autograd.functional.jacobian(
        lambda x: layer(x.clone()).flatten(1).sum(0), x.detach().clone()
    )
    return found.flatten(2).permute(1, 2, 0)


def guaranteed(layer, x):
    """Where the Jacobian is not zero for one of some samples, with weights that are not zero."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.rand(p.shape) + 0.5)
    return (jacobians(layer, x) != 0).any(0).numpy()


def bumps(*shape):
    """A sample for each input: that one is larger than all others."""
    size = math.prod(shape)
    return torch.eye(size, dtype=torch.float64).reshape(size, *shape)
