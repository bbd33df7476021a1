"""Carrying a schedule out: one ``match`` over its actions. It plans nothing.

A :class:`Run` performs the actions up to the first ``Backward`` in the forward pass, and the rest
when the gradient arrives. Ordinary autograd does the differentiating, a range at a time: the range
is recorded from detached leaves, and its graph is consumed by one ``torch.autograd.grad``.

Input and state gradients of a core called step by step are bitwise those of ordinary autograd
(rule 1). For that, contributions to the gradient of a state must be added in the same order: where
an output *is* the state (``y is h``), ordinary autograd adds the output's gradient first, before
those from within the next step. So it is handed to the range that consumes the state, as a root on
that range's own leaf, and not to the range that produced it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.discover.captured import foreign_tensors
from retrograde.discover.surroundings import Snapshot, Trail
from retrograde.errors import CellError
from retrograde.run.core import Core, Emit, Gradients, RangeCore, Tape, as_leaf
from retrograde.run.inputs import Inputs
from retrograde.run.states import Packed, apart, each_once, pack, unpack
from retrograde.schedule import Action, Advance, Backward, Free, Load, Record, Schedule, Store

__all__ = [
    "Run",
    "advance",
    "backpropagate",
    "joins",
    "record",
    "run_ordinary",
    "window",
]

Tensors = list[Tensor]
Gradient = Tensor | None


@dataclass
class Graph(Tape):
    """A tape that is an autograd graph, of one call or, of a cell, of several steps.

    Attributes:
        state: the leaves that the range begins with.
        last: whether it ends with the last step of all.
        output_edges: where the outputs are in the graph, those of several steps being stacked.
        state_edges: where the state after the range is.
    """

    state: Tensors
    last: bool
    output_edges: list[GradientEdge | None]
    state_edges: list[GradientEdge | None]


def pieces(core: Core, start: int, stop: int) -> list[tuple[int, int]]:
    """The calls that a range of steps takes."""
    return [(start, stop)] if core.fused else [(k, k + 1) for k in range(start, stop)]


def joins(core: Core) -> bool:
    """Whether steps can be recorded as one graph: not if they change what they depend on, or if the
    core says what a tape is."""
    apart = isinstance(core, RangeCore) or core.ambient.moves
    return core.fused or not apart


def window(core: Core, start: int, stop: int) -> int | slice:
    """The index of a call's part in a tensor over all steps."""
    return slice(start, stop) if core.fused else start


def advance(
    core: Core, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
) -> Tensors:
    """Run steps ``start`` … ``stop − 1`` and keep nothing but the state after them."""
    if isinstance(core, RangeCore):
        return core.advance(inputs, start, [stop], state, emit)[0]
    with torch.no_grad():
        for a, b in pieces(core, start, stop):
            index = window(core, a, b)
            if emit is None:
                state = core.carry(inputs[index], state)
            else:
                outputs, state = core(inputs[index], state)
                emit(a, b, outputs)
    return each_once(lambda s: apart(s.detach()), state)


