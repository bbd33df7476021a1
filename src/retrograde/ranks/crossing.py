"""One pass of one rank through its steps: forward in pieces, and backward across ranks.

torch differentiates a rank's own steps, from a leaf to the state that is passed on. :func:`cross`
adds them to the caller's graph as one node, whose backward pass joins the graphs of the ranks.

*By a line*, each rank waits for the gradient from the next one, goes back, and sends the gradient
to the one before. It does so piece by piece, so that ranks overlap.

*By a tree*, each rank computes what its steps do to any gradient, and a scan gives each the one
that reaches it (:mod:`retrograde.ranks.tree`). Then all go back at once. A product of many
Jacobians can overflow, or cancel, where the gradient itself does not. So each rank sends the
gradient of its own sweep to the rank before, which compares it with the result of the scan. If any
two differ by more than rounding, all ranks repeat the backward pass by a line.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograde.errors import RankError
from retrograde.ranks.peers import Peers
from retrograde.ranks.piece import Gradient, Piece, State, flat, unflat
from retrograde.ranks.range_map import rows_of
from retrograde.ranks.tree import scan
from retrograde.recurrent.base import BudgetedRNN
from retrograde.recurrent.dropout import Place
from retrograde.units import parse_memory

Way = Literal["linear", "tree"]

# How far two gradients may differ, in units of rounding of a sample's largest number.
_ROUNDINGS = 100.0


@dataclass
class Crossing:
    """One forward pass of one rank, and the backward pass through it."""

    peers: Peers  # the other ranks
    rnn: BudgetedRNN  # the recurrent module
    way: Way  # how gradients cross
    x: Tensor  # this rank's inputs, with a batch dimension
    state: State  # the initial state, empty where none was given
    batches: list[int]  # the number of samples in each piece
    gradient: bool  # whether a gradient is needed
    # Where this rank's steps are in the sequence, if there is dropout between layers.
    place: Place | None = None

    def __post_init__(self) -> None:
        self.dim = 0 if self.rnn.batch_first else 1  # of samples, in inputs and outputs

    def cut(self, t: Tensor, dim: int) -> Sequence[Tensor]:
        """Return a tensor's pieces of the batch."""
        return list(torch.split(t, self.batches, dim))

    def check_budget(self) -> None:
        """Refuse a budget that is too small for this rank's steps, by a BudgetError, before any
        other rank begins to wait."""
        rnn, part = self.rnn, self.cut(self.x, self.dim)[0].detach()
        if rnn.memory is None or not self.gradient or not part.shape[1 - self.dim]:
            return
        before = tuple(s.requires_grad_() for s in rnn._zeros(part.shape[self.dim], part))
        part = part.requires_grad_(self.x.requires_grad)
        with self._as_piece(0):
            rnn.fit(part, before if rnn.mode == "LSTM" else before[0])

    def run(self, x: Tensor, initial: State) -> list[Piece]:
        """Run forward, and send each piece's final state on."""
        pieces = []
        for number, (part, before) in enumerate(self._parts(x, initial)):
            with self._as_piece(number):
                piece = self._run_piece(part.detach(), before, x.requires_grad)
            if not self.peers.last:
                sent = flat(tuple(s.detach() for s in piece.after))
                self.peers.send(sent.to(before[0].dtype), self.peers.rank + 1)
            pieces.append(piece)
        self.peers.flush()
        return pieces

    def _parts(self, x: Tensor, initial: State) -> Iterator[tuple[Tensor, State]]:
        """Iterate over each piece's inputs and the state before it, which later ranks receive."""
        states = [self.cut(s, 1) for s in initial]
        for j, part in enumerate(self.cut(x, self.dim)):
            before = self.rnn._zeros(part.shape[self.dim], part)
            if self.peers.rank:
                before = unflat(self.peers.receive(flat(before), self.peers.rank - 1), before)
            elif states:
                before = tuple(s[j].detach().contiguous() for s in states)  # cuDNN insists on it
            yield part, before

    def _run_piece(self, x: Tensor, before: State, wanted: bool) -> Piece:
        rnn = self.rnn
        with torch.set_grad_enabled(self.gradient):
            x = x.requires_grad_(wanted and self.gradient)
            before = tuple(s.detach().requires_grad_(self.gradient) for s in before)
            if not x.shape[1 - self.dim]:
                outputs = x.new_empty(*x.shape[:-1], before[0].shape[-1])
                return Piece(x, before, outputs, before)
            hidden = before if rnn.mode == "LSTM" else before[0]
            outputs, after = rnn(x, hidden)
        return Piece(x, before, outputs, after if isinstance(after, tuple) else (after,))

    @contextmanager
    def _as_piece(self, number: int) -> Iterator[None]:
        """Let the module run a piece of the batch: with an equal share of a budget in bytes, and
        with the masks of its place."""
        rnn, memory = self.rnn, self.rnn.memory
        asked = None if memory is None else parse_memory(memory)
        if self.place is not None:
            rnn.place = self.place._replace(sample=sum(self.batches[:number]))
        try:
            rnn.memory = asked // len(self.batches) if isinstance(asked, int) else memory
            yield
        finally:
            rnn.memory = memory
            vars(rnn).pop("place", None)


