"""Pieces: neighbouring steps that run in one go, all with the same number of sequences.

A packed batch stores its steps one after the other. Each step has as many rows as there are
sequences that still continue. Where that number does not change, steps are a plain tensor (L, n,
…), so nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

__all__ = ["Piece", "cut", "runs"]


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


def runs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs (steps, sequences) of steps with equally many sequences in a packed batch.

    ``offsets`` gives the first row of every step, and at the end the total number of rows.
    """
    sizes = (b - a for a, b in pairwise(offsets))
    return [(len(list(group)), size) for size, group in groupby(sizes)]
