"""Products of two Jacobians in which all channels meet: a matrix product for each pair of places.

An unpruned convolution's Jacobian is full in its channels, so between an input place and an output
place stands a whole matrix, one number for each pair of channels. A product of two such Jacobians
is a sum of products of these matrices, as BLAS does them; the patterns of places say which.

In compressed rows a Jacobian full(C, D) ⊗ P is C times the rows of P, with D times the entries of a
row side by side.
"""

from itertools import pairwise

import torch
from torch import Tensor

from retrograde.jacobians.pattern import Pattern
from retrograde.jacobians.product import Product

__all__ = ["multiply_blocks"]


def multiply_blocks(plan: Product, a: Tensor, b: Tensor) -> Tensor:
    """The values of a product whose first factors are full.

    Args:
        plan: of the product.
        a: the values of the left one, (nnz,) or (samples, nnz).
        b: those of the right one.

    Returns:
        The values of the product.
    """
    places = plan.places
    before, between, after = places.channels
    lefts = [_blocks(x, places.left, before, between) for x in (a[None] if a.ndim == 1 else a)]
    rights = [_blocks(x, places.right, between, after) for x in (b[None] if b.ndim == 1 else b)]
    samples = max(len(lefts), len(rights))
    found = a.new_zeros(samples, plan.result.nnz)
    for i in range(samples):
        blocks = _multiply(plan, lefts[i % len(lefts)], rights[i % len(rights)])
        _put(plan, blocks, found[i])
    return found[0] if a.ndim == b.ndim == 1 else found


def _blocks(values: Tensor, places: Pattern, rows: int, columns: int) -> Tensor:
    """One sample's values as (entries of the places, rows, columns)."""
    found = values.new_empty(places.nnz, rows, columns)
    by_row = values.view(rows, columns * places.nnz)
    bounds = places.indptr.tolist()
    for start, end in pairwise(bounds):
        part = by_row[:, columns * start : columns * end].view(rows, columns, end - start)
        found[start:end] = part.permute(2, 0, 1)
    return found


def _multiply(plan: Product, lefts: Tensor, rights: Tensor) -> Tensor:
    """(entries of the product's places, rows, columns): for each the sum of its terms."""
    landing = plan.places.product.landing
    bounds = landing.ends.tolist()
    found = lefts.new_empty(len(bounds) - 1, lefts.shape[1], rights.shape[2])
    ours, theirs = (landing.tensor(name, lefts.device) for name in ("lefts", "rights"))
    for entry, (start, end) in enumerate(pairwise(bounds)):
        # Side by side and below one another, the terms' factors are those of one product.
        x = lefts[ours[start:end]].permute(1, 0, 2).reshape(lefts.shape[1], -1)
        torch.mm(x, rights[theirs[start:end]].flatten(0, 1), out=found[entry])
    return found


def _put(plan: Product, blocks: Tensor, out: Tensor) -> None:
    """Blocks (entries of the places, rows, columns) to where they stand among all values."""
    places = plan.places.product.result
    _, rows, columns = blocks.shape
    if plan.result.kind == "full":
        whole = out.view(rows, places.shape[0], columns, places.shape[1])
        i, j = (places.tensor(name, out.device).long() for name in ("row_of", "indices"))
        whole[:, i, :, j] = blocks
        return
    by_row = out.view(rows, columns * places.nnz)
    bounds = places.indptr.tolist()
    for start, end in pairwise(bounds):
        part = by_row[:, columns * start : columns * end].view(rows, columns, end - start)
        part.copy_(blocks[start:end].permute(1, 2, 0))
