"""Torch's own multi-step recurrent kernels as a core: a range of steps is one call.

A call of ``torch.lstm`` over a range from a given state computes what a step at a time would, up
to the order of additions, at the speed of the vendor's kernel (oneDNN, cuDNN, or torch's own for
the types that those lack). All layers of a range run in one call; inter-layer dropout is not
supported, since its mask would belong to the range and not to the step (rule 2).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from retrograde.execute.replay import Ambient

__all__ = ["HEAP_BYTES", "FusedLSTM"]

Tensors = list[Tensor]

#: The most that one recorded range should hold on a CPU. The C library's allocator maps larger
#: blocks afresh at every call, and the page faults cost more than long ranges save (glibc:
#: DEFAULT_MMAP_THRESHOLD_MAX, 32 MiB; the margin is for the block's neighbours).
HEAP_BYTES = 24 * 2**20


@dataclass(frozen=True)
class FusedLSTM:
    """``torch.nn.LSTM`` in one direction: inputs ``[x]`` (L, B, I), state ``[h, c]``.

    Args:
        parameters: as torch orders them, layer by layer: weight_ih, weight_hh, and, with biases,
            bias_ih, bias_hh; with projections, weight_hr.
        layers: how many layers.
        bias: whether there are biases.
        device: where the parameters are.
    """

    parameters: Tensors
    layers: int
    bias: bool
    device: torch.device
    fused: bool = True
    aliases: tuple[int | None, ...] = (None,)
    ambient: Ambient = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ambient", Ambient(self.device))

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        train, bidirectional, batch_first, dropout = True, False, False, 0.0
        output, h, c = torch._VF.lstm(  # type: ignore[attr-defined]
            inputs[0],
            state,
            self.parameters,
            self.bias,
            self.layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
        return [output], [h, c]
