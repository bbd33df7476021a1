"""The segments of a long chain that are searched: short ones, and those that end at a few places.

A table of all segments of T layers has T²/2 rows. A table with a *band* has the segments of at most
so many layers, since recomputation from one kept state is that short. For a few *ends* it also has
segments of any length, the whole chain included. A segment in the table divides into segments of
the table, as long as its left part is one. So the recurrence is the same over fewer j.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["RUN", "Cells", "all_cells", "band_of_cells"]

RUN = 16  # neighbouring j that share a minimum

_Ints = NDArray[np.int64]


class Cells(NamedTuple):
    """The segments x … e − 1 that have a row in a table; T layers.

    Args:
        first: the least x of each e, a multiple of :data:`RUN`, shape (T + 1,).
        row: added to x it is the row, shape (T + 1,).
        run: added to x // RUN it is the row in a table of runs, shape (T + 1,).
        stop: the least j > x that is not the end of a segment from x, T + 1 if none, shape (T,).
        ends: the e that end segments from every x, in ascending order; the last is T.
    """

    first: _Ints
    row: _Ints
    run: _Ints
    stop: _Ints
    ends: _Ints

    @property
    def rows(self) -> int:
        return int(self.row[-1]) + len(self.stop)


def all_cells(size: int) -> Cells:
    """Return every segment of ``size`` layers: size · (size + 1) / 2 of them."""
    return _cells(np.zeros(size + 1, np.int64), np.array([size]))


def band_of_cells(size: int, width: int, ends: list[int]) -> Cells:
    """Return the segments of up to about ``width`` layers, and all that end at one of ``ends``.
    ``ends`` ascend, and the last is ``size``."""
    first = np.maximum(np.arange(size + 1) - width, 0) // RUN * RUN
    first[ends] = 0
    return _cells(first, np.array(ends))


def _cells(first: _Ints, ends: _Ints) -> Cells:
    size = len(first) - 1
    counts = np.arange(size + 1) - first
    row = np.cumsum(counts) - counts - first
    runs = np.arange(size + 1) // RUN - first // RUN + 1
    run = np.cumsum(runs) - runs - first // RUN
    band = np.maximum.accumulate(np.where(np.isin(np.arange(size + 1), ends), 0, first))
    stop = np.searchsorted(band, np.arange(size), side="right")
    return Cells(first, row, run, stop, ends)
