"""One pass of one rank through its layers: forward in pieces, and backward across ranks.

torch differentiates a rank's own layers, from a leaf to the output that is passed on. :func:`cross`
adds them to the caller's graph as one node, whose backward pass joins the graphs of the ranks.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from retrograde.discover.captured import foreign_tensors
from retrograde.discover.surroundings import muted_hooks
from retrograde.errors import CellError, ScanError
from retrograde.machine import now
from retrograde.ranks import base
from retrograde.ranks.agreement import Guard, Told
from retrograde.ranks.layers.jacobian import joined, operations_a_second, run, run_with_jacobian
from retrograde.ranks.layers.way_timer import WayTimer
from retrograde.ranks.scan_over_ranks import RankReport, RankWay
from retrograde.ranks.way_back import Gradient, WayBack
from retrograde.scan.elements import combine
from retrograde.scan.sparse.csr import CSR
from retrograde.scan.sparse.pattern import Pattern

__all__ = ["Crossing", "Memo", "cross"]


@dataclass
class Memo:
    """The state that a rank keeps between passes.

    Attributes:
        report: the counts of the last backward pass across the ranks.
        made: patterns of this rank's layers, kept so that their plans are found again.
        met: patterns that the scan multiplied, kept for the same reason.
    """

    report: RankReport = field(default_factory=RankReport)
    made: list[Pattern] = field(default_factory=list)
    met: list[Pattern] = field(default_factory=list)


@dataclass
class Piece:
    """A piece of the batch that a rank has run.

    Attributes:
        x: the input of its layers; a leaf.
        y: their output.
        element: their Jacobian, if the scan needs it.
    """

    x: Tensor
    y: Tensor
    element: Any = None


@dataclass
class Crossing(base.Crossing):
    """One forward pass of one rank, and the backward pass through it.

    Attributes:
        layers: the rank's own layers.
        way: how gradients cross.
        memo: the state that is kept.
        timer: receives the seconds of the pass, where ways are tried.
        unable: whether a rank could not compute its Jacobian, so that all go by a line.
        seconds: the seconds of this rank's part of the pass.
    """

    layers: nn.Sequential
    way: RankWay
    memo: Memo
    timer: WayTimer | None = None
    unable: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.patience = None if self.timer is None else self.timer.patience

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to the seconds."""
        device = next((p.device for p in self.layers.parameters()), torch.device("cpu"))
        start = now(device)
        yield
        self.seconds += now(device) - start

    def tell(self) -> None:
        """Tell the timer the slowest rank's seconds, while ways are tried."""
        if self.timer is not None and not self.timer.over:
            slowest = max(self.links.gather(self.seconds))
            self.timer.done(self.way, slowest, by=self.memo.report.way)

    @property
    def crossed(self) -> bool:
        """Whether this rank's Jacobian is needed."""
        between = self.links.rank > 0 and not self.last
        return between and self.gradient and self.way != "linear" and not self.unable

    def run(self, input: Tensor | None) -> list[Piece]:
        """Run forward, and send each piece on; rank 0 gets the input.

        Raises:
            RankError: a rank cannot run its layers; the same on every rank.
        """
        guard, made = Guard(), list[Pattern]()
        wanted = self.links.rank > 0 or (input is not None and input.requires_grad)
        pieces = self.hand_along(
            guard,
            ((part, made, wanted) for part in self._parts(input)),
            self._run_piece,
            lambda piece: piece.y.detach(),
        )
        heard = guard.settle(self.links, Told(own=self.unable))
        self.unable = any(told.own for told in heard)
        if self.crossed:
            self.memo.made = made
        return pieces

    def _parts(self, input: Tensor | None) -> Iterator[Any]:
        if input is not None:
            yield from input.detach().split(self.batches)
        else:
            for _ in self.batches:
                yield self.links.receive(self.links.rank - 1)

    def _run_piece(self, part: Tensor, made: list[Pattern], wanted: bool) -> Piece:
        with torch.set_grad_enabled(self.gradient):
            x = part.detach().requires_grad_(wanted and self.gradient and part.is_floating_point())
            element = None
            if self.crossed:
                y, element, patterns = self._run_with_jacobian(x)
                made += patterns
            else:
                y = run(self.layers, x)
        if not isinstance(y, Tensor):
            raise CellError(f"the layers returned a {type(y).__name__}: expected one tensor")
        samples_first = y.ndim > 1 and len(y) == len(x)
        if self.patience is not None and not samples_first:
            self.unable = True
        apart = len(self.batches) > 1 or (self.way != "linear" and not self.unable)
        if apart and not samples_first:
            raise CellError(
                f"the layers took {tuple(x.shape)} to {tuple(y.shape)}: expected samples first, as "
                "many as they were given; or use way='linear' and pieces=1"
            )
        self._check_captured(x, y)
        return Piece(x, y, element)

    def _run_with_jacobian(self, x: Tensor) -> tuple[Tensor, Any, list[Pattern]]:
        try:
            return run_with_jacobian(self.layers, x, sum(self.batches), self.patience)
        except ScanError:
            if self.patience is None:
                raise
            self.unable = True
            return run(self.layers, x), None, []

    def _check_captured(self, x: Tensor, y: Tensor) -> None:
        """Refuse layers that use tensors whose gradients we could not give (rule 5)."""
        known = {id(t) for t in (x, *self.layers.parameters())}
        leaves, _ = foreign_tensors([y], 0)
        if any(id(t) not in known for t in leaves):
            raise CellError(
                "the layers use a tensor that requires a gradient and is not one of their "
                "parameters: expected parameters only; register it as one"
            )


