"""A recurrent layer on a CPU: its forward and backward passes, by compiled loops.

A step of a sample is a few elementwise products, and one product of a short vector with the hidden
weights. The call of each takes torch microseconds. Here a step is a compiled loop, and each thread
takes its samples through all steps. The inputs' part of the gates is one matrix product for a
whole block of steps. The dtype is float32 or float64.

The references are torch's own kernel for :class:`Forward`, and for :class:`Backward` the functions
of :mod:`retrograde.kernels.sweep` and :mod:`retrograde.kernels.cells`. The loops are in
``forward_loops`` and ``backward_loops``, and the formulas of the cells in ``cells``. Vectors are in
``lanes``, and matrix products in ``tiles``.
"""

import functools
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from retrograde.kernels.cells import GATES, Block, Kept, Kind, Resets, Weights
from retrograde.kernels.cpu import backward_loops, forward_loops
from retrograde.kernels.cpu.backward_loops import ROW, BackwardArrays, room_for
from retrograde.kernels.cpu.forward_loops import ForwardArrays
from retrograde.kernels.cpu.llvm.barrier import (
    bounds_of_units,
    parts_of_units,
    share_or_meet,
)
from retrograde.kernels.cpu.llvm.lanes import LANES, Reals
from retrograde.kernels.cpu.llvm.threads import numbered, parts_for, share
from retrograde.kernels.cpu.llvm.tiles import panels, panels_of, whole_vectors
from retrograde.kernels.cpu.products import linear
from retrograde.kernels.cpu.sweep import ELEMENT_WORK, starts_of

State = tuple[Tensor, ...]


