"""A rank's Jacobian, a backward pass through its recorded steps for each column."""

import torch
from torch import Tensor

from retrograde.ranks.piece import Piece, flat, unflat

__all__ = ["by_columns"]

SIDE_BY_SIDE = 64  # gradients that one backward pass takes


def by_columns(piece: Piece, dy: Tensor, apart: bool) -> Tensor:
    """The map of a piece's steps (B, n + 1, n): a sweep for the losses, and one a column."""
    zero = tuple(torch.zeros_like(s) for s in piece.after)
    offset = flat(piece.back(dy, zero, (), keep=True)[1])
    units = torch.eye(offset.shape[1], device=dy.device).unsqueeze(1).expand(-1, len(offset), -1)
    ends = [unflat(unit, piece.before) for unit in units]
    if apart:
        rows = [flat(piece.back(None, each, (), keep=True)[1]) for each in ends]
        return torch.stack([*rows, offset], 1)
    rows = []
    for start in range(0, len(ends), SIDE_BY_SIDE):
        some = [
            torch.stack(parts) for parts in zip(*ends[start : start + SIDE_BY_SIDE], strict=True)
        ]
        found = torch.autograd.grad(
            piece.after, piece.before, some, retain_graph=True, is_grads_batched=True
        )
        rows += [flat(state) for state in zip(*found, strict=True)]
    return torch.stack([*rows, offset], 1)
