"""Recurrent layers as a core: one kernel call runs a range of steps, and autograd records it.

Several layers of one direction are one call. With dropout between them they run one after the
other, because a mask belongs to its step (``dropout.py``). Two directions of one
layer are one recurrence that starts at both ends. While the first direction runs steps a … b − 1,
the second runs the steps equally far from the other end, reversed. The state is that of both.

torch's kernels (``vendor.py``) support every kind of layer and every option. Our
own kernels are in ``ranges.py``.
"""

from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from retrograde.recurrent.dropout import Masks, samples_of
from retrograde.recurrent.vendor import Kernel, Layers, run_alive, run_torch
from retrograde.replay.surroundings import Ambient
from retrograde.run.autograd_core import AutogradCore
from retrograde.run.core import Gate
from retrograde.run.layout import Layout

__all__ = ["Fused"]

Tensors = list[Tensor]


class Fused(AutogradCore):
    """Recurrent layers, where one call runs a range of steps.

    ``nets`` holds the layers of one direction, or one layer for each of two. A call's leaves are
    those of :class:`retrograde.run.layout.Rows`. For each direction they are its inputs, then step
    numbers if there is dropout, then sizes if the batch is packed.
    """

    def __init__(
        self,
        nets: tuple[Layers, ...],
        kernel: Kernel = run_torch,
        dropout: Masks | None = None,
        packed: bool = False,
    ) -> None:
        self.nets, self.kernel, self.dropout, self.packed = nets, kernel, dropout, packed
        self.ambient = Ambient(nets[0].weights[0].device)
        self.aliases = (None,) * len(nets)

    @cached_property
    def parameters(self) -> Tensors:
        return [w for net in self.nets for w in net.weights if w.requires_grad]

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        nothing: list[Tensor | None] = [None] * len(self.nets)
        leaves = iter(inputs)
        xs = [next(leaves) for _ in self.nets]
        steps = [next(leaves) for _ in self.nets] if self.dropout else nothing
        sizes = [next(leaves) for _ in self.nets] if self.packed else nothing
        states = [s.chunk(len(self.nets)) for s in state]
        outputs, afters = [], []
        for number in range(len(self.nets)):
            before = [parts[number] for parts in states]
            y, after = self._run(number, xs[number], steps[number], sizes[number], before)
            outputs.append(y)
            afters.append(after)
        if len(afters) == 1:
            return outputs, afters[0]
        return outputs, [torch.cat(parts) for parts in zip(*afters, strict=True)]

    def carry(self, inputs: Tensors, state: Tensors) -> Tensors:
        return self(inputs, state)[1]

    def ordinary(
        self, layout: Layout, inputs: Tensors, state: Tensors, gate: Gate
    ) -> tuple[Tensors, Tensors, Tensors]:
        nets = tuple(replace(net, weights=gate(net.weights)) for net in self.nets)
        core = Fused(nets, dropout=self.dropout, packed=self.packed)
        read = layout.read(inputs)
        return *core(read[slice(0, len(read))], state), core.parameters

    def _run(
        self, number: int, x: Tensor, steps: Tensor | None, sizes: Tensor | None, state: Tensors
    ) -> tuple[Tensor, Tensors]:
        """Run one direction; in a packed batch, only the sequences that have any of the steps."""
        net, order = self.nets[number], None
        if self.dropout and steps is not None and self.dropout.first:
            x = self.dropout(x, 0, steps, sizes)
        if number == 1:
            order = _backwards(x, sizes)
            x = x.index_select(0, order)
        y, after = run_alive(partial(self._layers, steps=steps), net, x, state, sizes)
        return y if order is None else y.index_select(0, order), after

    def _layers(
        self, net: Layers, x: Tensor, state: Tensors, sizes: Tensor | None, steps: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Run all layers in one call, or one after the other if there is dropout between them."""
        if self.dropout is None or steps is None or net.count == 1:
            return self.kernel(net, x, state, sizes)
        afters = []
        for number in range(net.count):
            if number:
                x = self.dropout(x, number, steps, sizes)
            x, after = self.kernel(net[number], x, [s[number : number + 1] for s in state], sizes)
            afters.append(after)
        return x, [torch.cat(parts) for parts in zip(*afters, strict=True)]


def _backwards(x: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the order of rows that reverses every sequence's steps; it is its own inverse."""
    if sizes is None:
        return torch.arange(len(x) - 1, -1, -1, device=x.device)
    first = sizes.cumsum(0) - sizes
    step = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    sample = samples_of(sizes)
    lengths = (sizes.unsqueeze(1) > torch.arange(int(sizes[0]), device=sizes.device)).sum(0)
    return (first[lengths[sample] - 1 - step] + sample).to(x.device)
