"""The measured seconds of a core's steps: for each kind of call, per call and per step.

A core that is called step by step is timed on one step. A fused kernel is timed on ranges of two
lengths, and the difference gives the cost of a step. What runs as a whole is timed as a whole.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from retrograde.machine import now
from retrograde.replay.surroundings import muted_hooks
from retrograde.replay.trees import Tensors
from retrograde.run.core import Core
from retrograde.run.layout import Inputs
from retrograde.sizes.footprint import Shapes, gradients_like, noting
from retrograde.torch_private import gradients_of

_LONG = 64  # steps of the longer range: about as many as schedules record at a time
_RAN = 0.75  # of the time, in which a thread that is not disturbed runs at least
_ENOUGH, _MOST = 1.0, 9  # seconds of timing iterations, and iterations


class Processor:
    """In a ``with`` block: whether this thread waited for a processor for much of the time, as it
    does where other processes want it (``is_busy``). Then the block's seconds tell little."""

    is_busy = False

    def __enter__(self) -> "Processor":
        self.wall, self.ran = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        ran, passed = time.thread_time() - self.ran, time.perf_counter() - self.wall
        self.is_busy = ran < _RAN * passed


@dataclass(frozen=True)
class LinearTime:
    """The seconds of ranges: per call (0 for a core that is called step by step), and per step."""

    call_seconds: float
    step_seconds: float

    def __call__(self, calls: int, steps: int) -> float:
        """Return the seconds of ``calls`` calls that run ``steps`` steps in all."""
        return calls * self.call_seconds + steps * self.step_seconds


@dataclass(frozen=True)
class RangeTimes:
    """The times of a range: run without recording, recorded, and backpropagated."""

    forward: LinearTime
    record: LinearTime
    backward: LinearTime


def time_steps(core: Core, inputs: Inputs, state: Tensors, repeats: int) -> RangeTimes:
    """Return median seconds of short ranges from the first step; leave no trace."""
    device, longest = core.surroundings.device, min(_LONG, len(inputs) if core.fused else 1)
    seconds: list[float] = []

    @contextmanager
    def lap() -> Iterator[None]:
        start = now(device)  # once the device has finished its work
        yield
        seconds.append(now(device) - start)

    def trial(steps: int) -> None:
        shapes: Shapes = []
        with lap():
            core.advance(inputs, 0, [steps], state, None)
        with lap():
            tape = core.record(inputs, 0, steps, state, noting(shapes))
        gradients = gradients_like(core, tape, shapes, inputs, steps)
        with lap(), muted_hooks(core.parameters):
            core.backpropagate(tape, gradients)

    medians = []
    with core.surroundings.measured():
        for length in sorted({1, longest}):
            trial(length)  # a first call may allocate or compile
            seconds.clear()
            for _ in range(repeats):
                trial(length)
            medians.append([statistics.median(seconds[i::3]) for i in range(3)])
    pairs = zip(medians[0], medians[-1], strict=True)
    return RangeTimes(*(linear_time(short, long, longest) for short, long in pairs))


def time_iterations(run: Callable[[], Tensors], wanted: Tensors) -> float:
    """Return the median seconds of a few iterations. ``run`` returns the results of a forward pass,
    and ``wanted`` are the tensors whose gradients are computed. A graph that they come from stays.
    """
    seconds, device = list[float](), wanted[0].device
    stays = any(t.grad_fn is not None for t in wanted)
    with torch.enable_grad(), muted_hooks(wanted):
        while len(seconds) < 2 or (len(seconds) < _MOST and sum(seconds) < _ENOUGH):
            start = now(device)
            outputs = [t for t in run() if t.requires_grad]
            seeds = [*map(torch.ones_like, outputs)]
            gradients_of(outputs, wanted, seeds, stays=stays)
            del outputs, seeds  # as a program lets them go before its next iteration
            seconds.append(now(device) - start)
    return statistics.median(seconds[1:])  # the first may allocate or compile


def linear_time(short: float, long: float, steps: int) -> LinearTime:
    """Return the time per call and per step, from the seconds of one step and of a range."""
    step = short if steps == 1 else min(max(0.0, (long - short) / (steps - 1)), long / steps)
    return LinearTime(max(0.0, short - step), step)
