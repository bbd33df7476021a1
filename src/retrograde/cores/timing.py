"""What the steps of a core take in seconds: a call of each kind, and each further step of it.

The executor's own functions are timed on the caller's tensors: a range that keeps nothing, one that
is recorded, and one that is backpropagated. A core that is called step by step is timed on one
step. A fused kernel is timed on ranges of two lengths, whose difference is what steps cost.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from retrograde.cores.probes import Shapes, gradients_like, noting
from retrograde.discover.surroundings import muted_hooks
from retrograde.machine import now
from retrograde.run.core import Core
from retrograde.run.inputs import Inputs

__all__ = ["Pace", "Paces", "pace", "time_calls", "time_steps"]

_LONG = 64  # steps of the longer range: about as many as schedules record at a time

Tensors = list[Tensor]


@dataclass(frozen=True)
class Pace:
    """What ranges of one kind take.

    Attributes:
        call_seconds: a call, besides its steps; 0 for a core that is called step by step.
        step_seconds: a step.
    """

    call_seconds: float
    step_seconds: float

    def __call__(self, calls: int, steps: int) -> float:
        """The seconds that some calls of so many steps in all take."""
        return calls * self.call_seconds + steps * self.step_seconds


@dataclass(frozen=True)
class Paces:
    """What the three kinds of ranges take: that keep nothing, are recorded, are backpropagated."""

    forward: Pace
    record: Pace
    backward: Pace


def time_steps(core: Core, inputs: Inputs, state: Tensors, repeats: int) -> Paces:
    """Time short ranges of a core, and leave no trace of it.

    Args:
        core: as the executor will run it.
        inputs: the inputs of all steps, time first; only the first few are used.
        state: the initial state.
        repeats: how often each range is timed; medians are told.

    Returns:
        :class:`Paces`.
    """
    lengths = sorted({1, min(len(inputs), _LONG)}) if core.fused else [1]
    medians = []
    with core.ambient.measured():
        for steps in lengths:
            _seconds_of_range(core, inputs, state, steps)  # a first call may allocate or compile
            found = [_seconds_of_range(core, inputs, state, steps) for _ in range(repeats)]
            medians.append([statistics.median(times) for times in zip(*found, strict=True)])
    short, long = medians[0], medians[-1]
    return Paces(*(pace(a, b, lengths[-1]) for a, b in zip(short, long, strict=True)))


def time_calls(
    calls: Sequence[Callable[[int], object]], steps: int, repeats: int, device: torch.device
) -> Paces:
    """Time calls that run forward, record, and go back, one after the other.

    Args:
        calls: functions of the number of steps.
        steps: of the longer range.
        repeats: how often each is timed; medians are told.
        device: where they run.

    Returns:
        :class:`Paces`.
    """
    medians = []
    for length in sorted({1, min(steps, _LONG)}):
        found = []
        for _ in range(repeats + 1):
            moments = [now(device)]
            for call in calls:
                call(length)
                moments.append(now(device))
            found.append([b - a for a, b in pairwise(moments)])
        # A first call may allocate or compile.
        medians.append([statistics.median(times) for times in zip(*found[1:], strict=True)])
    pairs = zip(medians[0], medians[-1], strict=True)
    return Paces(*(pace(a, b, min(steps, _LONG)) for a, b in pairs))


def pace(short: float, long: float, steps: int) -> Pace:
    """From the seconds of one step, and of a range."""
    step = short if steps == 1 else min(max(0.0, (long - short) / (steps - 1)), long / steps)
    return Pace(max(0.0, short - step), step)


def _seconds_of_range(
    core: Core, inputs: Inputs, state: Tensors, steps: int
) -> tuple[float, float, float]:
    shapes: Shapes = []
    device = core.ambient.device
    moments = [now(device)]
    core.advance(inputs, 0, [steps], state, None)
    moments.append(now(device))
    tape = core.record(inputs, 0, steps, state, noting(shapes))
    moments.append(now(device))
    gradients = gradients_like(core, tape, shapes, steps)
    moments.append(now(device))
    with muted_hooks(core.parameters):
        core.backpropagate(tape, gradients)
    end = now(device)
    return moments[1] - moments[0], moments[2] - moments[1], end - moments[3]
