"""Layers in one direction by compiled loops alone: no autograd, and hardly any memory besides.

A range that is recorded holds its states, and for an LSTM its gates: 6 numbers a unit and step, for
RNN and GRU 1. Going back, the loops read the outputs' gradients where they are, leave those of the
inputs where they belong, and add those of the weights to what there is. A range that keeps nothing
is run some steps at a time in the same room, whatever its length. What the loops want in one piece
and is not, such as inputs with the batch first, is copied some steps at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from retrograde.cores.fused import Layers
from retrograde.discover.surroundings import Ambient
from retrograde.kernels import Backward, Forward, kernels
from retrograde.kernels.cells import Block, Kept, Weights
from retrograde.run.core import Emit, Gradients, RangeCore, Tape
from retrograde.run.inputs import Inputs

__all__ = ["Direct", "sums_at_once"]

Tensors = list[Tensor]

# Steps, and steps of samples, that are worked on at a time where there is a choice: fewer would
# cost more in calls than they take, and be too little work for several threads.
_STEPS = 8
_ROWS = 64
_ROWS_ADVANCED = 128

# Rows whose gradients may be added to a total without an order: sums of 64 each, one by one.
_FEW_ROWS = 2**14


def sums_at_once(length: int, batch: int) -> bool:
    """Whether the weights' gradients may be summed in place, or that would round too much.

    Args:
        length: T.
        batch: B.

    Returns:
        Whether there are few enough steps of samples.
    """
    return length * batch <= _FEW_ROWS


@dataclass
class _Layer:
    """What one layer's range holds: h before the first step, and after every step (L + 1, B, H);
    an LSTM's gates and cells."""

    states: Tensor
    kept: Kept | None


@dataclass
class _Tape(Tape):
    layers: list[_Layer]


