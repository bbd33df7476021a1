"""The backward recurrence on a CPU, by compiled loops that share samples, or chunks, among threads.

The references are the functions of the same names in :mod:`retrograde.kernels.sweep` and
:mod:`retrograde.kernels.cells`. The loops are in ``sweep_loops``. A layer's whole passes are
in ``layer``.
"""

import functools
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrograde.kernels import sweep as reference
from retrograde.kernels.cells import Resets, Slopes
from retrograde.kernels.cpu import sweep_loops
from retrograde.kernels.cpu.llvm.barrier import (
    NOBODY,
    bounds_of_units,
    parts_of_units,
    share_or_meet,
)
from retrograde.kernels.cpu.llvm.lanes import Reals
from retrograde.kernels.cpu.llvm.panels import panels, panels_of, whole_vectors
from retrograde.kernels.cpu.llvm.threads import numbered, parts_for, share

#: The arrays ``starts``, ``entry`` and ``to_entry`` of resets.
ResetArrays = tuple[NDArray[np.bool_], Reals, Reals]

#: The work of one element of the slopes, in multiplications.
ELEMENT_WORK = 40


def starts_of(resets: Resets | None, like: Tensor) -> ResetArrays:
    if resets is None:
        return _no_starts(like.dtype)
    return resets.starts.contiguous().numpy(), resets.entry.numpy(), resets.gradient.numpy()


@functools.cache
def _no_starts(dtype: torch.dtype) -> ResetArrays:
    none = torch.empty(0, 0, dtype=dtype, device="cpu").numpy()
    return np.empty((0, 0), np.bool_), none, none


def as_they_lie(hidden: Tensor, samples: int) -> Tensor:
    """Return hidden weights for sweeps that read them without a copy."""
    return hidden.contiguous()[None, None]


def in_parts(hidden: Tensor, samples: int) -> Tensor:
    """Return hidden weights in panels, for each part of the units that ``samples`` pay for."""
    size = hidden.shape[1]
    units, _ = bounds_of_units(size, parts_of_units(samples, size, len(hidden) // size))
    return panels(*(hidden[:, left:right] for left, right in pairwise(units.tolist())))


def sweep(
    slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor, resets: Resets | None = None
) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.sweep`, for either dtype on a CPU. The hidden
    weights may be :func:`in_parts`, or :func:`as_they_lie`."""
    samples, size = slopes.gates.shape[1], slopes.gates.shape[3]
    g = g.clone(memory_format=torch.contiguous_format)
    hidden = hidden if hidden.dim() == 4 else in_parts(hidden, samples)
    units, each = bounds_of_units(size, len(hidden))
    arrays = _arrays(slopes, hidden, dy, resets), g.numpy()
    room = g.new_empty(len(hidden), samples, int(whole_vectors(each))).numpy()
    sample_ranges = parts_for(samples, slopes.gates.numel() * size)
    many = 0 if resets is not None else len(hidden)
    share_or_meet(sweep_loops.sweep, sample_ranges, many, *arrays, room, units)
    return g


def numbers_of_sweep(gates: int, samples: int, size: int, threads: int) -> int:
    """Return how many numbers weights :func:`in_parts`, and a sweep with them, allocate at most."""
    part_count = parts_of_units(samples, size, gates, threads)
    copied = part_count * gates * panels_of(bounds_of_units(size, part_count)[1])
    return copied * size + threads * samples * int(whole_vectors(size))


def scan(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor, chunk: int) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.scan`, for either dtype on a CPU."""
    length, samples, _, size = slopes.gates.shape
    rest = length % chunk
    if length // chunk < 2:
        return sweep(slopes, hidden, dy, g)
    chunks, losses = reference.in_chunks(slopes.at(slice(rest, None)), dy, rest, chunk)
    maps = products(chunks, hidden, losses)
    after, before = reference.carry(maps, g)
    if not reference.trusted(maps, after):
        return sweep(slopes, hidden, dy, g)
    units, _ = bounds_of_units(size, 1)
    arrays = _arrays(chunks, panels(hidden), losses), after.numpy(), units, NOBODY
    chunk_ranges = parts_for(len(chunks.gates), chunks.gates.numel() * size)
    room = g.new_empty(len(chunk_ranges), 1, samples, int(whole_vectors(size)))
    share(sweep_loops.sweep_chunks, numbered(chunk_ranges), *arrays, room.numpy())
    return sweep(slopes.at(slice(0, rest)), hidden, None if dy is None else dy[:rest], before)


def products(chunks: Slopes, hidden: Tensor, losses: Tensor | None) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.products`, for either dtype on a CPU."""
    count, _, samples, _, size = chunks.gates.shape
    n = size * (2 if chunks.gates.shape[-2] == 4 else 1)
    maps = hidden.new_empty(count, samples, n + 1, n)
    chunk_ranges = parts_for(count, chunks.gates.numel() * size * n)
    numbers = sweep_loops.room_for_products(size, n // size)
    arrays = _arrays(chunks, panels(hidden)[0], losses), maps.numpy()
    room = hidden.new_empty(len(chunk_ranges), numbers)
    share(sweep_loops.products, numbered(chunk_ranges), *arrays, room.numpy())
    return maps


def _arrays(
    slopes: Slopes, hidden: Tensor, losses: Tensor | None, resets: Resets | None = None
) -> sweep_loops.SweepArrays:
    """Return the arrays that the loops take. An absent one has no steps, in chunks or not."""
    gates = slopes.gates.flatten(-2).numpy()
    absent = np.empty((*gates.shape[:-3], 0, 0, 0), gates.dtype)
    keep, inner, terms = (
        absent if t is None else t.numpy() for t in (slopes.keep, slopes.inner, losses)
    )
    starts, _, to_entry = starts_of(resets, hidden)
    return sweep_loops.SweepArrays(gates, keep, inner, terms, hidden.numpy(), starts, to_entry)


def gru_slopes(inputs: Tensor, hidden: Tensor, before: Tensor) -> Slopes:
    """Do the same as :func:`retrograde.kernels.cells.gru_slopes`, for either dtype on a CPU."""
    length, samples, size = before.shape
    count = length * samples
    keep, inner = before.new_empty(before.shape), before.new_empty(before.shape)
    arrays = (inputs, hidden, before.contiguous(), keep, inner)
    flat = [t.view(count, -1).numpy() for t in arrays]
    row_ranges = parts_for(count, count * size * ELEMENT_WORK)
    share(sweep_loops.gru_slopes, row_ranges, *flat)
    return Slopes(hidden.unflatten(-1, (3, size)), keep, inner)


def lstm_slopes(
    gates: Tensor, after: Tensor, c: Tensor, activated: bool = False, resets: Resets | None = None
) -> Slopes:
    """Do the same as :func:`retrograde.kernels.cells.lstm_slopes`, for either dtype on a CPU."""
    length, samples, size = after.shape
    work = length * samples * size * ELEMENT_WORK
    keep, inner = (after.new_empty(after.shape) for _ in range(2))
    arrays = [t.numpy() for t in (gates, after.contiguous(), c.clone(), keep, inner)]
    arrays += starts_of(resets, c)[:2]
    share(sweep_loops.lstm_slopes, parts_for(samples, work), activated, *arrays)
    return Slopes(gates.unflatten(-1, (4, size)), keep, inner)
