"""Spoken digits: sound as it was sampled, up to 18,262 steps; at the last, who has spoken?

Recordings of the Free Spoken Digit Dataset (8 kHz) have 1,148 to 18,262 samples. Those of similar
length are batched, and begin with silence so that all end together: then the last output is that of
the last sample, whatever the length.

    python examples/spoken_digits.py --data FOLDER

trains in three ways, side by side, and prints losses, peaks and seconds (``sequences.py``).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sequences import Batch, Model, main, with_slope

BATCH, HIDDEN = 16, 64
ROUND = 512  # lengths are multiples of it: budgets are fitted once for a shape


class Speech:
    """Recordings in batches of similar length.

    Args:
        folder: where ``fsdd.npz`` is.
    """

    title = "Spoken digits: who speaks?"
    loss_label = "cross entropy (nats)"
    learning_rate = 1e-2
    iterations = 300

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "fsdd.npz") as data:
            recordings = np.split(data["samples"], data["offsets"][1:-1])
            speakers, test = data["speaker"], data["is_test"]
            self.classes = len(data["speaker_names"])
        self.training, self.testing = (
            in_groups([(recordings[i], int(speakers[i])) for i in np.flatnonzero(of)])
            for of in (~test, test)
        )

    def model(self) -> Model:
        """Units that remember up to an eighth of a second."""
        return Model(2, HIDDEN, self.classes, steps=1000)

    def batch(self, iteration: int) -> Batch:
        """A group at random, each once before any comes again."""
        epoch, place = divmod(iteration, len(self.training))
        order = np.random.default_rng(epoch).permutation(len(self.training))
        return together(self.training[order[place]])

    def longest(self) -> Batch:
        """The longest recordings."""
        return together(self.training[-1])

    def held_out(self) -> Sequence[Batch]:
        """The recordings for testing."""
        return [together(group) for group in self.testing]


Recording = tuple[NDArray[np.int16], int]


def in_groups(recordings: list[Recording]) -> list[list[Recording]]:
    """From the shortest to the longest."""
    ordered = sorted(recordings, key=lambda one: len(one[0]))
    return [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]


def together(recordings: Sequence[Recording]) -> Batch:
    """Recordings side by side that end together, loud and soft brought closer (as μ-law does)."""
    longest = max(len(samples) for samples, _ in recordings)
    x = np.zeros((-(-longest // ROUND) * ROUND, len(recordings)), np.float32)
    for column, (samples, _) in enumerate(recordings):
        x[-len(samples) :, column] = samples
    x = np.sign(x) * np.log1p(np.abs(x) / 250) / 2
    return Batch(with_slope(torch.from_numpy(x)), torch.tensor([who for _, who in recordings]))


def run(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write what was found."""
    main("spoken_digits", Speech, __doc__.splitlines()[0], arguments)


if __name__ == "__main__":
    run()
