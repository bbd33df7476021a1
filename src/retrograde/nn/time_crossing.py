"""One pass of one rank through its steps: forward in pieces, and back by a scan across ranks.

What is differentiated by torch is a rank's own steps, from a leaf to what is handed on; the ranks'
graphs are joined here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.errors import RankError
from retrograde.nn.recurrent import Recurrent
from retrograde.scan.elements import IDENTITY, UNREAD, Affine, Dense, Vector
from retrograde.scan.links import Links
from retrograde.scan.ranks import RankReport, RankWay, scan_ranks
from retrograde.units import parse_memory

__all__ = ["Crossing", "Gradient", "Piece", "added_up", "cross"]

State = tuple[Tensor, ...]
Gradient = Tensor | None


@dataclass
class Piece:
    """A piece of the batch, as this rank has run it: the leaves and ends of its graph."""

    x: Tensor
    before: State
    outputs: Tensor | GradientEdge
    after: State

    def hand_over(self) -> Tensor:
        """The outputs, of which only the place in the graph is kept."""
        outputs = self.outputs
        assert isinstance(outputs, Tensor)
        if outputs.requires_grad:
            self.outputs = get_gradient_edge(outputs)
        return outputs.detach()


@dataclass
class Crossing:
    """One forward pass of one rank, and the backward pass through it.

    Attributes:
        rnn: what is run.
        links: to the other ranks.
        way: how gradients cross.
        report: filled by the backward pass.
        x: this rank's inputs.
        state: the initial state, where it was given.
        batched: whether there is a batch.
        gradient: whether one is wanted.
        batches: samples in each piece.
        choose: asked for the way, where none was said.
    """

    rnn: Recurrent
    links: Links
    way: RankWay | Literal["auto"]
    report: RankReport
    x: Tensor
    state: State | None
    batched: bool
    gradient: bool
    batches: list[int]
    choose: Callable[["Crossing", list[Piece], list[Gradient]], RankWay]

    def check_budget(self) -> None:
        """Refuse a budget that is too small before any other rank has begun to wait."""
        rnn, part = self.rnn, self.cut(self.x, self.dim)[0].detach()
        if rnn.memory is None or not self.gradient or not self.steps(part):
            return
        before = tuple(s.requires_grad_() for s in self._zeros(part))
        part = part.requires_grad_(self.x.requires_grad)
        with _Divided(rnn, len(self.batches)):
            rnn.fit(part, before if rnn.mode == "LSTM" else before[0])

    def steps(self, x: Tensor) -> int:
        """How many steps an input has."""
        return x.shape[1 if self.rnn.batch_first and self.batched else 0]

    @property
    def dim(self) -> int:
        """Where the batch is in inputs and outputs."""
        return 0 if self.rnn.batch_first else 1

    def given(self) -> State:
        return self.state or ()

    def cut(self, t: Tensor, dim: int) -> Sequence[Tensor]:
        return t.split(self.batches, dim) if self.batched else [t]

    def joined(self, parts: Iterable[Tensor], dim: int) -> Tensor:
        parts = list(parts)
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def run(self, x: Tensor, given: State) -> list[Piece]:
        """Go forward, piece by piece, and hand each on."""
        links, rnn = self.links, self.rnn
        last = links.rank == links.size - 1
        states = zip(*(self.cut(s, 1) for s in given), strict=True) if given else None
        found = []
        for part in self.cut(x, self.dim):
            if links.rank:
                before = links.receive(links.rank - 1)
            elif states is not None:
                before = tuple(s.detach() for s in next(states))
            else:
                before = self._zeros(part)
            piece = self._run_piece(rnn, part.detach(), before, x.requires_grad)
            if not last:
                links.send(tuple(s.detach() for s in piece.after), links.rank + 1)
            found.append(piece)
        links.flush()
        return found

    def _zeros(self, part: Tensor) -> State:
        if not self.batched:
            return tuple(s[:, 0] for s in self.rnn._zeros(1, part))
        return self.rnn._zeros(part.shape[self.dim], part)

    def _run_piece(self, rnn: Recurrent, x: Tensor, before: State, wanted: bool) -> Piece:
        with torch.set_grad_enabled(self.gradient):
            x = x.requires_grad_(wanted and self.gradient)
            before = tuple(s.detach().requires_grad_(self.gradient) for s in before)
            if not self.steps(x):
                return Piece(x, before, x.new_empty(*x.shape[:-1], before[0].shape[-1]), before)
            hidden = before if rnn.mode == "LSTM" else before[0]
            with _Divided(rnn, len(self.batches)):
                outputs, after = rnn(x, hidden)
        return Piece(x, before, outputs, after if isinstance(after, tuple) else (after,))

    def back(
        self, pieces: list[Piece], outputs: Gradient, final: Sequence[Gradient], own: list[Tensor]
    ) -> tuple[Gradient, list[Gradient], list[Gradient]]:
        """Go backward: the gradients of this rank's inputs, of the initial state, of parameters."""
        links, report = self.links, self.report
        whole = outputs is not None and self.cut(outputs, self.dim)
        seeds: list[Gradient] = list(whole) if whole else [None] * len(pieces)
        way = self.choose(self, pieces, seeds) if self.way == "auto" else self.way
        report.way = way
        totals: list[Gradient] = [None] * len(own)
        inputs: list[Gradient] = []
        begun: list[State] = []
        last, first = links.rank == links.size - 1, links.rank == 0

        def through(j: int, ends: State) -> State:
            x, before = self.through(pieces[j], seeds[j], ends, own, totals)
            inputs.append(x)
            begun.append(before)
            return before

        if way == "linear":
            sent = links.traffic.messages, links.traffic.sent_bytes
            for j, piece in enumerate(pieces):
                ends = self._ends(j, piece, final) if last else links.receive(links.rank + 1)
                before = through(j, ends)
                if not first:
                    links.send(before, links.rank - 1)
            links.flush()
            report.up = links.size - 1
            report.messages = links.traffic.messages - sent[0]
            report.sent_bytes = links.traffic.sent_bytes - sent[1]
        elif last:
            for j, piece in enumerate(pieces):
                through(j, self._ends(j, piece, final))
            element = Vector(torch.cat([self._flat(state) for state in begun]))
            scan_ranks(element, links, way=way, backward=True, report=report)
        else:
            mine: Any = UNREAD if first else self.affine(pieces, seeds)
            arrived = scan_ranks(mine, links, way=way, backward=True, report=report)
            for j, part in enumerate(arrived.data.split(self.batches)):
                through(j, self._unflat(part, pieces[j].before))
        self._add_up(own, totals)
        x = (
            self.joined((g for g in inputs if g is not None), self.dim)
            if inputs[0] is not None
            else None
        )
        states = [self.joined(parts, 1) for parts in zip(*begun, strict=True)]
        return x, list(states), totals

    def _ends(self, j: int, piece: Piece, final: Sequence[Gradient]) -> State:
        """The gradients of the final state that the caller gives."""
        return tuple(
            torch.zeros_like(s) if g is None else self.cut(g, 1)[j]
            for g, s in zip(final, piece.after, strict=True)
        )

    def through(
        self,
        piece: Piece,
        seed: Gradient,
        ends: State,
        own: list[Tensor],
        totals: list[Gradient],
    ) -> tuple[Gradient, State]:
        """Go back through a piece, and add to the parameters' gradients."""
        if piece.after is piece.before:  # no steps
            return (torch.zeros_like(piece.x) if piece.x.requires_grad else None), ends
        wanted = [piece.x] if piece.x.requires_grad else []
        found = iter(_gradients(piece, seed, ends, [*wanted, *piece.before, *own]))
        x = next(found) if wanted else None
        before = tuple(
            torch.zeros_like(s) if g is None else g
            for s, g in zip(piece.before, found, strict=False)
        )
        for i, share in enumerate(found):
            if share is not None:
                so_far = totals[i]
                totals[i] = share if so_far is None else so_far + share
        return x, before

    def rehearse(self, pieces: Sequence[Piece], seeds: Sequence[Gradient]) -> None:
        """Go back through all pieces, for nothing but the time that it takes."""
        own = [p for p in self.rnn.parameters() if p.requires_grad]
        for piece, seed in zip(pieces, seeds, strict=True):
            if piece.after is not piece.before:
                ends = tuple(torch.zeros_like(s) for s in piece.after)
                _gradients(piece, seed, ends, [*piece.before, *own], keep=True)

    def affine(self, pieces: list[Piece], seeds: list[Gradient]) -> Any:
        """What this rank's steps and losses do to the gradient that reaches them: g ↦ b + J·g.

        One sweep for b, and one for each column of J, all samples at once, for they do not meet;
        where they can be, columns are swept side by side.
        """
        if pieces[0].after is pieces[0].before:
            return IDENTITY
        columns, offsets = [], []
        for piece, seed in zip(pieces, seeds, strict=True):
            zero = tuple(torch.zeros_like(s) for s in piece.after)
            offsets.append(self._sweep(piece, seed, zero))
            size = sum(s.shape[0] * s.shape[-1] for s in piece.after)
            samples = piece.after[0].shape[1] if self.batched else 1
            basis = torch.eye(size, dtype=piece.x.dtype, device=piece.x.device)
            ends = [self._unflat(row.expand(samples, size), piece.after) for row in basis]
            sweeps = self._side_by_side if self._steps_are_autograds() else self._in_turn
            columns.append(torch.stack(sweeps(piece, ends), -1))
        return Affine(Dense(torch.cat(columns)), Vector(torch.cat(offsets)))

    def _steps_are_autograds(self) -> bool:
        """Whether steps are operations that autograd can go back through for many gradients at
        once; kernels of whole layers, and ours, take one at a time."""
        rnn = self.rnn
        asked = (rnn.memory, rnn.backward, rnn.schedule)
        return self.x.device.type == "cpu" and rnn.mode != "LSTM" and asked == (None, None, None)

    def _in_turn(self, piece: Piece, ends: list[State]) -> list[Tensor]:
        return [self._sweep(piece, None, end) for end in ends]

    def _side_by_side(self, piece: Piece, ends: list[State]) -> list[Tensor]:
        found = []
        for start in range(0, len(ends), _SIDE_BY_SIDE):
            rows = ends[start : start + _SIDE_BY_SIDE]
            some = [torch.stack(parts) for parts in zip(*rows, strict=True)]
            before = torch.autograd.grad(
                piece.after, piece.before, some, retain_graph=True, is_grads_batched=True
            )
            found += [self._flat(state) for state in zip(*before, strict=True)]
        return found

    def _sweep(self, piece: Piece, seed: Gradient, ends: State) -> Tensor:
        found = _gradients(piece, seed, ends, piece.before, keep=True)
        pairs = zip(found, piece.before, strict=True)
        return self._flat(tuple(torch.zeros_like(s) if g is None else g for g, s in pairs))

    def _flat(self, state: State) -> Tensor:
        """A state as a vector for each sample."""
        if not self.batched:
            state = tuple(s[:, None] for s in state)
        return torch.cat([s.transpose(0, 1).flatten(1) for s in state], 1)

    def _unflat(self, flat: Tensor, like: State) -> State:
        sizes = [s.shape[0] * s.shape[-1] for s in like]
        parts = zip(flat.split(sizes, 1), like, strict=True)
        states = (p.unflatten(1, (s.shape[0], s.shape[-1])).transpose(0, 1) for p, s in parts)
        return tuple(s.contiguous() if self.batched else s[:, 0] for s in states)

    def _add_up(self, own: list[Tensor], totals: list[Gradient]) -> None:
        """Sum the parameters' gradients over the ranks, in one go."""
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(own, totals, strict=True)]
        totals[:] = added_up(self.links, parts)


