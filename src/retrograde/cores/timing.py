"""The seconds that the steps of a core take: for each kind of call, the call and each step of it.

A core that is called step by step is timed on one step. A fused kernel is timed on ranges of two
lengths, whose difference is what steps cost.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograde.cores.footprint import Shapes, gradients_like, noting
from retrograde.discover.surroundings import muted_hooks
from retrograde.machine import now
from retrograde.run.core import Core
from retrograde.run.inputs import Inputs

__all__ = ["LinearTime", "RangeTimes", "Stopwatch", "linear_time", "time_calls", "time_steps"]

_LONG = 64  # steps of the longer range: about as many as schedules record at a time

Tensors = list[Tensor]


@dataclass(frozen=True)
class LinearTime:
    """The seconds of ranges: for a call (0 for a core called step by step), and for each step."""

    call_seconds: float
    step_seconds: float

    def __call__(self, calls: int, steps: int) -> float:
        """The seconds that some calls of so many steps in all take."""
        return calls * self.call_seconds + steps * self.step_seconds


@dataclass(frozen=True)
class RangeTimes:
    """What the three kinds of ranges take: that keep nothing, are recorded, are backpropagated."""

    forward: LinearTime
    record: LinearTime
    backward: LinearTime


class Stopwatch:
    """Collects the seconds of laps; a device finishes its work within a lap."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        start = now(self.device)
        yield
        self.seconds.append(now(self.device) - start)


def time_steps(core: Core, inputs: Inputs, state: Tensors, repeats: int) -> RangeTimes:
    """Median seconds of short ranges, run from the first step by the executor's own functions; no
    trace is left."""

    def trial(watch: Stopwatch, steps: int) -> None:
        shapes: Shapes = []
        with watch.lap():
            core.advance(inputs, 0, [steps], state, None)
        with watch.lap():
            tape = core.record(inputs, 0, steps, state, noting(shapes))
        gradients = gradients_like(core, tape, shapes, steps)
        with watch.lap(), muted_hooks(core.parameters):
            core.backpropagate(tape, gradients)

    with core.ambient.measured():
        return _range_times(trial, len(inputs) if core.fused else 1, repeats, core.ambient.device)


def time_calls(
    calls: Sequence[Callable[[int], object]], steps: int, repeats: int, device: torch.device
) -> RangeTimes:
    """Median seconds of three calls in turn for a number of steps: forward, record, backward."""

    def trial(watch: Stopwatch, length: int) -> None:
        for call in calls:
            with watch.lap():
                call(length)

    return _range_times(trial, steps, repeats, device)


def _range_times(
    trial: Callable[[Stopwatch, int], None], steps: int, repeats: int, device: torch.device
) -> RangeTimes:
    medians = []
    longest = min(steps, _LONG)
    for length in sorted({1, longest}):
        trial(Stopwatch(device), length)  # a first call may allocate or compile
        watches = [Stopwatch(device) for _ in range(repeats)]
        for watch in watches:
            trial(watch, length)
        laps = zip(*(watch.seconds for watch in watches), strict=True)
        medians.append([statistics.median(times) for times in laps])
    pairs = zip(medians[0], medians[-1], strict=True)
    return RangeTimes(*(linear_time(short, long, longest) for short, long in pairs))


def linear_time(short: float, long: float, steps: int) -> LinearTime:
    """From the seconds of one step, and of a range."""
    step = short if steps == 1 else min(max(0.0, (long - short) / (steps - 1)), long / steps)
    return LinearTime(max(0.0, short - step), step)
