"""A core that ordinary autograd differentiates, a range at a time.

The range is recorded from detached leaves, and one ``torch.autograd.grad`` consumes its graph. That
costs a graph, its leaves, and a copy of every gradient's share to its destination. It works for any
function of torch's.

Input and state gradients of a core called step by step are bitwise those of ordinary autograd (rule
1). For that, contributions to the gradient of a state must be added in the same order. Where an
output *is* the state (``y is h``), ordinary autograd adds the output's gradient first, before those
from within the next step. So that gradient enters at a leaf of the range that consumes the state,
and not in the range that produced it.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.errors import CellError
from retrograde.replay.trees import Tensors
from retrograde.run.core import Core, Emit, Gradient, Gradients, Tape, as_leaf, window
from retrograde.run.foreign import LeafWatch
from retrograde.run.layout import Inputs, leaves_of, rows_of, steps_of
from retrograde.run.prints import Prints
from retrograde.run.settled import operations
from retrograde.run.states import each_once, entry, is_real, renewed, renewed_apart
from retrograde.schedule import Action, Backward, Load
from retrograde.torch_private import add_each, gradients_of, next_node

_NOTHING = torch.empty(0, device="cpu")


@dataclass
class Graph(Tape):
    """A tape that is an autograd graph, of one call or, for a cell, of several steps."""

    state: Tensors  # the leaves that the range begins with
    entries: list[GradientEdge | None]  # where the first step reads them
    output_edges: list[GradientEdge | None]  # one edge for the outputs of several steps
    state_edges: list[GradientEdge | None]


class AutogradCore(Core):
    """A core that is a function of inputs and state: of one step, or of a range if it is fused."""

    aliases: tuple[int | None, ...]  # for each output, the part of the state that it is, or None
    made = 0  # leaves that step 0 makes itself
    per_call = 1  # steps of a call, if it is not fused
    numbers = False  # whether the state holds numbers

    @property
    def stepwise(self) -> bool:  # type: ignore[override]
        return not self.fused

    @property
    def watched(self) -> bool:
        """Whether to check that steps use only known parameters."""
        return not self.fused

    @property
    def targets(self) -> Tensors:
        """The parameters' counterparts in the graph of a recorded range."""
        return self.parameters

    def recording(self) -> AbstractContextManager[Any]:
        """Return the context in which a range is recorded."""
        return nullcontext()

    def totals(self) -> list[Gradient]:
        return [None] * len(self.parameters)

    @abstractmethod
    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Run one step, or a fused range: outputs, and the state after it."""

    def rerun(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """As a call, for steps that ran before, and were checked then."""
        return self(inputs, state)

    def _run_for(
        self, emit: Emit | None
    ) -> "Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]":
        """Return how to run steps: those that run again were checked when they first ran."""
        return self.rerun if emit is None or isinstance(emit, Prints) else self

    @abstractmethod
    def next_state(self, inputs: Tensors, state: Tensors) -> Tensors:
        """As a call, but return the state only; work for the outputs alone may be skipped."""

    def try_first(self, inputs: Inputs, state: Tensors) -> object:
        """Run the trial step that precedes every call, and return what it holds."""
        return None

    @property
    def records_ranges(self) -> bool:
        return self.fused or not self.surroundings.moves

    def cuts(self, actions: Iterable[Action], length: int) -> Sequence[int]:
        if self.fused or not self.records_ranges:
            return super().cuts(actions, length)
        loaded = {a.at for a in actions if isinstance(a, Load)}
        return sorted(loaded | {a.start for a in actions if isinstance(a, Backward)})

    def advance(
        self, inputs: Inputs, start: int, stops: Sequence[int], state: Tensors, emit: Emit | None
    ) -> list[Tensors]:
        states = []
        for stop in stops:
            if self.fused:
                with torch.no_grad():
                    if emit is None:
                        state = self.next_state(inputs[start:stop], state)
                    else:
                        outputs, state = self(inputs[start:stop], state)
                        emit(start, stop, outputs)
            else:
                state = self._sweep(inputs, start, stop, state, emit)
            kept = partial(renewed_apart, linked=self.settled.sweeps_without_graph)
            start, state = stop, each_once(kept, state)
            states.append(state)
        return states

    def _sweep(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> Tensors:
        """Run steps as when they are recorded, where the graph of each ends with it. They run
        without one, if that is known to give the same bits."""
        settled = self.settled
        records = not settled.sweeps_without_graph
        with torch.set_grad_enabled(records):
            for k, x in enumerate(steps_of(inputs, start, stop), start):
                if records and k > start:
                    state = each_once(renewed, state)
                if emit is None:
                    state = self.next_state(x, state)
                    continue
                before = operations()
                outputs, state = self(x, state)
                if records:
                    settled.note(k, operations() - before)
                    if not settled.passes:
                        linked = (t.requires_grad or not is_real(t) for t in (*outputs, *state))
                        settled.linked &= all(linked)
                emit(k, k + 1, outputs, state)
                del outputs  # BUDGET: before the next step runs
        return state

    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> Tape:
        mark = next_node()
        joint, last = not self.fused and stop - start > 1, stop == len(inputs)
        with torch.enable_grad(), self.recording():
            x = leaves_of(inputs, window(self, start, stop))
            leaves = self.fused or self.per_call > 1  # a compiled block makes leaves of states
            pairs = each_once((lambda t: (as_leaf(t),) * 2) if leaves else entry, state)
            state_leaves, entering = [leaf for leaf, _ in pairs], [s for _, s in pairs]
            del state, pairs  # BUDGET: the states given, of which leaves are in use now
            entries, watch = [_edge(s) for s in entering], None
            if self.watched:
                watch = LeafWatch([*x, *state_leaves, *self.targets], self.targets, mark)
            if joint:
                steps = rows_of(inputs, x, stop - start)
                outputs, after = self._record_steps(steps, entering, start, last, emit, watch)
            else:
                passed = x if self.fused else [t[...] if t.requires_grad else t for t in x]
                before = operations()
                outputs, after = self._run_for(emit)(passed, entering)
                if not self.fused:
                    self.settled.note(start, operations() - before)
                if emit is not None:
                    emit(start, stop, outputs, after)
                if watch is not None:
                    _check_known(self, start, watch.foreign([*outputs, *after]))
            output_edges, state_edges = [_edge(y) for y in outputs], [_edge(t) for t in after]
            del outputs, watch  # BUDGET: outputs that the graph does not save
            after = each_once(Tensor.detach if self.fused else renewed, after)
        return Graph(
            start=start,
            stop=stop,
            inputs=x,
            wanted=[t.requires_grad for t in x],
            passes=[edge is not None for edge in state_edges],
            state=state_leaves,
            entries=entries,
            output_edges=output_edges,
            state_edges=state_edges,
            state_after=after,
            ambient_after=self.surroundings.capture(),
        )

    def _record_steps(
        self, steps: Iterable[Tensors], state: Tensors, start: int, last: bool,
        emit: Emit | None, watch: LeafWatch | None,
    ) -> tuple[Tensors, Tensors]:  # fmt: skip
        """Run the steps of a range in sequence; return a root for each output, and the state. An
        output that is the state is left out at the last step, unless that is the ``last`` of all.
        """
        by_step, run, settled = [], self._run_for(emit), self.settled
        for k, x in enumerate(steps, start):
            before = operations()
            outputs, state = run(x, state)
            settled.note(k, operations() - before)
            if emit is not None:
                emit(k, k + 1, outputs, state)
            if watch is not None:
                _check_known(self, k, watch.foreign([*outputs, *state]))
            by_step.append(outputs)
        return [
            _Join.apply(*(ys if alias is None or last else ys[:-1]))  # type: ignore[no-untyped-call]
            for ys, alias in zip(zip(*by_step, strict=True), self.aliases, strict=True)
        ], state

    def backpropagate(self, tape: Tape, gradients: Gradients) -> None:
        assert isinstance(tape, Graph)
        joint = not self.fused and tape.stop - tape.start > 1
        index = window(self, tape.start, tape.stop)
        # Autograd adds the gradients of several steps to these totals, one after another, as it
        # ordinarily does. The share of a single call is added afterwards.
        begun = [
            t if joint and t is not None and t.layout == torch.strided else None
            for t in gradients.parameters
        ]
        seeded = _seeded(self, tape, gradients, index)
        totals = zip(self.targets, begun, strict=True)
        seeded += ((_edge(t), total) for t, total in totals if total is not None)
        # Edges without a gradient are freed before any gradient is allocated.
        tape.output_edges, tape.state_edges, tape.entries = [], [], []
        entering = [(edge, g) for edge, g in seeded if edge is not None and g is not None]
        del seeded  # BUDGET: gradients that go nowhere
        roots, seeds = [edge for edge, _ in entering], [g for _, g in entering]

        target_ids = {id(t) for t in self.targets}
        state = {id(s): s for s in tape.state if s.requires_grad and id(s) not in target_ids}
        leaves = [*(t for t in tape.inputs if t.requires_grad), *state.values()]
        asked = gradients.asked or [True] * len(self.targets)
        wanted = [*leaves, *compress(self.targets, asked)]
        computed: Sequence[Gradient] = [None] * len(wanted)
        if roots and wanted:
            with gradients.outside:
                computed = gradients_of(roots, wanted, seeds)
        shares = iter(computed)
        gradients.take_inputs(
            index, [next(shares) if x.requires_grad else None for x in tape.inputs]
        )
        # Where parts of the state are one tensor, the first part gets its gradient.
        gradients.states = [
            next(shares) if state.pop(id(s), None) is not None else None for s in tape.state
        ]
        of_parameters = [next(shares) if is_asked else None for is_asked in asked]
        _accumulate(gradients.parameters, begun, of_parameters, self.parameters)


class _Join(torch.autograd.Function):
    """One root for the outputs of several steps, without the memory of a stack. Their gradient,
    stacked, is the node's attribute ``gradient``. It passes first of all, as a stack's does."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.real = [y.is_floating_point() or y.is_complex() for y in outputs]
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Gradient, ...]:
        pairs = zip(ctx.real, ctx.gradient, strict=False)  # the last part may go to another range
        return tuple(g if real else None for real, g in pairs)


