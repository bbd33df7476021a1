"""One recurrent layer in one direction: forward by torch's kernel, backward from the states alone.

Forward, a kernel runs that keeps nothing for a backward pass: a compiled one of ours where there is
one (:mod:`retrograde.kernels`), and else torch's own. The tape is the hidden states, which are the
outputs, and an LSTM's c at the first step of each block; our own kernel leaves an LSTM's gates and
cells as well, five numbers a unit and step in place of torch's sixteen. Backward, blocks of steps
are taken from the last to the first: their slopes are recomputed, by one matrix product where the
gates are not known, the recurrence runs over them (:mod:`retrograde.kernels.sweep`), and what it
leaves, the gates' gradients, is multiplied once by the inputs, once by the states and once by the
weights.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from retrograde.kernels import Backward, kernels
from retrograde.kernels.cells import Block, Kept, Kind, Slopes, Weights, slopes
from retrograde.kernels.sweep import safe_chunk
from retrograde.scan.block_lengths import Way

__all__ = ["Gradients", "Tape", "Way", "backpropagate", "room_for", "run", "run_and_keep"]

State = tuple[Tensor, ...]


@dataclass
class Tape:
    """What is kept from forward to backward, besides the caller's own tensors.

    Attributes:
        way: how the layer is to be backpropagated.
        outputs: h after every step (T, B, H).
        sizes: how many sequences have a step t, longest first, or None where all have all.
        kept: an LSTM's gates and cells, if the forward pass left them.
        marks: if it did not, an LSTM's c before the first step of every block (number, B, H).
    """

    way: Way
    outputs: Tensor
    sizes: Tensor | None = None
    kept: Kept | None = None
    marks: Tensor | None = None

    def block(self, x: Tensor, h: Tensor, start: int, stop: int) -> Block:
        """The block of some steps, of all inputs (T, B, I) and the initial h (B, H)."""
        after = self.outputs[start:stop]
        if start == 0:
            before = torch.cat([h.unsqueeze(0), after[:-1]])
        else:
            before = self.outputs[start - 1 : stop - 1]
        kept, c = None, None
        if self.kept is not None:
            kept = self.kept.at(slice(start, stop))
            c = kept.cells[0]
        elif self.marks is not None:
            c = self.marks[start // self.way.block]
        return Block(x[start:stop], before, after, c, kept, self.valid(start, stop))

    def valid(self, start: int, stop: int) -> Tensor | None:
        """Which sequences have which of some steps (L, B, 1), or None where all have all."""
        if self.sizes is None:
            return None
        reached = self.sizes[start:stop].unsqueeze(1) > torch.arange(int(self.sizes[0]))
        return reached.unsqueeze(-1)


@dataclass
class Gradients:
    """The gradients of a layer, those not asked for being None."""

    x: Tensor | None
    state: State
    weights: dict[str, Tensor]


# The most numbers in hidden weights whose products our own loops do faster than BLAS; how much
# longer their blocks are, since nothing is stored.
_SMALL = 2**18
_LONGER = 8
# Rows to a product of sums over steps and samples: one sum over all would round more.
_ROWS = 4096

_CALLS: dict[Kind, str] = {
    "RNN_TANH": "rnn_tanh",
    "RNN_RELU": "rnn_relu",
    "GRU": "gru",
    "LSTM": "lstm",
}


def run(
    weights: Weights,
    x: Tensor,
    state: State,
    sizes: Tensor | None = None,
    kept: Kept | None = None,
) -> tuple[Tensor, State]:
    """Run a range of steps by the fastest kernel, recording nothing.

    Args:
        weights: the layer's parameters.
        x: inputs (L, B, I).
        state: before the range: (h,), or (h, c), each (B, H).
        sizes: how many sequences have each step, longest first; None for all.
        kept: where an LSTM's gates and cells are to be left; :func:`room_for` says if they can be.

    Returns:
        The outputs (L, B, H), and the state after the range.
    """
    ours = kernels(x.device.type, x.dtype, weights.size).run
    if ours is not None and sizes is None:
        with torch.no_grad():
            return ours(weights, x, state, kept)
    return _run_by_torch(weights, x, state, sizes)


def room_for(weights: Weights, x: Tensor, sizes: Tensor | None) -> Kept | None:
    """Where an LSTM's forward pass can leave its gates and cells; None where it cannot."""
    ours = kernels(x.device.type, x.dtype, weights.size).run
    if weights.kind != "LSTM" or ours is None or sizes is not None:
        return None
    gates, cells = (x.new_empty(*x.shape[:2], k * weights.size) for k in (4, 1))
    return Kept(gates, cells)


