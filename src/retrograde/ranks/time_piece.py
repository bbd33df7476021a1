"""A piece of the batch, as one rank has run it: the leaves and the ends of its own graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.discover.surroundings import muted_hooks

__all__ = ["Gradient", "Piece", "State"]

State = tuple[Tensor, ...]
Gradient = Tensor | None


@dataclass
class Piece:
    """Some samples of the batch.

    Attributes:
        x: the inputs of this rank's steps; a leaf.
        before: the state before them; leaves.
        outputs: of these steps, or their place in the graph.
        after: the state after them.
        batched: whether states have a dimension for samples.
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
        """The outputs, of which only the place in the graph is kept."""
        outputs = self.outputs
        assert isinstance(outputs, Tensor)
        if outputs.requires_grad:
            self.outputs = get_gradient_edge(outputs)
        return outputs.detach()

    def back(
        self, seed: Gradient, ends: State, own: Sequence[Tensor] = (), *, keep: bool = False
    ) -> tuple[Gradient, State, Sequence[Gradient]]:
        """Go back through the steps.

        Args:
            seed: the gradient of the outputs, or None for zero.
            ends: those of the state after the steps.
            own: parameters whose gradients are wanted.
            keep: whether to leave the graph for another time.

        Returns:
            The gradients of the inputs, if they want one; of the state before; of the parameters.
        """
        wanted = [self.x] if self.x.requires_grad and own else []
        if self.empty:
            return (torch.zeros_like(self.x) if wanted else None), ends, [None] * len(own)
        roots: Any = [*self.after, *([] if seed is None else [self.outputs])]
        seeds = [*ends, *([] if seed is None else [seed])]
        leaves = [*wanted, *self.before, *own]
        with muted_hooks(own):  # they are called with the whole gradient, not a piece's
            found = torch.autograd.grad(roots, leaves, seeds, retain_graph=keep, allow_unused=True)
        start, stop = len(wanted), len(wanted) + len(self.before)
        pairs = zip(found[start:stop], self.before, strict=True)
        before = tuple(torch.zeros_like(s) if g is None else g for g, s in pairs)
        return (found[0] if wanted else None), before, found[stop:]

    def flat(self, state: State) -> Tensor:
        """A state as a vector for each sample."""
        if not self.batched:
            state = tuple(s[:, None] for s in state)
        return torch.cat([s.transpose(0, 1).flatten(1) for s in state], 1)

    def unflat(self, flat: Tensor) -> State:
        """The state that a vector for each sample stands for."""
        sizes = [s.shape[0] * s.shape[-1] for s in self.before]
        parts = zip(flat.split(sizes, 1), self.before, strict=True)
        states = (p.unflatten(1, (s.shape[0], s.shape[-1])).transpose(0, 1) for p, s in parts)
        return tuple(s.contiguous() if self.batched else s[:, 0] for s in states)
