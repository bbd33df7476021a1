"""A recurrent layer on a CPU, compiled: samples, or chunks of steps, shared among threads.

A step is a few products of elements and one product of a short vector with the hidden weights.
torch spends microseconds on calling each; here a step of a sample is a loop, and each thread takes
some samples through all the steps. The inputs' part of the gates is one matrix product for a whole
block of steps.

The references of the backward pass are the functions of the same names in
:mod:`retrograde.kernels.sweep` and :mod:`retrograde.kernels.cells`; that of :class:`Forward` is
torch's own kernel. The loops are in ``cpu_states``, ``cpu_backward``, ``cpu_slopes`` and
``cpu_sweep``, their vectors and products in ``lanes`` and ``tiles``.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograde.kernels import cpu_backward, cpu_slopes, cpu_states, cpu_sweep
from retrograde.kernels import sweep as reference
from retrograde.kernels.cells import Block, Kept, Kind, Slopes, Weights
from retrograde.kernels.lanes import LANES
from retrograde.kernels.team import Range, ranges, share
from retrograde.kernels.tiles import panels, whole_vectors

__all__ = [
    "THREAD_WORK",
    "Backward",
    "Forward",
    "gru_slopes",
    "lstm_slopes",
    "panels",
    "products",
    "recall",
    "scan",
    "sweep",
]

State = tuple[Tensor, ...]

#: Multiplications that are worth a thread of their own: about a tenth of a millisecond.
THREAD_WORK = _THREAD_WORK = 2_000_000
_ELEMENT_WORK = 40  # of a row of slopes, in the same unit


class Forward:
    """A layer's forward pass for B samples, a range of steps after another."""

    def __init__(self, weights: Weights, samples: int) -> None:
        self.weights, self.rows = weights, weights.inputs.shape[0]
        self.bias, fixed = _biases(weights)
        self.fixed: list[Any] = [t.numpy() for t in (*fixed, panels(weights.hidden.t()))]
        self.sums = weights.hidden.new_empty(samples * int(whole_vectors(self.rows)))
        self.work = samples * self.rows * (weights.size + _ELEMENT_WORK // 4)

    def room(self, steps: int) -> Tensor:
        """Room for the gates of some steps (L, B, K·H)."""
        samples = len(self.sums) // int(whole_vectors(self.rows))
        return self.sums.new_empty(steps, samples, self.rows)

    def __call__(
        self, x: Tensor, state: State, outputs: Tensor, gates: Tensor, cells: Tensor | None = None
    ) -> None:
        """Run inputs x (L, B, I); the state, (h,) or (h, c), each (B, H) and contiguous, is
        overwritten. ``outputs`` take h (L, B, H), ``cells`` an LSTM's c before each step. ``gates``
        (L, B, K·H) are overwritten, with i, f, g, o for an LSTM; an RNN's may be the outputs."""
        kind = self.weights.kind
        _drive(self.weights.inputs, self.bias, x, gates)
        arrays: list[Any] = [gates.numpy(), *self.fixed, *(t.numpy() for t in (*state, outputs))]
        if kind == "LSTM":
            arrays.append((outputs[:0] if cells is None else cells).numpy())
        elif kind != "GRU":
            arrays.append(kind == "RNN_RELU")
        arrays.append(self.sums.numpy())
        _share(functools.partial(_RUN[kind], *arrays), x.shape[1], len(x) * self.work)


_RUN = {
    "RNN_TANH": cpu_states.run_rnn,
    "RNN_RELU": cpu_states.run_rnn,
    "GRU": cpu_states.run_gru,
    "LSTM": cpu_states.run_lstm,
}


def _biases(weights: Weights) -> tuple[Tensor | None, list[Tensor]]:
    """The bias of the inputs' part of the gates; and, for a GRU, that of the state's part."""
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


class Backward:
    """A layer's backward pass, a block of steps after another, from the last to the first.

    The sums for the weights are added to their gradients by :meth:`finish`, and not before: a sum
    of many small numbers rounds less than adding each to a large total.

    Args:
        weights: the layer's parameters.
        totals: the gradients of the weights, by name, to which those of the blocks are added.
        samples: B.
        steps: the most steps of a block.
        at_once: add every few dozen steps to totals of whole vectors, which takes less memory.
    """

    def __init__(
        self,
        weights: Weights,
        totals: dict[str, Tensor],
        samples: int,
        steps: int,
        *,
        at_once: bool = False,
    ) -> None:
        size, width = weights.size, weights.inputs.shape[1]
        self.weights, self.totals = weights, totals
        self.kernel, self.constants, hidden = _loop(weights)
        rows, numbers = hidden.shape[0], _ROW[weights.kind] * size
        work = steps * samples * rows * (2 * size + width)
        self.parts = ranges(samples, 1 + work // THREAD_WORK)
        each = max(last - first for first, last in self.parts)
        self.read = [_readable(w, each).numpy() for w in (weights.inputs, hidden)]
        self.direct = {
            name: at_once and _has_whole_vectors(totals[name])
            for name in (("inputs",) if weights.kind == "GRU" else ("inputs", "hidden"))
        }
        shapes = {
            "inputs": (rows if weights.kind != "GRU" else 3 * size, int(whole_vectors(width))),
            "hidden": (rows, int(whole_vectors(size))),
            "biases": (numbers,),
        }
        self.sums = {
            name: [
                totals[name] if number == 0 and self.direct.get(name) else hidden.new_zeros(shape)
                for number in range(len(self.parts))
            ]
            for name, shape in shapes.items()
        }
        numbers_between = max(  # fewer samples may have more rows at a time
            cpu_backward.room_for(weights.kind, steps, last - first, width, size)
            for first, last in self.parts
        )
        self.room = hidden.new_empty(len(self.parts), numbers_between)

    def add(self, block: Block, dy: Tensor | None, g: Tensor, dx: Tensor | None) -> Tensor:
        """Go through a block.

        Args:
            block: its inputs and states; an LSTM's with its gates and cells.
            dy: the loss's gradient of each output (L, B, H), or None for zero.
            g: of the state after the block (B, n).
            dx: takes the gradients of the inputs (L, B, I), if they are wanted.

        Returns:
            The gradient of the state before the block.
        """
        absent = block.after[:0]
        g = g.clone(memory_format=torch.contiguous_format)
        given = [t.contiguous().numpy() for t in _given(self.weights.kind, block)]
        more = [absent if dy is None else dy, g, absent if dx is None else dx]
        arrays = [*self.constants, *given, *self.read, *(t.contiguous().numpy() for t in more)]

        def loop(first: int, last: int) -> None:
            number = self.parts.index((first, last))
            own = [sums[number].numpy() for sums in self.sums.values()]
            self.kernel(*arrays, *own, self.room[number].numpy(), first, last)

        share(loop, self.parts)
        return g

    def finish(self) -> None:
        """Add what was summed to the totals."""
        for first, *others in self.sums.values():
            for other in others:
                first += other
        kind, size, totals = self.weights.kind, self.weights.size, self.totals
        inputs, hidden, biases = (first for first, *_ in self.sums.values())
        if not self.direct["inputs"]:
            totals["inputs"] += inputs[:, : totals["inputs"].shape[1]]
        if kind == "GRU":  # rows: n as states see it, r, z, n as inputs see it
            totals["hidden"][: 2 * size] += hidden[size:, :size]
            totals["hidden"][2 * size :] += hidden[:size, :size]
        elif not self.direct["hidden"]:
            totals["hidden"] += hidden[:, :size]
        if "bias_inputs" in totals:
            gru = kind == "GRU"
            totals["bias_inputs"] += biases[size:] if gru else biases
            if gru:
                biases = torch.cat([biases[size : 3 * size], biases[:size]])
            totals["bias_hidden"] += biases
        for name, (first, *others) in self.sums.items():
            for part in others if self.direct.get(name) else (first, *others):
                part.zero_()


# Gradients of gates in a row; a GRU's third gate has two, as inputs and as states see it.
_ROW = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 4, "LSTM": 4}


def _loop(weights: Weights) -> tuple[Any, list[Any], Tensor]:
    """The loop for a cell, what it is given first, and the hidden weights as it orders them."""
    match weights.kind:
        case "GRU":
            zero = weights.hidden.new_zeros(weights.hidden.shape[0])
            given = [weights.bias_inputs, weights.bias_hidden]
            biases = torch.stack([zero if bias is None else bias for bias in given])
            forward = panels(weights.inputs.t()), panels(weights.hidden.t()), biases
            r_z, n = weights.hidden.split([2 * weights.size, weights.size])
            return cpu_backward.backward_gru, [t.numpy() for t in forward], torch.cat([n, r_z])
        case "LSTM":
            return cpu_backward.backward_lstm, [], weights.hidden
        case _:
            relu = weights.kind == "RNN_RELU"
            return functools.partial(cpu_backward.backward_rnn, relu), [], weights.hidden


def _given(kind: Kind, block: Block) -> list[Tensor]:
    """What a loop is given of a block, besides the gradients."""
    inputs = [block.x, block.before]
    if kind == "LSTM":
        assert block.kept is not None
        return [block.kept.gates, block.after, block.kept.cells, *inputs]
    return inputs if kind == "GRU" else [block.after, *inputs]


# Rows of a tile of a product; the most numbers in a matrix that stays in the caches although its
# rows lie apart.
_TILE_ROWS = 4
_COMPACT = 2**15


def _readable(w: Tensor, rows: int) -> Tensor:
    """A matrix for products with some rows: as it is if each number is read once, or in panels."""
    read_once = rows <= _TILE_ROWS and w.numel() <= _COMPACT
    return w.detach().unsqueeze(0) if read_once and _has_whole_vectors(w) else panels(w)


def _has_whole_vectors(matrix: Tensor) -> bool:
    return matrix.is_contiguous() and matrix.shape[1] % LANES == 0


def recall(weights: Weights, x: Tensor, before: Tensor, c: Tensor) -> Kept:
    """An LSTM's gates i, f, g, o and c before each step, by matrix products and no recurrence of h.
    From x (L, B, I) and h before each step (L, B, H); c (B, H) goes from before the first step to
    after the last."""
    gates = before.new_empty(*before.shape[:2], 4 * weights.size)
    cells, (bias, _) = before.new_empty(before.shape), _biases(weights)
    _drive(weights.inputs, bias, x, gates)
    gates.flatten(0, 1).addmm_(before.flatten(0, 1), weights.hidden.t())
    arrays = [t.numpy() for t in (gates, c, cells)]
    work = before.numel() * _ELEMENT_WORK
    _share(functools.partial(cpu_slopes.lstm_cells, *arrays), before.shape[1], work)
    return Kept(gates, cells)


def sweep(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor) -> Tensor:
    """As :func:`retrograde.kernels.sweep.sweep`, for float32 and float64 on a CPU; the hidden
    weights may be in panels."""
    samples, size = slopes.gates.shape[1], slopes.gates.shape[3]
    gates = slopes.gates.flatten(-2).numpy()
    absent = np.empty((0, 0, 0), gates.dtype)
    keep, inner, losses = (
        absent if t is None else t.numpy() for t in (slopes.keep, slopes.inner, dy)
    )
    weights = (hidden if hidden.dim() == 3 else panels(hidden)).numpy()
    g = g.clone(memory_format=torch.contiguous_format)
    kernel = cpu_sweep.sweep_lstm if g.shape[-1] == 2 * size else cpu_sweep.sweep_state
    parts = ranges(samples, 1 + slopes.gates.numel() * size // THREAD_WORK)
    numbers = cpu_sweep.room_to_sweep(max(b - a for a, b in parts), size)
    arrays = gates, keep, inner, weights, losses, g.numpy()
    _share_with_room(kernel, arrays, parts, numbers, g)
    return g


def scan(
    slopes: Slopes,
    hidden: Tensor,
    dy: Tensor | None,
    g: Tensor,
    chunk: int,
    doubts: None = None,
) -> Tensor:
    """As :func:`retrograde.kernels.sweep.scan`, for float32 and float64 on a CPU."""
    length, samples, _, size = slopes.gates.shape
    rest = length % chunk
    if length // chunk < 2:
        return sweep(slopes, hidden, dy, g)
    chunks, losses = reference.in_chunks(slopes.at(slice(rest, None)), dy, rest, chunk)
    rows = products(chunks, hidden, losses)
    after, before = reference.carry(rows, g)
    if not reference.trusted(rows, after):
        return sweep(slopes, hidden, dy, g)
    arrays, count = _arrays(chunks, hidden, losses), len(chunks.gates)
    parts = ranges(count, 1 + chunks.gates.numel() * size // THREAD_WORK)
    numbers = cpu_sweep.room_to_sweep(samples, size)
    _share_with_room(cpu_sweep.sweep_chunks, (*arrays, after.numpy()), parts, numbers, g)
    return sweep(slopes.at(slice(0, rest)), hidden, None if dy is None else dy[:rest], before)


def products(chunks: Slopes, hidden: Tensor, losses: Tensor | None) -> Tensor:
    """As :func:`retrograde.kernels.sweep.products`, for float32 and float64 on a CPU."""
    count, _, samples, _, size = chunks.gates.shape
    lstm = chunks.gates.shape[-2] == 4
    n = size * (2 if lstm else 1)
    rows = hidden.new_empty(count, samples, n + 1, n)
    kernel = cpu_sweep.products_lstm if lstm else cpu_sweep.products_state
    parts = ranges(count, 1 + chunks.gates.numel() * size * n // THREAD_WORK)
    numbers = cpu_sweep.room_for_products(size, n // size)
    arrays = (*_arrays(chunks, hidden, losses), rows.numpy())
    _share_with_room(kernel, arrays, parts, numbers, hidden)
    return rows


def _arrays(chunks: Slopes, hidden: Tensor, losses: Tensor | None) -> tuple[Any, ...]:
    """Chunks as the loops have them."""
    absent = np.empty((len(chunks.gates), 0, 0, 0), hidden.numpy().dtype)
    keep, inner, terms = (
        absent if t is None else t.numpy() for t in (chunks.keep, chunks.inner, losses)
    )
    return chunks.gates.flatten(-2).numpy(), keep, inner, panels(hidden).numpy(), terms


def gru_slopes(inputs: Tensor, hidden: Tensor, before: Tensor) -> Slopes:
    """As :func:`retrograde.kernels.cells.gru_slopes`, for float32 and float64 on a CPU."""
    length, samples, size = before.shape
    rows = length * samples
    keep, inner = before.new_empty(before.shape), before.new_empty(before.shape)
    arrays = (inputs, hidden, before.contiguous(), keep, inner)
    flat = [t.view(rows, -1).numpy() for t in arrays]
    _share(functools.partial(cpu_slopes.gru_slopes, *flat), rows, rows * size * _ELEMENT_WORK)
    return Slopes(hidden.unflatten(-1, (3, size)), keep, inner)


def lstm_slopes(gates: Tensor, after: Tensor, c: Tensor, known: bool = False) -> Slopes:
    """As :func:`retrograde.kernels.cells.lstm_slopes`, for float32 and float64 on a CPU."""
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
    share(kernel, ranges(count, 1 + work // THREAD_WORK))


def _share_with_room(
    kernel: Any, arrays: tuple[Any, ...], parts: list[Range], numbers: int, like: Tensor
) -> None:
    """The same for a kernel that needs room, which torch allocates, so that it is counted."""
    room = like.new_empty(len(parts), numbers)

    def loop(first: int, last: int) -> None:
        kernel(*arrays, room[parts.index((first, last))].numpy(), first, last)

    share(loop, parts)
