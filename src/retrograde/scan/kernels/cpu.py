"""The backward recurrence on a CPU, compiled: samples, or chunks of steps, shared among threads.

A step of the backward recurrence is a few products of elements and one product of a short vector
with the hidden weights. torch spends microseconds on calling each; here a step of a sample is a
loop. Samples do not depend on one another, so each thread takes some of them through all the
steps. Two samples and eight rows of the weights are taken at a time, so that a loaded weight is
used twice and a loaded sum eight times; the compiler vectorises over the units. The slopes take a
pass of their own, but that torch's vectorised tanh and sigmoid are called.

The references are the functions of the same names in :mod:`retrograde.scan.sweep` and
:mod:`retrograde.scan.recurrent`; the loops are in :mod:`retrograde.scan.kernels.cpu_sweep` and
:mod:`retrograde.scan.kernels.cpu_slopes`.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from retrograde.scan import sweep as reference
from retrograde.scan.kernels import cpu_slopes, cpu_sweep
from retrograde.scan.kernels.team import share
from retrograde.scan.recurrent import Slopes

__all__ = ["gru_slopes", "lstm_slopes", "scan", "sweep"]

# Multiplications that are worth a thread of their own: about a fifth of a millisecond.
_THREAD_WORK = 2_000_000
_ELEMENT_WORK = 40  # of a row of slopes, in the same unit


def sweep(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor) -> Tensor:
    """As :func:`retrograde.scan.sweep.sweep`, for float32 and float64 on a CPU."""
    samples, size = slopes.gates.shape[1], slopes.gates.shape[3]
    gates = slopes.gates.flatten(-2).numpy()
    absent = np.empty((0, 0, 0), gates.dtype)
    keep, inner, losses = (
        absent if t is None else t.numpy() for t in (slopes.keep, slopes.inner, dy)
    )
    weights, g = hidden.contiguous().numpy(), g.clone(memory_format=torch.contiguous_format)
    kernel = cpu_sweep.sweep_lstm if g.shape[-1] == 2 * size else cpu_sweep.sweep_state
    _share(
        functools.partial(kernel, gates, keep, inner, weights, losses, g.numpy()),
        samples,
        slopes.gates.numel() * size,
    )
    return g


def scan(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor, chunk: int) -> Tensor:
    """As :func:`retrograde.scan.sweep.scan`, for float32 and float64 on a CPU."""
    length, samples, _, size = slopes.gates.shape
    rest = length % chunk
    if length // chunk < 2:
        return sweep(slopes, hidden, dy, g)
    chunks, losses = reference.in_chunks(slopes.at(slice(rest, None)), dy, rest, chunk)
    count, n = len(chunks.gates), g.shape[-1]
    absent = np.empty((0, 0, 0, 0), hidden.numpy().dtype)
    keep, inner, terms = (
        absent if t is None else t.numpy() for t in (chunks.keep, chunks.inner, losses)
    )
    gates, weights = chunks.gates.flatten(-2).numpy(), hidden.contiguous().numpy()
    rows = g.new_empty(count, samples, n + 1, n)
    kernel = cpu_sweep.products_lstm if n == 2 * size else cpu_sweep.products_state
    arrays = gates, keep, inner, weights, terms
    work = chunks.gates.numel() * size
    _share(functools.partial(kernel, *arrays, rows.numpy()), count, work * n)
    after, before = reference.carry(rows, g)
    if not reference.trusted(rows, after):
        return sweep(slopes, hidden, dy, g)
    _share(functools.partial(cpu_sweep.local, *arrays, after.numpy()), count, work)
    return sweep(slopes.at(slice(0, rest)), hidden, None if dy is None else dy[:rest], before)


def gru_slopes(inputs: Tensor, hidden: Tensor, before: Tensor) -> Slopes:
    """As :func:`retrograde.scan.recurrent.gru_slopes`, for float32 and float64 on a CPU."""
    length, samples, size = before.shape
    rows = length * samples
    rz, n, keep = (before.new_empty(rows, width) for width in (2 * size, size, size))
    arrays = [t.view(rows, -1).numpy() for t in (inputs, hidden, before.contiguous(), rz, n, keep)]
    work = rows * _ELEMENT_WORK
    _share(functools.partial(cpu_slopes.gru_gates, *arrays[:2], arrays[3]), rows, work)
    rz.sigmoid_()
    _share(functools.partial(cpu_slopes.gru_candidate, *arrays[:2], *arrays[3:5]), rows, work)
    n.tanh_()
    _share(functools.partial(cpu_slopes.gru_slopes, *arrays[1:]), rows, work)
    shape = before.shape
    return Slopes(hidden.unflatten(-1, (3, size)), keep.view(shape), n.view(shape))


def lstm_slopes(gates: Tensor, after: Tensor, c: Tensor) -> Slopes:
    """As :func:`retrograde.scan.recurrent.lstm_slopes`, for float32 and float64 on a CPU."""
    length, samples, size = after.shape
    part = gates[..., 2 * size : 3 * size]
    g = part.clone(memory_format=torch.contiguous_format).tanh_()
    gates.sigmoid_()  # the third gate too: one pass over all is quicker than two over parts
    keep = torch.empty_like(g)
    arrays = [t.numpy() for t in (gates, g, after.contiguous(), keep, c.clone())]
    work = length * samples * _ELEMENT_WORK
    _share(functools.partial(cpu_slopes.lstm_slopes, *arrays), samples, work)
    return Slopes(gates.unflatten(-1, (4, size)), keep, g)


def _share(kernel: Callable[[int, int], None], count: int, work: int) -> None:
    """Call a kernel on ranges of samples, or of chunks, on as many threads as the work pays."""
    share(kernel, count, 1 + work // _THREAD_WORK)
