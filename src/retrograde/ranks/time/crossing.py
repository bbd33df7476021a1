"""One pass of one rank through its steps: forward in pieces, and backward across ranks.

torch differentiates a rank's own steps, from a leaf to the state that is passed on. :func:`cross`
adds them to the caller's graph as one node, whose backward pass joins the graphs of the ranks.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograde.ranks import base
from retrograde.ranks.agreement import Guard
from retrograde.ranks.scan_over_ranks import RankReport, RankWay
from retrograde.ranks.time.piece import Piece, State, by_sweeps
from retrograde.ranks.time.range_map import by_slopes, has_closed_form
from retrograde.ranks.transport import Links
from retrograde.ranks.way_back import Gradient, WayBack
from retrograde.recurrent.modules import BudgetedRNN
from retrograde.units import parse_memory

__all__ = ["Crossing", "added_up", "cross"]


@dataclass
class Crossing(base.Crossing):
    """One forward pass of one rank, and the backward pass through it.

    Attributes:
        rnn: the recurrent module.
        way: how gradients cross.
        report: receives the counts of the backward pass.
        x: this rank's inputs.
        state: the initial state, empty where none was given.
        batched: whether there is a batch dimension.
        choose: chooses the way for a kind of call, for ``way="auto"``.
        chosen: the chosen ways, by kind of call.
        longest: the most steps of any rank.
    """

    rnn: BudgetedRNN
    way: RankWay | Literal["auto"]
    report: RankReport
    x: Tensor
    state: State
    batched: bool
    choose: Callable[["Crossing", list[Piece], Gradient], RankWay]
    chosen: dict[Hashable, RankWay]
    longest: int = 0

    def __post_init__(self) -> None:
        self.closed = has_closed_form(self.rnn, self.x)

    @property
    def kind(self) -> Hashable:
        """The key of a choice: the batch, about the number of steps, and the type."""
        return tuple(self.batches), self.longest.bit_length(), self.x.dtype

    @property
    def dim(self) -> int:
        """The batch dimension of inputs and outputs."""
        return 0 if self.rnn.batch_first else 1

    def steps(self, x: Tensor) -> int:
        """Return how many steps an input has."""
        return x.shape[1 if self.rnn.batch_first and self.batched else 0]

    def cut(self, t: Tensor, dim: int) -> Sequence[Tensor]:
        return t.split(self.batches, dim) if self.batched else [t]

    def seeds(self, dy: Gradient) -> Sequence[Gradient]:
        """Return the gradients of each piece's outputs."""
        return [None] * len(self.batches) if dy is None else self.cut(dy, self.dim)

    def check_budget(self) -> None:
        """Refuse a budget that is too small before any other rank begins to wait."""
        rnn, part = self.rnn, self.cut(self.x, self.dim)[0].detach()
        if rnn.memory is None or not self.gradient or not self.steps(part):
            return
        before = tuple(s.requires_grad_() for s in self._zeros(part))
        part = part.requires_grad_(self.x.requires_grad)
        piece = _for_a_piece(rnn, len(self.batches))
        piece.fit(part, before if rnn.mode == "LSTM" else before[0])

    def run(self, x: Tensor, given: State) -> list[Piece]:
        """Run forward, and send each piece's final state on.

        Raises:
            RankError: a rank cannot run its steps; the same on every rank.
        """
        guard, wanted = Guard(), x.requires_grad
        pieces = self.hand_along(
            guard,
            ((part.detach(), before, wanted) for part, before in self._parts(x, given)),
            self._run_piece,
            lambda piece: tuple(s.detach() for s in piece.after),
        )
        guard.settle(self.links)
        return pieces

    def _parts(self, x: Tensor, given: State) -> Iterator[tuple[Tensor, Any]]:
        """Iterate over each piece's inputs and the state before it, which later ranks receive."""
        states = [self.cut(s, 1) for s in given]
        for j, part in enumerate(self.cut(x, self.dim)):
            if self.links.rank:
                yield part, self.links.receive(self.links.rank - 1)
            elif states:
                yield part, tuple(s[j].detach() for s in states)
            else:
                yield part, self._zeros(part)

    def _zeros(self, part: Tensor) -> State:
        if not self.batched:
            return tuple(s[:, 0] for s in self.rnn._zeros(1, part))
        return self.rnn._zeros(part.shape[self.dim], part)

    def _run_piece(self, x: Tensor, before: State, wanted: bool) -> Piece:
        rnn = self.rnn
        with torch.set_grad_enabled(self.gradient):
            x = x.requires_grad_(wanted and self.gradient)
            before = tuple(s.detach().requires_grad_(self.gradient) for s in before)
            if not self.steps(x):
                outputs = x.new_empty(*x.shape[:-1], before[0].shape[-1])
                return Piece(x, before, outputs, before, self.batched)
            hidden = before if rnn.mode == "LSTM" else before[0]
            outputs, after = _for_a_piece(rnn, len(self.batches))(x, hidden)
        after = after if isinstance(after, tuple) else (after,)
        return Piece(x, before, outputs, after, self.batched)

    def rehearse(self, pieces: Sequence[Piece], dy: Gradient) -> None:
        """Go back through all pieces, only to time it."""
        own = [p for p in self.rnn.parameters() if p.requires_grad]
        for piece, seed in zip(pieces, self.seeds(dy), strict=True):
            piece.back(seed, tuple(torch.zeros_like(s) for s in piece.after), own, keep=True)

    def affine(self, pieces: Sequence[Piece], dy: Gradient) -> Any:
        """Return this rank's map of the gradient that reaches it, with its losses: g ↦ b + J·g."""
        if not self.closed:
            rnn = self.rnn
            asked = (rnn.memory, rnn.backward, rnn.schedule) != (None, None, None)
            apart = asked or self.x.device.type != "cpu" or rnn.mode == "LSTM"
            return by_sweeps(pieces, self.seeds(dy), apart=apart)
        states = list(zip(*(piece.before for piece in pieces), strict=True))
        if not self.batched:
            dim, before = 1, tuple(s.unsqueeze(1) for (s,) in states)
            x, dy = self.x.unsqueeze(1), None if dy is None else dy.unsqueeze(1)
        else:
            dim, before = self.dim, tuple(_joined(parts, 1) for parts in states)
            x = self.x
        if dim == 0:
            x, dy = x.transpose(0, 1), None if dy is None else dy.transpose(0, 1)
        return by_slopes(self.rnn, x, before, dy)


