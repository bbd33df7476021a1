"""Layers over a range by the compiled loops of :mod:`retrograde.scan`, as a kernel for schedules.

A range that is recorded holds its outputs, and on CPUs an LSTM's gates and cells, five numbers a
unit and step; everything else is recomputed from them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from retrograde.cores.fused import Layers
from retrograde.kernels import kernels
from retrograde.kernels.cells import Weights
from retrograde.scan import layer as layers
from retrograde.scan.block_lengths import scan_way, sequential_way
from retrograde.scan.layer import Way
from retrograde.scan.layer_node import layer

__all__ = ["Compiled", "has_slopes", "is_fast"]

Tensors = list[Tensor]


def has_slopes(net: Layers) -> bool:
    """Whether layers can be run by :class:`Compiled`: without projections, and not under autocast.

    Args:
        net: the layers.

    Returns:
        Whether they can.
    """
    plain = len(net.weights) == net.count * (4 if net.bias else 2)
    return plain and not torch.is_autocast_enabled(net.weights[0].device.type)


def is_fast(net: Layers) -> bool:
    """Whether there are compiled loops for the whole of a forward and a backward pass.

    Args:
        net: the layers.

    Returns:
        Whether there are.
    """
    weight = net.weights[1]
    found = kernels(weight.device.type, weight.dtype, weight.shape[1])
    return has_slopes(net) and found.backward is not None


@dataclass(frozen=True)
class Compiled:
    """A kernel: runs layers over a range, and goes backward in a given way.

    Args:
        way: by steps or by a scan.

    Example:
        >>> gru = torch.nn.GRU(3, 5)
        >>> net = Layers("GRU", gru._flat_weights, 1, True)
        >>> x, h = torch.randn(7, 2, 3), torch.zeros(1, 2, 5)
        >>> torch.allclose(Compiled()(net, x, [h], None)[0], gru(x)[0], atol=1e-6)
        True
    """

    way: Literal["sequential", "scan"] = "sequential"
    accumulates: ClassVar[bool] = True

    def __call__(
        self, net: Layers, x: Tensor, state: Tensors, sizes: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        if sizes is not None:
            x, _ = torch._VF._pad_packed_sequence(x, sizes, False, 0.0, len(sizes))  # type: ignore[attr-defined]
        afters = []
        for number in range(net.count):
            before = tuple(s[number] for s in state)
            x, after = self._run(net[number], x, before, sizes)
            afters.append(after)
        if sizes is not None:
            lengths: Any = (sizes.unsqueeze(1) > torch.arange(int(sizes[0]))).sum(0)
            x, _ = torch._VF._pack_padded_sequence(x, lengths, False)  # type: ignore[attr-defined]
        return x, [torch.stack(parts) for parts in zip(*afters, strict=True)]

    def _run(
        self, net: Layers, x: Tensor, before: tuple[Tensor, ...], sizes: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not torch.is_grad_enabled():
            return layers.run(Weights.of(net.mode, net.weights), x, before, sizes)
        return layer(net.mode, net.weights, self._way(net, x), x, before, sizes, net.totals)

    def _way(self, net: Layers, x: Tensor) -> Way:
        steps, *width = x.shape
        shape: Any = (*width, net.weights[1].shape[1], x.dtype, x.device.type)
        if self.way == "scan":
            return scan_way(net.mode, steps, *shape)
        return sequential_way(net.mode, *shape)