def cross(call: Crossing) -> tuple[Tensor, State | None]:
    """Run this rank's steps in the caller's graph; return their outputs, and the last rank's state.
    RankError where another rank does not answer."""
    parameters = [p for p in call.rnn.parameters() if p.requires_grad]
    outputs, *state = _Node.apply(call, call.x, *call.state, *parameters)  # type: ignore[no-untyped-call]
    return outputs, tuple(state) or None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Crossing, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(call.state)
        state, parameters = rest[:count], list(rest[count:])
        with call.peers.a_pass():
            pieces = call.run(x, state)
        ctx.call, ctx.own, ctx.pieces = call, parameters, pieces
        outputs = _concatenated((piece.hand_over() for piece in pieces), call.dim)
        if not call.peers.last:
            return (outputs,)
        ends = zip(*(piece.after for piece in pieces), strict=True)
        return outputs, *(_concatenated((s.detach() for s in tensors), 1) for tensors in ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Gradient, *final: Gradient) -> tuple[Any, ...]:
        call, pieces = ctx.call, ctx.pieces
        if pieces is None:
            raise RankError(
                "a backward pass across ranks has been made already: expected one for each call"
            )
        ctx.pieces = None
        back = _Back(call, pieces, dy, final, ctx.own)
        with call.peers.a_pass():
            totals = back.go()
        inputs = [g for g in back.inputs if g is not None]
        x = _concatenated(inputs, call.dim) if inputs else None
        state = [_concatenated(gradients, 1) for gradients in zip(*back.begun, strict=True)]
        return None, x, *state[: len(call.state)], *totals


def _concatenated(tensors: Iterable[Tensor], dim: int) -> Tensor:
    tensors = list(tensors)
    return torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]


