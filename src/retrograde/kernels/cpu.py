"""A recurrent layer on a CPU, by compiled loops that share samples, or chunks, among threads.

A step of a sample is a few elementwise products, and one product of a short vector with the hidden
weights. The call of each takes torch microseconds. Here a step is a compiled loop, and each thread
takes its samples through all steps. The inputs' part of the gates is one matrix product for a
whole block of steps. The dtype is float32 or float64.

The references of the backward pass are the functions of the same names in
:mod:`retrograde.kernels.sweep` and :mod:`retrograde.kernels.cells`. The reference of
:class:`Forward` is torch's own kernel. The loops are in ``cpu_states``, ``cpu_backward``,
``cpu_slopes`` and ``cpu_sweep``, and the formulas of the cells in ``cpu_cells``. Vectors are in
``lanes``, and matrix products in ``tiles``.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograde.kernels import cpu_backward, cpu_slopes, cpu_states, cpu_sweep
from retrograde.kernels import sweep as reference
from retrograde.kernels.cells import Block, Kept, Kind, Resets, Slopes, Weights
from retrograde.kernels.lanes import LANES
from retrograde.kernels.team import Range, ranges, share
from retrograde.kernels.tiles import panels, whole_vectors

__all__ = [
    "THREAD_WORK",
    "Backward",
    "Forward",
    "ForwardInPlace",
    "gru_slopes",
    "lstm_slopes",
    "panels",
    "products",
    "recall",
    "scan",
    "sweep",
    "sweep_in_place",
]

State = tuple[Tensor, ...]

#: The multiplications for which one more thread pays; they take about a tenth of a millisecond.
THREAD_WORK = 2_000_000
_ELEMENT_WORK = 40  # the work of one element of the slopes, in multiplications
_THREAD_ELEMENTS = 2**13  # the elements of one step for which one more thread pays


class Forward:
    """A layer's forward pass for B samples, one range of steps at each call."""

    in_panels = True

    def __init__(self, weights: Weights, samples: int) -> None:
        self.weights, rows = weights, weights.inputs.shape[0]
        self.bias, self.own = _biases(weights)
        hidden = panels(weights.hidden.t()) if self.in_panels else _no_panels(weights.hidden)
        self.fixed = [hidden.numpy()] if self.own is None else [self.own.numpy(), hidden.numpy()]
        width = int(whole_vectors(rows)) if self.in_panels else rows
        self.sums = weights.hidden.new_empty(samples, width)
        self.work = samples * rows * (weights.size + _ELEMENT_WORK // 4)

    def room(self, steps: int) -> Tensor:
        """Return an uninitialized tensor for the gates of ``steps`` steps (L, B, K·H)."""
        return self.sums.new_empty(steps, len(self.sums), len(self.weights.inputs))

    def __call__(
        self,
        x: Tensor,
        state: State,
        outputs: Tensor,
        gates: Tensor,
        cells: Tensor | None = None,
        resets: Resets | None = None,
    ) -> None:
        """Run the layer on inputs x (L, B, I).

        Args:
            x: the inputs.
            state: (h,) or (h, c), each (B, H) and contiguous; overwritten by the state after.
            outputs: receives h after each step (L, B, H).
            gates: scratch memory (L, B, K·H). An LSTM's receive i, f, g, o. An RNN's may be the
                same tensor as the outputs.
            cells: receives an LSTM's c before each step (L, B, H), if given.
            resets: where samples begin anew.
        """
        _drive(self.weights.inputs, self.bias, x, gates)
        by_step = [gates.numpy(), outputs.numpy()]
        if self.weights.kind == "LSTM":
            by_step.append((outputs[:0] if cells is None else cells).numpy())
        self._run(by_step, [*self.fixed, *(s.numpy() for s in state)], state, resets)

    def _run(
        self, by_step: list[Any], arrays: list[Any], state: State, resets: Resets | None
    ) -> None:
        """Run the loop, whose arrays are those ``by_step`` and others."""
        arrays += [*_starts(resets, self.sums)[:2], self.sums.numpy()]
        loop = functools.partial(_RUN[self.weights.kind], *by_step, *arrays)
        _share(loop, len(state[0]), len(by_step[0]) * self.work)


class ForwardInPlace(Forward):
    """The same without a copy of the weights: BLAS reads them in place, a product at each step.

    This is nearly as fast for layers of many units, and slower for small layers.
    """

    in_panels = False

    def _run(
        self, by_step: list[Any], arrays: list[Any], state: State, resets: Resets | None
    ) -> None:
        kernel, hidden, h = _RUN[self.weights.kind], self.weights.hidden.t(), state[0]
        arrays += [*_starts(None, self.sums)[:2], self.sums.numpy()]
        parts = ranges(len(h), 1 + h.numel() // _THREAD_ELEMENTS)
        for t in range(len(by_step[0])):
            if resets is not None:
                resets.enter(t, *state)
            if self.own is None:
                torch.mm(h, hidden, out=self.sums)
            else:
                torch.addmm(self.own, h, hidden, out=self.sums)
            share(functools.partial(kernel, *(a[t : t + 1] for a in by_step), *arrays), parts)


_RUN: dict[Kind, Any] = {
    "RNN_TANH": functools.partial(cpu_states.run_rnn, False),
    "RNN_RELU": functools.partial(cpu_states.run_rnn, True),
    "GRU": cpu_states.run_gru,
    "LSTM": cpu_states.run_lstm,
}


def _starts(resets: Resets | None, like: Tensor) -> tuple[Any, Any, Any]:
    """Return the arrays of resets: ``starts``, ``entry`` and ``to_entry``."""
    if resets is None:
        return _no_starts(like.dtype)
    return resets.starts.contiguous().numpy(), resets.entry.numpy(), resets.gradient.numpy()


@functools.cache
def _no_starts(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    none = torch.empty(0, 0, dtype=dtype, device="cpu").numpy()
    return np.empty((0, 0), np.bool_), none, none


def _no_panels(like: Tensor) -> Tensor:
    return like.new_empty(0, 0, 0)


def _biases(weights: Weights) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias of the inputs' part of the gates, and that of a GRU's state."""
    inputs, hidden = weights.bias_inputs, weights.bias_hidden
    if weights.kind == "GRU":
        rows = weights.hidden.shape[0]
        return inputs, weights.hidden.new_zeros(rows) if hidden is None else hidden
    return inputs if hidden is None or inputs is None else inputs + hidden, None


def _drive(inputs: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """Write x Wᵀ + bias to ``out``."""
    flat, into = x.flatten(0, 1), out.flatten(0, 1)
    if bias is None:
        torch.mm(flat, inputs.t(), out=into)
    else:
        torch.addmm(bias, flat, inputs.t(), out=into)


class Backward:
    """A layer's backward pass, one block of steps at a time, from the last block to the first.

    Each thread sums the gradients of the weights in its own arrays. :meth:`finish` adds these to
    the totals, since adding each small number to a large total would round more.

    Args:
        weights: the layer's parameters.
        totals: the gradients of the weights, by name, to which those of the blocks are added.
        samples: B.
        steps: the most steps of a block.
        at_once: let the first thread add directly to totals whose rows are whole vectors, every
            few dozen steps. This takes less memory and rounds more.
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
        numbers_between = max(  # a thread with fewer samples may have more rows
            cpu_backward.room_for(weights.kind, steps, last - first, width, size)
            for first, last in self.parts
        )
        self.room = hidden.new_empty(len(self.parts), numbers_between)

    def add(self, block: Block, dy: Tensor | None, g: Tensor, dx: Tensor | None) -> Tensor:
        """Backpropagate a block.

        Args:
            block: the inputs and states; an LSTM's must have its kept gates and cells.
            dy: the loss's gradient of each output (L, B, H), or None for zero.
            g: the gradient of the state after the block (B, n).
            dx: receives the gradients of the inputs (L, B, I); None if they are not needed.

        Returns:
            The gradient of the state before the block.
        """
        absent = block.after[:0]
        g = g.clone(memory_format=torch.contiguous_format)
        kept = _kept(self.weights.kind, block)
        given = [*self.constants, *(t.contiguous().numpy() for t in kept)]
        shared = [block.x.contiguous().numpy(), block.before.contiguous().numpy()]
        losses = (absent if dy is None else dy).contiguous().numpy()
        starts, _, to_entry = _starts(block.resets, g)
        arrays = [*shared, *self.read, losses, g.numpy(), starts, to_entry]
        arrays.append((absent if dx is None else dx).contiguous().numpy())

        def loop(first: int, last: int) -> None:
            number = self.parts.index((first, last))
            own = [
                *(sums[number].numpy() for sums in self.sums.values()),
                self.room[number].numpy(),
            ]
            self.kernel(*given, cpu_backward.Arrays(*arrays, *own), first, last)

        share(loop, self.parts)
        return g

    def finish(self) -> None:
        """Add the sums of all threads to the totals, and set the sums to zero."""
        for first, *others in self.sums.values():
            for other in others:
                first += other
        kind, size, totals = self.weights.kind, self.weights.size, self.totals
        inputs, hidden, biases = (first for first, *_ in self.sums.values())
        if not self.direct["inputs"]:
            totals["inputs"] += inputs[:, : totals["inputs"].shape[1]]
        if kind == "GRU":  # the rows of the sums are m, r, z, n
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


# Gate gradients in a row, in multiples of H. A GRU has four: those of m = U_n h + b, r, z and n.
_ROW = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 4, "LSTM": 4}


def _loop(weights: Weights) -> tuple[Any, list[Any], Tensor]:
    """Return the loop of a cell, its first arguments, and the hidden weights in its order."""
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


def _kept(kind: Kind, block: Block) -> list[Tensor]:
    """Return what a cell's loop reads of a block, besides inputs and states."""
    if kind == "LSTM":
        assert block.kept is not None
        return [block.kept.gates, block.after, block.kept.cells]
    return [] if kind == "GRU" else [block.after]


# The rows of a tile of a product, and the most numbers of a matrix that is read without panels.
# Such a matrix stays in the caches although its rows are not in panels.
_TILE_ROWS = 4
_COMPACT = 2**15


def _readable(w: Tensor, rows: int) -> Tensor:
    """Return a matrix (R, N) for products with ``rows`` rows.

    It is in panels, unless copying does not pay: it is then returned as (1, R, N). That is so if it
    is small, its rows are whole vectors, and each of its numbers is read only once.
    """
    read_once = rows <= _TILE_ROWS and w.numel() <= _COMPACT
    return w.detach().unsqueeze(0) if read_once and _has_whole_vectors(w) else panels(w)


def _has_whole_vectors(matrix: Tensor) -> bool:
    return matrix.is_contiguous() and matrix.shape[1] % LANES == 0


def recall(
    weights: Weights, x: Tensor, before: Tensor, c: Tensor, resets: Resets | None = None
) -> Kept:
    """Recompute an LSTM's gates i, f, g, o, and c before each step, from the kept h.

    This takes matrix products, and a recurrence of c but none of h. ``x`` is (L, B, I), ``before``
    is h before each step (L, B, H). ``c`` (B, H), before the first step, is overwritten by that
    after the last.
    """
    gates = before.new_empty(*before.shape[:2], 4 * weights.size)
    cells, (bias, _) = before.new_empty(before.shape), _biases(weights)
    _drive(weights.inputs, bias, x, gates)
    gates.flatten(0, 1).addmm_(before.flatten(0, 1), weights.hidden.t())
    arrays = [t.numpy() for t in (gates, before[:0], cells, _no_panels(c), c, c)]
    arrays += [*_starts(resets, c)[:2], c[:0].numpy()]
    work = before.numel() * _ELEMENT_WORK
    _share(functools.partial(cpu_states.run_lstm, *arrays), before.shape[1], work)
    return Kept(gates, cells)


def sweep(
    slopes: Slopes,
    hidden: Tensor,
    dy: Tensor | None,
    g: Tensor,
    resets: Resets | None = None,
) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.sweep`, for either dtype on a CPU.

    The hidden weights may be in panels.
    """
    samples, size = slopes.gates.shape[1], slopes.gates.shape[3]
    g = g.clone(memory_format=torch.contiguous_format)
    arrays = _arrays(slopes, hidden if hidden.dim() == 3 else panels(hidden), dy, resets)
    room = g.new_empty(samples, int(whole_vectors(size)))
    loop = functools.partial(_sweep_of(g, size), arrays, g.numpy(), room.numpy())
    _share(loop, samples, slopes.gates.numel() * size)
    return g


def sweep_in_place(
    slopes: Slopes,
    hidden: Tensor,
    dy: Tensor | None,
    g: Tensor,
    resets: Resets | None = None,
) -> Tensor:
    """Do the same by one BLAS product at each step, which reads the weights in place."""
    length, samples, _, size = slopes.gates.shape
    g = g.clone(memory_format=torch.contiguous_format)
    kernel, flat, past = _sweep_of(g, size), slopes.gates.flatten(-2), g.new_empty(samples, size)
    *by_step, none, starts, to_entry = _arrays(slopes, _no_panels(hidden), dy)
    known, room = g.numpy(), past.numpy()
    parts = ranges(samples, 1 + past.numel() // _THREAD_ELEMENTS)
    for t in range(length - 1, -1, -1):
        given = [*(a[t : t + 1] for a in by_step), none, starts, to_entry]
        step = cpu_sweep.Arrays._make(given)
        share(functools.partial(kernel, step, known, room), parts)
        if kernel is cpu_sweep.sweep_lstm:
            torch.mm(flat[t], hidden, out=past)
            g[:, :size] = past
        else:
            torch.addmm(past, flat[t], hidden, out=g)
        if resets is not None:
            resets.leave(t, g)
    return g


def _sweep_of(g: Tensor, size: int) -> Any:
    return cpu_sweep.sweep_lstm if g.shape[-1] == 2 * size else cpu_sweep.sweep_state


def scan(
    slopes: Slopes,
    hidden: Tensor,
    dy: Tensor | None,
    g: Tensor,
    chunk: int,
) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.scan`, for either dtype on a CPU."""
    length, samples, _, size = slopes.gates.shape
    rest = length % chunk
    if length // chunk < 2:
        return sweep(slopes, hidden, dy, g)
    chunks, losses = reference.in_chunks(slopes.at(slice(rest, None)), dy, rest, chunk)
    rows = products(chunks, hidden, losses)
    after, before = reference.carry(rows, g)
    if not reference.trusted(rows, after):
        return sweep(slopes, hidden, dy, g)
    arrays = _arrays(chunks, panels(hidden), losses), after.numpy()
    parts = ranges(len(chunks.gates), 1 + chunks.gates.numel() * size // THREAD_WORK)
    room = g.new_empty(len(parts), samples, int(whole_vectors(size)))
    _share_with_room(cpu_sweep.sweep_chunks, arrays, parts, room)
    return sweep(slopes.at(slice(0, rest)), hidden, None if dy is None else dy[:rest], before)


def products(chunks: Slopes, hidden: Tensor, losses: Tensor | None) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.products`, for either dtype on a CPU."""
    count, _, samples, _, size = chunks.gates.shape
    lstm = chunks.gates.shape[-2] == 4
    n = size * (2 if lstm else 1)
    rows = hidden.new_empty(count, samples, n + 1, n)
    kernel = cpu_sweep.products_lstm if lstm else cpu_sweep.products_state
    parts = ranges(count, 1 + chunks.gates.numel() * size * n // THREAD_WORK)
    numbers = cpu_sweep.room_for_products(size, n // size)
    arrays = _arrays(chunks, panels(hidden), losses), rows.numpy()
    _share_with_room(kernel, arrays, parts, hidden.new_empty(len(parts), numbers))
    return rows


def _arrays(
    slopes: Slopes, hidden: Tensor, losses: Tensor | None, resets: Resets | None = None
) -> cpu_sweep.Arrays:
    """Return the arrays that the loops take. An absent one has no steps, in chunks or not."""
    gates = slopes.gates.flatten(-2).numpy()
    absent = np.empty((*gates.shape[:-3], 0, 0, 0), gates.dtype)
    keep, inner, terms = (
        absent if t is None else t.numpy() for t in (slopes.keep, slopes.inner, losses)
    )
    starts, _, to_entry = _starts(resets, hidden)
    return cpu_sweep.Arrays(gates, keep, inner, terms, hidden.numpy(), starts, to_entry)


def gru_slopes(inputs: Tensor, hidden: Tensor, before: Tensor) -> Slopes:
    """Do the same as :func:`retrograde.kernels.cells.gru_slopes`, for either dtype on a CPU."""
    length, samples, size = before.shape
    rows = length * samples
    keep, inner = before.new_empty(before.shape), before.new_empty(before.shape)
    arrays = (inputs, hidden, before.contiguous(), keep, inner)
    flat = [t.view(rows, -1).numpy() for t in arrays]
    _share(functools.partial(cpu_slopes.gru_slopes, *flat), rows, rows * size * _ELEMENT_WORK)
    return Slopes(hidden.unflatten(-1, (3, size)), keep, inner)


def lstm_slopes(
    gates: Tensor, after: Tensor, c: Tensor, known: bool = False, resets: Resets | None = None
) -> Slopes:
    """Do the same as :func:`retrograde.kernels.cells.lstm_slopes`, for either dtype on a CPU."""
    length, samples, size = after.shape
    work = length * samples * size * _ELEMENT_WORK
    if not known:
        flat = gates.view(length * samples, -1).numpy()
        _share(functools.partial(cpu_slopes.lstm_gates, flat), length * samples, work)
    keep, inner = (after.new_empty(after.shape) for _ in range(2))
    arrays = [t.numpy() for t in (gates, after.contiguous(), c.clone(), keep, inner)]
    arrays += _starts(resets, c)[:2]
    _share(functools.partial(cpu_slopes.lstm_slopes, *arrays), samples, work)
    return Slopes(gates.unflatten(-1, (4, size)), keep, inner)


def _share(kernel: Callable[[int, int], None], count: int, work: int) -> None:
    """Call a kernel on ranges of samples or chunks, on as many threads as pay for the work."""
    share(kernel, ranges(count, 1 + work // THREAD_WORK))


def _share_with_room(kernel: Any, arrays: Any, parts: list[Range], room: Tensor) -> None:
    """Call a kernel on ranges, each of which has scratch memory of its own.

    torch allocates that memory, so that measurements count it.
    """

    def loop(first: int, last: int) -> None:
        kernel(*arrays, room[parts.index((first, last))].numpy(), first, last)

    share(loop, parts)
