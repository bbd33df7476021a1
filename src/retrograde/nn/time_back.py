"""The way back of one rank through its steps, by a scan across ranks.

*Exact, or by a line.* A product of many Jacobians can overflow, or cancel, where the gradient that
is handed from rank to rank does not. So after a tree or a gather each rank tells the one before it
the gradient that its own sweep found there, and that one compares it with what the scan had told
it. If they differ by more than rounding, all go back once more, by a line.

A rank that fails goes on to where all meet, the sum of the parameters' gradients; there every rank
hears of it.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograde.errors import RankError
from retrograde.nn.agreement import Guard, Told, agree, reason, settle
from retrograde.nn.time_crossing import Crossing
from retrograde.nn.time_piece import Gradient, Piece, State
from retrograde.scan.elements import UNREAD, Vector, combine
from retrograde.scan.links import Links
from retrograde.scan.ranks import RankWay, scan_ranks

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
        found = _go_back(call, pieces, outputs, final, ctx.own)
        inputs = [g for g in found.inputs if g is not None]
        x = call.joined(inputs, call.dim) if inputs else None
        state = [call.joined(parts, 1) for parts in zip(*found.begun, strict=True)]
        return None, None, x, *state[: ctx.given], *found.totals


@dataclass
class Found:
    """What a way back has found.

    Attributes:
        totals: the gradients of the parameters.
        inputs: those of each piece's inputs, where they are wanted.
        begun: those of the state before this rank's steps.
        agrees: whether the next rank's sweep found what the scan had told this one.
    """

    totals: list[Gradient]
    inputs: list[Gradient] = field(default_factory=list)
    begun: list[State] = field(default_factory=list)
    agrees: bool = True


def _go_back(
    call: Crossing,
    pieces: list[Piece],
    dy: Gradient,
    final: Sequence[Gradient],
    own: list[Tensor],
) -> Found:
    """Go backward.

    Args:
        call: of the forward pass.
        pieces: as it ran them.
        dy: the gradient of this rank's outputs.
        final: those of the final state, on the last rank.
        own: the parameters that want a gradient.

    Returns:
        The gradients of this rank's inputs, of the state before its steps, of the parameters.

    Raises:
        RankError: a rank fails, or does not answer.
    """
    way = call.choose(call, pieces, dy) if call.way == "auto" else call.way
    back = _Back(call, pieces, dy, final, own)
    found = back.by_line() if way == "linear" else back.by_scan(way)
    if not back.add_up(found):
        warnings.warn(
            "products of Jacobians overflowed, cancelled or are not finite, though the "
            "gradient itself may well be: this pass goes back across the ranks by a line, "
            "which is exact but slower; clip the weights, or use way='linear'",
            RuntimeWarning,
            stacklevel=2,
        )
        found = back.by_line()
        back.add_up(found)
    return found


class _Back:
    """The way back of one rank; its graphs are kept until the last use of them."""

    def __init__(
        self,
        call: Crossing,
        pieces: list[Piece],
        dy: Gradient,
        final: Sequence[Gradient],
        own: list[Tensor],
    ) -> None:
        self.call, self.pieces, self.dy, self.final, self.own = call, pieces, dy, final, own
        self.links, self.report = call.links, call.report
        self.seeds = call.seeds(dy, pieces)
        self.guard = Guard()

    def by_line(self) -> Found:
        """Wait for the next rank, go back, hand on to the one before; piece by piece."""
        links, report, call = self.links, self.report, self.call
        report.way = "linear"
        sent = links.traffic.messages, links.traffic.sent_bytes
        found = self._nothing()
        for j in range(len(self.pieces)):
            ends = self._ends(j) if call.last else links.receive(links.rank + 1)
            before = self.guard(self._through, found, j, ends)
            if links.rank:
                links.send(before, links.rank - 1)
        links.flush()
        report.up = links.size - 1
        report.messages = links.traffic.messages - sent[0]
        report.sent_bytes = links.traffic.sent_bytes - sent[1]
        return found

    def by_scan(self, way: RankWay) -> Found:
        """Learn from all what reaches this rank, and go back."""
        links, call, guard = self.links, self.call, self.guard
        found = self._nothing()
        if call.last:
            swept = guard(self._sweep, found, [self._ends(j) for j in range(len(self.pieces))])
            arrived = self._scan(guard(Vector, swept), way)
        else:
            element = guard(call.affine, self.pieces, self.dy) if links.rank else UNREAD
            arrived = self._scan(element, way)
            swept = guard(self._arrive, found, arrived)
        found.agrees = links.size < 3 or self._compare(swept, arrived)
        return found

    def _scan(self, element: Any, way: RankWay) -> Any:
        def operator(a: Any, b: Any) -> Any:
            return self.guard(combine, a, b)

        return scan_ranks(element, self.links, operator, way=way, backward=True, report=self.report)

    def _arrive(self, found: Found, arrived: Vector) -> Tensor:
        parts = arrived.data.split(self.call.batches)
        ends = [piece.unflat(part) for piece, part in zip(self.pieces, parts, strict=True)]
        return self._sweep(found, ends)

    def _sweep(self, found: Found, ends: list[State]) -> Tensor:
        """Go back through all pieces; the gradient of the state before them, a row a sample."""
        keep = self.links.size > 2  # for another time, by a line
        begun = [self._through(found, j, each, keep) for j, each in enumerate(ends)]
        return torch.cat([p.flat(s) for p, s in zip(self.pieces, begun, strict=True)])

    def _compare(self, swept: Any, arrived: Any) -> bool:
        """Tell the rank before what was swept here, and hear whether the next one swept alike."""
        links, alike = self.links, True
        if links.rank:
            links.send(swept, links.rank - 1)
        if not self.call.last:
            told = links.receive(links.rank + 1)
            alike = bool(self.guard(lambda a, b: agree(a.data, b), arrived, told))
        links.flush()
        return alike

    def _through(self, found: Found, j: int, ends: State, keep: bool = False) -> State:
        """Go back through a piece, and add to what is found."""
        x, before, shares = self.pieces[j].back(self.seeds[j], ends, self.own, keep=keep)
        found.inputs.append(x)
        found.begun.append(before)
        for i, share in enumerate(shares):
            if share is not None:
                so_far = found.totals[i]
                found.totals[i] = share if so_far is None else so_far + share
        return before

    def add_up(self, found: Found) -> bool:
        """Sum the parameters' gradients over the ranks; whether what was found can be used.

        Raises:
            RankError: a rank has failed.
        """
        cause = self.guard.cause
        pairs = zip(self.own, found.totals, strict=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in pairs]
        flags = parts[0].new_tensor([cause is not None, not found.agrees])
        *sums, flags = added_up(self.links, [*parts, flags])
        found.totals = list(sums)
        failed, differs = flags.tolist()
        if failed:
            settle(self.links, Told(reason(cause) if cause else ""), cause)
        return not differs

    def _ends(self, j: int) -> State:
        """The gradients of the final state that the caller gives."""
        return tuple(
            torch.zeros_like(s) if g is None else self.call.cut(g, 1)[j]
            for g, s in zip(self.final, self.pieces[j].after, strict=True)
        )

    def _nothing(self) -> Found:
        return Found([None] * len(self.own))


def added_up(links: Links, parts: list[Tensor]) -> list[Tensor]:
    """Sums over the ranks, in one go, the same bits on each."""
    if links.size == 1 or not parts:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    links.add_up(flat)
    sums = flat.split([part.numel() for part in parts])
    return [total.view_as(part) for total, part in zip(sums, parts, strict=True)]
