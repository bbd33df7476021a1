"""Seconds of an iteration over lengths and batch sizes: figures 5.2 and 5.4 of Wang (2020).

The paper subtracts: an iteration less one without its backward pass. Here forward, backward and
update are each timed by themselves, and the ways take turns, in every round each beginning once.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from retrograde.machine import machine_of
from retrograde_papers.options import CELLS, Options
from wang2020.race import Runner, runners_for
from wang2020.results import Timing, Timings
from wang2020.task import Task

__all__ = ["grid_of", "measure_seconds", "measure_task"]

_LEAST_SECONDS = 0.5  # of measuring, where more rounds are cheap
_MOST_ROUNDS = 20  # times what was asked for

Point = tuple[str, int, int]
TaskOf = Callable[[str, int], Task]


def grid_of(options: Options, names: Sequence[tuple[str, int]]) -> list[Point]:
    """Names, lengths and batch sizes at which seconds are measured.

    Data sets are measured at every batch size. Bitstreams, for which there are no ``names``, are
    measured at every length with training's batch size, and at every batch size with its length.

    Example:
        >>> options = Options("bitstream", iterations=1, lengths=(10, 30), batches=(2,))
        >>> grid_of(options, [])
        [('', 10, 16), ('', 30, 16), ('', 1000, 2)]
    """
    if names:
        return [(name, length, batch) for name, length in names for batch in options.batches]
    points = [("", length, options.batch) for length in options.lengths]
    points += [("", options.length, batch) for batch in options.batches]
    return list(dict.fromkeys(points))


def measure_seconds(
    grid: Sequence[Point], task_of: TaskOf, options: Options, show: Callable[[Timing], object]
) -> Timings:
    """Measure every point of a grid; ``show`` is told each one."""
    points = []
    for name, length, batch in grid:
        points.append(measure_task(task_of(name, length), name, batch, options))
        show(points[-1])
    return Timings(
        machine=machine_of(options.device),
        settings={
            "cell": CELLS[options.experiment],
            "length": options.length,
            "batch": options.batch,
            "hidden": options.hidden,
            "seed": options.seed,
        },
        rounds=options.rounds,
        points=tuple(points),
    )


def measure_task(task: Task, name: str, batch: int, options: Options) -> Timing:
    """Measure all ways on one batch of a task."""
    runners = runners_for(task, options)
    samples = task.training_samples(np.arange(batch))
    inputs, targets = (tensor.to(options.device) for tensor in samples)
    for runner in runners:
        runner.warm_up(inputs, targets)
        runner.step(inputs, targets)
        runner.laps.clear()  # its first step made the optimizer's moments
    begun = time.perf_counter()
    for turn in range(options.rounds * _MOST_ROUNDS):
        if turn >= options.rounds and time.perf_counter() - begun > _LEAST_SECONDS:
            break
        first = turn % len(runners)
        for runner in (*runners[first:], *runners[:first]):
            runner.step(inputs, targets)
    return Timing(
        name=name,
        length=task.length,
        batch=batch,
        forward=_medians(runners, "forward"),
        backward=_medians(runners, "backward"),
        update=_medians(runners, "update"),
    )


def _medians(runners: Sequence[Runner], part: str) -> dict[str, float]:
    return {runner.way: median(getattr(lap, part) for lap in runner.laps) for runner in runners}
