"""A recurrent layer as a core: a range of steps is one call.

A call of ``torch.lstm`` over a range from a given state computes what a step at a time would, up
to the order of additions, at the speed of the vendor's kernel (oneDNN, cuDNN, or torch's own for
the types that those lack). All layers of a range run in one call; inter-layer dropout is not
supported, since its mask would belong to the range and not to the step (rule 2).

An RNN and a GRU are run likewise (:class:`FusedRNN`). For an LSTM on a CPU there is a choice.
oneDNN's kernel is the fastest, but a range that it records holds sixteen numbers a unit and step,
and copies of the weights; :mod:`retrograde.execute.lean` holds six. So a budget of a few steps may
be met sooner by recording with the lean kernel, or, the tightest ones, by the lean kernel alone.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from retrograde.execute.lean import lean_lstm
from retrograde.execute.replay import Ambient

__all__ = ["HEAP_BYTES", "Fused", "FusedLSTM", "FusedRNN", "Kernel", "Mode"]

Tensors = list[Tensor]
#: ``torch.lstm`` always, or the lean kernel where a range is recorded, or the lean one always.
Kernel = Literal["torch", "lean record", "lean"]

#: What torch calls its layers that have one state.
Mode = Literal["RNN_TANH", "RNN_RELU", "GRU"]

#: The most that one recorded range should hold on a CPU. The C library's allocator maps larger
#: blocks afresh at every call, and the page faults cost more than long ranges save (glibc:
#: DEFAULT_MMAP_THRESHOLD_MAX, 32 MiB; the margin is for the block's neighbours).
HEAP_BYTES = 24 * 2**20

# On CPUs a range of one step costs about as much as 30 MFLOP more than its arithmetic, for a call
# forward as for a call backward, and no step takes less than the time of half a MFLOP. Nominal and
# not timed, so that a budget gives the same schedule, and the same sums, on every run.
_CALL_FLOPS = 3e7
_STEP_FLOPS = 5e5

# On CPUs torch has no kernel of a vendor's for an RNN or a GRU, and a call costs little besides its
# steps: as much as 1.5 MFLOP.
_NATIVE_CALL_FLOPS = 1.5e6

# Recording and backpropagating a step, beyond running it forward, in forward steps of oneDNN. (That
# the lean kernel advances more slowly is counted here too, for one sweep: there is at least one.)
_BACKWARD_STEPS: dict[Kernel, float] = {"torch": 2.0, "lean record": 2.8, "lean": 3.3}


@dataclass(frozen=True)
class FusedLSTM:
    """``torch.nn.LSTM`` in one direction: inputs ``[x]`` (L, B, I), state ``[h, c]``.

    Args:
        weights: as torch orders them, layer by layer: weight_ih, weight_hh, and, with biases,
            bias_ih, bias_hh; with projections, weight_hr.
        layers: how many layers.
        bias: whether there are biases.
        kernel: which kernel runs a range.
    """

    weights: Tensors
    layers: int
    bias: bool
    kernel: Kernel = "torch"
    fused: bool = True
    sums: bool = False
    aliases: tuple[int | None, ...] = (None,)
    parameters: Tensors = field(init=False)
    ambient: Ambient = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", [w for w in self.weights if w.requires_grad])
        object.__setattr__(self, "ambient", Ambient(self.weights[0].device))

    @property
    def targets(self) -> Tensors:
        return self.parameters

    def recording(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        (x,), (h, c) = inputs, state
        if self.kernel == "lean" or (self.kernel == "lean record" and torch.is_grad_enabled()):
            output, h, c = lean_lstm(x, (h, c), self.weights, self.layers, self.bias)
            return [output], [h, c]
        train, bidirectional, batch_first, dropout = True, False, False, 0.0
        output, h, c = torch._VF.lstm(  # type: ignore[attr-defined]
            x,
            (h, c),
            self.weights,
            self.bias,
            self.layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
        return [output], [h, c]

    def carry(self, inputs: Tensors, state: Tensors) -> Tensors:
        return self(inputs, state)[1]

    def call_steps(self, batch: int) -> float:
        """What a kernel call costs besides its steps, in forward steps."""
        flops = 2 * batch * sum(w.numel() for w in self.weights if w.dim() == 2)
        return _CALL_FLOPS / (flops + _STEP_FLOPS)

    @property
    def backward_steps(self) -> float:
        """What recording and backpropagating a step costs more than running it forward."""
        return _BACKWARD_STEPS[self.kernel]

    def kernels(self) -> list["FusedLSTM"]:
        """The cores to choose between: this one, and on a CPU those with the lean kernel."""
        per_layer = len(self.weights) // self.layers
        lean = (
            self.weights[0].device.type == "cpu"
            and per_layer == (4 if self.bias else 2)  # no projections
            and not torch.is_autocast_enabled("cpu")
        )
        others: tuple[Kernel, ...] = ("lean record", "lean") if lean else ()
        return [self, *(replace(self, kernel=kernel) for kernel in others)]


@dataclass(frozen=True)
class FusedRNN:
    """``torch.nn.RNN`` or ``GRU`` in one direction: inputs ``[x]`` (L, B, I), state ``[h]``.

    Args:
        mode: which of them.
        weights: as torch orders them, layer by layer.
        layers: how many layers.
        bias: whether there are biases.
    """

    mode: Mode
    weights: Tensors
    layers: int
    bias: bool
    backward_steps: float = 2.0
    fused: bool = True
    sums: bool = False
    aliases: tuple[int | None, ...] = (None,)
    parameters: Tensors = field(init=False)
    ambient: Ambient = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", [w for w in self.weights if w.requires_grad])
        object.__setattr__(self, "ambient", Ambient(self.weights[0].device))

    @property
    def targets(self) -> Tensors:
        return self.parameters

    def recording(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        run = getattr(torch._VF, self.mode.lower())
        train, bidirectional, batch_first, dropout = True, False, False, 0.0
        output, h = run(
            inputs[0],
            state[0],
            self.weights,
            self.bias,
            self.layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
        return [output], [h]

    def carry(self, inputs: Tensors, state: Tensors) -> Tensors:
        return self(inputs, state)[1]

    def call_steps(self, batch: int) -> float:
        """What a kernel call costs besides its steps, in forward steps."""
        flops = 2 * batch * sum(w.numel() for w in self.weights if w.dim() == 2)
        on_cpu = self.weights[0].device.type == "cpu"
        return (_NATIVE_CALL_FLOPS if on_cpu else _CALL_FLOPS) / (flops + _STEP_FLOPS)

    def kernels(self) -> list["FusedRNN"]:
        """The cores to choose between: this one."""
        return [self]


#: Either kind.
Fused = FusedLSTM | FusedRNN
