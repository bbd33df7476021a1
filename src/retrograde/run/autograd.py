"""The one ``autograd.Function``: a whole recurrence as a single node of the caller's graph.

Its forward pass runs the first part of a schedule and its backward pass the rest. Between the two,
only what the schedule keeps is held. Autograd itself saves the inputs and the initial state, and so
detects a write to one of them in the meantime (rule 6). Of the parameters, only those with a
gradient are checked, since a cell may refer to a whole model and use a part. A second backward pass
(``retain_graph=True``) runs the schedule again from its start. So does a pass after one that
raised.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograde.errors import CellError, RetrogradeError
from retrograde.replay.surroundings import muted_hooks, version
from retrograde.replay.switches import autocast_as_now
from retrograde.replay.trees import Tensors
from retrograde.run.autograd_core import AutogradCore
from retrograde.run.core import Core, Gradients, discard, window
from retrograde.run.executor import Run
from retrograde.run.layout import NOTHING, ROWS, Inputs, Layout, OneByOne, Straight, steps_of
from retrograde.run.states import is_real, with_attributes
from retrograde.run.transforms import no_forward_mode, refuse_batches, uncompiled
from retrograde.schedule import Schedule
from retrograde.torch_private import will_run

_OTHERS = 5  # the number of the node's arguments before the tensors
_NO_SECOND_ORDER = (
    "the gradient of this budgeted recurrence cannot itself be differentiated: expected "
    "create_graph=False; for second derivatives use backward=None, memory=None and "
    "schedule=None (ordinary BPTT)"
)


def run_schedule(
    core: Core, schedule: Schedule, inputs: Tensors, state: Tensors, layout: Layout | None = None,
    *, stand_ins: Tensors | None = None,
) -> tuple[Tensors, Tensors]:  # fmt: skip
    """Run a recurrence so that ``schedule`` computes its gradient. Return the outputs and the state
    after the last step. ``stand_ins`` are given by a rehearsal: what receives the parameters'
    gradients. Its reruns are not compared, and it does not count as a pass of the core."""
    layout = layout or Straight(schedule.length, core.fused)
    prints = core.prints(schedule.length) if stand_ins is None else None
    parameters = core.parameters if stand_ins is None else stand_ins
    run = Run(core, tuple(schedule), schedule.length, prints=prints)
    return _applied(run, layout, inputs, state, parameters)


def _applied(
    run: Run, layout: Layout, inputs: Tensors, state: Tensors, parameters: Tensors,
    done: "Done | None" = None,
) -> tuple[Tensors, Tensors]:  # fmt: skip
    results = _Recurrence.apply(  # type: ignore[no-untyped-call]
        run, layout, len(inputs), len(state), done, *inputs, *state, *parameters
    )
    return list(results[: -run.states or None]), list(results[len(results) - run.states :])


class Begun:
    """What surrounds a call when it begins, and the versions of its tensors, parameters last."""

    def __init__(self, core: Core, state: Tensors, tensors: Sequence[Tensor]) -> None:
        place = core.surroundings.device.type
        self.autocast = autocast_as_now(core.surroundings.device)
        self.casts = torch.is_autocast_enabled(place)
        self.same = [next(i for i, s in enumerate(state) if s is t) for t in state]
        self.before, self.marks = core.surroundings.capture(), core.surroundings.marks()
        self.versions = [version(t) for t in tensors]

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Refuse a forward pass that wrote to its tensors."""
        if self.versions != [version(t) for t in tensors]:
            raise CellError(
                "the cell wrote in place to an input, an initial state or a parameter during the "
                "forward pass: expected them to stay as they are; return new tensors instead"
            )


@dataclass(frozen=True)
class Done:
    """A forward pass that has been performed: its outputs and which of them require a gradient, and
    the state after it."""

    begun: Begun
    outputs: Tensors
    wanted: list[bool]
    after: Tensors


