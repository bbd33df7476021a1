"""A recurrent layer on a CPU, compiled: samples, or chunks of steps, shared among threads.

A step is a few products of elements and one product of a short vector with the hidden weights,
forward as well as backward. torch spends microseconds on calling each; here a step of a sample is
a loop. Samples do not depend on one another, so each thread takes some of them through all the
steps. What does not follow the recurrence, the inputs' part of the gates, is a matrix product for a
whole block of steps.

The references of the backward pass are the functions of the same names in
:mod:`retrograde.scan.sweep` and :mod:`retrograde.scan.recurrent`, that of :func:`run` is
:func:`retrograde.scan.layer.run`. The loops are in ``cpu_states``, ``cpu_fused``, ``cpu_slopes``
and ``cpu_sweep``, what they are made of in ``lanes`` and ``tiles``.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from retrograde.scan import sweep as reference
from retrograde.scan.kernels import cpu_fused, cpu_slopes, cpu_states, cpu_sweep
from retrograde.scan.kernels.team import share
from retrograde.scan.kernels.tiles import panels
from retrograde.scan.recurrent import Kept, Slopes, Weights

__all__ = ["fused", "gru_slopes", "lstm_slopes", "run", "scan", "sweep"]

State = tuple[Tensor, ...]

# Multiplications that are worth a thread of their own: about a tenth of a millisecond.
_THREAD_WORK = 2_000_000
_ELEMENT_WORK = 40  # of a row of slopes, in the same unit
_BLOCK_BYTES = 2**20  # of what the inputs bring to the gates, for one block of steps


def run(
    weights: Weights, x: Tensor, state: State, kept: Kept | None = None
) -> tuple[Tensor, State]:
    """Run a layer forward, as :func:`retrograde.scan.layer.run`.

    Args:
        weights: the layer's parameters.
        x: inputs (L, B, I).
        state: before the first step: (h,), or (h, c), each (B, H).
        kept: where an LSTM is to leave its gates and cells, if anywhere.

    Returns:
        The outputs (L, B, H), and the state after the last step.
    """
    samples, rows = x.shape[1], weights.inputs.shape[0]
    outputs = x.new_empty(len(x), samples, weights.size)
    after = tuple(s.clone(memory_format=torch.contiguous_format) for s in state)
    bias, fixed = _biases(weights)
    fixed += [panels(weights.hidden.t()), *after]
    block = max(1, _BLOCK_BYTES // (samples * rows * x.itemsize))
    room = x.new_empty(min(block, len(x)), samples, rows) if kept is None else kept.gates
    for start in range(0, len(x), block):
        steps = slice(start, min(start + block, len(x)))
        driven = room[: steps.stop - start] if kept is None else room[steps]
        _drive(weights.inputs, bias, x[steps], driven)
        arrays = [t.numpy() for t in (driven, *fixed, outputs[steps])]
        more: Any = weights.kind == "RNN_RELU"
        if weights.kind == "LSTM":
            more = (outputs[:0] if kept is None else kept.cells[steps]).numpy()
        if weights.kind != "GRU":
            arrays.append(more)
        work = driven.numel() * (weights.size + _ELEMENT_WORK // 4)
        _share(functools.partial(_RUN[weights.kind], *arrays), samples, work)
    return outputs, after


_RUN = {
    "RNN_TANH": cpu_states.run_rnn,
    "RNN_RELU": cpu_states.run_rnn,
    "GRU": cpu_states.run_gru,
    "LSTM": cpu_states.run_lstm,
}


def _biases(weights: Weights) -> tuple[Tensor | None, list[Tensor]]:
    """The bias of what the inputs bring; and, for a GRU, that of what the state brings."""
    inputs, hidden = weights.bias_inputs, weights.bias_hidden
    if weights.kind == "GRU":
        rows = weights.hidden.shape[0]
        return inputs, [weights.hidden.new_zeros(rows) if hidden is None else hidden]
    return inputs if hidden is None or inputs is None else inputs + hidden, []


def _drive(inputs: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """out ← x Wᵀ + bias."""
    flat, into = x.flatten(0, 1), out.flatten(0, 1)
    if bias is None:
        torch.mm(flat, inputs.t(), out=into)
    else:
        torch.addmm(bias, flat, inputs.t(), out=into)


def fused(
    weights: Weights,
    x: Tensor,
    before: Tensor,
    after: Tensor,
    kept: Kept | None,
    dy: Tensor | None,
    g: Tensor,
) -> tuple[Slopes, Tensor]:
    """Slopes and sweep of a block in one: :func:`retrograde.scan.recurrent.slopes`, and the sweep.

    Args:
        weights: the layer's parameters.
        x: inputs (L, B, I).
        before: h before each step (L, B, H).
        after: h after each step.
        kept: what an LSTM's forward pass left of these steps.
        dy: the loss's gradient of each output (L, B, H), or None for zero.
        g: of the state after the block (B, n).

    Returns:
        The gradients of the gates (``keep`` is None), and that of the state before the block.
    """
    length, samples, size = after.shape
    g, losses = g.clone(memory_format=torch.contiguous_format), after[:0] if dy is None else dy
    hidden, inner = panels(weights.hidden), None
    match weights.kind:
        case "GRU":
            inputs = functional.linear(x, weights.inputs, weights.bias_inputs)
            out = functional.linear(before, weights.hidden, weights.bias_hidden)
            inner = torch.empty_like(after, memory_format=torch.contiguous_format)
            kernel, given = cpu_fused.sweep_gru, [inputs, out, before, inner, hidden, losses, g]
        case "LSTM":
            assert kept is not None
            out = torch.empty_like(kept.gates)
            kernel = cpu_fused.sweep_lstm
            given = [kept.gates, after, kept.cells, hidden, losses, g, out]
        case _:
            out = torch.empty_like(after, memory_format=torch.contiguous_format)
            kernel, given = cpu_fused.sweep_rnn, [after, hidden, losses, g, out]
    arrays: list[Any] = [t.contiguous().numpy() for t in given]
    if weights.kind.startswith("RNN"):
        arrays.append(weights.kind == "RNN_RELU")
    work = out.numel() * (size + _ELEMENT_WORK // 4)
    _share(functools.partial(kernel, *arrays), samples, work)
    return Slopes(out.unflatten(-1, (-1, size)), None, inner), g


def sweep(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor) -> Tensor:
    """As :func:`retrograde.scan.sweep.sweep`, for float32 and float64 on a CPU."""
    samples, size = slopes.gates.shape[1], slopes.gates.shape[3]
    gates = slopes.gates.flatten(-2).numpy()
    absent = np.empty((0, 0, 0), gates.dtype)
    keep, inner, losses = (
        absent if t is None else t.numpy() for t in (slopes.keep, slopes.inner, dy)
    )
    weights, g = panels(hidden).numpy(), g.clone(memory_format=torch.contiguous_format)
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
    absent = np.empty((count, 0, 0, 0), hidden.numpy().dtype)
    keep, inner, terms = (
        absent if t is None else t.numpy() for t in (chunks.keep, chunks.inner, losses)
    )
    gates, weights = chunks.gates.flatten(-2).numpy(), panels(hidden).numpy()
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
    keep, inner = before.new_empty(before.shape), before.new_empty(before.shape)
    arrays = (inputs, hidden, before.contiguous(), keep, inner)
    flat = [t.view(rows, -1).numpy() for t in arrays]
    _share(functools.partial(cpu_slopes.gru_slopes, *flat), rows, rows * size * _ELEMENT_WORK)
    return Slopes(hidden.unflatten(-1, (3, size)), keep, inner)


def lstm_slopes(gates: Tensor, after: Tensor, c: Tensor, known: bool = False) -> Slopes:
    """As :func:`retrograde.scan.recurrent.lstm_slopes`, for float32 and float64 on a CPU."""
    length, samples, size = after.shape
    work = length * samples * size * _ELEMENT_WORK
    if not known:
        flat = gates.view(length * samples, -1).numpy()
        _share(functools.partial(cpu_slopes.lstm_gates, flat), length * samples, work)
    keep, inner = (after.new_empty(after.shape) for _ in range(2))
    arrays = [t.numpy() for t in (gates, after.contiguous(), c.clone(), keep, inner)]
    _share(functools.partial(cpu_slopes.lstm_slopes, *arrays), samples, work)
    return Slopes(gates.unflatten(-1, (4, size)), keep, inner)


def _share(kernel: Callable[[int, int], None], count: int, work: int) -> None:
    """Call a kernel on ranges of samples, or of chunks, on as many threads as the work pays."""
    share(kernel, count, 1 + work // _THREAD_WORK)
