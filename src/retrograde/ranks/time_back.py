"""A rank's steps in the caller's graph, and their way back across ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograde.errors import RankError
from retrograde.ranks.time_crossing import Crossing
from retrograde.ranks.time_piece import Gradient, Piece, State
from retrograde.ranks.transport import Links
from retrograde.ranks.way_back import WayBack, add_shares

__all__ = ["added_up", "cross"]


def cross(call: Crossing) -> tuple[Tensor, State | None]:
    """Run this rank's steps, and put them into the caller's graph.

    Args:
        call: as read, and agreed upon by all ranks.

    Returns:
        The outputs of these steps; and on the last rank the final state, on others None.

    Raises:
        RankError: a rank does not answer.
    """
    own = [p for p in call.rnn.parameters() if p.requires_grad]
    given = call.given()
    outputs, *state = _Node.apply(call, len(given), call.x, *given, *own)  # type: ignore[no-untyped-call]
    return outputs, tuple(state) or None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Crossing, given: int, x: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        state, own = rest[:given], list(rest[given:])
        pieces = call.run(x, state)
        ctx.call, ctx.pieces, ctx.own, ctx.given = call, pieces, own, given
        outputs = call.joined((piece.hand_over() for piece in pieces), call.dim)
        if not call.last:
            return (outputs,)
        ends = zip(*(piece.after for piece in pieces), strict=True)
        return outputs, *(call.joined((s.detach() for s in parts), 1) for parts in ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Gradient, *final: Gradient) -> tuple[Any, ...]:
        if ctx.pieces is None:
            raise RankError(
                "a backward pass across ranks has been made already: expected one for each call"
            )
        pieces, ctx.pieces = ctx.pieces, None
        call = ctx.call
        way = call.choose(call, pieces, outputs) if call.way == "auto" else call.way
        back = _Back(call, pieces, outputs, final, ctx.own)
        back.go(way)
        if call.report.way != way:
            call.learn(call, call.report.way)
        inputs = [g for g in back.inputs if g is not None]
        x = call.joined(inputs, call.dim) if inputs else None
        state = [call.joined(parts, 1) for parts in zip(*back.begun, strict=True)]
        return None, None, x, *state[: ctx.given], *back.totals


class _Back(WayBack):
    """The way back of one rank through its steps; its graphs are kept until the last use of them.

    Attributes:
        totals: the gradients of the parameters.
        inputs: those of each piece's inputs, where they are wanted.
        begun: those of the state before this rank's steps.
    """

    def __init__(
        self,
        call: Crossing,
        pieces: list[Piece],
        dy: Gradient,
        final: Sequence[Gradient],
        own: list[Tensor],
    ) -> None:
        super().__init__(call.links, call.report, len(pieces))
        self.call, self.pieces, self.dy, self.final, self.own = call, pieces, dy, final, own
        self.seeds = call.seeds(dy, pieces)

    def forget(self) -> None:
        self.totals: list[Gradient] = [None] * len(self.own)
        self.inputs: list[Gradient] = []
        self.begun: list[State] = []

    def ends(self, j: int) -> State:
        return tuple(
            torch.zeros_like(s) if g is None else self.call.cut(g, 1)[j]
            for g, s in zip(self.final, self.pieces[j].after, strict=True)
        )

    def through(self, j: int, ends: State, keep: bool) -> State:
        x, before, shares = self.pieces[j].back(self.seeds[j], ends, self.own, keep=keep)
        self.inputs.append(x)
        self.begun.append(before)
        add_shares(self.totals, shares)
        return before

    def element(self) -> Any:
        return self.call.affine(self.pieces, self.dy)

    def packed(self, begun: list[State]) -> Tensor:
        return torch.cat([p.flat(s) for p, s in zip(self.pieces, begun, strict=True)])

    def unpacked(self, arrived: Tensor) -> list[State]:
        parts = arrived.split(self.call.batches)
        return [piece.unflat(part) for piece, part in zip(self.pieces, parts, strict=True)]

    def meet(self, alike: bool) -> bool:
        """As told; in the same go the parameters' gradients are added up over the ranks."""
        pairs = zip(self.own, self.totals, strict=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in pairs]
        flags = parts[0].new_tensor([self.guard.cause is not None, not alike])
        *sums, flags = added_up(self.links, [*parts, flags])
        failed, differs = flags.tolist()
        if failed:
            self.guard.settle(self.links)
        self.totals = list(sums)
        return not differs


def added_up(links: Links, parts: list[Tensor]) -> list[Tensor]:
    """Sums over the ranks, in one go, the same bits on each."""
    if links.size == 1 or not parts:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    links.add_up(flat)
    sums = flat.split([part.numel() for part in parts])
    return [total.view_as(part) for total, part in zip(sums, parts, strict=True)]
