"""A piece of the batch that one rank has run: the leaves and the ends of its own graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.replay.surroundings import muted_hooks
from retrograde.torch_private import gradients_of

Gradient = Tensor | None
State = tuple[Tensor, ...]


@dataclass
class Piece:
    """Some samples of the batch."""

    x: Tensor  # the inputs of this rank's steps; a leaf
    before: State  # the state before the steps; leaves
    outputs: Tensor | GradientEdge  # the outputs of the steps, or their edge in the graph
    after: State  # the state after the steps; ``before`` itself where the rank has no steps

    def hand_over(self) -> Tensor:
        """Return the outputs, and keep only their edge in the graph."""
        outputs = self.outputs
        assert isinstance(outputs, Tensor)
        if outputs.requires_grad:
            self.outputs = get_gradient_edge(outputs)
        return outputs.detach()

    def back(
        self, dy: Gradient, ends: State, parameters: Sequence[Tensor], *, keep: bool = False
    ) -> tuple[Gradient, State, Sequence[Gradient]]:
        """Return the gradients of the inputs, of the state before, and of some parameters.

        Args:
            dy: the gradient of the outputs, or None for zero.
            ends: the gradient of the state after the steps.
            parameters: those whose gradients are needed.
            keep: whether to keep the graph for another pass.
        """
        wanted = [self.x] if self.x.requires_grad else []
        if self.after is self.before:
            return (torch.zeros_like(self.x) if wanted else None), ends, [None] * len(parameters)
        roots: Any = [*self.after, *([] if dy is None else [self.outputs])]
        seeds = [*ends, *([] if dy is None else [dy])]
        leaves = [*wanted, *self.before, *parameters]
        with muted_hooks(parameters):  # hooks get the whole gradient, not a piece's
            shares = gradients_of(roots, leaves, seeds, stays=keep)
        start, stop = len(wanted), len(wanted) + len(self.before)
        pairs = zip(shares[start:stop], self.before, strict=True)
        before = tuple(torch.zeros_like(s) if g is None else g for g, s in pairs)
        return (shares[0] if wanted else None), before, shares[stop:]


def flat(state: State) -> Tensor:
    """Return a state, of tensors (layers, B, H), as one vector a sample (B, n)."""
    return torch.cat([s.transpose(0, 1).flatten(1) for s in state], 1)


def unflat(vectors: Tensor, like: State) -> State:
    """Return the state, of the shapes of another one, whose vectors are given (B, n)."""
    columns = vectors.split([s.shape[0] * s.shape[-1] for s in like], 1)
    pairs = zip(columns, like, strict=True)
    states = (p.unflatten(1, (s.shape[0], s.shape[-1])).transpose(0, 1) for p, s in pairs)
    return tuple(s.contiguous() for s in states)
