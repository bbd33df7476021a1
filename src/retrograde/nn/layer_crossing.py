"""One pass of one rank through its layers: forward in pieces, and back by a scan across ranks.

What is differentiated by torch is a rank's own layers, from a leaf to what is handed on; the ranks'
graphs are joined here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from retrograde.errors import CellError, RankError
from retrograde.execute.captured import foreign_tensors
from retrograde.execute.replay import muted_hooks
from retrograde.nn.agreement import Told, reason, settle
from retrograde.nn.layer_jacobian import joined, run, run_with_jacobian
from retrograde.scan.elements import UNREAD, Vector, combine
from retrograde.scan.links import Links
from retrograde.scan.ranks import RankReport, RankWay, scan_ranks
from retrograde.scan.sparse.csr import CSR
from retrograde.scan.sparse.pattern import Pattern

__all__ = ["Crossing", "Memo", "cross"]

Gradient = Tensor | None


@dataclass
class Memo:
    """What a rank keeps from one pass to the next.

    Attributes:
        report: what the last backward pass did to cross the ranks.
        made: patterns of this rank's layers; kept, so that plans for them are found again.
        met: patterns that the scan multiplied.
    """

    report: RankReport = field(default_factory=RankReport)
    made: list[Pattern] = field(default_factory=list)
    met: list[Pattern] = field(default_factory=list)


@dataclass
class Piece:
    """A piece of the batch, as a rank has run it.

    Attributes:
        x: what its layers were given; a leaf.
        y: what they gave.
        element: their Jacobian, if the scan wants it.
    """

    x: Tensor
    y: Tensor
    element: Any = None


@dataclass
class Crossing:
    """One forward pass of one rank, and the backward pass through it.

    Attributes:
        layers: the rank's own.
        links: to the other ranks.
        way: how gradients cross.
        gradient: whether any rank wants one.
        batches: samples of each piece.
        memo: what is kept.
    """

    layers: nn.Sequential
    links: Links
    way: RankWay
    gradient: bool
    batches: list[int]
    memo: Memo

    @property
    def last(self) -> bool:
        """Whether this is the last rank."""
        return self.links.rank == self.links.size - 1

    @property
    def crossed(self) -> bool:
        """Whether this rank's Jacobian is wanted."""
        between = self.links.rank > 0 and not self.last
        return between and self.gradient and self.way != "linear"

    def run(self, input: Tensor | None) -> list[Piece]:
        """Go forward, piece by piece, and hand each on.

        Args:
            input: on rank 0.

        Returns:
            The pieces.

        Raises:
            RankError: a rank cannot run its layers; the same on every rank.
        """
        links, found, made = self.links, list[Piece](), list[Pattern]()
        wanted = links.rank > 0 or (input is not None and input.requires_grad)
        cause: Exception | None = None
        for part in self._parts(input):
            # None is handed on for what could not be run, so that no rank waits for it.
            failed = part is None or cause is not None
            if not failed:
                try:
                    found.append(self._run_piece(part, made, wanted))
                except Exception as error:
                    cause, failed = error, True
            if not self.last:
                links.send(None if failed else found[-1].y.detach(), links.rank + 1)
        links.flush()
        settle(links, Told(reason(cause) if cause else ""), cause)
        if self.crossed:
            self.memo.made = made
        return found

    def _parts(self, input: Tensor | None) -> Iterable[Any]:
        if input is not None:
            return tuple(input.detach().split(self.batches))
        return (self.links.receive(self.links.rank - 1) for _ in self.batches)

    def _run_piece(self, part: Tensor, made: list[Pattern], wanted: bool) -> Piece:
        with torch.set_grad_enabled(self.gradient):
            x = part.detach().requires_grad_(wanted and self.gradient and part.is_floating_point())
            element = None
            if self.crossed:
                y, element, patterns = run_with_jacobian(self.layers, x, sum(self.batches))
                made += patterns
            else:
                y = run(self.layers, x)
        if not isinstance(y, Tensor):
            raise CellError(f"the layers returned a {type(y).__name__}: expected one tensor")
        apart = len(self.batches) > 1 or self.way != "linear"
        if apart and (y.ndim < 2 or len(y) != len(x)):
            raise CellError(
                f"the layers took {tuple(x.shape)} to {tuple(y.shape)}: expected samples first, as "
                "many as they were given; or use way='linear' and pieces=1"
            )
        self._check_captured(x, y)
        return Piece(x, y, element)

    def _check_captured(self, x: Tensor, y: Tensor) -> None:
        """Refuse layers that use tensors of which we could not give the gradient (rule 5)."""
        known = {id(t) for t in (x, *self.layers.parameters())}
        leaves, _ = foreign_tensors([y], 0)
        if any(id(t) not in known for t in leaves):
            raise CellError(
                "the layers use a tensor that wants a gradient and is none of their parameters: "
                "expected parameters only; register it as one"
            )

    def back(
        self, pieces: list[Piece], dy: Gradient, own: list[Tensor]
    ) -> tuple[Gradient, list[Gradient]]:
        """Go backward.

        Args:
            pieces: of the forward pass.
            dy: the gradient of the output, on the last rank.
            own: the parameters that want a gradient.

        Returns:
            The gradients of the input, on rank 0, and of the parameters.
        """
        self.memo.report = RankReport(self.way)
        totals: list[Gradient] = [None] * len(own)

        def through(piece: Piece, g: Gradient) -> Gradient:
            return _through(piece, g, own, totals)

        if self.way == "linear":
            inputs = self._hand_back(pieces, dy, through)
        elif self.last:
            inputs = list(map(through, pieces, self._seeds(pieces, dy)))
            self._scan(UNREAD if self.links.rank == 0 else Vector(_flat(inputs)))
        else:
            elements = [piece.element for piece in pieces]
            arrived = self._scan(joined(elements, self.batches) if self.links.rank else UNREAD)
            parts = zip(arrived.data.split(self.batches), pieces, strict=True)
            inputs = [through(piece, part.reshape(piece.y.shape)) for part, piece in parts]
        found = [g for g in inputs if g is not None]
        return (torch.cat(found) if found and not self.links.rank else None), totals

    def _seeds(self, pieces: list[Piece], dy: Gradient) -> Sequence[Gradient]:
        if dy is None or not self.last:  # what comes to others is the gradient of their zero
            return [None] * len(pieces)
        if len(pieces) == 1:
            return [dy]
        return list(dy.split([len(piece.y) for piece in pieces]))

    def _hand_back(
        self, pieces: list[Piece], dy: Gradient, through: Callable[[Piece, Gradient], Gradient]
    ) -> list[Gradient]:
        """Plain model parallelism: wait for the next rank, go back, hand on to the one before."""
        links, report, inputs = self.links, self.memo.report, list[Gradient]()
        before = links.traffic.messages, links.traffic.sent_bytes
        seeds = self._seeds(pieces, dy)
        for j, piece in enumerate(pieces):
            g = seeds[j] if self.last else links.receive(links.rank + 1)
            inputs.append(through(piece, g))
            if links.rank:
                links.send(inputs[-1], links.rank - 1)
        links.flush()
        report.up = links.size - 1
        report.messages = links.traffic.messages - before[0]
        report.sent_bytes = links.traffic.sent_bytes - before[1]
        return inputs

    def _scan(self, element: Any) -> Any:
        met: list[Pattern] = []

        def operator(a: Any, b: Any) -> Any:
            met.extend(each.pattern for each in (a, b) if isinstance(each, CSR))
            return combine(a, b)

        found = scan_ranks(
            element, self.links, operator, way=self.way, backward=True, report=self.memo.report
        )
        self.memo.met = met
        return found


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
        x, own = ctx.crossing.back(pieces, dy, ctx.own)
        return None, None, x, *own


def _through(piece: Piece, g: Gradient, own: list[Tensor], totals: list[Gradient]) -> Gradient:
    """Go back through a piece, and add to the parameters' gradients."""
    zero = torch.zeros_like(piece.x) if piece.x.requires_grad else None
    if g is None or not piece.y.requires_grad:
        return zero
    wanted = [piece.x] if piece.x.requires_grad else []
    with muted_hooks(own):  # they are called with the whole gradient, not a piece's
        found = torch.autograd.grad(piece.y, [*wanted, *own], g, allow_unused=True)
    for i, share in enumerate(found[len(wanted) :]):
        so_far = totals[i]
        if share is not None:
            totals[i] = share if so_far is None else so_far + share
    return found[0] if wanted and found[0] is not None else zero


def _flat(gradients: Iterable[Gradient]) -> Tensor:
    return torch.cat([g.flatten(1) for g in gradients if g is not None])