def cross(crossing: Crossing, input: Tensor | None) -> Tensor:
    """Run this rank's layers in the caller's graph; return the output on the last rank, else a
    zero.

    Raises:
        RankError: a rank does not answer, or cannot run its layers.
    """
    own = [p for p in crossing.layers.parameters() if p.requires_grad]
    # A rank may have no other tensor that requires a gradient.
    start = torch.zeros((), device="cpu", requires_grad=crossing.gradient)
    found: Tensor = _Node.apply(crossing, start, input, *own)  # type: ignore[no-untyped-call]
    return found


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, crossing: Crossing, start: Tensor, input: Tensor | None, *own: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.own = crossing, list(own)
        with crossing.timed():
            ctx.pieces = pieces = crossing.run(input)
        if not crossing.last:
            return torch.zeros((), device="cpu")
        if len(pieces) == 1:
            return pieces[0].y.detach().clone()
        return torch.cat([piece.y.detach() for piece in pieces])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Gradient) -> tuple[Any, ...]:
        pieces, crossing = base.pieces_of(ctx), ctx.crossing
        with crossing.timed():
            back = _Back(crossing, pieces, dy, ctx.own)
            back.go("linear" if crossing.unable else crossing.way)
        crossing.tell()
        found = [g for g in back.inputs if g is not None]
        x = torch.cat(found) if found and not crossing.links.rank else None
        return None, None, x, *back.totals


class _Back(WayBack):
    """The backward pass of one rank through its layers."""

    pieces: list[Piece]

    def __init__(
        self, crossing: Crossing, pieces: list[Piece], dy: Gradient, own: list[Tensor]
    ) -> None:
        self.memo = crossing.memo
        self.memo.report = RankReport(crossing.way)
        patience = math.inf if crossing.patience is None else crossing.patience
        most_flops = patience * operations_a_second(pieces[0].x.device)
        super().__init__(crossing, self.memo.report, pieces, own, most_flops)
        self.seeds = self._seeds(dy)

    def _seeds(self, dy: Gradient) -> list[Gradient]:
        if dy is None or not self.last:  # on other ranks dy is the gradient of their zero
            return [None] * len(self.pieces)
        if len(self.pieces) == 1:
            return [dy]
        return list(dy.split([len(piece.y) for piece in self.pieces]))

    def forget(self) -> None:
        super().forget()
        self.met: list[Pattern] = []

    def ends(self, j: int) -> Gradient:
        return self.seeds[j]

    def through(self, j: int, ends: Gradient, keep: bool) -> Gradient:
        piece = self.pieces[j]
        before = torch.zeros_like(piece.x) if piece.x.requires_grad else None
        if ends is not None and piece.y.requires_grad:
            wanted = [piece.x] if piece.x.requires_grad else []
            leaves = [*wanted, *self.own]
            with muted_hooks(self.own):  # hooks get the whole gradient, not a piece's
                found = torch.autograd.grad(
                    piece.y, leaves, ends, retain_graph=keep, allow_unused=True
                )
            self.add(found[len(wanted) :])
            before = found[0] if wanted and found[0] is not None else before
        self.inputs.append(before)
        return before

    def element(self) -> Any:
        return joined([piece.element for piece in self.pieces], self.batches)

    def packed(self, begun: list[Gradient]) -> Tensor:
        return torch.cat([g.flatten(1) for g in begun if g is not None])

    def unpacked(self, arrived: Tensor) -> list[Tensor]:
        parts = zip(arrived.split(self.batches), self.pieces, strict=True)
        return [part.reshape(piece.y.shape) for part, piece in parts]

    def multiply(self, a: Any, b: Any) -> Any:
        self.met += [each.pattern for each in (a, b) if isinstance(each, CSR)]
        return combine(a, b)

    def meet(self, alike: bool) -> bool:
        self.memo.met = self.met  # kept so that their plans are found again
        heard = self.guard.settle(self.links, Told(own=alike))
        return all(told.own for told in heard)