def finish_schedule(
    run: Run, done: Done, inputs: Sequence[Tensors], state: Tensors
) -> tuple[Tensors, Tensors]:
    """As :func:`run_schedule`, for a forward pass that is performed, given each step's inputs."""
    run.actions = tuple(run.actions)  # which is indexed faster
    flat = [t for leaves in inputs for t in leaves if t is not NOTHING]
    layout = OneByOne(run.length, len(flat) // run.length, len(done.outputs) // run.length)
    return _applied(run, layout, flat[::-1], state, run.core.parameters, done)


def run_without_gradient(
    core: Core, inputs: Inputs, state: Tensors, layout: Layout, first_outputs: Tensors | None = None
) -> tuple[Tensors, Tensors]:
    """Run a recurrence and keep nothing for a backward pass. ``first_outputs`` are those of step 0,
    if that has run, and then ``state`` is the state after it."""
    outputs = _Outputs(core, layout)
    if first_outputs is not None:
        outputs.emit(0, 1, first_outputs)
    start = 0 if first_outputs is None else 1
    if isinstance(core, AutogradCore) and not core.fused:
        for k, x in enumerate(steps_of(inputs, start, len(inputs)), start):
            values, state = core(x, state)
            outputs.emit(k, k + 1, values)
    else:
        (state,) = core.advance(inputs, start, [len(inputs)], state, outputs.emit)
    return outputs.tensors, state


class _Outputs:
    """The outputs of all steps, allocated as a whole when the first of them is known."""

    def __init__(self, core: Core, layout: Layout) -> None:
        self.core, self.layout = core, layout
        self.by_rows = core.stepwise and isinstance(layout, Straight)
        self.tensors: Tensors = []
        self.rows: list[Sequence[Tensor]] = []  # some that are cut out of each, from the first on
        self.first = 0
        self.wanted: list[bool] = []  # for each, whether some step's requires a gradient

    def emit(self, start: int, stop: int, values: Tensors, *_: Tensors) -> None:
        if not self.tensors:
            self.tensors = self.layout.allocate(values)
            all_wanted = self.core.settled.sweeps_without_graph or not self.core.stepwise
            self.wanted = [all_wanted] * len(values)
        if not all(self.wanted):
            pairs = zip(self.wanted, values, strict=True)
            self.wanted = [wanted or y.requires_grad for wanted, y in pairs]
        detached = [y.detach() for y in values]
        if not self.by_rows:
            self.layout.put(self.tensors, window(self.core, start, stop), detached)
            return
        if not self.first <= start < self.first + ROWS or not self.rows:
            self.first, self.rows = start, [t[start : start + ROWS].unbind() for t in self.tensors]
        for places, value in zip(self.rows, detached, strict=True):
            places[start - self.first].copy_(value)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, layout: Layout, n_inputs: int, n_state: int, done: Done | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        core, ctx.run = run.core, run
        ctx.n_inputs, ctx.layout = n_inputs, layout
        inputs, state = list(tensors[:n_inputs]), list(tensors[n_inputs : n_inputs + n_state])
        held: Tensors = []
        if done is None:
            begun = Begun(core, state, tensors)
            outputs = _Outputs(core, layout)
            outputs.tensors = held = core.room(layout.read(inputs))
            with begun.autocast:
                after = run.forward(layout.read(inputs, held), state, outputs.emit)
            begun.check(tensors)
            done = Done(begun, outputs.tensors, outputs.wanted, after)
        ctx.begun, ctx.fresh = done.begun, True
        core.surroundings.cut()
        versions, others = done.begun.versions, n_inputs + n_state
        ctx.versions = versions[len(versions) - len(tensors[others:]) :]
        ctx.n_held = len(held)
        ctx.save_for_backward(*held, *inputs, *state)
        wanted = done.wanted or [True] * len(done.outputs)
        wanted = [*wanted, *(t.requires_grad or not core.stepwise for t in done.after)]
        results = (*done.outputs, *(with_attributes(t.detach(), t) for t in done.after))
        pairs = zip(results, wanted, strict=True)
        ctx.mark_non_differentiable(
            *(t for t, is_wanted in pairs if not (is_wanted and is_real(t)))
        )
        return results

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_batches(grads)
        if torch.is_grad_enabled():
            raise RetrogradeError(_NO_SECOND_ORDER)
        saved = ctx.saved_tensors  # read once: hooks that recompute them then do so once
        held, saved = saved[: ctx.n_held], saved[ctx.n_held :]
        inputs, state = list(saved[: ctx.n_inputs]), list(saved[ctx.n_inputs :])
        run, layout, begun = ctx.run, ctx.layout, ctx.begun
        parameters = run.core.parameters
        needs = ctx.needs_input_grad[_OTHERS:]
        read = layout.read(inputs, held)
        count = len(grads) - run.states
        wanted = [x if needed else None for x, needed in zip(inputs, needs, strict=False)]
        eager, device = run.core.fused, run.core.surroundings.device
        casts = begun.casts or torch.is_autocast_enabled(device.type)
        gradients = Gradients(
            outputs=grads[:count],
            states=list(grads[count:]),
            inputs=[torch.empty_like(x) if eager and x is not None else None for x in wanted],
            wanted=wanted if layout.whole else (),
            parameters=run.core.totals(),
            length=run.length,
            layout=layout,
            read=read,
            outside=autocast_as_now(device) if casts else nullcontext(),
            asked=[will_run(node) for node, _ in ctx.next_functions[len(saved) :]],
        )
        with begun.marks.as_then(), begun.autocast, muted_hooks([*parameters, *state]):
            try:
                if not ctx.fresh:
                    with run.without_trace():
                        run.core.surroundings.restore(begun.before)
                        run.forward(read, [state[i] for i in begun.same], discard)
                ctx.fresh = False
                run.backward(read, gradients)
                if run.prints is not None:
                    run.core.complete()
            except BaseException as error:
                run.clear()
                if type(error) is RetrogradeError:  # a changed parameter is the better reason
                    _check_unchanged(parameters, ctx.versions, [*parameters])
                raise
        _check_unchanged(parameters, ctx.versions, gradients.parameters)
        flat = [*gradients.inputs, *gradients.states, *gradients.parameters]
        kept = (g if needed else None for g, needed in zip(flat, needs, strict=True))
        return *(None,) * _OTHERS, *kept

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RetrogradeError(no_forward_mode())


def _check_unchanged(parameters: Tensors, versions: list[int], totals: list[Tensor | None]) -> None:
    """Refuse parameters that changed: a recomputation with them gives a wrong gradient (rule 6)."""
    for p, before, gradient in zip(parameters, versions, totals, strict=True):
        if gradient is not None and version(p) != before:
            raise RetrogradeError(
                f"a parameter of shape {tuple(p.shape)} has been modified by an inplace operation "
                "between the forward pass and the backward pass, which recomputes with it: "
                "expected it to stay as it was; call backward() before optimizer.step()"
            )
