"""What the two experiments have in common: labelled sequences, read in batches."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Integers", "Task", "training_batches"]

Integers = NDArray[np.int64]


class Task(Protocol):
    """Sequences and their classes.

    Attributes:
        length: steps of a sequence.
        features: numbers at each step.
        classes: how many there are.
        training: samples to learn from.
        testing: samples held out.
    """

    @property
    def length(self) -> int: ...
    @property
    def features(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def training(self) -> int: ...
    @property
    def testing(self) -> int: ...

    def training_samples(self, places: Integers) -> tuple[Tensor, Tensor]:
        """Inputs ``(length, samples, features)`` and classes ``(samples,)`` to learn from."""

    def test_samples(self, places: Integers) -> tuple[Tensor, Tensor]:
        """The same of samples that are held out."""


def training_batches(
    task: Task, batch: int, iterations: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in an order that is shuffled anew in each epoch; a last, smaller one is left out."""
    random = np.random.default_rng(seed)
    whole = task.training // batch
    order = np.empty(0, np.int64)
    for iteration in range(iterations):
        place = iteration % whole
        if place == 0:
            order = random.permutation(task.training)
        yield task.training_samples(order[batch * place : batch * (place + 1)])
