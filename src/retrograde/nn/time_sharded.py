"""A recurrent module whose sequence lies across ranks, cut along time.

*Forward*, the state is handed along, piece by piece of the batch, so that ranks overlap. *Backward*
there are two kinds of ways. In a linear scan the gradient of the state is handed back in the same
manner. In a tree or a gather no rank waits for its neighbour: each forms what its steps do to any
gradient, the affine map g ↦ b + J·g of its own losses and steps; the scan across ranks
(:mod:`retrograde.scan.ranks`; W20, algorithm 1) tells each the gradient that reaches it, and all go
through their steps at once. Then the parameters' gradients are added up over the ranks.

What is exchanged is a state a sample each way, and in a tree the matrices J, of its size squared.
No rank holds anything of another's steps.

Before anything else is exchanged, ranks tell one another what they were called with, so that one
that is called wrongly makes every other say so, and none waits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import CellError, RankError
from retrograde.execute.transforms import uncompiled
from retrograde.nn.agreement import Told, check_crossing, reason, settle
from retrograde.nn.recurrent import Recurrent
from retrograde.scan.elements import IDENTITY, UNREAD, Affine, Dense, Vector
from retrograde.scan.links import GroupLinks, Links
from retrograde.scan.ranks import RankReport, RankWay, scan_ranks
from retrograde.units import parse_memory

__all__ = ["TimeSharded"]

State = tuple[Tensor, ...]
Gradient = Tensor | None


class TimeSharded(nn.Module):
    """A recurrent module run over a sequence of which each rank has its own steps.

    The steps of rank 0 come first. Every rank calls the module with its own, of any number, none
    included, and gets their outputs; every rank then calls ``backward`` on a loss of its own.
    Each parameter's gradient is that of the sum of all these losses, the same on every rank, so
    that any optimizer keeps the ranks' parameters equal. The numbers are those of one process, up
    to rounding.

    Args:
        rnn: an ``rg.RNN``, ``rg.GRU`` or ``rg.LSTM`` in one direction, with the same parameters on
            every rank. With ``memory=`` each rank keeps its own steps within that.
        group: of the ranks; all, by default.
        way: how gradients cross the ranks: ``"linear"``, ``"tree"`` or ``"gather"``.
        pieces: of the batch, which are handed along one after the other; as many as there are
            ranks, by default.

    Attributes:
        report: what the last backward pass did to cross the ranks.

    Raises:
        CellError: it is no such module.
        RankError: at a call, the ranks do not agree; the message says which and how. Or one ended.

    Example:
        >>> import copy
        >>> import retrograde as rg
        >>> from retrograde.scan.links import simulate  # in place of processes
        >>> rnn = rg.GRU(3, 4)
        >>> def rank(links):
        ...     net = TimeSharded(copy.deepcopy(rnn), links)
        ...     outputs, last = net(torch.ones(5 + links.rank, 2, 3))
        ...     outputs.sum().backward()
        ...     return outputs.shape[0], last is None, net.rnn.weight_hh_l0.grad.sum().item()
        >>> (a, *first), (b, *last) = simulate(2, rank)
        >>> a, b, first[0], last[0], first[1] == last[1]
        (5, 6, True, False, True)
    """

    def __init__(
        self,
        rnn: Recurrent,
        group: distributed.ProcessGroup | Links | None = None,
        *,
        way: RankWay = "linear",
        pieces: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(rnn, Recurrent) or rnn.bidirectional:
            what = "two directions" if isinstance(rnn, Recurrent) else type(rnn).__name__
            raise CellError(
                f"got {what}: expected an rg.RNN, rg.GRU or rg.LSTM in one direction, to be run "
                "along time"
            )
        check_crossing(way, pieces)
        self.rnn = rnn
        self.links = group if isinstance(group, Links) else GroupLinks(group)
        self.way = way
        self.pieces = pieces
        self.report = RankReport()
        self._compared = False

    @uncompiled
    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Run this rank's steps.

        Args:
            input: (T, B, I), or (B, T, I) with ``batch_first``, or (T, I): of this rank's T steps.
            hx: the initial state, on the first rank only; zeros if not given.

        Returns:
            The outputs of these steps; and on the last rank the final state, on others None.

        Raises:
            CellError: the input cannot be run.
            RankError: the ranks do not agree, or one does not answer.
        """
        call = self._agreed(input, hx)
        own = [p for p in self.rnn.parameters() if p.requires_grad]
        given = call.given()
        found = _Crossing.apply(call, len(given), input, *given, *own)  # type: ignore[no-untyped-call]
        outputs, *state = found
        return outputs, call.user_form(tuple(state)) if state else None

    def _agreed(self, input: Any, hx: Any) -> "_Call":
        """Tell the others what this rank was called with, and hear what they were."""
        call, told, cause = None, Told(), None
        try:
            call = _Call.of(self, input, hx)
            told = Told(alike=call.described(whole=not self._compared))
        except Exception as error:
            told, cause = Told(reason(error)), error
        settle(self.links, told, cause)
        assert call is not None
        self._compared = True
        return call

    def add_up(self, module: nn.Module) -> None:
        """Sum the gradients of another module, such as one behind this, over the ranks.

        Args:
            module: of which every rank has the same, with gradients of its own steps.
        """
        own = [p for p in module.parameters() if p.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        for p, total in zip(own, _added_up(self.links, parts), strict=True):
            p.grad = total

    def extra_repr(self) -> str:
        """What crosses ranks, and how."""
        return f"rank={self.links.rank}, ranks={self.links.size}, way={self.way!r}"


@dataclass
class _Piece:
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
class _Call:
    """One forward pass of one rank, and the backward pass through it."""

    sharded: TimeSharded
    x: Tensor
    state: State | None
    batched: bool
    gradient: bool
    batches: list[int]

    @classmethod
    def of(cls, sharded: TimeSharded, input: Any, hx: Any) -> "_Call":
        rnn, links = sharded.rnn, sharded.links
        if isinstance(input, PackedSequence):
            raise CellError("the input is packed: expected a tensor; give padded sequences")
        if input.dim() not in (2, 3):
            raise CellError(f"the input has {input.dim()} dimensions: expected 2 or 3")
        if hx is not None and links.rank:
            raise CellError(
                f"rank {links.rank} was given an initial state: expected it on rank 0 only, where "
                "the sequence begins"
            )
        batched = input.dim() == 3
        samples = input.shape[0 if rnn.batch_first else 1] if batched else 1
        if input.shape[-1] != rnn.input_size:
            raise CellError(f"the input has {input.shape[-1]} features: expected {rnn.input_size}")
        state = None
        if hx is not None:
            state = hx if isinstance(hx, tuple) else (hx,)
        like = rnn._zeros(samples, input) if batched else None
        if state is not None and like is not None:
            for given, zero in zip(state, like, strict=True):
                if given.shape != zero.shape:
                    raise CellError(
                        f"the initial state is {tuple(given.shape)}: expected {tuple(zero.shape)}"
                    )
        wants = [input, *(state or ()), *rnn.parameters()]
        gradient = torch.is_grad_enabled() and any(t.requires_grad for t in rnn.parameters())
        if torch.is_grad_enabled() and not gradient and any(t.requires_grad for t in wants):
            raise CellError("no parameter wants a gradient, and an input does: expected both")
        pieces = min(sharded.pieces or links.size, max(samples, 1))
        share, more = divmod(samples, pieces)
        batches = [share + (k < more) for k in range(pieces)]
        call = cls(sharded, input, state, batched, gradient, batches)
        call._check_budget()
        return call

    def described(self, *, whole: bool) -> dict[str, Any]:
        """What must be the same on every rank; the parameters too, where it is to be whole."""
        rnn = self.sharded.rnn
        with torch.no_grad():
            sums = (float(p.double().sum()) for p in rnn.parameters()) if whole else ()
            checksums = tuple(sums)
        return {
            "the module": f"{type(rnn).__name__}({nn.RNNBase.extra_repr(rnn)})",
            "way=": self.sharded.way,
            "pieces=": self.sharded.pieces or 0,
            "the batch": self.samples if self.batched else None,
            "the type": str(self.x.dtype),
            "whether the module is training": rnn.training,
            "whether a gradient is wanted": self.gradient,
            "the parameters' sum (seed them alike, or load one state_dict)": checksums,
        }

    def _check_budget(self) -> None:
        """Refuse a budget that is too small before any other rank has begun to wait."""
        rnn, part = self.sharded.rnn, self.cut(self.x, self.dim)[0].detach()
        if rnn.memory is None or not self.gradient or not self._steps(part):
            return
        before = tuple(s.requires_grad_() for s in self._zeros(part))
        part = part.requires_grad_(self.x.requires_grad)
        with _Divided(rnn, len(self.batches)):
            rnn.fit(part, before if rnn.mode == "LSTM" else before[0])

    def _steps(self, x: Tensor) -> int:
        return x.shape[1 if self.sharded.rnn.batch_first and self.batched else 0]

    @property
    def samples(self) -> int:
        return sum(self.batches)

    @property
    def dim(self) -> int:
        """Where the batch is in inputs and outputs."""
        return 0 if self.sharded.rnn.batch_first else 1

    def given(self) -> State:
        return self.state or ()

    def user_form(self, state: State) -> Any:
        return state if self.sharded.rnn.mode == "LSTM" else state[0]

    def cut(self, t: Tensor, dim: int) -> Sequence[Tensor]:
        return t.split(self.batches, dim) if self.batched else [t]

    def joined(self, parts: Iterable[Tensor], dim: int) -> Tensor:
        parts = list(parts)
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def run(self, x: Tensor, given: State) -> list[_Piece]:
        """Go forward, piece by piece, and hand each on."""
        links, rnn = self.sharded.links, self.sharded.rnn
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
            return tuple(s[:, 0] for s in self.sharded.rnn._zeros(1, part))
        return self.sharded.rnn._zeros(part.shape[self.dim], part)

    def _run_piece(self, rnn: Recurrent, x: Tensor, before: State, wanted: bool) -> _Piece:
        with torch.set_grad_enabled(self.gradient):
            x = x.requires_grad_(wanted and self.gradient)
            before = tuple(s.detach().requires_grad_(self.gradient) for s in before)
            if not self._steps(x):
                return _Piece(x, before, x.new_empty(*x.shape[:-1], before[0].shape[-1]), before)
            hidden = before if rnn.mode == "LSTM" else before[0]
            with _Divided(rnn, len(self.batches)):
                outputs, after = rnn(x, hidden)
        return _Piece(x, before, outputs, after if isinstance(after, tuple) else (after,))

    def back(
        self, pieces: list[_Piece], outputs: Gradient, final: Sequence[Gradient], own: list[Tensor]
    ) -> tuple[Gradient, list[Gradient], list[Gradient]]:
        """Go backward: the gradients of this rank's inputs, of the initial state, of parameters."""
        links, way = self.sharded.links, self.sharded.way
        self.sharded.report = report = RankReport(way)
        whole = outputs is not None and self.cut(outputs, self.dim)
        seeds: list[Gradient] = list(whole) if whole else [None] * len(pieces)
        totals: list[Gradient] = [None] * len(own)
        inputs: list[Gradient] = []
        begun: list[State] = []
        last, first = links.rank == links.size - 1, links.rank == 0

        def through(j: int, ends: State) -> State:
            x, before = self._through(pieces[j], seeds[j], ends, own, totals)
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
            mine: Any = UNREAD if first else self._affine(pieces, seeds)
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

    def _ends(self, j: int, piece: _Piece, final: Sequence[Gradient]) -> State:
        """The gradients of the final state that the caller gives."""
        return tuple(
            torch.zeros_like(s) if g is None else self.cut(g, 1)[j]
            for g, s in zip(final, piece.after, strict=True)
        )

    def _through(
        self,
        piece: _Piece,
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

    def _affine(self, pieces: list[_Piece], seeds: list[Gradient]) -> Any:
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
        rnn = self.sharded.rnn
        asked = (rnn.memory, rnn.backward, rnn.schedule)
        return self.x.device.type == "cpu" and rnn.mode != "LSTM" and asked == (None, None, None)

    def _in_turn(self, piece: _Piece, ends: list[State]) -> list[Tensor]:
        return [self._sweep(piece, None, end) for end in ends]

    def _side_by_side(self, piece: _Piece, ends: list[State]) -> list[Tensor]:
        found = []
        for start in range(0, len(ends), _SIDE_BY_SIDE):
            rows = ends[start : start + _SIDE_BY_SIDE]
            some = [torch.stack(parts) for parts in zip(*rows, strict=True)]
            before = torch.autograd.grad(
                piece.after, piece.before, some, retain_graph=True, is_grads_batched=True
            )
            found += [self._flat(state) for state in zip(*before, strict=True)]
        return found

    def _sweep(self, piece: _Piece, seed: Gradient, ends: State) -> Tensor:
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
        totals[:] = _added_up(self.sharded.links, parts)


def _gradients(
    piece: _Piece, seed: Gradient, ends: State, wanted: Sequence[Tensor], *, keep: bool = False
) -> Sequence[Gradient]:
    roots: Any = [*piece.after, *([] if seed is None else [piece.outputs])]
    seeds = [*ends, *([] if seed is None else [seed])]
    return torch.autograd.grad(roots, wanted, seeds, retain_graph=keep, allow_unused=True)


def _added_up(links: Links, parts: list[Tensor]) -> list[Tensor]:
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


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, given: int, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        state, own = rest[:given], list(rest[given:])
        pieces = call.run(x, state)
        ctx.call, ctx.pieces, ctx.own, ctx.given = call, pieces, own, given
        links = call.sharded.links
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