@dataclass
class _Back:
    """The backward pass of one rank through its steps.

    Attributes:
        inputs: the gradients of each piece's inputs, where they are needed.
        begun: for each piece, the gradient of the state before the steps.
    """

    call: Crossing
    pieces: list[Piece]
    dy: Gradient
    final: Sequence[Gradient]
    own: list[Tensor]

    def __post_init__(self) -> None:
        call, dy = self.call, self.dy
        self.peers = call.peers
        self.seeds = [None] * len(self.pieces) if dy is None else call.cut(dy, call.dim)

    def go(self) -> list[Tensor]:
        """Run the backward pass; return the sums of the parameters' gradients over the ranks."""
        # With two ranks no matrix would be sent, and both ways do the same.
        tree = self.call.way == "tree" and self.peers.size > 2
        sums, differ = self._pass(self._by_tree if tree else self._by_line)
        if not differ:
            return sums
        warnings.warn(
            "products of Jacobians overflowed, cancelled or are not finite, though the gradient "
            "itself may be finite, or the module does more than its forward (a hook): this pass "
            "goes back across the ranks by a line, which is exact but slower; clip the weights, or "
            "use way='linear'",
            RuntimeWarning,
            stacklevel=2,
        )
        return self._pass(self._by_line)[0]

    def _pass(self, way: Callable[[], bool]) -> tuple[list[Tensor], bool]:
        """Go back; return the sums over the ranks, and whether any rank found a difference."""
        self.totals: list[Gradient] = [None] * len(self.own)
        self.inputs: list[Gradient] = []
        self.begun: list[State] = []
        alike = way()
        pairs = zip(self.own, self.totals, strict=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in pairs]
        *sums, differ = self.peers.add_up([*filled, filled[0].new_tensor([float(not alike)])])
        return sums, bool(differ)

    def _by_line(self) -> bool:
        """Wait for the next rank, go back, send to the rank before; piece by piece."""
        for j, piece in enumerate(self.pieces):
            if self.peers.last:
                ends = self._given(j)
            else:
                like = flat(piece.before)
                ends = unflat(self.peers.receive(like, self.peers.rank + 1), piece.before)
            before = self._through(j, ends)
            if self.peers.rank:
                self.peers.send(flat(before), self.peers.rank - 1)
        self.peers.flush()
        return True

    def _by_tree(self) -> bool:
        """Scan for this rank's gradient, and go back; return whether the next rank agrees."""
        peers, count = self.peers, range(len(self.pieces))
        if peers.last:
            swept = self._sweep([self._given(j) for j in count])
            scan(swept.unsqueeze(1), peers)
            peers.send(swept, peers.rank - 1)
            peers.flush()
            return True
        reached = scan(self._rows(), peers)
        assert reached is not None
        scanned = reached.squeeze(1)
        pairs = zip(self.call.cut(scanned, 0), self.pieces, strict=True)
        swept = self._sweep([unflat(part, piece.before) for part, piece in pairs])
        if peers.rank:
            peers.send(swept, peers.rank - 1)
        alike = agree(scanned, peers.receive(scanned, peers.rank + 1))
        peers.flush()
        return alike

    def _given(self, j: int) -> State:
        """Return, on the last rank, the gradients that the caller gives for a piece's state."""
        return tuple(
            torch.zeros_like(s) if g is None else self.call.cut(g, 1)[j]
            for g, s in zip(self.final, self.pieces[j].after, strict=True)
        )

    def _sweep(self, ends: list[State]) -> Tensor:
        """Go back through all pieces, whose graphs are kept for a pass by a line."""
        return torch.cat([flat(self._through(j, each, keep=True)) for j, each in enumerate(ends)])

    def _through(self, j: int, ends: State, *, keep: bool = False) -> State:
        """Go back through a piece, add to the totals, and return the gradient to pass on."""
        x, before, shares = self.pieces[j].back(self.seeds[j], ends, self.own, keep=keep)
        self.inputs.append(x)
        self.begun.append(before)
        for i, share in enumerate(shares):
            if share is not None:
                so_far = self.totals[i]
                self.totals[i] = share if so_far is None else so_far + share
        return before

    def _rows(self) -> Tensor:
        """Return what this rank's steps do to any gradient; the first rank's is not read."""
        states = zip(*(piece.before for piece in self.pieces), strict=True)
        before = tuple(_concatenated(tensors, 1) for tensors in states)
        if not self.peers.rank:
            return flat(before).unsqueeze(1)
        x, dy = self.call.x, self.dy
        if self.call.dim == 0:
            x, dy = x.transpose(0, 1), None if dy is None else dy.transpose(0, 1)
        return rows_of(self.call.rnn, x, before, dy)


def agree(scanned: Tensor, swept: Tensor) -> bool:
    """Return whether two gradients (samples, n) agree, up to rounding of a sample's largest number.

    Where the sweep has NaN, the scan may have NaN too.

    Example:
        >>> g = torch.tensor([[1.0, 2.0]])
        >>> agree(g, g + 1e-6), agree(g, g + 1e-3), agree(g * torch.nan, g)
        (True, False, False)
    """
    if not swept.numel():
        return True
    largest = torch.maximum(scanned.abs(), swept.abs()).amax(-1, keepdim=True)
    near = (scanned - swept).abs() <= _ROUNDINGS * torch.finfo(swept.dtype).eps * largest
    same = (scanned == swept) | (scanned.isnan() & swept.isnan())
    return bool((near & largest.isfinite() | same).all())
