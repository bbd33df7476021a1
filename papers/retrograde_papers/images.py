"""Small colour images and their classes, CIFAR-10's or any that are stored like them."""

import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from retrograde_papers.options import ExperimentError

__all__ = ["Images", "Losses", "load_images", "noise_images", "train_in_turns"]

Losses = dict[str, list[float]]
Bytes = NDArray[np.uint8]
Integers = NDArray[np.integer[Any]]

_FILE = "cifar10.npz"
_PARTS = ("train_d", "train_y", "test_d", "test_y")
_SHIFT = 4  # pixels, at most, by which augmentation moves an image each way


@dataclass(frozen=True, eq=False)
class Images:
    """Images as a network reads them: of zero mean and unit variance in each colour.

    Attributes:
        training: images to learn from, ``(samples, 3, height, width)``.
        training_classes: the class of each.
        testing: images held out.
        testing_classes: the class of each.

    Example:
        >>> images = noise_images(training=6, testing=2)
        >>> images.training.shape, images.testing_classes.shape
        (torch.Size([6, 3, 32, 32]), torch.Size([2]))
    """

    training: Tensor
    training_classes: Tensor
    testing: Tensor
    testing_classes: Tensor

    def batches(
        self, batch: int, random: np.random.Generator, *, augment: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch: batches in a new order; a last, smaller one is left out.

        With ``augment``, every image may be mirrored and is moved by up to four pixels over zeros.

        Example:
            >>> images = noise_images(training=6, testing=2)
            >>> [len(x) for x, _ in images.batches(4, np.random.default_rng(0))]
            [4]
        """
        order = torch.from_numpy(random.permutation(len(self.training)))
        for places in order.split(batch)[: len(order) // batch]:
            chosen = self.training[places]
            yield _moved(chosen, random) if augment else chosen, self.training_classes[places]

    def batches_of(self, batch: int, total: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """So many batches in all, epoch after epoch, in an order that the seed decides."""
        random = np.random.default_rng(seed)
        epochs = (self.batches(batch, random) for _ in count())
        return islice(chain.from_iterable(epochs), total)


def load_images(folder: str | Path) -> Images:
    """Read CIFAR-10 from ``cifar10.npz``, an npz file of differences.

    It has ``train_d``, ``train_y``, ``test_d`` and ``test_y``. Its pixels are red and blue less
    green, and then the differences along rows and along columns, all modulo 256.

    Raises:
        ExperimentError: the file is not there, or is not such a file.
    """
    path = Path(folder) / _FILE
    try:
        with np.load(path, allow_pickle=False) as file:
            train, train_y, test, test_y = (file[part] for part in _PARTS)
    except FileNotFoundError:
        raise ExperimentError(f"there is no {path}: give --data FOLDER that has {_FILE}") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ExperimentError(
            f"cannot read {path}: {error}; expected an npz file with {', '.join(_PARTS)}"
        ) from error
    for images, classes in ((train, train_y), (test, test_y)):
        if images.ndim != 4 or images.shape[1] != 3 or classes.shape != images.shape[:1]:
            raise ExperimentError(
                f"cannot use {path}: images {images.shape} and classes {classes.shape}; expected "
                "(samples, 3, height, width) and a class for each"
            )
    return _normalised(_pixels(train), train_y, _pixels(test), test_y)


def noise_images(training: int, testing: int, seed: int = 0) -> Images:
    """Images of 32×32 where no data are at hand: noise, brighter in one colour by class."""
    random = np.random.default_rng(seed)
    classes = random.integers(0, 10, training + testing)
    images = random.integers(0, 128, (len(classes), 3, 32, 32), dtype=np.uint8)
    brighter = (12 * (1 + classes // 3)).astype(np.uint8)
    images[np.arange(len(classes)), classes % 3] += brighter[:, None, None]
    return _normalised(images[:training], classes[:training], images[training:], classes[training:])


def _pixels(differences: Bytes) -> Bytes:
    summed = differences.cumsum(-1, dtype=np.uint8).cumsum(-2, dtype=np.uint8)
    summed[:, 0] += summed[:, 1]
    summed[:, 2] += summed[:, 1]
    return summed


def _normalised(train: Bytes, train_y: Integers, test: Bytes, test_y: Integers) -> Images:
    pixels = torch.from_numpy(train).float()
    mean, spread = pixels.mean((0, 2, 3), True), pixels.std((0, 2, 3), keepdim=True)
    return Images(
        (pixels - mean) / spread,
        torch.from_numpy(train_y.astype(np.int64)),
        (torch.from_numpy(test).float() - mean) / spread,
        torch.from_numpy(test_y.astype(np.int64)),
    )


def _moved(images: Tensor, random: np.random.Generator) -> Tensor:
    count, _, height, width = images.shape
    mirrored = torch.from_numpy(random.random(count) < 0.5)
    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    padded = torch.nn.functional.pad(images, (_SHIFT,) * 4)
    tops, lefts = (torch.from_numpy(random.integers(0, 2 * _SHIFT + 1, count)) for _ in range(2))
    rows = (tops[:, None] + torch.arange(height))[:, None, :, None]
    columns = (lefts[:, None] + torch.arange(width))[:, None, None, :]
    samples, channels = torch.arange(count)[:, None, None, None], torch.arange(3)[:, None, None]
    return padded[samples, channels, rows, columns]


def train_in_turns(
    nets: Mapping[str, nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer],
    batches: Iterable[tuple[Tensor, Tensor]],
    seed: int,
    show: Callable[[int, Losses], object],
) -> tuple[Losses, Losses]:
    """Train networks on the same batches, iteration by iteration in turn.

    Args:
        nets: by name.
        optimizer: makes one of a network's parameters.
        batches: images and classes.
        seed: of the random numbers that a network draws, the same for each.
        show: told, after each iteration, how many are done, and all losses.

    Returns:
        By name, the loss before each iteration, and its seconds.
    """
    optimizers = {name: optimizer(net.parameters()) for name, net in nets.items()}
    losses: Losses = {name: [] for name in nets}
    seconds: Losses = {name: [] for name in nets}
    for done, (x, y) in enumerate(batches, start=1):
        for name, net in nets.items():
            torch.manual_seed(seed + done)
            start = time.perf_counter()
            losses[name].append(_step(net, optimizers[name], x, y))
            seconds[name].append(time.perf_counter() - start)
        show(done, losses)
    return losses, seconds


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    loss = functional.cross_entropy(net(x), y)
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
