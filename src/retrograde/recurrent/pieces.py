"""Pieces: neighbouring steps that run in one go, all with the same number of sequences.

A packed batch stores its steps one after the other. Each step has as many rows as there are
sequences that still continue. Where that number does not change, steps are a plain tensor (L, n,
…), so nothing is padded.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

__all__ = ["Piece", "Sequences", "cut"]


@dataclass(frozen=True)
class Piece:
    """Steps ``start`` … ``stop − 1`` of the first ``samples`` sequences."""

    start: int
    stop: int
    samples: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """The number of rows; one row is one step of one sample."""
        return len(self) * self.samples


def cut(
    start: int, stop: int, block: int, samples: int, sizes: Sequence[int] | None = None
) -> list[Piece]:
    """Return the pieces of steps ``start`` … ``stop − 1``, in order.

    A piece has at most ``block`` rows, or one step where even that has more. ``sizes`` gives the
    number of sequences at each step of a packed batch.

    Example:
        >>> [(p.start, p.stop, p.samples) for p in cut(0, 5, 6, 3, [3, 3, 3, 1, 1])]
        [(0, 2, 3), (2, 3, 3), (3, 5, 1)]
    """
    bounds = [start, stop]
    if sizes is not None:
        changes = (t for t in range(start + 1, stop) if sizes[t] != sizes[t - 1])
        bounds = [start, *changes, stop]
    found = []
    for first, last in pairwise(bounds):
        count = samples if sizes is None else sizes[first]
        steps = max(1, block // max(1, count))
        found += [Piece(a, min(a + steps, last), count) for a in range(first, last, steps)]
    return found


@dataclass(frozen=True)
class Sequences:
    """The lengths of a batch: T, B and, if packed, ``offsets``.

    ``offsets`` gives the first row of every step, and at the end the number of rows.
    """

    length: int
    batch: int
    offsets: Sequence[int] | None = None

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of neighbouring steps with equally many sequences, as (steps, sequences)."""
        if self.offsets is None:
            return [(self.length, self.batch)]
        sizes = (b - a for a, b in pairwise(self.offsets))
        return [(len(list(group)), size) for size, group in groupby(sizes)]

    @property
    def rows(self) -> int:
        """The rows of all steps; one row is one step of one sequence."""
        return self.length * self.batch if self.offsets is None else self.offsets[-1]

    def pieces(self, block: int) -> int:
        """Return the number of sequences summed over all pieces, in units of the batch, rounded up.

        Each piece has at most ``block`` rows.
        """
        total = sum(n * -(-steps // max(1, block // n)) for steps, n in self.runs)
        return -(-total // self.batch)

    def largest(self, block: int) -> int:
        """Return the most rows of a piece."""
        return max(n * min(steps, max(1, block // n)) for steps, n in self.runs)

    def last(self, steps: int, both: bool) -> int:
        """Return the rows of the last steps; with two directions, the average over both."""
        if self.offsets is None:
            return steps * self.batch
        late = self.offsets[-1] - self.offsets[self.length - steps]
        return -(-(late + self.offsets[steps]) // 2) if both else late

    def most_kept(self, rows: int, both: bool) -> int:
        """Return the largest number of last steps that have at most ``rows`` rows."""
        steps = range(self.length + 1)
        return bisect_right(steps, rows, key=lambda k: self.last(k, both)) - 1
