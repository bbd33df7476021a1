"""Training one network in several ways, side by side: figures 5.1 and 5.3 of Wang (2020).

All ways start from the same weights and read the same batches. They take turns iteration by
iteration, each beginning in its turn, so that a slow spell of the machine, or a batch that the one
before has left in the cache, meets them all. A batch is made before any clock is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from retrograde.machine import machine_of, now
from retrograde_papers.options import CELLS, ExperimentError, Options
from wang2020.classifier import Classifier, classifiers
from wang2020.results import Curves
from wang2020.task import Task, training_batches

__all__ = ["Lap", "Runner", "curves_of", "race", "runners_for"]

_POINTS = 50  # of a curve, at most
_TEST_BATCH = 100

Show = Callable[[Sequence["Runner"]], object]


@dataclass(frozen=True)
class Lap:
    """One iteration of one way.

    Attributes:
        loss: mean cross entropy of the batch, before the update.
        forward: seconds of the forward pass, loss included.
        backward: seconds of the backward pass.
        update: seconds of the optimizer's step.
    """

    loss: float
    forward: float
    backward: float
    update: float

    @property
    def seconds(self) -> float:
        """Of the whole iteration."""
        return self.forward + self.backward + self.update


@dataclass(eq=False)
class Runner:
    """A network in training, one way.

    Attributes:
        way: ``"torch"``, ``"sequential"`` (a full budget) or ``"scan"``.
        model: the network.
        optimizer: of its parameters.
        first: seconds of the first call, see :meth:`warm_up`.
        laps: the iterations done.
    """

    way: str
    model: Classifier
    optimizer: torch.optim.Optimizer
    first: float = 0.0
    laps: list[Lap] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.model.linear.weight.device

    def warm_up(self, inputs: Tensor, targets: Tensor) -> None:
        """Forward and backward without an update, for what happens only once."""
        start = now(self.device)
        torch.autograd.backward(functional.cross_entropy(self.model(inputs), targets))
        self.first = now(self.device) - start
        self.optimizer.zero_grad()

    def step(self, inputs: Tensor, targets: Tensor) -> Lap:
        """One iteration; ExperimentError if its loss is not finite."""
        start = now(self.device)
        loss = functional.cross_entropy(self.model(inputs), targets)
        middle = now(self.device)
        torch.autograd.backward(loss)
        end = now(self.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
        done = now(self.device)
        value = loss.item()
        if not np.isfinite(value):
            raise ExperimentError(
                f"the loss of {self.way} is {value} in iteration {len(self.laps) + 1}: expected a "
                "finite number; name a smaller --learning-rate"
            )
        self.laps.append(Lap(value, middle - start, end - middle, done - end))
        return self.laps[-1]

    def accuracy(self, task: Task) -> float:
        """The share of held-out sequences that the network classifies rightly."""
        right = 0
        with torch.no_grad():
            for start in range(0, task.testing, _TEST_BATCH):
                places = np.arange(start, min(start + _TEST_BATCH, task.testing))
                inputs, classes = task.test_samples(places)
                found = self.model(inputs.to(self.device)).argmax(1).cpu()
                right += int((found == classes).sum())
        return right / task.testing


def runners_for(task: Task, options: Options) -> list[Runner]:
    """One runner a way, all of the same weights."""
    made = classifiers(
        CELLS[options.experiment], options.ways, task.features, options.hidden, task.classes,
        options.seed,
    )  # fmt: skip
    runners = []
    for way, model in zip(options.ways, made, strict=True):
        model.to(options.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
        runners.append(Runner(way, model, optimizer))
    return runners


def race(runners: Sequence[Runner], task: Task, options: Options, show: Show) -> None:
    """Train all runners on the same batches, and show them after each iteration."""
    total = options.iterations_of(task.training)
    batches = training_batches(task, options.batch, total, options.seed)
    for iteration, batch in enumerate(batches):
        inputs, targets = (tensor.to(options.device) for tensor in batch)
        turn = iteration % len(runners)
        if iteration == 0:
            for runner in runners:
                runner.warm_up(inputs, targets)
        for runner in (*runners[turn:], *runners[:turn]):
            runner.step(inputs, targets)
        show(runners)


def curves_of(runners: Sequence[Runner], task: Task, options: Options, name: str = "") -> Curves:
    """What a race has come to, torch's runner being the first."""
    laps = {runner.way: runner.laps for runner in runners}
    base = runners[0].laps
    every = -(-len(base) // _POINTS)
    ends = [min(start + every, len(base)) for start in range(0, len(base), every)]
    return Curves(
        machine=machine_of(options.device),
        settings=_settings(task, options, name),
        every=every,
        seconds={way: _until(taken, ends) for way, taken in laps.items()},
        losses={way: _means(taken, every) for way, taken in laps.items()},
        forward={way: median(lap.forward for lap in taken) for way, taken in laps.items()},
        backward={way: median(lap.backward for lap in taken) for way, taken in laps.items()},
        update={way: median(lap.update for lap in taken) for way, taken in laps.items()},
        first={runner.way: runner.first for runner in runners},
        difference={
            way: max(abs(a.loss - b.loss) for a, b in zip(taken, base, strict=True))
            for way, taken in laps.items()
        },
        accuracy={runner.way: runner.accuracy(task) for runner in runners},
    )


def _settings(task: Task, options: Options, name: str) -> dict[str, str | int | float]:
    return {
        "cell": CELLS[options.experiment],
        "data": name,
        "length": task.length,
        "features": task.features,
        "classes": task.classes,
        "hidden": options.hidden,
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "iterations": options.iterations_of(task.training),
        "training": task.training,
        "testing": task.testing,
    }


def _until(laps: Sequence[Lap], ends: Sequence[int]) -> tuple[float, ...]:
    """Seconds that the iterations before each end have taken."""
    sums = list(accumulate(lap.seconds for lap in laps))
    return tuple(sums[end - 1] for end in ends)


def _means(laps: Sequence[Lap], every: int) -> tuple[float, ...]:
    return tuple(
        fmean(lap.loss for lap in laps[start : start + every])
        for start in range(0, len(laps), every)
    )