def _run_by_torch(
    weights: Weights, x: Tensor, state: State, sizes: Tensor | None
) -> tuple[Tensor, State]:
    biases = [b for b in (weights.bias_inputs, weights.bias_hidden) if b is not None]
    before: Any = tuple(s.unsqueeze(0).contiguous() for s in state)
    layers, dropout, train, bidirectional, batch_first = 1, 0.0, False, False, False
    call = getattr(torch._VF, _CALLS[weights.kind])  # type: ignore[attr-defined]
    hx = before if weights.kind == "LSTM" else before[0]
    flat = [weights.inputs, weights.hidden, *biases]
    options: Any = (flat, bool(biases), layers, dropout, train, bidirectional)
    with torch.no_grad():
        if sizes is None:
            outputs, *after = call(x, hx, *options, batch_first)
        else:
            outputs, *after = call(_packed(x, sizes), sizes, hx, *options)
            outputs = _padded(outputs, sizes)
    return outputs, tuple(s.squeeze(0) for s in after)


def _packed(x: Tensor, sizes: Tensor) -> Tensor:
    return torch.cat([step[:size] for step, size in zip(x, sizes.tolist(), strict=True)])


def _padded(data: Tensor, sizes: Tensor) -> Tensor:
    padded, _ = torch._VF._pad_packed_sequence(data, sizes, False, 0.0, len(sizes))  # type: ignore[attr-defined]
    return padded