def _seeded(
    core: AutogradCore, tape: Graph, gradients: Gradients, index: int | slice
) -> list[tuple[GradientEdge | None, Gradient]]:
    """Return the edges where a range's given gradients enter its graph. Several contributions to
    one tensor are added as ordinary autograd adds them: a state's first, then the outputs'. The
    last output was joined last."""
    steps = tape.stop - tape.start
    joint = not core.fused and steps > 1
    seeded = [*zip(tape.state_edges, gradients.states, strict=True)]
    if tape.start > 0 and any(alias is not None for alias in core.aliases):
        output_gradients = gradients.of_outputs(tape.start - 1)
        for alias, part in reversed([*zip(core.aliases, output_gradients, strict=True)]):
            if alias is not None:
                seeded.append((tape.entries[alias], part))
    output_gradients = gradients.outputs if core.output_is_total else gradients.of_outputs(index)
    outputs = [*zip(tape.output_edges, core.aliases, output_gradients, strict=True)]
    for edge, alias, part in reversed(outputs):
        if joint and part is not None and edge is not None:
            node: Any = edge.node
            part = part.expand(steps) if core.output_is_total else part
            node.gradient = part if isinstance(part, tuple) else part.unbind()
            seeded.append((edge, _NOTHING))
        elif alias is None or tape.stop == gradients.length:
            seeded.append((edge, part))
    return seeded