def run_ordinary(core: Core, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
    """Run all steps as ordinary autograd would record them: the outputs, the state after them."""
    if core.fused:
        return core(inputs, state)
    outputs = []
    for x in zip(*(t.unbind() for t in inputs), strict=True):
        y, state = core(list(x), state)
        outputs.append(y)
    return [torch.stack(ys) for ys in zip(*outputs, strict=True)], state


def record(
    core: Core, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
) -> Tape:
    """Run a range of steps and keep their internal states."""
    if isinstance(core, RangeCore):
        return core.record(inputs, start, stop, state, emit)
    core.ambient.bar()
    mark = torch._C._autograd._get_sequence_nr()
    joint, last = not core.fused and stop - start > 1, stop == len(inputs)
    with torch.enable_grad(), core.recording():
        x = [
            t.detach().requires_grad_(wanted)
            for t, wanted in zip(
                inputs[slice(start, stop) if joint else window(core, start, stop)],
                inputs.differentiable,
                strict=True,
            )
        ]
        first = each_once(as_leaf, state)
        if joint:
            outputs, after = _record_steps(core, x, first, start, last, emit)
        else:
            outputs, after = core(x, first)
            if emit is not None:
                emit(start, stop, outputs)
        output_edges, state_edges = [_edge(y) for y in outputs], [_edge(t) for t in after]
        del outputs
    if not core.fused:
        roots = [edge for edge in (*output_edges, *state_edges) if edge is not None]
        _check_leaves(core, roots, mark, {id(t) for t in (*x, *first)}, range(start, stop))
    return Graph(
        start=start,
        stop=stop,
        inputs=x,
        wanted=[t.requires_grad for t in x],
        passes=[edge is not None for edge in state_edges],
        state=first,
        last=last,
        output_edges=output_edges,
        state_edges=state_edges,
        state_after=each_once(Tensor.detach, after),
        ambient_after=core.ambient.capture(),
    )


def _record_steps(
    core: Core, leaves: Tensors, state: Tensors, start: int, last: bool, emit: Emit | None
) -> tuple[Tensors, Tensors]:
    """Run the steps of a range, one after the other: their outputs, stacked, and the state.

    An output that is the state is left out at the last step, unless that is the last of all.
    """
    found = []
    for k, x in enumerate(zip(*(t.unbind() for t in leaves), strict=True), start):
        outputs, state = core(list(x), state)
        if emit is not None:
            emit(k, k + 1, outputs)
        found.append(outputs)
    return [
        torch.stack(ys if alias is None or last else ys[:-1])
        for ys, alias in zip(zip(*found, strict=True), core.aliases, strict=True)
    ], state


def backpropagate(core: Core, tape: Tape, gradients: Gradients) -> None:
    """Backpropagate the steps of a tape, collect their gradients, and use the tape up."""
    if isinstance(core, RangeCore):
        core.backpropagate(tape, gradients)
        return
    assert isinstance(tape, Graph)
    steps = tape.stop - tape.start
    joint = not core.fused and steps > 1
    index = slice(tape.start, tape.stop) if joint else window(core, tape.start, tape.stop)
    begun = _begun(gradients.parameters, joint)
    seeded = _seeded(core, tape, gradients, index)
    seeded += zip(map(_edge, core.targets), begun, strict=True)
    # What no gradient goes through is let go of before there is any.
    tape.output_edges, tape.state_edges = [], []
    given = [(edge, g) for edge, g in seeded if edge is not None and g is not None]
    del seeded
    roots, seeds = [edge for edge, _ in given], [g for _, g in given]

    state = {id(s): s for s in tape.state if s.requires_grad}
    leaves = [*(t for t in tape.inputs if t.requires_grad), *state.values()]
    found: Sequence[Gradient] = [None] * (len(leaves) + len(core.targets))
    if roots:
        with gradients.outside:
            wanted = [*leaves, *core.targets]
            found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    shares = iter(found)
    gradients.take_inputs(index, [next(shares) if x.requires_grad else None for x in tape.inputs])
    # Where parts of the state are one tensor, its gradient is the first one's.
    gradients.states = [
        next(shares) if state.pop(id(s), None) is not None else None for s in tape.state
    ]
    _accumulate(gradients.parameters, begun, list(shares), core.parameters)


def _seeded(
    core: Core, tape: Graph, gradients: Gradients, index: int | slice
) -> list[tuple[GradientEdge | None, Gradient]]:
    """Where the gradients that a range is given enter its graph.

    What several of them bring to one tensor is added as ordinary autograd adds it: a state's first,
    then the outputs', of which the last one was stacked last.
    """
    steps = tape.stop - tape.start
    joint = not core.fused and steps > 1
    found = [*zip(tape.state_edges, gradients.states, strict=True)]
    if tape.start > 0 and any(alias is not None for alias in core.aliases):
        parts = gradients.of_outputs(tape.start - 1)
        for alias, part in reversed([*zip(core.aliases, parts, strict=True)]):
            if alias is not None:
                found.append((_edge(tape.state[alias]), part))
    parts = gradients.outputs if core.sums else gradients.of_outputs(index)
    outputs = [*zip(tape.output_edges, core.aliases, parts, strict=True)]
    for edge, alias, part in reversed(outputs):
        if joint and part is not None:
            whole = part.expand(steps) if core.sums else part
            found.append((edge, whole if alias is None or tape.last else whole[:-1]))
        elif alias is None or tape.stop == gradients.length:
            found.append((edge, part))
    return found


def _begun(totals: list[Gradient], joint: bool) -> list[Gradient]:
    """What autograd is to add the parameters' gradients of several steps to, one after the other
    as ordinary autograd would; the share of a single call is added afterwards."""
    if not joint:
        return [None] * len(totals)
    return [t if t is not None and t.layout == torch.strided else None for t in totals]


def _accumulate(
    totals: list[Gradient], begun: list[Gradient], shares: list[Gradient], parameters: Tensors
) -> None:
    """Add one tape's parameter gradients, in the order in which ordinary autograd adds them."""
    old, new = [], []
    for i, (share, start) in enumerate(zip(shares, begun, strict=True)):
        total = totals[i]
        if share is None or share is total:
            continue
        if share.layout != torch.strided:  # as torch.nn.Embedding(sparse=True) gives
            totals[i] = share if total is None else total + share
        elif total is None:
            # A copy, since a gradient may share its memory with another tensor.
            totals[i] = torch.empty_like(parameters[i]).copy_(share)
        elif start is not None:
            total.copy_(share)
        else:
            old.append(total)
            new.append(share)
    if old:
        torch._foreach_add_(old, new)


def _edge(t: Tensor) -> GradientEdge | None:
    return get_gradient_edge(t) if t.requires_grad else None


def _check_leaves(
    core: Core, roots: list[GradientEdge], mark: int, ours: set[int], steps: range
) -> None:
    """Rule 5: a tensor first used at a later step must not lose its gradient in silence."""
    edges = {(p.grad_fn, p.output_nr) for p in core.targets if p.grad_fn is not None}
    leaves, older = foreign_tensors(roots, mark, edges)
    known = ours | {id(p) for p in core.targets}
    if any(id(t) not in known for t in leaves) or older - edges:
        where = f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} … {steps[-1]}"
        raise CellError(
            f"at {where} the cell uses a tensor that requires a gradient and that it did not "
            "use at step 0: expected the same parameters at every step; pass the cell as an "
            "nn.Module that owns them, or use them at every step"
        )


