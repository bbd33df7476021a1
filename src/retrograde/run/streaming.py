"""A schedule from the first step to the gradients: algorithm 2 of Gruslys et al. (2016), streamed.

Inputs are read and losses computed a step, or a range of steps, at a time; no output is kept. The
caller has no graph, so the forward pass and the backward pass are one call. Its gradients are
handed over at the very end, all or none. So an exception at any step leaves every ``.grad``
unchanged.

The gradients go through one ``autograd.Function``: they accumulate, and hooks see them once and
whole. Gradients continue into the graph of a state, an input or a captured tensor that is not a
leaf, as in an ordinary backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from retrograde.errors import CellError
from retrograde.replay.surroundings import muted_hooks, version
from retrograde.replay.switches import autocast_as_now
from retrograde.replay.trees import Tensors
from retrograde.run.arriving import OpenEnd
from retrograde.run.core import Core, Gradients
from retrograde.run.executor import Run
from retrograde.run.layout import Straight
from retrograde.run.sources import Stream
from retrograde.run.states import with_attributes
from retrograde.schedule import Schedule
from retrograde.schedule.schedule import forward_ranges

Gradient = Tensor | None
#: Called with the step, or the range of steps, and the gradient of its input; later steps first.
TakeInput = Callable[[Any, Any], object]
#: Called with the number of steps of work that are done, and the number in all. While nobody knows
#: where the sequence ends, the latter is that of the steps that are done.
Progress = Callable[[int, int], object]


def run_stream(
    core: Core, stream: Stream, schedule: Schedule | OpenEnd, state: Tensors,
    take_input: TakeInput | None = None, progress: Progress | None = None,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """Run a recurrence with its loss, backpropagate it, and accumulate the gradients. Returns the
    sum of all losses in double precision, and the state after the last step. Raises CellError if a
    property of the core that was found at one step does not hold at another."""
    device, end = core.surroundings.device, None
    inputs, counter = stream, None
    if isinstance(schedule, OpenEnd):
        end, schedule = schedule, Schedule.from_actions((), length=1)
    if progress is not None:
        counter = _Counter(progress, 0 if end else _work(schedule))
        inputs = replace(stream, reading=counter.reading)
    total = torch.zeros((), dtype=torch.float64, device=device)
    mine = [*state, *core.parameters, *(t for t in stream.source.trained if t is not None)]
    versions, marks = [version(t) for t in mine], core.surroundings.marks()
    length = len(stream) if end is None else schedule.length
    run = Run(core, schedule, length, prints=core.prints(length))

    def emit(start: int, stop: int, values: Tensors, *_: Tensors) -> None:
        total.add_(values[0].detach())

    with autocast_as_now(device), muted_hooks([*core.parameters, *state]):
        if end is None:
            after = run.forward(inputs, state, emit)
        else:
            after = end.sweep(run, inputs, state, emit)
            stream, inputs = stream.ended(run.length), inputs.ended(run.length)
            if counter is not None:
                counter.work = _work(cast(Schedule, run.actions))
        gradients = _Streamed(
            outputs=[torch.ones((), dtype=torch.float64, device=device)],
            states=[None] * len(after),
            inputs=[None] * (len(stream.source.trained) + 1),
            wanted=stream.source.trained,
            parameters=core.totals(),
            length=len(stream),
            layout=Straight(len(stream), core.fused),
            stream=stream,
            take=take_input,
            counter=counter,
        )
        core.surroundings.cut()
        with marks.as_then():
            run.backward(inputs, gradients)
            core.complete()
    if versions != [version(t) for t in mine]:
        raise CellError(
            "a parameter, an initial state or an input was written to in place during the call: "
            "expected them to stay as they are; return new tensors instead"
        )
    _hand_over(core, stream, state, gradients)
    return total, [with_attributes(t.detach(), t) for t in after]


def _work(schedule: Schedule) -> int:
    """Return the number of forward and backward steps."""
    starts, stops = forward_ranges(schedule)
    return int((stops - starts).sum()) + schedule.length


def _hand_over(core: Core, stream: Stream, state: Tensors, gradients: "_Streamed") -> None:
    """Accumulate the gradients, and pass them on to the graphs of non-leaf tensors."""
    flat = [*gradients.states, *gradients.parameters, *gradients.inputs[:-1]]
    if all(g is None for g in flat):
        raise CellError("no step has a loss: expected a scalar tensor for at least one")
    owners: Sequence[Gradient] = [*state, *core.parameters, *stream.source.trained]
    wanted = [t is not None and t.requires_grad for t in owners]
    tensors = [t for t, is_wanted in zip(owners, wanted, strict=True) if is_wanted]
    grads = [g for g, is_wanted in zip(flat, wanted, strict=True) if is_wanted]
    gradients.states, gradients.parameters, gradients.inputs = [], [], []
    del flat  # BUDGET: what nothing else refers to becomes .grad without a copy
    if tensors:
        with torch.enable_grad():
            _HandOver.apply(grads, *tensors).backward()  # type: ignore[no-untyped-call]


class _HandOver(torch.autograd.Function):
    """A scalar whose gradients are already computed."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Gradient], *tensors: Tensor) -> Tensor:
        ctx.found = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        result = (None, *ctx.found)
        ctx.found.clear()
        return result


@dataclass
class _Streamed(Gradients):
    """Gradients whose input gradients are given away, call by call."""

    stream: Stream = field(kw_only=True)
    take: TakeInput | None = field(kw_only=True)
    counter: "_Counter | None" = field(kw_only=True)
    layout: Straight

    def take_inputs(self, index: int | slice, shares: list[Gradient]) -> None:
        super().take_inputs(index, shares)
        if self.take is not None:
            unflatten = self.stream.source.structure.unflatten
            if not isinstance(index, slice):
                self.take(index, unflatten(shares[:-1]))
            elif self.layout.fused:
                self.take(range(index.start, index.stop), unflatten(shares[:-1]))
            else:  # steps recorded together
                for k in reversed(range(index.start, index.stop)):
                    of_step = [None if s is None else s[k - index.start] for s in shares[:-1]]
                    self.take(k, unflatten(of_step))
        if self.counter is not None:
            self.counter.tick(index.stop - index.start if isinstance(index, slice) else 1)


@dataclass
class _Counter:
    """Reports progress. A step counts as done when the next step is read, or when a gradient
    arrives."""

    progress: Progress
    work: int
    done: int = 0
    pending: int = 0

    def reading(self, steps: int) -> None:
        """Note that steps are read, which will run."""
        self.tick(0)
        self.pending = steps

    def tick(self, steps: int) -> None:
        """Count steps that were backpropagated, and the steps read before, which have run."""
        steps += self.pending
        self.pending = 0
        if steps:
            self.done += steps
            self.progress(self.done, max(self.done, self.work))
