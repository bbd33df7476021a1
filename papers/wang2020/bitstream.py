"""Bitstreams and their classes: Wang, *BPPSA* (2020), section 4.1, equation 4.1.

A bitstream of class c has ones with probability 0.05 + 0.1·c, independently. Samples 0, 1, 2, …
take the ten classes in turn, which the paper leaves open. Bit t of sample k comes from a generator
of its own, keyed by seed and k: the same sample has the same bits in every batch and process, a
shorter one is the beginning of a longer one, and no more is ever held than a batch, where all
32,000 of 30,000 bits would be 3.8 GB.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wang2020.task import Integers

__all__ = ["Bitstreams"]


@dataclass(frozen=True)
class Bitstreams:
    """The task of telling a bitstream's class.

    Attributes:
        length: bits in a stream.
        seed: of all the bits.
        training: streams to learn from.
        testing: streams held out: those that come after the training streams.

    Example:
        >>> inputs, classes = Bitstreams(10).training_samples(np.array([0, 9, 10]))
        >>> inputs.shape, classes.tolist()
        (torch.Size([10, 3, 1]), [0, 9, 0])
    """

    length: int
    seed: int = 0
    training: int = 32_000
    testing: int = 500

    features: ClassVar[int] = 1
    classes: ClassVar[int] = 10

    def bits(self, sample: int) -> NDArray[np.float32]:
        """The zeros and ones of one sample, shape ``(length,)``.

        Example:
            >>> Bitstreams(8).bits(9)
            array([1., 1., 1., 1., 1., 1., 1., 1.], dtype=float32)
        """
        random = np.random.Generator(np.random.Philox(key=[self.seed, sample]))
        share = 0.05 + 0.1 * (sample % self.classes)
        return (random.random(self.length, np.float32) < share).astype(np.float32)

    def training_samples(self, places: Integers) -> tuple[Tensor, Tensor]:
        """Some of the streams to learn from."""
        return self._samples(places)

    def test_samples(self, places: Integers) -> tuple[Tensor, Tensor]:
        """Some of the streams held out."""
        return self._samples(places + self.training)

    def _samples(self, places: Integers) -> tuple[Tensor, Tensor]:
        streams = np.stack([self.bits(int(place)) for place in places], axis=1)
        return torch.from_numpy(streams[:, :, np.newaxis]), torch.from_numpy(places % self.classes)