def run_and_keep(
    weights: Weights, way: Way, x: Tensor, state: State, sizes: Tensor | None = None
) -> tuple[Tensor, State, Tape]:
    """Run all steps and keep what the backward pass will need.

    Args:
        weights: the layer's parameters.
        way: how it will be backpropagated.
        x: inputs (T, B, I).
        state: as for :func:`run`.
        sizes: as for :func:`run`.

    Returns:
        The outputs (T, B, H), the state after all steps, and the tape.
    """
    kept = room_for(weights, x, sizes)
    if weights.kind != "LSTM" or kept is not None:
        outputs, after = run(weights, x, state, sizes, kept)
        return outputs, after, Tape(way, outputs, sizes, kept)
    outputs = x.new_zeros(*x.shape[:2], weights.size)
    marks = x.new_empty(-(-len(x) // way.block), *state[1].shape)
    for number, start in enumerate(range(0, len(x), way.block)):
        marks[number] = state[1]
        steps = slice(start, start + way.block)
        outputs[steps], state = _run_alive(weights, x[steps], state, sizes, start)
    return outputs, state, Tape(way, outputs, sizes, None, marks)


def _run_alive(
    weights: Weights, x: Tensor, state: State, sizes: Tensor | None, start: int
) -> tuple[Tensor, State]:
    """Run a range of the sequences that have its first step; the others' state stays."""
    if sizes is None:
        return run(weights, x, state)
    among = sizes[start : start + len(x)]
    alive = int(among[0])
    outputs, after = run(weights, x[:, :alive], tuple(s[:alive] for s in state), among)
    padding = (0, 0, 0, x.shape[1] - alive)
    final = (torch.cat([new, old[alive:]]) for new, old in zip(after, state, strict=True))
    return functional.pad(outputs, padding), tuple(final)


@torch.no_grad()
def backpropagate(
    weights: Weights,
    tape: Tape,
    x: Tensor,
    first: State,
    dy: Tensor | None,
    after: State,
    needs_x: bool,
    totals: dict[str, Tensor] | None = None,
) -> Gradients:
    """Backpropagate all steps.

    Args:
        weights: the layer's parameters, as in the forward pass.
        tape: what :func:`run_and_keep` kept.
        x: inputs (T, B, I).
        first: the initial state.
        dy: the loss's gradient of each output (T, B, H), or None for zero.
        after: that of the final state, (h,), or (h, c).
        needs_x: whether the gradient of the inputs is wanted.
        totals: gradients of weights, by name, to which the layer's are to be added.

    Returns:
        Every gradient, in the dtype of what it is the gradient of.
    """
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    way, at_once = tape.way, _at_once(weights, tape, x, real)
    sums = _Sums(weights.cast(real), x if needs_x else None, at_once, totals or {})
    if way.name == "scan":
        way = replace(way, chunk=safe_chunk(sums.cast.hidden, way.chunk))
    if tape.sizes is not None:
        dy, after = _at_the_ends(tape.sizes, dy, after)
    g = torch.cat([s.to(real) for s in after], -1)
    for start, stop in reversed(_blocks(len(x), way, at_once is not None)):
        block = tape.block(x, first[0], start, stop)
        g = sums.add(way, block, None if dy is None else dy[start:stop], g, start)
    state = tuple(part.to(x.dtype) for part in g.split(weights.size, -1))
    return Gradients(sums.x, state, {k: v.to(x.dtype) for k, v in sums.weights.items()})


def _at_the_ends(sizes: Tensor, dy: Tensor | None, after: State) -> tuple[Tensor, State]:
    """Let the gradient of each sequence's last h come in where the sequence ends."""
    g = after[0]
    total = g.new_zeros(len(sizes), *g.shape) if dy is None else dy.clone()
    last = (sizes.unsqueeze(1) > torch.arange(len(g))).sum(0) - 1
    total[last.to(g.device), torch.arange(len(g), device=g.device)] += g
    return total, (torch.zeros_like(g), *after[1:])


def _mask(block: Block, steps: Slopes) -> None:
    """Past a sequence's end nothing is passed on, but an LSTM's c, which is unchanged."""
    if block.valid is None:
        return
    ended = ~block.valid.to(block.x.device)
    steps.gates.masked_fill_(ended.unsqueeze(-1), 0)
    if steps.keep is not None and steps.inner is not None:
        steps.keep.masked_fill_(ended, 0 if block.c is None else 1)
        steps.inner.masked_fill_(ended, 0)


def _blocks(length: int, way: Way, at_once: bool) -> list[tuple[int, int]]:
    """The ranges of steps that are backpropagated at a time.

    A kernel for the whole pass needs no room of its own, so its ranges are longer; step 0 is one by
    itself, since the state before it is not in the outputs.
    """
    starts = [*range(0, length, way.block)]
    if at_once:
        starts = [0, *range(1, length, _LONGER * way.block)]
    return list(zip(starts, [*starts[1:], length], strict=True))


def _at_once(weights: Weights, tape: Tape, x: Tensor, real: torch.dtype) -> type[Backward] | None:
    """A kernel for the whole backward pass, if there is one and it is the fastest."""
    known = weights.kind != "LSTM" or tape.kept is not None
    if tape.way.name == "scan" or tape.sizes is not None or x.dtype != real or not known:
        return None
    if x.shape[1] < 2 or weights.hidden.numel() > _SMALL:
        return None  # no samples to share among threads, or too much for the caches
    return kernels(x.device.type, real, weights.size).backward


class _Sums:
    """The gradients of inputs and weights, to which each block adds its share."""

    def __init__(
        self,
        weights: Weights,
        x: Tensor | None,
        at_once: type[Backward] | None,
        totals: dict[str, Tensor],
    ) -> None:
        self.cast, self.at_once = weights, at_once
        self.x = None if x is None else x.new_empty(x.shape)
        self.weights = {
            name: totals[name]
            if name in totals
            else torch.zeros_like(w, memory_format=torch.contiguous_format)
            for name, w in weights.tensors().items()
        }

    def add(self, way: Way, block: Block, dy: Tensor | None, g: Tensor, start: int) -> Tensor:
        """Backpropagate a block; return the gradient of the state before it."""
        weights = self.cast
        real = weights.hidden.dtype
        dx = None if self.x is None else self.x[start : start + len(block.x)]
        block, losses = block.cast(real), None if dy is None else dy.to(real).contiguous()
        if self.at_once is not None:
            loops = self.at_once(weights, self.weights, block.x.shape[1], len(block.x))
            g = loops.add(block, losses, g, dx)
            loops.finish()
            return g
        use = kernels(block.x.device.type, real, weights.size)
        known = None if block.kept is None else block.kept.gates.clone()  # they become slopes
        steps = slopes(weights, block.x, block.before, block.after, block.c, use.gates, known)
        _mask(block, steps)
        if way.name == "scan":
            g = use.scan(steps, weights.hidden, losses, g, way.chunk)
        else:
            g = use.sweep(steps, weights.hidden, losses, g)
        self._add_weights(steps, block.x, block.before, dx)
        return g

    def _add_weights(self, steps: Slopes, x: Tensor, before: Tensor, dx: Tensor | None) -> None:
        gates = steps.gates.flatten(0, 1)
        flat = gates.flatten(-2)
        biased = "bias_hidden" in self.weights
        total = flat.sum(0) if biased else None
        if total is not None:
            self.weights["bias_hidden"] += total
        _add_product(self.weights["hidden"], flat, before.flatten(0, 1))
        if self.cast.kind == "GRU":  # as the input weights see the third gate
            assert steps.inner is not None
            gates[:, 2].copy_(steps.inner.flatten(0, 1))
            total = flat.sum(0) if biased else None
        if total is not None:
            self.weights["bias_inputs"] += total
        _add_product(self.weights["inputs"], flat, x.flatten(0, 1))
        if dx is not None:
            dx.copy_((flat @ self.cast.inputs).view(x.shape))


def _add_product(total: Tensor, gates: Tensor, by: Tensor) -> None:
    """total += gatesᵀ by, the rows being summed in parts, and then the parts."""
    for part, other in zip(gates.split(_ROWS), by.split(_ROWS), strict=True):
        total += part.t() @ other  # not added to a large total one by one
