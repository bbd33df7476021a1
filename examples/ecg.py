"""ECG: 30 seconds of a heart at 360 Hz, 10,800 steps; each beat is told to be normal or not.

The signal is the MIT-BIH Arrhythmia Database's (Moody and Mark, 2001), one channel as it was
sampled. The loss comes with every beat, a ninth of a second after it.

    python examples/ecg.py --data FOLDER

trains in three ways, side by side, and prints losses, peaks and seconds (``sequences.py``).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sequences import Batch, Model, main, with_slope

LENGTH, DELAY = 10_800, 40  # in samples, 360 a second
BATCH, HIDDEN = 8, 32
NORMAL = ("N", "L", "R", "e", "j")
NO_BEAT = -1


class BeatModel(Model):
    """At each beat, whether it is normal; the loss is the mean over beats."""

    beats: Tensor

    def aim(self, batch: Batch) -> None:
        """Take the targets; the mean is over all their beats, whichever range they come in."""
        super().aim(batch)
        self.beats = (batch.targets != NO_BEAT).sum()

    def loss(self, steps: range, y: Tensor) -> Tensor:
        """The loss of the beats in a range, its share of the mean."""
        targets = self.targets[steps.start : steps.stop]
        told = targets != NO_BEAT
        answers = self.head(y[told])[:, 0]
        wanted = targets[told].to(answers.dtype)
        total = functional.binary_cross_entropy_with_logits(answers, wanted, reduction="sum")
        return total / self.beats

    def right(self, batch: Batch) -> Tensor:
        """Whether each beat is told rightly."""
        y, _ = self.lstm(batch.inputs)
        told = batch.targets != NO_BEAT
        return (self.head(y[told])[:, 0] > 0) == (batch.targets[told] == 1)


class Beats:
    """Windows of records of hearts.

    Args:
        folder: where ``ecg.npz`` is.
    """

    title = "ECG: is this beat normal?"
    loss_label = "cross entropy a beat (nats)"
    learning_rate = 1e-2
    iterations = 250

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "ecg.npz") as data:
            test = data["window_is_test"]
            x = windows(data["signal"].astype(np.float32), len(test))
            y = windows(targets(data), len(test))
        x = (x - np.median(x, 0)) / 40  # a fifth of a millivolt
        self.training, self.testing = (
            tuple(torch.from_numpy(part[:, :, of]).flatten(1) for part in (x, y))
            for of in (~test, test)
        )

    def model(self) -> Model:
        """Units that remember up to a quarter of a second."""
        return BeatModel(2, HIDDEN, 1, steps=100)

    def batch(self, iteration: int) -> Batch:
        """Windows at random."""
        x, y = self.training
        seed = torch.Generator().manual_seed(iteration)
        chosen = torch.randint(x.shape[1], (BATCH,), generator=seed)
        return Batch(with_slope(x[:, chosen]), y[:, chosen])

    def longest(self) -> Batch:
        """All windows have the same length."""
        return self.batch(0)

    def held_out(self) -> Sequence[Batch]:
        """Later windows of the same hearts."""
        x, y = (part.split(BATCH, 1) for part in self.testing)
        return [Batch(with_slope(some), told) for some, told in zip(x, y, strict=True)]


def windows(records: NDArray, count: int) -> NDArray:
    """Records (n, samples) cut into windows: (LENGTH, n, count)."""
    return records[:, : count * LENGTH].reshape(-1, count, LENGTH).transpose(2, 0, 1)


def targets(data: Mapping[str, NDArray]) -> NDArray[np.int8]:
    """For every sample of every record, 1 or 0 where a beat is due that is abnormal or not."""
    found = np.full(data["signal"].shape, NO_BEAT, np.int8)
    abnormal = ~np.isin(data["beat_symbol"], NORMAL)
    record = np.repeat(np.arange(len(found)), np.diff(data["beat_offsets"]))
    due = data["beat_sample"] + DELAY
    seen = (due < found.shape[1]) & (due // LENGTH == data["beat_sample"] // LENGTH)
    found[record[seen], due[seen]] = abnormal[seen]
    return found


def run(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write what was found."""
    main("ecg", Beats, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    run()
