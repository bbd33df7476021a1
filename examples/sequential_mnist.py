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
from torch import Tensor
from torch.nn import functional

from sequences import Batch, Model, main

BATCH, HIDDEN, CLASSES = 64, 64, 10
ANGLE, SCALE, MOVE = 0.2, 0.1, 0.07  # radians; of the size; of half the width: one pixel


class Digits:
    """Images as sequences of pixels.

    Args:
        folder: where ``mnist.npz`` is.
    """

    title = "Sequential MNIST"
    loss_label = "cross entropy (nats)"
    learning_rate = 1e-2
    iterations = 6000

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "mnist.npz") as data:
            names = "train_x", "train_y", "test_x", "test_y"
            x, y, held_x, held_y = (torch.from_numpy(data[name]) for name in names)
        self.training = x.float(), y.long()
        self.testing = pixels(held_x), held_y.long()

    def model(self) -> Model:
        """Units that remember up to the whole image."""
        return Model(1, HIDDEN, CLASSES, steps=len(self.testing[0]))

    def batch(self, iteration: int) -> Batch:
        """Images at random, each turned, scaled and moved a little, as another hand would."""
        images, labels = self.training
        generator = torch.Generator().manual_seed(iteration)
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        angle, scale, right, down = 2 * torch.rand(4, BATCH, generator=generator) - 1
        turned = torch.polar(1 + SCALE * scale, ANGLE * angle)
        rows = turned.real, -turned.imag, MOVE * right, turned.imag, turned.real, MOVE * down
        maps = torch.stack(rows, -1).unflatten(-1, (2, 3))
        given = images[chosen].unsqueeze(1)
        grid = functional.affine_grid(maps, list(given.shape), align_corners=False)
        moved = functional.grid_sample(given, grid, align_corners=False)
        return Batch(pixels(moved), labels[chosen])

    def longest(self) -> Batch:
        """All images have the same length."""
        return self.batch(0)

    def held_out(self) -> Sequence[Batch]:
        """The images for testing."""
        x, y = self.testing
        return [Batch(*part) for part in zip(x.split(500, 1), y.split(500), strict=True)]


def pixels(images: Tensor) -> Tensor:
    """Images (n, …) of 0 to 255 as (pixels, n, 1), of about zero mean and unit variance."""
    x = images.flatten(1) / 255
    return ((x - 0.13) / 0.31).T.unsqueeze(-1).contiguous()


def run(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write what was found."""
    main("sequential_mnist", Digits, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    run()