def _accumulate(
    totals: list[Gradient], begun: list[Gradient], shares: list[Gradient], parameters: Tensors
) -> None:
    """Add one tape's parameter gradients, in the order in which ordinary autograd adds them."""
    old, new = [], []
    for i, (share, start) in enumerate(zip(shares, begun, strict=True)):
        total = totals[i]
        if share is None or share is total:
            continue
        if share.layout != torch.strided:  # such as that of torch.nn.Embedding(sparse=True)
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
        add_each(old, new)


def _edge(t: Tensor) -> GradientEdge | None:
    return get_gradient_edge(t) if t.requires_grad else None


def _check_known(core: AutogradCore, step: int, foreign: int) -> None:
    """Refuse a tensor that is new at a later step: its gradient would be lost (rule 5)."""
    if foreign > (core.made if step == 0 else 0):
        raise CellError(
            f"at step {step} the cell uses a tensor that requires a gradient and that it did not "
            f"use at step 0, {core.surroundings.cause()}: expected the same parameters at every "
            "step; pass the cell as an nn.Module that owns them, use them at every step, or name "
            "modules that keep a state in stateful="
        )


def run_ordinary(
    core: AutogradCore, inputs: Tensors, state: Tensors, first_outputs: Tensors | None = None
) -> tuple[Tensors, Tensors]:
    """Run all steps as ordinary autograd records them; return the outputs and the last state.
    ``first_outputs`` are those of step 0, if that has run, and then ``state`` is that after it."""
    if core.fused:
        return core(inputs, state)
    single, outputs = core.per_call == 1, [] if first_outputs is None else [first_outputs]
    cut = (t.unbind() if single else t.split(core.per_call) for t in inputs)
    for x in islice(zip(*cut, strict=True), len(outputs), None):
        y, state = core(list(x), state)
        outputs.append(y)
    join = torch.stack if single else torch.cat
    return [join(ys) for ys in zip(*outputs, strict=True)], state
