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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.errors import CellError
from retrograde.execute.captured import foreign_tensors
from retrograde.execute.cell import Core, as_leaf
from retrograde.execute.inputs import Inputs
from retrograde.execute.ranges import Emit, Gradients, RangeCore, Tape
from retrograde.execute.replay import Snapshot
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
    """A tape that is an autograd graph, of one call or, of a cell, of as many as there are steps.

    Attributes:
        calls: the leaves of every call.
        state: the leaves that the range begins with.
        output_edges: where the outputs of every call are in the graph.
        state_edges: where the state after the range is.
    """

    calls: list[Tensors]
    state: Tensors
    output_edges: list[list[GradientEdge | None]]
    state_edges: list[GradientEdge | None]


def pieces(core: Core, start: int, stop: int) -> list[tuple[int, int]]:
    """The calls that a range of steps takes."""
    return [(start, stop)] if core.fused else [(k, k + 1) for k in range(start, stop)]


def joins(core: Core) -> bool:
    """Whether steps can be recorded as one graph: not if they change what they depend on."""
    return core.fused or not (core.ambient.sources or core.ambient.buffers)


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
    return [s.detach() for s in state]


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
    mark = torch._C._autograd._get_sequence_nr()
    calls: list[Tensors] = []
    edges: list[list[GradientEdge | None]] = []
    with torch.enable_grad(), core.recording():
        first = after = [as_leaf(t) for t in state]
        for a, b in pieces(core, start, stop):
            x = [
                t.detach().requires_grad_(wanted)
                for t, wanted in zip(inputs[window(core, a, b)], inputs.differentiable, strict=True)
            ]
            outputs, after = core(x, after)
            calls.append(x)
            edges.append([_edge(y) for y in outputs])
            if emit is not None:
                emit(a, b, outputs)
            del outputs
    state_edges = [_edge(t) for t in after]
    if not core.fused:
        roots = [edge for call in (*edges, state_edges) for edge in call if edge is not None]
        known = {id(t) for x in (*calls, first) for t in x}
        _check_leaves(core, roots, mark, known, range(start, stop))
    return Graph(
        start=start,
        stop=stop,
        inputs=calls[0],
        wanted=[t.requires_grad for t in calls[0]],
        passes=[edge is not None for edge in state_edges],
        calls=calls,
        state=first,
        output_edges=edges,
        state_edges=state_edges,
        state_after=[t.detach() for t in after],
        ambient_after=core.ambient.capture(),
    )


def backpropagate(core: Core, tape: Tape, gradients: Gradients) -> None:
    """Backpropagate the steps of a tape, collect their gradients, and use the tape up."""
    if isinstance(core, RangeCore):
        core.backpropagate(tape, gradients)
        return
    assert isinstance(tape, Graph)
    calls = pieces(core, tape.start, tape.stop)
    roots: list[GradientEdge] = []
    seeds: Tensors = []

    def seed(edge: GradientEdge | None, gradient: Gradient) -> None:
        if edge is not None and gradient is not None:
            roots.append(edge)
            seeds.append(gradient)

    if tape.start > 0 and any(alias is not None for alias in core.aliases):
        for alias, part in zip(core.aliases, gradients.of_outputs(tape.start - 1), strict=True):
            if alias is not None:
                seed(_edge(tape.state[alias]), part)
    for (a, b), edges in zip(calls, tape.output_edges, strict=True):
        parts = gradients.outputs if core.sums else gradients.of_outputs(window(core, a, b))
        for edge, alias, part in zip(edges, core.aliases, parts, strict=True):
            if alias is None or b < tape.stop or b == gradients.length:
                seed(edge, part)
    for edge, gradient in zip(tape.state_edges, gradients.states, strict=True):
        seed(edge, gradient)
    begun = _begun(gradients.parameters, len(calls))
    for target, total in zip(core.targets, begun, strict=True):
        seed(_edge(target), total)

    leaves = [t for x in (*tape.calls, tape.state) for t in x if t.requires_grad]
    found: Sequence[Gradient] = [None] * (len(leaves) + len(core.targets))
    if roots:
        with gradients.outside:
            wanted = [*leaves, *core.targets]
            found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    shares = iter(found)
    each = [[next(shares) if t.requires_grad else None for t in x] for x in tape.calls]
    for (a, b), share in reversed(list(zip(calls, each, strict=True))):
        gradients.take_inputs(window(core, a, b), share)
    gradients.states = [next(shares) if s.requires_grad else None for s in tape.state]
    _accumulate(gradients.parameters, begun, list(shares), core.parameters)


def _begun(totals: list[Gradient], calls: int) -> list[Gradient]:
    """What autograd is to add the parameters' gradients of several calls to, one after the other
    as ordinary autograd would; a share of one call is added afterwards."""
    if calls == 1:
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

    Tensors of the caller are passed to its methods and never kept.
    """

    core: Core
    actions: Schedule | tuple[Action, ...]
    length: int
    done: int = 0
    position: int = 0
    state: Tensors = field(default_factory=list)
    stored: dict[int, tuple[Tensors, Snapshot]] = field(default_factory=dict)
    tapes: list[Tape] = field(default_factory=list)
    cuts: list[int] | None = None

    def forward(self, inputs: Inputs, state: Tensors, emit: Emit | None) -> Tensors:
        """Perform all that precedes the first ``Backward``; return the state after all steps."""
        self.clear()
        self.done, self.position, self.state = 0, 0, [s.detach() for s in state]
        while not isinstance(self.actions[self.done], Backward):
            self._perform(inputs, emit, None)
        after, self.state = self.state, []
        return after

    def backward(self, inputs: Inputs, gradients: Gradients) -> None:
        """Perform the rest, from the first ``Backward`` on."""
        while self.done < len(self.actions):
            self._perform(inputs, None, gradients)
        self.state = []

    def clear(self) -> None:
        """Let go of all that is held."""
        self.stored, self.tapes, self.state = {}, [], []

    def _perform(self, inputs: Inputs, emit: Emit | None, gradients: Gradients | None) -> None:
        action: Any = self.actions[self.done]
        self.done += 1
        match action:
            case Advance(start) if isinstance(self.core, RangeCore):
                self._advance_far(self.core, inputs, start, emit)
            case Advance(start, stop):
                self.state = advance(self.core, inputs, start, stop, self.state, emit)
                self.position = stop
            case Store(at):
                self.stored[at] = (self.state, self.core.ambient.capture())
            case Record(start, stop):
                for a, b in self._tapes(start, stop):
                    tape = record(self.core, inputs, a, b, self.state, emit)
                    self.tapes.append(tape)
                    self.state, self.position = tape.state_after, b
            case Load(at):
                self.state, ambient = self._kept(at)
                self.core.ambient.restore(ambient)
                self.position = at
            case Free(at):
                del self.stored[at]
            case Backward(start, _):
                assert gradients is not None
                self.state = []
                while self.tapes and self.tapes[-1].start >= start:
                    backpropagate(self.core, self.tapes.pop(), gradients)

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
        if not joins(self.core):
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
            return self.stored[at]
        tape = next(tape for tape in reversed(self.tapes) if tape.stop == at)
        return tape.state_after, tape.ambient_after