def _gradients(
    piece: Piece, seed: Gradient, ends: State, wanted: Sequence[Tensor], *, keep: bool = False
) -> Sequence[Gradient]:
    roots: Any = [*piece.after, *([] if seed is None else [piece.outputs])]
    seeds = [*ends, *([] if seed is None else [seed])]
    return torch.autograd.grad(roots, wanted, seeds, retain_graph=keep, allow_unused=True)


def added_up(links: Links, parts: list[Tensor]) -> list[Tensor]:
    """Sums over the ranks, in one go, the same bits on each."""
    if links.size == 1 or not parts:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts])
    links.add_up(flat)
    sums = flat.split([part.numel() for part in parts])
    return [total.view_as(part) for total, part in zip(sums, parts, strict=True)]


_SIDE_BY_SIDE = 64  # gradients that go back at once


class _Divided:
    """A budget in bytes is for all pieces of the batch, which are held side by side."""

    def __init__(self, rnn: Recurrent, pieces: int) -> None:
        self.rnn, self.pieces, self.memory = rnn, pieces, rnn.memory

    def __enter__(self) -> None:
        if self.memory is not None:
            asked = parse_memory(self.memory)
            self.rnn.memory = asked // self.pieces if isinstance(asked, int) else self.memory

    def __exit__(self, *error: object) -> Literal[False]:
        self.rnn.memory = self.memory
        return False


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Crossing, given: int, x: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        state, own = rest[:given], list(rest[given:])
        pieces = call.run(x, state)
        ctx.call, ctx.pieces, ctx.own, ctx.given = call, pieces, own, given
        links = call.links
        outputs = call.joined((piece.hand_over() for piece in pieces), call.dim)
        if links.rank < links.size - 1:
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
        x, state, own = ctx.call.back(pieces, outputs, final, ctx.own)
        return None, None, x, *state[: ctx.given], *own


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