class Forward:
    """A layer's forward pass for B samples, one range of steps at each call.

    Without ``in_panels`` there is no copy of the weights, which is slower for small layers.
    """

    def __init__(self, weights: Weights, samples: int, *, in_panels: bool = True) -> None:
        self.weights, gates = weights, GATES[weights.kind]
        self.bias, own = _biases(weights)
        u = weights.hidden.detach()
        parts = parts_of_units(samples, weights.size, gates)
        self.units, each = bounds_of_units(weights.size, parts)
        if in_panels:  # the columns of a part are all gates of its units, the first gate first
            by_gate = u.unflatten(0, (-1, u.shape[1]))
            ends = pairwise(self.units.tolist())
            hidden = panels(*(by_gate[:, a:b].permute(2, 0, 1) for a, b in ends))
        else:
            hidden = u.contiguous()[None, :, None]
        self.fixed = u.new_empty(0) if own is None else own.detach().contiguous(), hidden
        self.sums = u.new_empty(parts, samples, int(whole_vectors(gates * each)))
        self.work = samples * len(u) * (weights.size + ELEMENT_WORK // 4)

    @staticmethod
    def numbers(kind: Kind, samples: int, size: int, parts: int, *, in_panels: bool) -> int:
        """Return how many numbers an instance allocates; a part of several is copied twice."""
        whole, own = GATES[kind] * size, GATES[kind] * bounds_of_units(size, parts)[1]
        found = parts * samples * int(whole_vectors(own)) + whole
        copies = parts * panels_of(own) + (own if parts > 1 else 0)
        return found + (copies * size if in_panels else 0)

    def room(self, steps: int) -> Tensor:
        """Return an uninitialized tensor for the gates of ``steps`` steps (L, B, K·H)."""
        return self.sums.new_empty(steps, self.sums.shape[1], len(self.weights.inputs))

    def __call__(
        self, x: Tensor, state: State, outputs: Tensor, gates: Tensor, cells: Tensor | None = None,
        resets: Resets | None = None,
    ) -> None:  # fmt: skip
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
        linear(x.flatten(0, 1), self.weights.inputs, self.bias, gates.flatten(0, 1))
        kind, none = self.weights.kind, outputs[:0]
        before = none if cells is None else cells
        c = state[1] if kind == "LSTM" else none.flatten(0, 1)
        arrays = [t.numpy() for t in (gates, outputs, before, *self.fixed, state[0], c)]
        arrays += [*starts_of(resets, self.sums)[:2], self.sums.numpy()]
        given = GATES[kind], kind == "RNN_RELU", ForwardArrays(*arrays), self.units
        parts = parts_for(len(state[0]), len(x) * self.work)
        many = 0 if resets is not None else len(self.units) - 1
        share_or_meet(forward_loops.run, parts, many, *given)


def _biases(weights: Weights) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias of the inputs' part of the gates, and that of a GRU's state."""
    inputs, hidden = weights.bias_inputs, weights.bias_hidden
    if weights.kind == "GRU":
        rows = weights.hidden.shape[0]
        return inputs, weights.hidden.new_zeros(rows) if hidden is None else hidden
    return inputs if hidden is None or inputs is None else inputs + hidden, None


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
        self, weights: Weights, totals: dict[str, Tensor], samples: int, steps: int, *,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        size, width = weights.size, weights.inputs.shape[1]
        self.weights, self.totals = weights, totals
        self.constants, hidden = _constants(weights)
        work = steps * samples * hidden.shape[0] * (2 * size + width)
        self.parts = parts_for(samples, work)
        self.numbered = numbered(self.parts)
        each = max(last - first for first, last in self.parts)
        self.read = [_readable(w, each).numpy() for w in (weights.inputs, hidden)]
        self.direct = {
            name: at_once and _has_whole_vectors(totals[name])
            for name in (("inputs",) if weights.kind == "GRU" else ("inputs", "hidden"))
        }
        self.sums = {
            name: hidden.new_zeros(len(self.parts) - self.direct.get(name, False), *shape)
            for name, shape in _shapes_of_sums(weights.kind, width, size).items()
        }
        # A thread with fewer samples may have more rows.
        rooms = (room_for(weights.kind, steps, b - a, width, size) for a, b in self.parts)
        room = hidden.new_empty(len(self.parts), max(rooms))
        own = {name: sums.numpy() for name, sums in self.sums.items()}
        twice = [
            (totals[name][None].numpy() if self.direct.get(name) else own[name][:0], own[name])
            for name in ("inputs", "hidden")
        ]
        self.own = *twice, own["biases"], room.numpy()
        self.absent: Reals = hidden.new_empty(0, 1, 1).numpy()

    @staticmethod
    def pays(samples: int, size: int, gates: int, threads: int = 0) -> bool:
        """Return whether this is the fastest: if weights are few and threads share the samples."""
        few = gates * size**2 <= _LARGE
        return few and samples > 1 and parts_of_units(samples, size, gates, threads) == 1

    @staticmethod
    def numbers(
        kind: Kind, samples: int, width: int, size: int, steps: int, threads: int, at_once: bool
    ) -> int:
        """Return how many numbers an instance holds at most, on so many threads."""
        rows, parts = GATES[kind] * size, min(threads, max(1, samples // 2))
        each = ceil(samples / parts) + (parts > 1)
        found = sum(rows * panels_of(n) for n in (width, size) if not _is_plain(each, rows, n))
        if kind == "GRU":
            found += (width + size) * panels_of(rows) + 2 * rows + rows * size
        found += parts * sum(map(prod, _shapes_of_sums(kind, width, size).values()))
        if at_once:  # one thread sums directly into the gradients
            found -= rows * width * (width % LANES == 0)
            found -= rows * size * (size % LANES == 0 and kind != "GRU")
        rooms = (room_for(kind, steps, max(1, each - fewer), width, size) for fewer in range(3))
        return found + parts * max(rooms)

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
        kind, kept = self.weights.kind, block.kept
        assert kept is not None or kind != "LSTM"
        g = g.clone(memory_format=torch.contiguous_format)

        def array(t: Tensor | None) -> Reals:
            return self.absent if t is None else t.contiguous().numpy()

        gates, cells = (None, None) if kept is None else (kept.gates, kept.cells)
        states = [gates, None if kind == "GRU" else block.after, cells, block.x, block.before]
        starts, _, to_entry = starts_of(block.resets, g)
        arrays: list[Any] = [*self.constants, *map(array, states), *self.read, array(dy)]
        arrays += [g.numpy(), starts, to_entry, array(dx), *self.own]
        given = GATES[kind], kind == "RNN_RELU", BackwardArrays(*arrays)
        share(backward_loops.backward, self.numbered, *given)
        return g

    def finish(self) -> None:
        """Add the sums of all threads to the totals, and set the sums to zero."""
        kind, size, totals = self.weights.kind, self.weights.size, self.totals
        inputs, hidden, biases = map(self._sum, self.sums)
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
        for sums in self.sums.values():
            sums.zero_()

    def _sum(self, name: str) -> Tensor:
        """Return the sum of all threads. It is in the array of the first, or in the total."""
        sums = list(self.sums[name])
        first, *others = [self.totals[name], *sums] if self.direct.get(name) else sums
        total: Tensor = functools.reduce(Tensor.add_, others, first)
        return total


def _shapes_of_sums(kind: Kind, width: int, size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a thread's sums of the weights' gradients, by name."""
    rows, wide = GATES[kind] * size, [int(whole_vectors(n)) for n in (width, size)]
    return {"inputs": (rows, wide[0]), "hidden": (rows, wide[1]), "biases": (ROW[kind] * size,)}


def _constants(weights: Weights) -> tuple[list[Reals], Tensor]:
    """Return what recomputes a GRU's gates, and the hidden weights in the order of the loop."""
    hidden, absent = weights.hidden, weights.hidden.detach()[:0]
    if weights.kind != "GRU":
        return [absent[None].numpy(), absent[None].numpy(), absent.numpy()], hidden
    zero = hidden.new_zeros(hidden.shape[0])
    given = [weights.bias_inputs, weights.bias_hidden]
    biases = torch.stack([zero if bias is None else bias for bias in given])
    forward = panels(weights.inputs.t())[0], panels(hidden.t())[0], biases
    r_z, n = hidden.split([2 * weights.size, weights.size])
    return [t.numpy() for t in forward], torch.cat([n, r_z])


# The rows of a tile of a product, and the most numbers of a matrix that is read without panels.
# Such a matrix stays in the caches although its rows are not in panels.
_TILE_ROWS = 4
_COMPACT = 2**15
# The most numbers in hidden weights for which one loop is faster than BLAS.
_LARGE = 2**18


def _readable(w: Tensor, rows: int) -> Tensor:
    """Return a matrix (R, N) for products with ``rows`` rows.

    It is in panels, unless copying does not pay: it is then returned as (1, R, N). That is so if it
    is small, its rows are whole vectors, and each of its numbers is read only once.
    """
    is_plain = _is_plain(rows, *w.shape) and w.is_contiguous()
    return w.detach().unsqueeze(0) if is_plain else panels(w)[0]


def _is_plain(rows: int, count: int, width: int) -> bool:
    return rows <= _TILE_ROWS and count * width <= _COMPACT and width % LANES == 0


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
    flat = gates.flatten(0, 1)
    linear(x.flatten(0, 1), weights.inputs, bias, flat)
    linear(before.flatten(0, 1), weights.hidden, None, flat, add=True)
    arrays = gates.numpy(), cells.numpy(), c.numpy(), *starts_of(resets, c)[:2]
    parts = parts_for(before.shape[1], before.numel() * ELEMENT_WORK)
    share(forward_loops.run_cells, parts, *arrays)
    return Kept(gates, cells)
