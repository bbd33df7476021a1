"""Torch's own multi-step recurrent kernels as a core: a range of steps is one call.

A call of ``torch.lstm`` over a range from a given state computes what a step at a time would, up
to the order of additions, at the speed of the vendor's kernel (oneDNN, cuDNN, or torch's own for
the types that those lack). All layers of a range run in one call; inter-layer dropout is not
supported, since its mask would belong to the range and not to the step (rule 2).

On a CPU there are two kernels to choose between. oneDNN's is the faster, but where a range is
recorded it holds about half as much again per step, and it copies the weights several times;
torch's own fits budgets of a few steps, where it wins. So oneDNN may be used always, for ranges
that only advance, or never.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from retrograde.execute.replay import Ambient

__all__ = ["HEAP_BYTES", "FusedLSTM", "OneDNN"]

Tensors = list[Tensor]
OneDNN = Literal["always", "advance", "never"]

#: The most that one recorded range should hold on a CPU. The C library's allocator maps larger
#: blocks afresh at every call, and the page faults cost more than long ranges save (glibc:
#: DEFAULT_MMAP_THRESHOLD_MAX, 32 MiB; the margin is for the block's neighbours).
HEAP_BYTES = 24 * 2**20

# On CPUs a range of one step costs about as much as 30 MFLOP more than its arithmetic, for a call
# forward as for a call backward, and no step takes less than the time of half a MFLOP. Nominal and
# not timed, so that a budget gives the same schedule, and the same sums, on every run.
_CALL_FLOPS = 3e7
_STEP_FLOPS = 5e5

# Recording and backpropagating a step, beyond running it forward, in forward steps of oneDNN. (Its
# absence from the advancing steps too is counted here, as that of one step: there is at least one.)
_BACKWARD_STEPS: dict[OneDNN, float] = {"always": 2.0, "advance": 3.0, "never": 3.5}


@dataclass(frozen=True)
class FusedLSTM:
    """``torch.nn.LSTM`` in one direction: inputs ``[x]`` (L, B, I), state ``[h, c]``.

    Args:
        weights: as torch orders them, layer by layer: weight_ih, weight_hh, and, with biases,
            bias_ih, bias_hh; with projections, weight_hr.
        layers: how many layers.
        bias: whether there are biases.
        onednn: when oneDNN's kernel may be used, where torch would use it.
    """

    weights: Tensors
    layers: int
    bias: bool
    onednn: OneDNN = "always"
    fused: bool = True
    aliases: tuple[int | None, ...] = (None,)
    parameters: Tensors = field(init=False)
    ambient: Ambient = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", [w for w in self.weights if w.requires_grad])
        object.__setattr__(self, "ambient", Ambient(self.weights[0].device))

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        train, bidirectional, batch_first, dropout = True, False, False, 0.0
        advancing = not torch.is_grad_enabled()
        with _onednn_only_if(self.onednn == "always" or (advancing and self.onednn == "advance")):
            output, h, c = torch._VF.lstm(  # type: ignore[attr-defined]
                inputs[0],
                state,
                self.weights,
                self.bias,
                self.layers,
                dropout,
                train,
                bidirectional,
                batch_first,
            )
        return [output], [h, c]

    def call_steps(self, batch: int) -> float:
        """What a kernel call costs besides its steps, in forward steps."""
        flops = 2 * batch * sum(w.numel() for w in self.weights if w.dim() == 2)
        return _CALL_FLOPS / (flops + _STEP_FLOPS)

    @property
    def backward_steps(self) -> float:
        """What recording and backpropagating a step costs more than running it forward."""
        return _BACKWARD_STEPS[self.onednn]

    def kernels(self) -> list["FusedLSTM"]:
        """The cores to choose between: this one, and others where oneDNN would be used."""
        weight = self.weights[0]
        both = (
            weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and torch.backends.mkldnn.enabled
        )
        others: tuple[OneDNN, ...] = ("advance", "never") if both else ()
        return [self, *(replace(self, onednn=onednn) for onednn in others)]


@contextmanager
def _onednn_only_if(wanted: bool) -> Iterator[None]:
    """Leave torch's choice of kernel alone, or keep oneDNN out of it."""
    if wanted:
        yield
        return
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
