"""The one ``autograd.Function``: a whole recurrence as a single node of the caller's graph.

Its forward pass performs the first part of a schedule and its backward pass the rest, so nothing
between the two is held but what the schedule keeps. Inputs, initial state and parameters are saved
through autograd itself, which therefore notices when one of them is written to in the meantime
(rule 6). A second backward pass (``retain_graph=True``) runs the schedule again from its start.
"""

from typing import Any

import torch
from torch import Tensor

from retrograde.errors import CellError, RetrogradeError
from retrograde.execute.cell import Core
from retrograde.execute.executor import Gradients, Run, advance, window
from retrograde.execute.inputs import Held
from retrograde.execute.replay import autocast_as_now, muted_hooks, random_position
from retrograde.schedule import Schedule

__all__ = ["run_schedule", "run_without_gradient"]

Tensors = list[Tensor]


def run_schedule(
    core: Core, schedule: Schedule, inputs: Tensors, state: Tensors
) -> tuple[Tensors, Tensors]:
    """Run a recurrence so that its gradient is computed by ``schedule``.

    Args:
        core: what a step, or a range of steps, is.
        schedule: for exactly as many steps as the inputs have.
        inputs: tensors with time as their first dimension.
        state: the initial state.

    Returns:
        The outputs, with time first, and the state after the last step.
    """
    results = _Recurrence.apply(  # type: ignore[no-untyped-call]
        core, schedule, len(inputs), len(state), *inputs, *state, *core.parameters
    )
    return list(results[: len(core.aliases)]), list(results[len(core.aliases) :])


def run_without_gradient(
    core: Core, length: int, chunk: int, inputs: Tensors, state: Tensors
) -> tuple[Tensors, Tensors]:
    """Run a recurrence and keep nothing for a backward pass.

    Args:
        core: as for :func:`run_schedule`.
        length: the number of steps.
        chunk: the longest range of one call.
        inputs: tensors with time as their first dimension.
        state: the initial state.

    Returns:
        The outputs, with time first, and the state after the last step.
    """
    outputs, held = _Outputs(core, length), Held(inputs)
    for start in range(0, length, chunk):
        state = advance(core, held, start, min(start + chunk, length), state, outputs.emit)
    return outputs.tensors, state


class _Outputs:
    """The outputs of all steps, allocated whole when the first of them is known."""

    def __init__(self, core: Core, length: int) -> None:
        self.core, self.length = core, length
        self.tensors: Tensors = []
        self.differentiable: list[bool] = []

    def emit(self, start: int, stop: int, values: Tensors) -> None:
        if not self.tensors:
            shapes = [y.shape[1:] if self.core.fused else y.shape for y in values]
            self.tensors = [
                y.new_empty((self.length, *shape)) for y, shape in zip(values, shapes, strict=True)
            ]
        index = window(self.core, start, stop)
        for whole, value in zip(self.tensors, values, strict=True):
            whole[index] = value.detach()


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, core: Core, schedule: Schedule, n_inputs: int, n_state: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.counts = (n_inputs, n_state)
        inputs, state, _ = _split(tensors, n_inputs, n_state)
        versions = [t._version for t in tensors]
        device = tensors[0].device
        ctx.autocast = autocast_as_now(device)
        ctx.before = core.ambient.capture()
        position = random_position(device)
        ctx.run = Run(core, tuple(schedule), schedule.length)
        outputs = _Outputs(core, schedule.length)
        with ctx.autocast:
            after = ctx.run.forward(Held(inputs), state, outputs.emit)
        ctx.fresh = True
        if versions != [t._version for t in tensors]:
            raise CellError(
                "the cell wrote in place to an input, an initial state or a parameter during the "
                "forward pass: expected them to stay as they are; return new tensors instead"
            )
        if not core.ambient.draws and position != random_position(device):
            raise CellError(
                "the cell drew random numbers at a later step, but none at step 0: expected it to "
                "draw at every step or at none; draw at step 0 too, and discard what is not used"
            )
        ctx.save_for_backward(*tensors)
        results = (*outputs.tensors, *(t.detach() for t in after))
        ctx.mark_non_differentiable(
            *(t for t in results if not (t.is_floating_point() or t.is_complex()))
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RetrogradeError(
                "the gradient of a budgeted recurrence cannot itself be differentiated: expected "
                "create_graph=False; for second derivatives use memory=None (ordinary BPTT)"
            )
        tensors = ctx.saved_tensors
        inputs, state, parameters = _split(tensors, *ctx.counts)
        run: Run = ctx.run
        count = len(run.core.aliases)
        needs = ctx.needs_input_grad[4:]
        with run.core.ambient.without_trace(), ctx.autocast, muted_hooks(parameters):
            if not ctx.fresh:
                run.core.ambient.restore(ctx.before)
                run.forward(Held(inputs), state, None)
            ctx.fresh = False
            gradients = Gradients(
                outputs=grads[:count],
                states=list(grads[count:]),
                inputs=[
                    torch.empty_like(x) if needed else None
                    for x, needed in zip(inputs, needs, strict=False)
                ],
                parameters=[None] * len(parameters),
                length=run.length,
            )
            run.backward(Held(inputs), gradients)
        found = (*gradients.inputs, *gradients.states, *gradients.parameters)
        return (None,) * 4 + tuple(
            g if needed else None for g, needed in zip(found, needs, strict=True)
        )


def _split(tensors: tuple[Tensor, ...], n: int, m: int) -> tuple[Tensors, Tensors, Tensors]:
    return list(tensors[:n]), list(tensors[n : n + m]), list(tensors[n + m :])