@dataclass
class Run:
    """The state of one execution: what is stored, what is recorded, what is current.

    Tensors of the caller are passed to its methods and never kept. Where ``loads`` is given, the
    states after recorded steps are held only as long as they are current, but for those: pairs of
    the recording's number among the actions and of the state's. Where ``cuts`` is given, in
    ascending order, recordings are divided there.
    """

    core: Core
    actions: Schedule | tuple[Action, ...]
    length: int
    done: int = 0
    position: int = 0
    state: Tensors = field(default_factory=list)
    stored: dict[int, tuple[Sequence[Tensor | Packed], Snapshot]] = field(default_factory=dict)
    tapes: list[Tape] = field(default_factory=list)
    cuts: list[int] | None = None
    loads: frozenset[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        self.trail = Trail(self.core.ambient)

    def forward(self, inputs: Inputs, state: Tensors, emit: Emit | None) -> Tensors:
        """Perform all that precedes the first ``Backward``; return the state after all steps."""
        self.clear()
        self.trail = Trail(self.core.ambient)
        self.done, self.position, self.state = 0, 0, each_once(Tensor.detach, state)
        while not isinstance(self.actions[self.done], Backward):
            self._perform(inputs, emit)
        after, self.state = self.state, []
        return after

    def backward(self, inputs: Inputs, gradients: Gradients) -> None:
        """Perform the rest, from the first ``Backward`` on."""
        for _ in self.retreat(inputs, gradients):
            pass

    def retreat(self, inputs: Inputs, gradients: Gradients) -> Iterator[None]:
        """Perform the rest, and pause after each tape that is backpropagated."""
        self.trail.begin()
        while self.done < len(self.actions):
            match self.actions[self.done]:
                case Backward(start, _):
                    self.done, self.state = self.done + 1, []
                    while self._has_tape(start):
                        backpropagate(self.core, self.tapes.pop(), gradients)
                        if not self._has_tape(start):
                            self._let_go()
                        yield
                case _:
                    self._perform(inputs, None)
        self.state = []

    def _has_tape(self, start: int) -> bool:
        return bool(self.tapes) and self.tapes[-1].start >= start

    def _let_go(self) -> None:
        """Perform what frees states, so that none is held over a pause."""
        while self.done < len(self.actions):
            match self.actions[self.done]:
                case Free(at):
                    del self.stored[at]
                case Backward(start, _) if not self._has_tape(start):
                    pass
                case _:
                    return
            self.done += 1

    def keep(self, at: int, state: Tensors) -> None:
        """Store a state that was not computed here."""
        self.stored[at] = ([t.detach() for t in state], self.core.ambient.capture())

    def clear(self) -> None:
        """Let go of all that is held."""
        self.stored, self.tapes, self.state = {}, [], []

    def _perform(self, inputs: Inputs, emit: Emit | None) -> None:
        action: Any = self.actions[self.done]
        self.done += 1
        match action:
            case Advance(start) if isinstance(self.core, RangeCore):
                self._advance_far(self.core, inputs, start, emit)
            case Advance(start, stop):
                self.state = advance(self.core, inputs, start, stop, self.state, emit)
                self.position = stop
                self.trail.reach(stop)
            case Store(at):
                ours = not isinstance(self.core, RangeCore)
                state = pack(self.state) if ours else self.state
                self.stored[at] = (state, self.core.ambient.capture())
            case Record(start, stop):
                for a, b in self._tapes(start, stop):
                    state, self.state = [*self.state], []
                    tape = record(self.core, inputs, a, b, state, emit)
                    self.tapes.append(tape)
                    self.state, self.position = tape.state_after, b
                    self.trail.reach(b)
                    if self.loads is not None and (self.done - 1, b) not in self.loads:
                        tape.state_after = []
            case Load(at):
                self.state, ambient = self._kept(at)
                self.core.ambient.restore(ambient)
                self.position = at
            case Free(at):
                del self.stored[at]

    def _advance_far(self, core: RangeCore, inputs: Inputs, start: int, emit: Emit | None) -> None:
        """Carry out an ``Advance``, and with it those that only a ``Store`` parts from it."""
        stops = [cast(Advance, self.actions[self.done - 1]).stop]
        while isinstance(self.actions[self.done], Store):
            after = self.actions[self.done + 1]
            if not isinstance(after, Advance):
                break
            stops.append(after.stop)
            self.done += 2
        *between, (self.position, self.state) = zip(
            stops, core.advance(inputs, start, stops, self.state, emit), strict=True
        )
        for at, state in between:
            self.stored[at] = (state, core.ambient.capture())

    def _tapes(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges that a recording is divided into, since they are loaded or used up one by one;
        into steps, where their surroundings have to be put back between them."""
        if self.core.fused:
            return [(start, stop)]
        if self.cuts is None and not joins(self.core):
            return pieces(self.core, start, stop)
        if self.cuts is None:
            found = {
                a.at if isinstance(a, Load) else a.start
                for a in self.actions
                if isinstance(a, Load | Backward)
            }
            self.cuts = sorted(found)
        inside = self.cuts[bisect_right(self.cuts, start) : bisect_left(self.cuts, stop)]
        return list(pairwise([start, *inside, stop]))

    def _kept(self, at: int) -> tuple[Tensors, Snapshot]:
        if at in self.stored:
            state, ambient = self.stored[at]
            return unpack(state), ambient
        tape = next(tape for tape in reversed(self.tapes) if tape.stop == at)
        return tape.state_after, tape.ambient_after
