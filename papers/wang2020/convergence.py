"""LeNet-5 trained by the scan, beside torch: Wang, *BPPSA* (2020), section 3.5, figure 3.4."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from retrograde.machine import machine_of
from retrograde.models.sequential import Sequential
from retrograde.scan.sparse.feedforward import Algorithm
from retrograde_papers.images import Images, Losses, train_in_turns
from retrograde_papers.networks import lenet5
from retrograde_papers.options import ExperimentError, check_batch, check_positive, check_seed
from wang2020.pruning import accuracy_of
from wang2020.training_figures import Convergence

__all__ = ["Comparison", "compare"]

_TEST_BATCH = 1000
_POINTS = 60  # of a curve, at most
_ALGORITHMS = ("linear", "blelloch", "auto")

Show = Callable[[int, float], object]


@dataclass(frozen=True)
class Comparison:
    """How LeNet-5 is trained; by default as in the paper.

    Attributes:
        epochs: passes over the images.
        batch: images side by side.
        learning_rate: of SGD.
        momentum: likewise.
        algorithm: of the scan.
        seed: of weights and order.

    Raises:
        ExperimentError: a number is out of its range.

    Example:
        >>> Comparison(epochs=1).batch
        256
    """

    epochs: int
    batch: int = 256
    learning_rate: float = 0.001
    momentum: float = 0.9
    algorithm: str = "blelloch"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "epochs", "batch", "learning_rate")
        check_seed(self.seed)
        if self.algorithm not in _ALGORITHMS:
            raise ExperimentError(
                f"--algorithm is {self.algorithm!r}: expected linear, blelloch or auto"
            )


def compare(images: Images, how: Comparison, show: Show) -> Convergence:
    """Train both on the same batches, iteration by iteration in turn.

    ``show`` is told, after each iteration, how many are done and torch's loss.

    Raises:
        ExperimentError: a batch is larger than the training data.
    """
    check_batch(how.batch, len(images.training))
    torch.manual_seed(how.seed)
    plain = nn.Sequential(*lenet5())
    layers, algorithm = copy.deepcopy(list(plain)), cast(Algorithm, how.algorithm)
    nets = {"torch": plain, "scan": Sequential(*layers, backward="scan", algorithm=algorithm)}
    total = len(images.training) // how.batch * how.epochs
    every = -(-total // _POINTS)
    testing: Losses = {way: [] for way in nets}

    def test_and_show(done: int, losses: Losses) -> None:
        if done % every == 0:
            for way, net in nets.items():
                testing[way].append(_test_loss(net, images))
        show(done, losses["torch"][-1])

    losses, seconds = train_in_turns(
        nets,
        partial(torch.optim.SGD, lr=how.learning_rate, momentum=how.momentum),
        images.batches_of(how.batch, total, how.seed),
        how.seed,
        test_and_show,
    )
    means = {
        way: [
            fmean(each[start : start + every]) for start in range(0, total - total % every, every)
        ]
        for way, each in losses.items()
    }
    return Convergence(
        machine=machine_of("cpu"),
        settings={
            "network": "LeNet-5", "algorithm": how.algorithm, "batch": how.batch,
            "learning_rate": how.learning_rate, "momentum": how.momentum, "seed": how.seed,
            "epochs": how.epochs, "iterations": total, "training": len(images.training),
            "testing": len(images.testing),
        },
        every=every,
        training=means,
        testing=testing,
        difference=_distance(losses),
        test_difference=_distance(testing),
        accuracy={way: accuracy_of(net, images) for way, net in nets.items()},
        seconds={way: median(each) for way, each in seconds.items()},
    )  # fmt: skip


def _test_loss(net: nn.Module, images: Images) -> float:
    parts = zip(
        images.testing.split(_TEST_BATCH), images.testing_classes.split(_TEST_BATCH), strict=True
    )
    with torch.no_grad():
        whole = sum(float(functional.cross_entropy(net(x), y, reduction="sum")) for x, y in parts)
    return whole / len(images.testing)


def _distance(losses: Losses) -> float:
    return max(abs(a - b) for a, b in zip(losses["torch"], losses["scan"], strict=True))
