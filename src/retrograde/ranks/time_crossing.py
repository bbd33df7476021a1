"""One pass of one rank through its steps: forward in pieces, and what its way back needs to know.

What is differentiated by torch is a rank's own steps, from a leaf to what is handed on; the ranks'
graphs are joined in :mod:`retrograde.ranks.time_back`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from retrograde.nn.recurrent import Recurrent
from retrograde.ranks.agreement import Guard
from retrograde.ranks.scan_over_ranks import RankReport, RankWay
from retrograde.ranks.time_jacobian import by_slopes, by_sweeps, has_closed_form
from retrograde.ranks.time_piece import Gradient, Piece, State
from retrograde.ranks.transport import Links
from retrograde.units import parse_memory

__all__ = ["Crossing"]

Choose = Callable[["Crossing", list[Piece], Gradient], RankWay]
Learn = Callable[["Crossing", RankWay], None]


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
        learn: told of the way that was gone in place of that.
        longest: steps of any rank.
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
    choose: Choose
    learn: Learn
    longest: int = 0

    def __post_init__(self) -> None:
        self.closed = has_closed_form(self.rnn, self.x)

    def check_budget(self) -> None:
        """Refuse a budget that is too small before any other rank has begun to wait."""
        rnn, part = self.rnn, self.cut(self.x, self.dim)[0].detach()
        if rnn.memory is None or not self.gradient or not self.steps(part):
            return
        before = tuple(s.requires_grad_() for s in self._zeros(part))
        part = part.requires_grad_(self.x.requires_grad)
        piece = _for_a_piece(rnn, len(self.batches))
        piece.fit(part, before if rnn.mode == "LSTM" else before[0])

    def steps(self, x: Tensor) -> int:
        """How many steps an input has."""
        return x.shape[1 if self.rnn.batch_first and self.batched else 0]

    @property
    def dim(self) -> int:
        """Where the batch is in inputs and outputs."""
        return 0 if self.rnn.batch_first else 1

    @property
    def last(self) -> bool:
        """Whether this is the last rank."""
        return self.links.rank == self.links.size - 1

    def given(self) -> State:
        return self.state or ()

    def cut(self, t: Tensor, dim: int) -> Sequence[Tensor]:
        return t.split(self.batches, dim) if self.batched else [t]

    def joined(self, parts: Iterable[Tensor], dim: int) -> Tensor:
        parts = list(parts)
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def run(self, x: Tensor, given: State) -> list[Piece]:
        """Go forward, piece by piece, and hand each on.

        Raises:
            RankError: a rank cannot run its steps; the same on every rank.
        """
        links, guard = self.links, Guard()
        states = zip(*(self.cut(s, 1) for s in given), strict=True) if given else None
        found = []
        for part in self.cut(x, self.dim):
            if links.rank:
                before = links.receive(links.rank - 1)
            elif states is not None:
                before = tuple(s.detach() for s in next(states))
            else:
                before = self._zeros(part)
            piece = guard(self._run_piece, part.detach(), before, x.requires_grad)
            if not self.last:
                after = guard(lambda piece: tuple(s.detach() for s in piece.after), piece)
                links.send(after, links.rank + 1)
            found.append(piece)
        links.flush()
        guard.settle(links)
        return found

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

    def seeds(self, dy: Gradient, pieces: Sequence[Piece]) -> Sequence[Gradient]:
        """The gradients of each piece's outputs."""
        return [None] * len(pieces) if dy is None else self.cut(dy, self.dim)

    def rehearse(self, pieces: Sequence[Piece], dy: Gradient) -> None:
        """Go back through all pieces, for nothing but the time that it takes."""
        own = [p for p in self.rnn.parameters() if p.requires_grad]
        for piece, seed in zip(pieces, self.seeds(dy, pieces), strict=True):
            piece.back(seed, tuple(torch.zeros_like(s) for s in piece.after), own, keep=True)

    def affine(self, pieces: Sequence[Piece], dy: Gradient) -> Any:
        """What this rank's steps and losses do to the gradient that reaches them: g ↦ b + J·g."""
        if not self.closed:
            rnn = self.rnn
            asked = (rnn.memory, rnn.backward, rnn.schedule) != (None, None, None)
            apart = asked or self.x.device.type != "cpu" or rnn.mode == "LSTM"
            return by_sweeps(pieces, self.seeds(dy, pieces), apart=apart)
        states = list(zip(*(piece.before for piece in pieces), strict=True))
        if not self.batched:
            dim, before = 1, tuple(s.unsqueeze(1) for (s,) in states)
            x, dy = self.x.unsqueeze(1), None if dy is None else dy.unsqueeze(1)
        else:
            dim, before = self.dim, tuple(self.joined(parts, 1) for parts in states)
            x = self.x
        if dim == 0:
            x, dy = x.transpose(0, 1), None if dy is None else dy.transpose(0, 1)
        return by_slopes(self.rnn, x, before, dy)


def _for_a_piece(rnn: Recurrent, pieces: int) -> Recurrent:
    """The module for one piece of the batch: a budget in bytes is for all, held side by side."""
    asked = None if rnn.memory is None else parse_memory(rnn.memory)
    if pieces == 1 or not isinstance(asked, int):
        return rnn
    piece = type(rnn).__new__(type(rnn))
    vars(piece).update(vars(rnn), memory=asked // pieces)
    return piece