class Direct(RangeCore):
    """Layers above one another, in one direction.

    Args:
        net: the layers; without projections, in single or double precision, on a CPU.
        at_once: as :func:`sums_at_once` has it.

    Example:
        >>> from retrograde.run.inputs import Held
        >>> gru = torch.nn.GRU(3, 5)
        >>> core = Direct(Layers("GRU", gru._flat_weights, 1, True), at_once=True)
        >>> x, h = torch.randn(7, 2, 3), torch.zeros(1, 2, 5)
        >>> torch.allclose(core.advance(Held([x]), 0, [7], [h], None)[0][0], gru(x)[1], atol=1e-6)
        True
    """

    def __init__(self, net: Layers, at_once: bool) -> None:
        self.net, self.at_once = net, at_once
        self.parameters = [w for w in net.weights if w.requires_grad]
        self.ambient = Ambient(net.weights[0].device)
        self.layers = [_weights(net[number]) for number in range(net.count)]
        self.loops = kernels("cpu", net.weights[0].dtype, net.weights[1].shape[1])

    def totals(self) -> list[Tensor | None]:
        return [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in self.parameters]

    @torch.no_grad()
    def advance(
        self, inputs: Inputs, start: int, stops: Sequence[int], state: Tensors, emit: Emit | None
    ) -> list[Tensors]:
        stop, found = stops[-1], []
        (x,), after = inputs[start:stop], [_copied(s) for s in state]
        samples, longest = x.shape[1], max(b - a for a, b in pairwise([start, *stops]))
        steps = _steps(samples, longest, _ROWS_ADVANCED)
        passes = [self._forward(weights, samples) for weights in self.layers]
        rooms = [x.new_empty(steps, samples, w.size) for w in self.layers[:2]]
        gates = None if self.net.mode.startswith("RNN") else passes[0].room(steps)
        for a, b in _cut(start, stops, steps):
            y = x[a - start : b - start]
            for number, run in enumerate(passes):
                given, y = y, rooms[number % 2][: b - a]
                own = tuple(s[number] for s in after)
                run(given, own, y, y if gates is None else gates[: b - a])
            if emit is not None:
                emit(a, b, [y])
            if b in stops:
                found.append(after if b == stop else [s.clone() for s in after])
        return found

    @torch.no_grad()
    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> Tape:
        (x,), after = inputs[start:stop], [_copied(s) for s in state]
        layers, y = [], x
        for number, weights in enumerate(self.layers):
            layer = self._record(weights, y, tuple(s[number] for s in after))
            layers.append(layer)
            y = layer.states[1:]
        if emit is not None:
            emit(start, stop, [y])
        wanted, passes = [*inputs.differentiable], [True] * len(state)
        return _Tape(start, stop, [x], wanted, passes, after, (), layers)

    @torch.no_grad()
    def backpropagate(self, tape: _Tape, gradients: Gradients) -> None:
        index = slice(tape.start, tape.stop)
        (dy,), (dx,) = gradients.of_outputs(index), gradients.of_inputs(index)
        given = [
            torch.zeros_like(t) if g is None else g
            for t, g in zip(tape.state_after, gradients.states, strict=True)
        ]
        firsts: list[Tensors] = []
        for number in reversed(range(self.net.count)):
            layer = tape.layers.pop()
            x = tape.layers[-1].states[1:] if number else tape.inputs[0]
            into = torch.empty_like(x) if number else dx
            g = torch.cat([part[number] for part in given], -1)
            g = self._backpropagate(number, layer, x, dy, g, into, gradients.parameters)
            firsts.insert(0, [*g.split(self.layers[number].size, -1)])
            dy = into
        gradients.states = [torch.stack(parts) for parts in zip(*firsts, strict=True)]

    def _forward(self, weights: Weights, samples: int) -> Forward:
        assert self.loops.forward is not None
        return self.loops.forward(weights, samples)

    def _record(self, weights: Weights, x: Tensor, state: tuple[Tensor, ...]) -> _Layer:
        """Run a layer; its state goes from before to after."""
        length, samples = x.shape[:2]
        states = x.new_empty(length + 1, samples, weights.size)
        states[0], outputs = state[0], states[1:]
        run, kept, steps, gates = self._forward(weights, samples), None, length, outputs
        if weights.kind == "LSTM":
            gates, cells = (x.new_empty(length, samples, k * weights.size) for k in (4, 1))
            kept = Kept(gates, cells)
        elif weights.kind == "GRU":
            steps = _steps(samples, length)
            gates = run.room(steps)
        for a, b in _cut(0, [length], steps):
            part = gates[: b - a] if weights.kind == "GRU" else gates[a:b]
            run(x[a:b], state, outputs[a:b], part, None if kept is None else kept.cells[a:b])
        return _Layer(states, kept)

    def _backpropagate(
        self,
        number: int,
        layer: _Layer,
        x: Tensor,
        dy: Tensor | None,
        g: Tensor,
        dx: Tensor | None,
        parameters: list[Tensor | None],
    ) -> Tensor:
        """Go through a layer's range; the gradient of the state before it."""
        weights, (length, samples) = self.layers[number], x.shape[:2]
        whole = all(t is None or t.is_contiguous() for t in (x, dy, dx))
        steps = length if whole else _steps(samples, length)
        assert self.loops.backward is not None
        totals = self._totals(number, parameters)
        loops: Backward = self.loops.backward(weights, totals, samples, steps, at_once=self.at_once)
        before, after = layer.states[:-1], layer.states[1:]
        for a, b in reversed([*_cut(0, [length], steps)]):
            kept = None if layer.kept is None else layer.kept.at(slice(a, b))
            block = Block(x[a:b].contiguous(), before[a:b], after[a:b], None, kept)
            into = None if dx is None else dx[a:b]
            part = into if into is None or into.is_contiguous() else torch.empty_like(block.x)
            losses = None if dy is None else dy[a:b].contiguous()
            g = loops.add(block, losses, g, part)
            if into is not None and part is not None and part is not into:
                into.copy_(part)
        loops.finish()
        return g

    def _totals(self, number: int, parameters: list[Tensor | None]) -> dict[str, Tensor]:
        """Where the gradients of a layer's weights go, by name; for frozen ones, nowhere else."""
        known = {id(w): t for w, t in zip(self.parameters, parameters, strict=True)}
        own, found = iter(self.net[number].weights), {}
        for name, w in self.layers[number].tensors().items():
            total = known.get(id(next(own)))
            found[name] = torch.zeros_like(w) if total is None else total
        return found


def _weights(net: Layers) -> Weights:
    """One layer's weights, as the loops take them."""
    return Weights.of(net.mode, [w.detach().contiguous() for w in net.weights])


def _copied(state: Tensor) -> Tensor:
    return state.detach().clone(memory_format=torch.contiguous_format)


def _steps(samples: int, length: int, rows: int = _ROWS) -> int:
    """How many steps of a range are worked on at a time."""
    return min(length, max(_STEPS, rows // max(1, samples)))


def _cut(start: int, stops: Sequence[int], steps: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most so many steps, up to every one of some stops."""
    for first, stop in pairwise([start, *stops]):
        for a in range(first, stop, steps):
            yield a, min(a + steps, stop)
