"""One layer in one direction, backpropagated span by span, from the last to the first.

The gates of a span are recomputed from its inputs and states, unless they were kept. Then the
backward recurrence runs over their slopes (:mod:`retrograde.kernels.sweep`). Matrix products of the
gates' gradients with inputs, states and weights give the other gradients. For small layers on a CPU
one compiled loop does all of this.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from retrograde.kernels import BlockSweep, kernels
from retrograde.kernels.cells import Block, Slopes, Weights, slopes
from retrograde.kernels.cpu.products import add_outer, times
from retrograde.kernels.sweep import safe_chunk
from retrograde.recurrent.bytes import LAID_ROWS, LAID_SHARE, Backend

if TYPE_CHECKING:
    from retrograde.kernels.cpu.layer import Backward

# On a CPU, sums over steps and samples are matrix products of so many rows each. A single sum over
# all rows would round more. On a GPU, hundreds of launches would replace one product that sums in
# blocks by itself.
_ROWS = 4096


class LayerBackward:
    """The backward pass of one layer.

    ``totals``, by the names of the weights, are complete after ``finish``. ``rows`` is the most
    rows of a span of several steps. ``chunk`` is the steps in a chunk of a scan; None runs no scan.
    ``at_once`` sums gradients of weights in place, which takes less memory and rounds more.
    ``tight`` lays less of the outputs' gradient into contiguous memory. Blocks may have ``resets``.
    """

    def __init__(
        self, weights: Weights, totals: dict[str, Tensor], batch: int, rows: int, *,
        chunk: int | None = None, means: Backend = "loops", at_once: bool = False,
        tight: bool = False, resets: bool = False,
    ) -> None:  # fmt: skip
        hidden = weights.hidden
        self.on_cpu = on_cpu = hidden.device.type == "cpu"
        self.weights, self.totals, self.chunk = weights, totals, chunk
        # On a GPU each launch counts: biases are added once, and their gradients kept apart.
        self.of_gates, self.ones = weights, hidden[:0, 0]
        self.sums = dict[tuple[str, ...], Tensor]()
        inputs = weights.bias_inputs
        if weights.kind == "LSTM" and not on_cpu and inputs is not None:
            assert weights.bias_hidden is not None
            both = weights.bias_hidden + inputs
            self.of_gates = replace(weights, bias_inputs=None, bias_hidden=both)
        self.rows, self.at_once = rows, at_once or not on_cpu
        self.planned = chunk
        self.use = kernels(hidden.device.type, hidden.dtype, weights.size)
        if means == "in place":
            self.use = self.use.in_place
        if resets:
            self.use = self.use.resetting
        if chunk is not None and on_cpu:  # a GPU would have to be waited for
            self.chunk = safe_chunk(hidden, chunk)
        self.batch = batch
        kernel, self.in_place, form = self.use.backward, means == "in place", weights.form
        loops = chunk is None and (means == "loops" or form.step is not None)
        self.in_one_loop = loops and kernel is not None and kernel.pays(form, batch, weights.size)
        self.loops: Backward | None = None
        self.samples = -1
        few = LAID_ROWS * (means != "in place" and not tight)
        self.laid_rows = few if on_cpu else rows  # on a GPU each part is another launch
        self.sweep: BlockSweep | None = None

    def add(self, block: Block, dy: Tensor | None, g: Tensor, dx: Tensor | None) -> Tensor:
        """Backpropagate a span, and return the gradient of the state before it. That of the
        state after it is g, (n, H), or (n, 2 H) for (h, c). ``dy`` (L, n, H), in any layout, is the
        loss's gradient of the outputs, None for zero. ``dx`` receives the gradients of the inputs
        (L, n, I). The block's kept gates are overwritten."""
        if self.in_one_loop:
            return self._in_one_loop(block, dy, g, dx)
        weights, kept_gates = self.weights, None if block.kept is None else block.kept.gates
        c, anew = block.c if block.kept is None else block.kept.cells[0], block.resets
        arguments = self.of_gates, block.x, block.before, block.after, c, self.use.gates, kept_gates
        steps = slopes(*arguments, anew)
        if self.chunk is not None:
            assert self.planned is not None
            # With shorter chunks than planned, which overflow less, no more products at a time.
            most = len(block.x)
            if self.chunk < self.planned:
                most = self.chunk * max(1, most // self.planned)
            for part in _slices(len(block.x), most):
                losses = None if dy is None else _laid(dy[part], g)
                g = self.use.scan(steps.at(part), weights.hidden, losses, g, self.chunk)
                del losses  # before the next copy is made
        else:
            self.sweep = self.sweep or self.use.sweep_with(weights.hidden, self.batch)
            for part in self._parts(dy, samples=len(g)):
                losses = None if dy is None else _laid(dy[part], g)
                resets = () if anew is None else (anew.at(part),)
                g = self.sweep(steps.at(part), losses, g, *resets)
                del losses  # before the next copy is made
        self._add_products(steps, block, dx)
        return g

    def finish(self) -> None:
        """Add the sums that were kept separately to the totals."""
        if self.loops is not None:
            self.loops.finish()
        self.loops = None
        for names, total in self.sums.items():
            for name in names:
                self.totals[name] += total
        self.sums.clear()

    def _in_one_loop(self, block: Block, dy: Tensor | None, g: Tensor, dx: Tensor | None) -> Tensor:
        if self.loops is None or self.samples != len(g):
            self.finish()
            assert self.use.backward is not None
            self.samples = len(g)
            steps = max(1, self.rows // self.samples)
            ways = {"at_once": self.at_once, "in_place": self.in_place}
            self.loops = self.use.backward(self.weights, self.totals, self.samples, steps, **ways)
        form = self.weights.form
        if block.kept is None and (form.others or (self.in_place and form.keeps)):
            assert self.use.recall is not None
            kept = self.use.recall(self.weights, block.x, block.before, block.c, block.resets)
            block = replace(block, kept=kept)
        for part in self._parts(dy, samples=len(g)):
            losses = None if dy is None else _laid(dy[part], g)
            into = None if dx is None else dx[part]
            g = self.loops.add(block.at(part), losses, g, into)
            del losses
        return g

    def _parts(self, dy: Tensor | None, samples: int) -> list[slice]:
        """Return the steps to backpropagate at a time, from the last to the first. There are few at
        a time if the outputs' gradient must be copied first."""
        if dy is None or (dy.is_contiguous() and dy.dtype == self.weights.hidden.dtype):
            return [slice(None)]
        most = max(1, self.laid_rows // samples, len(dy) // LAID_SHARE)
        return _slices(len(dy), most)

    def _add_products(self, steps: Slopes, block: Block, dx: Tensor | None) -> None:
        gates = steps.gates.flatten(0, 1)
        flat = gates.flatten(-2)
        gru = self.weights.kind == "GRU"
        self._sum(flat, "bias_hidden", *["bias_inputs"] * (not gru))
        self._add("hidden", flat, block.before.flatten(0, 1))
        if gru:  # the input weights' part of the third gate
            assert steps.inner is not None
            gates[:, 2].copy_(steps.inner.flatten(0, 1))
            self._sum(flat, "bias_inputs")
        self._add("inputs", flat, block.x.flatten(0, 1))
        if dx is not None:
            times(flat, self.weights.inputs, dx.flatten(0, 1))

    def _sum(self, gates: Tensor, *names: str) -> None:
        """Add the sum of rows to the totals of biases, if there are any."""
        if "bias_hidden" not in self.totals:
            return
        if self.on_cpu:
            total = gates.sum(0)
            for name in names:
                self.totals[name] += total
            return
        if len(self.ones) < len(gates):
            self.ones = gates.new_ones(len(gates))
        if names not in self.sums:
            self.sums[names] = torch.zeros_like(self.totals[names[0]])
        self.sums[names].addmv_(gates.t(), self.ones[: len(gates)])

    def _add(self, name: str, gates: Tensor, by: Tensor) -> None:
        """Add gatesᵀ · ``by`` to a total. Many rows are summed in parts, which rounds less."""
        if self.at_once:
            add_outer(gates, by, self.totals[name])
            return
        for part, other in zip(gates.split(_ROWS), by.split(_ROWS), strict=True):
            product = torch.zeros_like(self.totals[name])
            add_outer(part, other, product)
            self.totals[name] += product


def _slices(length: int, most: int) -> list[slice]:
    """Return steps of at most so many, from the last to the first."""
    return [slice(a, min(a + most, length)) for a in range(0, length, most)][::-1]


def _laid(dy: Tensor, like: Tensor) -> Tensor:
    """Return a gradient in contiguous memory, in the dtype of the computation."""
    return dy.to(like.dtype).contiguous()