def _joined(parts: Iterable[Tensor], dim: int) -> Tensor:
    parts = list(parts)
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _for_a_piece(rnn: BudgetedRNN, pieces: int) -> BudgetedRNN:
    """Return the module for one piece of the batch, whose share of a budget in bytes is equal."""
    asked = None if rnn.memory is None else parse_memory(rnn.memory)
    if pieces == 1 or not isinstance(asked, int):
        return rnn
    piece = type(rnn).__new__(type(rnn))
    vars(piece).update(vars(rnn), memory=asked // pieces)
    return piece


def cross(call: Crossing) -> tuple[Tensor, State | None]:
    """Run this rank's steps in the caller's graph; return their outputs, and the last rank's state.

    Raises:
        RankError: a rank does not answer, or cannot run its steps.
    """
    own = [p for p in call.rnn.parameters() if p.requires_grad]
    outputs, *state = _Node.apply(call, call.x, *call.state, *own)  # type: ignore[no-untyped-call]
    return outputs, tuple(state) or None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Crossing, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        given = len(call.state)
        state, own = rest[:given], list(rest[given:])
        ctx.call, ctx.own = call, own
        ctx.pieces = pieces = call.run(x, state)
        outputs = _joined((piece.hand_over() for piece in pieces), call.dim)
        if not call.last:
            return (outputs,)
        ends = zip(*(piece.after for piece in pieces), strict=True)
        return outputs, *(_joined((s.detach() for s in parts), 1) for parts in ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Gradient, *final: Gradient) -> tuple[Any, ...]:
        pieces, call = base.pieces_of(ctx), ctx.call
        way = call.way
        if way == "auto":
            if call.kind not in call.chosen:
                call.chosen[call.kind] = call.choose(call, pieces, outputs)
            way = call.chosen[call.kind]
        back = _Back(call, pieces, outputs, final, ctx.own)
        back.go(way)
        if call.report.way != way:  # products of Jacobians fail here, and would fail later too
            call.chosen[call.kind] = call.report.way
        inputs = [g for g in back.inputs if g is not None]
        x = _joined(inputs, call.dim) if inputs else None
        state = [_joined(parts, 1) for parts in zip(*back.begun, strict=True)]
        return None, x, *state[: len(call.state)], *back.totals


class _Back(WayBack):
    """The backward pass of one rank through its steps.

    Attributes:
        begun: for each piece, the gradient of the state before the steps.
    """

    pieces: list[Piece]

    def __init__(
        self,
        call: Crossing,
        pieces: list[Piece],
        dy: Gradient,
        final: Sequence[Gradient],
        own: list[Tensor],
    ) -> None:
        super().__init__(call, call.report, pieces, own)
        self.call, self.dy, self.final, self.seeds = call, dy, final, call.seeds(dy)

    def forget(self) -> None:
        super().forget()
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
        self.add(shares)
        return before

    def element(self) -> Any:
        return self.call.affine(self.pieces, self.dy)

    def packed(self, begun: list[State]) -> Tensor:
        return torch.cat([p.flat(s) for p, s in zip(self.pieces, begun, strict=True)])

    def unpacked(self, arrived: Tensor) -> list[State]:
        parts = arrived.split(self.batches)
        return [piece.unflat(part) for piece, part in zip(self.pieces, parts, strict=True)]

    def meet(self, alike: bool) -> bool:
        """As in the base class; the same message also sums the parameters' gradients."""
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
    """Return sums over the ranks, by one message, the same bits on each."""
    if links.size == 1 or not parts:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    links.add_up(flat)
    sums = flat.split([part.numel() for part in parts])
    return [total.view_as(part) for total, part in zip(sums, parts, strict=True)]
