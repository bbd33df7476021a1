"""A recurrent layer on a CPU, compiled: samples, or chunks of steps, shared among threads.

A step is a few products of elements and one product of a short vector with the hidden weights,
forward as well as backward. torch spends microseconds on calling each; here a step of a sample is
a loop. Samples do not depend on one another, so each thread takes some of them through all the
steps. What does not follow the recurrence, the inputs' part of the gates, is a matrix product for a
whole block of steps.

The references of the backward pass are the functions of the same names in
:mod:`retrograde.scan.sweep` and :mod:`retrograde.scan.recurrent`, that of :func:`run` is
:func:`retrograde.scan.layer.run`. The loops are in ``cpu_states``, ``cpu_backward``, ``cpu_slopes``
and ``cpu_sweep``, what they are made of in ``lanes`` and ``tiles``.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograde.scan import sweep as reference
from retrograde.scan.kernels import cpu_backward, cpu_slopes, cpu_states, cpu_sweep
from retrograde.scan.kernels.team import Range, ranges, share
from retrograde.scan.kernels.tiles import panels, whole_vectors
from retrograde.scan.recurrent import Block, Kept, Slopes, Weights

__all__ = ["backward", "gru_slopes", "lstm_slopes", "run", "scan", "sweep"]

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
    sums = x.new_zeros(samples * int(whole_vectors(rows)))
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
        arrays.append(sums.numpy())
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


def backward(
    weights: Weights,
    block: Block,
    dy: Tensor | None,
    g: Tensor,
    dx: Tensor | None,
    totals: dict[str, Tensor],
) -> Tensor:
    """The whole backward pass of a block of steps.

    Args:
        weights: the layer's parameters.
        block: its inputs and states.
        dy: the loss's gradient of each output (L, B, H), or None for zero.
        g: of the state after the block (B, n).
        dx: takes the gradients of the inputs (L, B, I), if they are wanted.
        totals: the gradients of the weights, by name, to which the block's are added.

    Returns:
        The gradient of the state before the block.
    """
    size, samples, width = weights.size, block.x.shape[1], block.x.shape[2]
    kernel, given, hidden = _given(weights, block)
    absent = block.after[:0]
    g = g.clone(memory_format=torch.contiguous_format)
    states = [block.x, block.before, panels(weights.inputs), panels(hidden)]
    states += [absent if dy is None else dy, g, absent if dx is None else dx]
    arrays = [t.contiguous().numpy() if isinstance(t, Tensor) else t for t in (*given, *states)]
    rows, numbers = hidden.shape[0], _ROW[weights.kind] * size
    work = len(block.x) * samples * rows * (2 * size + width)
    parts = ranges(samples, 1 + work // _THREAD_WORK)
    shapes = ((rows, whole_vectors(width)), (rows, whole_vectors(size)), (numbers,))
    sums = [g.new_zeros(len(parts), *shape) for shape in shapes]
    numbers_between = max(  # fewer samples may have more rows at a time
        cpu_backward.room_for(weights.kind, len(block.x), last - first, width, size)
        for first, last in parts
    )
    room = g.new_empty(len(parts), numbers_between)

    def loop(first: int, last: int) -> None:
        number = parts.index((first, last))
        own = (part[number].numpy() for part in (*sums, room))
        kernel(*arrays, *own, first, last)

    share(loop, parts)
    for first_part, *others in sums:
        for other in others:
            first_part += other
    _add_named(weights, totals, *(first_part for first_part, *_ in sums))
    return g


# Kinds of gates whose gradients a row has; a GRU's third has two, as inputs and as states see it.
_ROW = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 4, "LSTM": 4}


def _given(weights: Weights, block: Block) -> tuple[Any, list[Any], Tensor]:
    """The loop for a cell, what it is given first, and the hidden weights as it orders them."""
    match weights.kind:
        case "GRU":
            zero = weights.hidden.new_zeros(weights.hidden.shape[0])
            given = [weights.bias_inputs, weights.bias_hidden]
            biases = torch.stack([zero if bias is None else bias for bias in given])
            forward = panels(weights.inputs.t()), panels(weights.hidden.t()), biases
            r_z, n = weights.hidden.split([2 * weights.size, weights.size])
            return cpu_backward.backward_gru, [*forward], torch.cat([n, r_z])
        case "LSTM":
            assert block.kept is not None
            lstm = [block.kept.gates, block.after, block.kept.cells]
            return cpu_backward.backward_lstm, [*lstm], weights.hidden
        case _:
            rnn = [block.after, weights.kind == "RNN_RELU"]
            return cpu_backward.backward_rnn, rnn, weights.hidden


def _add_named(
    weights: Weights, totals: dict[str, Tensor], inputs: Tensor, hidden: Tensor, rows: Tensor
) -> None:
    """Add the sums of a block to the gradients of the parameters."""
    size, of_inputs, of_hidden = weights.size, rows, rows
    hidden = hidden[:, :size]
    totals["inputs"] += inputs[:, : weights.inputs.shape[1]]
    if weights.kind == "GRU":  # rows: n as states see it, r, z, n as inputs see it
        totals["hidden"][: 2 * size] += hidden[size:]
        totals["hidden"][2 * size :] += hidden[:size]
        of_inputs, of_hidden = rows[size:], torch.cat([rows[size : 3 * size], rows[:size]])
    else:
        totals["hidden"] += hidden
    for name, found in (("bias_inputs", of_inputs), ("bias_hidden", of_hidden)):
        if name in totals:
            totals[name] += found


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
    parts = ranges(samples, 1 + slopes.gates.numel() * size // _THREAD_WORK)
    numbers = cpu_sweep.room_to_sweep(max(b - a for a, b in parts), size)
    arrays = gates, keep, inner, weights, losses, g.numpy()
    _share_with_room(kernel, arrays, parts, numbers, g)
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
    numbers = cpu_sweep.room_for_products(size, n // size)
    parts = ranges(count, 1 + work * n // _THREAD_WORK)
    _share_with_room(kernel, (*arrays, rows.numpy()), parts, numbers, g)
    after, before = reference.carry(rows, g)
    if not reference.trusted(rows, after):
        return sweep(slopes, hidden, dy, g)
    numbers, parts = cpu_sweep.room_to_sweep(samples, size), ranges(count, 1 + work // _THREAD_WORK)
    _share_with_room(cpu_sweep.local, (*arrays, after.numpy()), parts, numbers, g)
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
    share(kernel, ranges(count, 1 + work // _THREAD_WORK))


def _share_with_room(
    kernel: Any, arrays: tuple[Any, ...], parts: list[Range], numbers: int, like: Tensor
) -> None:
    """The same for a kernel that needs room, which torch allocates, so that it is counted."""
    room = like.new_empty(len(parts), numbers)

    def loop(first: int, last: int) -> None:
        kernel(*arrays, room[parts.index((first, last))].numpy(), first, last)

    share(loop, parts)
