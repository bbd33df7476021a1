"""Sequential MNIST: a digit read pixel by pixel, 784 steps, told at the last one.

The test of memory over long sequences since Le, Jaitly and Hinton, *A Simple Way to Initialize
Recurrent Networks of Rectified Linear Units* (2015): most of the digit is in the middle, so what
decides was seen hundreds of steps before the only loss.

    python examples/sequential_mnist.py --data FOLDER

trains in three ways, side by side, and prints losses, peaks and seconds (``sequences.py``).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequences import Batch, Model, main

BATCH, HIDDEN, CLASSES = 64, 64, 10


class Digits:
    """Images as sequences of pixels.

    Args:
        folder: where ``mnist.npz`` is.
    """

    title = "Sequential MNIST"
    loss_label = "cross entropy (nats)"
    learning_rate = 1e-2
    iterations = 2500

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "mnist.npz") as data:
            self.training = pixels(data["train_x"]), torch.from_numpy(data["train_y"]).long()
            self.testing = pixels(data["test_x"]), torch.from_numpy(data["test_y"]).long()

    def model(self) -> Model:
        """Units that remember up to the whole image."""
        return Model(1, HIDDEN, CLASSES, steps=len(self.training[0]))

    def batch(self, iteration: int) -> Batch:
        """Images at random."""
        x, y = self.training
        chosen = torch.randint(len(y), (BATCH,), generator=torch.Generator().manual_seed(iteration))
        return Batch(x[:, chosen].contiguous(), y[chosen])

    def longest(self) -> Batch:
        """All images have the same length."""
        return self.batch(0)

    def held_out(self) -> Sequence[Batch]:
        """The images for testing."""
        x, y = self.testing
        return [Batch(*part) for part in zip(x.split(500, 1), y.split(500), strict=True)]


def pixels(images: NDArray[np.uint8]) -> Tensor:
    """Images (n, height, width) as (height · width, n, 1), of about zero mean and unit variance."""
    x = torch.from_numpy(images).flatten(1).float() / 255
    return ((x - 0.13) / 0.31).T.unsqueeze(-1)


def run(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write what was found."""
    main("sequential_mnist", Digits, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    run()
