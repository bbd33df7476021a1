"""Train VGG-11, prune 97 % of its weights, train it again: Wang, *BPPSA* (2020), section 4.3.

In every convolution and linear layer the same share of the weights, those of least magnitude, is
set to zero and held there ("class-uniform" in See, Luong and Manning, *Compression of Neural
Machine Translation Models via Pruning*, 2016). Without batch normalisation a network that loses all
of that share at once hands no signal on, and does not learn again in a few epochs; so during the
first half of the retraining the share rises to it, as in Zhu and Gupta, *To Prune, or Not to Prune*
(2017). Each of the two trainings is SGD with momentum, its rate rising and falling once (Smith and
Topin, 2019), on mirrored and shifted images.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from retrograde_papers.images import Images
from retrograde_papers.networks import vgg11
from retrograde_papers.options import ExperimentError, check_batch, check_positive, check_seed

__all__ = ["Pruned", "Training", "accuracy_of", "prune_weights", "train_and_prune"]

_TEST_BATCH = 500
_MOMENTUM, _DECAY = 0.9, 5e-4
_PRUNED_EVERY = 10  # batches, while the share rises

Show = Callable[[str, int, float], object]


@dataclass(frozen=True)
class Training:
    """How a network is trained, before it is pruned and after.

    Attributes:
        epochs: of each of the two trainings.
        batch: images side by side.
        learning_rate: the highest, of SGD with a momentum of 0.9.
        share: of the weights of every layer that are pruned.
        width: channels of VGG-11's first convolution.
        seed: of weights and order.

    Raises:
        ExperimentError: a number is out of its range.

    Example:
        >>> Training(epochs=1).share
        0.97
    """

    epochs: int
    batch: int = 128
    learning_rate: float = 0.05
    share: float = 0.97
    width: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "epochs", "batch", "learning_rate")
        check_seed(self.seed)
        if not 0 <= self.share < 1:
            raise ExperimentError(f"--share is {self.share}: expected 0 or more, and less than 1")


@dataclass(frozen=True, eq=False)
class Pruned:
    """A pruned network, and how well it does.

    Attributes:
        model: the network, trained, pruned and trained again.
        trained: share of the held-out images that are classified rightly before pruning.
        pruned: the same if all of the share is pruned at once, before retraining.
        retrained: the same in the end.
        losses: mean cross entropy of each epoch, of both trainings.
    """

    model: nn.Sequential
    trained: float
    pruned: float
    retrained: float
    losses: list[float] = field(default_factory=list)


def train_and_prune(images: Images, training: Training, show: Show) -> Pruned:
    """The whole of section 4.3's preparation.

    ``show`` is told, after each batch, what is done, how many batches of all are, and the loss. The
    weights of the network that is returned are under masks of :mod:`torch.nn.utils.prune`.

    Raises:
        ExperimentError: a batch is larger than the training data, or the loss is not finite.
    """
    check_batch(training.batch, len(images.training))
    torch.manual_seed(training.seed)
    model = nn.Sequential(*vgg11(width=training.width))
    random = np.random.default_rng(training.seed)
    losses = _train(model, images, training, random, lambda *told: show("training", *told))
    trained = accuracy_of(model, images)
    at_once = copy.deepcopy(model)
    prune_weights(at_once, training.share)
    pruned = accuracy_of(at_once, images)

    def show_and_prune(done: int, loss: float) -> None:
        if done % _PRUNED_EVERY == 0:
            prune_weights(model, training.share * _risen(done / total))
        show("retraining", done, loss)

    total = len(images.training) // training.batch * training.epochs
    losses += _train(model, images, training, random, show_and_prune)
    prune_weights(model, training.share)
    return Pruned(model, trained, pruned, accuracy_of(model, images), losses)


def _risen(progress: float) -> float:
    """The part of the share that is pruned: 1 − (1 − t)³ over the first half of the retraining."""
    return 1 - (1 - min(1.0, 2 * progress)) ** 3


def prune_weights(model: nn.Module, share: float) -> None:
    """Set that share of the weights of each convolution and linear layer to zero, the smallest.

    They are held there. What is pruned already stays so while the share does not fall.

    Example:
        >>> layer = nn.Linear(10, 10)
        >>> prune_weights(layer, 0.97)
        >>> int(layer.weight.count_nonzero())
        3
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear):
            if prune.is_pruned(layer):  # type: ignore[no-untyped-call]
                prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
            prune.l1_unstructured(layer, "weight", share)  # type: ignore[no-untyped-call]


def accuracy_of(model: nn.Module, images: Images) -> float:
    """The share of held-out images that a network classifies rightly."""
    parts = zip(
        images.testing.split(_TEST_BATCH), images.testing_classes.split(_TEST_BATCH), strict=True
    )
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
    return right / len(images.testing)


def _train(
    model: nn.Module,
    images: Images,
    training: Training,
    random: np.random.Generator,
    show: Callable[[int, float], object],
) -> list[float]:
    """The mean loss of each epoch."""
    rate, total = training.learning_rate, len(images.training) // training.batch * training.epochs
    optimizer = torch.optim.SGD(
        model.parameters(), lr=rate, momentum=_MOMENTUM, weight_decay=_DECAY
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=total, cycle_momentum=False
    )
    done, means = 0, []
    for _ in range(training.epochs):
        losses = []
        for x, y in images.batches(training.batch, random, augment=True):
            losses.append(_step(model, optimizer, x, y))
            schedule.step()
            done += 1
            show(done, losses[-1])
        means.append(float(np.mean(losses)))
    return means


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    loss = functional.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if not np.isfinite(value):
        raise ExperimentError(
            f"the loss is {value}: expected a finite number; name a smaller --learning-rate"
        )
    return value
