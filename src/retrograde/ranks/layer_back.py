"""A rank's layers in the caller's graph, and their way back across ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograde.discover.surroundings import muted_hooks
from retrograde.errors import RankError
from retrograde.jacobians.csr import CSR
from retrograde.jacobians.pattern import Pattern
from retrograde.ranks.agreement import Told
from retrograde.ranks.layer_crossing import Crossing, Gradient, Piece
from retrograde.ranks.layer_jacobian import joined, operations_a_second
from retrograde.ranks.scan_over_ranks import RankReport
from retrograde.ranks.way_back import WayBack, add_shares
from retrograde.scan.elements import combine

__all__ = ["cross"]


def cross(crossing: Crossing, input: Tensor | None) -> Tensor:
    """Run a rank's layers, and join their graph to those of the other ranks.

    Args:
        crossing: what the ranks agreed on.
        input: on rank 0.

    Returns:
        The output on the last rank, a zero on others; their ``backward`` goes back.

    Raises:
        RankError: a rank cannot run its layers.
    """
    own = [p for p in crossing.layers.parameters() if p.requires_grad]
    start = torch.zeros((), requires_grad=crossing.gradient)  # a rank may have nothing else
    found: Tensor = _Cross.apply(crossing, start, input, *own)  # type: ignore[no-untyped-call]
    return found


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, crossing: Crossing, start: Tensor, input: Tensor | None, *own: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.own = crossing, list(own)
        with crossing.timed():
            ctx.pieces = pieces = crossing.run(input)
        if not crossing.last:
            return torch.zeros(())
        if len(pieces) == 1:
            return pieces[0].y.detach().clone()
        return torch.cat([piece.y.detach() for piece in pieces])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Gradient) -> tuple[Any, ...]:
        if ctx.pieces is None:
            raise RankError(
                "a backward pass across ranks has been made already: expected one for each call"
            )
        pieces, ctx.pieces = ctx.pieces, None
        crossing = ctx.crossing
        with crossing.timed():
            back = _Back(crossing, pieces, dy, ctx.own)
            back.go("linear" if crossing.unable else crossing.way)
        crossing.tell()
        found = [g for g in back.inputs if g is not None]
        x = torch.cat(found) if found and not crossing.links.rank else None
        return None, None, x, *back.totals


class _Back(WayBack):
    """The way back of one rank through its layers; its graphs are kept until their last use.

    Attributes:
        totals: the gradients of the parameters.
        inputs: those of each piece's inputs, where they are wanted.
    """

    def __init__(
        self, crossing: Crossing, pieces: list[Piece], dy: Gradient, own: list[Tensor]
    ) -> None:
        memo = crossing.memo
        memo.report = RankReport(crossing.way)
        patience = math.inf if crossing.patience is None else crossing.patience
        device = pieces[0].x.device
        super().__init__(
            crossing.links, memo.report, len(pieces), patience * operations_a_second(device)
        )
        self.crossing, self.pieces, self.own, self.memo = crossing, pieces, own, memo
        self.seeds = self._seeds(dy)

    def _seeds(self, dy: Gradient) -> Sequence[Gradient]:
        if dy is None or not self.last:  # what comes to others is the gradient of their zero
            return [None] * self.count
        if self.count == 1:
            return [dy]
        return list(dy.split([len(piece.y) for piece in self.pieces]))

    def forget(self) -> None:
        self.totals: list[Gradient] = [None] * len(self.own)
        self.inputs: list[Gradient] = []
        self.met: list[Pattern] = []

    def ends(self, j: int) -> Gradient:
        return self.seeds[j]

    def through(self, j: int, ends: Gradient, keep: bool) -> Gradient:
        piece = self.pieces[j]
        before = torch.zeros_like(piece.x) if piece.x.requires_grad else None
        if ends is not None and piece.y.requires_grad:
            wanted = [piece.x] if piece.x.requires_grad else []
            leaves = [*wanted, *self.own]
            with muted_hooks(self.own):  # they are called with the whole gradient, not a piece's
                found = torch.autograd.grad(
                    piece.y, leaves, ends, retain_graph=keep, allow_unused=True
                )
            add_shares(self.totals, found[len(wanted) :])
            before = found[0] if wanted and found[0] is not None else before
        self.inputs.append(before)
        return before

    def element(self) -> Any:
        return joined([piece.element for piece in self.pieces], self.crossing.batches)

    def packed(self, begun: list[Gradient]) -> Tensor:
        return torch.cat([g.flatten(1) for g in begun if g is not None])

    def unpacked(self, arrived: Tensor) -> list[Tensor]:
        parts = zip(arrived.split(self.crossing.batches), self.pieces, strict=True)
        return [part.reshape(piece.y.shape) for part, piece in parts]

    def multiply(self, a: Any, b: Any) -> Any:
        self.met += [each.pattern for each in (a, b) if isinstance(each, CSR)]
        return combine(a, b)

    def meet(self, alike: bool) -> bool:
        self.memo.met = self.met  # kept, so that plans for them are found again
        heard = self.guard.settle(self.links, Told(own=alike))
        return all(told.own for told in heard)
