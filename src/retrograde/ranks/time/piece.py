"""A piece of the batch that one rank has run: the leaves and the ends of its own graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.discover.surroundings import muted_hooks
from retrograde.ranks.way_back import Gradient
from retrograde.scan.any_cell import unit_vectors
from retrograde.scan.elements import IDENTITY, Affine, Dense, Vector

__all__ = ["Piece", "State", "by_sweeps"]

State = tuple[Tensor, ...]

_SIDE_BY_SIDE = 64  # gradients that one backward pass takes


@dataclass
class Piece:
    """Some samples of the batch.

    Attributes:
        x: the inputs of this rank's steps; a leaf.
        before: the state before the steps; leaves.
        outputs: the outputs of the steps, or their edge in the graph.
        after: the state after the steps.
        batched: whether states have a batch dimension.
    """

    x: Tensor
    before: State
    outputs: Tensor | GradientEdge
    after: State
    batched: bool = True

    @property
    def empty(self) -> bool:
        """Whether the rank has no steps."""
        return self.after is self.before

    def hand_over(self) -> Tensor:
        """Return the outputs, and keep only their edge in the graph."""
        outputs = self.outputs
        assert isinstance(outputs, Tensor)
        if outputs.requires_grad:
            self.outputs = get_gradient_edge(outputs)
        return outputs.detach()

    def back(
        self, seed: Gradient, ends: State, own: Sequence[Tensor] = (), *, keep: bool = False
    ) -> tuple[Gradient, State, Sequence[Gradient]]:
        """Return the gradients of the inputs, of the state before, and of some parameters.

        Args:
            seed: the gradient of the outputs, or None for zero.
            ends: the gradient of the state after the steps.
            own: parameters whose gradients are needed.
            keep: whether to keep the graph for another pass.
        """
        wanted = [self.x] if self.x.requires_grad and own else []
        if self.empty:
            return (torch.zeros_like(self.x) if wanted else None), ends, [None] * len(own)
        roots: Any = [*self.after, *([] if seed is None else [self.outputs])]
        seeds = [*ends, *([] if seed is None else [seed])]
        leaves = [*wanted, *self.before, *own]
        with muted_hooks(own):  # hooks get the whole gradient, not a piece's
            found = torch.autograd.grad(roots, leaves, seeds, retain_graph=keep, allow_unused=True)
        start, stop = len(wanted), len(wanted) + len(self.before)
        pairs = zip(found[start:stop], self.before, strict=True)
        before = tuple(torch.zeros_like(s) if g is None else g for g, s in pairs)
        return (found[0] if wanted else None), before, found[stop:]

    def flat(self, state: State) -> Tensor:
        """Return a state as a vector for each sample."""
        if not self.batched:
            state = tuple(s[:, None] for s in state)
        return torch.cat([s.transpose(0, 1).flatten(1) for s in state], 1)

    def unflat(self, flat: Tensor) -> State:
        """Return the state of a vector for each sample."""
        sizes = [s.shape[0] * s.shape[-1] for s in self.before]
        parts = zip(flat.split(sizes, 1), self.before, strict=True)
        states = (p.unflatten(1, (s.shape[0], s.shape[-1])).transpose(0, 1) for p, s in parts)
        return tuple(s.contiguous() if self.batched else s[:, 0] for s in states)


def by_sweeps(pieces: Sequence[Piece], seeds: Sequence[Gradient], *, apart: bool) -> Any:
    """Compute g ↦ b + J·g by sweeps through the graph: one for b, and one for each column of J.

    Args:
        pieces: the pieces of the batch; their graphs are kept.
        seeds: the gradients of each piece's outputs.
        apart: whether autograd takes one gradient at a time, as through kernels of whole layers.

    Returns:
        ``IDENTITY`` where there is no step, else an ``Affine``.
    """
    if pieces[0].empty:
        return IDENTITY
    columns, offsets = [], []
    for piece, seed in zip(pieces, seeds, strict=True):
        zero = tuple(torch.zeros_like(s) for s in piece.after)
        offset = piece.flat(piece.back(seed, zero, keep=True)[1])
        ends = [piece.unflat(unit) for unit in unit_vectors(offset)]
        if apart:
            found = [piece.flat(piece.back(None, end, keep=True)[1]) for end in ends]
        else:
            found = _side_by_side(piece, ends)
        columns.append(torch.stack(found, -1))
        offsets.append(offset)
    return Affine(Dense(torch.cat(columns)), Vector(torch.cat(offsets)))


def _side_by_side(piece: Piece, ends: list[State]) -> list[Tensor]:
    found = []
    for start in range(0, len(ends), _SIDE_BY_SIDE):
        rows = ends[start : start + _SIDE_BY_SIDE]
        some = [torch.stack(parts) for parts in zip(*rows, strict=True)]
        before = torch.autograd.grad(
            piece.after, piece.before, some, retain_graph=True, is_grads_batched=True
        )
        found += [piece.flat(state) for state in zip(*before, strict=True)]
    return found
