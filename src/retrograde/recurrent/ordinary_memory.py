"""The memory of ordinary backpropagation through a recurrent module, measured on torch's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from retrograde.plan.footprint import Highest
from retrograde.recurrent.call import Call
from retrograde.recurrent.weights import over_weights, stand_ins
from retrograde.sizes.ordinary import expanded, grows_evenly, measure_pass, ordinary_curve
from retrograde.torch_private import flat_weights, gradients_of
from retrograde.units import Memory


@dataclass(frozen=True)
class Ordinary:
    """The working bytes of ordinary backpropagation, for any length."""

    batch: int  # the number of sequences
    full: Highest  # bytes by steps, if all sequences have all steps
    # For a packed batch, bytes by steps if only one sequence has them.
    single: Highest | None = None
    gradient_copy: int = 0  # further bytes a step, where a kernel must copy the outputs' gradient
    even: bool = False  # whether bytes may be told of more steps than were measured

    def is_certain(self, steps: int) -> bool:
        """Return whether the bytes of so many steps are known."""
        return self.single is None and (self.even or steps in dict(self.full.curves[0].points))

    def __call__(self, steps: int, rows: int) -> int:
        """Return the bytes for so many steps; ``rows`` are those of a packed batch."""
        if self.single is None or self.batch == 1:
            return self.full(steps)
        least, most = self.single(steps), self.full(steps)
        return least + -(-(most - least) * (rows - steps) // (steps * (self.batch - 1)))


def measure_ordinary(call: Call, memory: Memory | None) -> Ordinary:
    """Measure torch's own module on short sequences; beyond a few steps, within the budget."""
    batch, packed, length = call.batch, call.sizes is not None, call.measured_length
    bends = packed or not call.runs_held  # gradients in pieces take most only after many steps
    full = ordinary_curve(_taker(call, batch), length, memory, bends=bends)
    single = ordinary_curve(_taker(call, 1), length, memory, bends=bends) if packed else None
    steps = full.curves[0].points[-1][0]
    more = max(0, max(_taker(call, batch, expanded)(steps)) - full(steps))
    even = call.x.is_cuda and grows_evenly(full)
    return Ordinary(batch, full, single, -(-more // steps), even)


def measure_whole(call: Call) -> int:
    """Measure torch's own module on all steps of a call, the copy of a gradient included. What is
    extrapolated shows neither a phase that takes most only later, nor pages that are filled."""
    return max(_taker(call, call.batch, expanded, whole=True)(call.length))


def _taker(
    call: Call, batch: int, like: Callable[[Tensor], Tensor] = torch.ones_like, *,
    whole: bool = False,
) -> Callable[[int], tuple[int, int]]:  # fmt: skip
    """Return what measures the first steps of a call, for its first ``batch`` sequences. ``like``
    makes the gradient of an output. A packed batch has sequences of one length, unless it is
    measured as a ``whole``."""
    x, packed = call.x, call.sizes is not None
    if packed and not whole:
        x = x.new_zeros(call.measured_length * batch, x.shape[1])
    by_sample = not packed and x.transpose(0, 1).is_contiguous()
    state = [s[:, :batch] for s in call.state] if call.given else []
    shell = over_weights(call.module, stand_ins(call.weights))

    def measured(steps: int) -> tuple[int, int]:
        inputs: Any = x[: steps * batch] if packed else x[:steps, :batch]
        if by_sample:  # as the whole input lies
            inputs = inputs.transpose(0, 1).contiguous().transpose(0, 1)
        leaf = inputs.detach().requires_grad_(call.x.requires_grad)
        inputs = leaf.transpose(0, 1) if shell.batch_first else leaf
        if packed:
            order = torch.arange(batch, device=x.device) if call.sorts else None
            sizes = call.sizes if whole else torch.full((steps,), batch, device="cpu")
            inputs = PackedSequence(leaf, sizes, order, order)
        if leaf.requires_grad and not leaf.is_contiguous():  # autograd copies the gradient
            leaf.register_hook(lambda g: torch.empty_like(leaf).copy_(g))
        handed: list[Any] = []  # the tensors that the caller would be handed

        def forward() -> None:
            kept = tuple(s.detach().clone().requires_grad_(s.requires_grad) for s in state)
            hx: Any = (kept if shell.mode == "LSTM" else kept[0]) if kept else None
            handed.extend((*shell.forward(inputs, hx), kept))

        def backward() -> None:
            outputs, final, kept = handed
            ends = final if isinstance(final, tuple) else (final,)
            roots = [t for t in (outputs.data if packed else outputs, *ends) if t.requires_grad]
            seeds = [like(t) for t in roots]
            wanted = [t for t in (leaf, *kept, *flat_weights(shell)) if t.requires_grad]
            gradients = gradients_of(roots, wanted, seeds)
            handed.extend((seeds, gradients))
            torch.clear_autocast_cache()  # of the weights' casts, which count

        torch.clear_autocast_cache()
        set_flags: Any = torch.backends.mkldnn.set_flags
        ragged = call.is_ragged and call.runs_held  # no LSTM of oneDNN's runs then
        before, *_ = set_flags(False if ragged else None, _fp32_precision=None)
        try:
            with torch.enable_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
                return measure_pass(forward, backward, handed.clear, x.device)
        finally:
            set_flags(before, _fp32_precision=None)

    return measured
