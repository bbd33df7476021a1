"""The memory of ordinary backpropagation through a recurrent module, measured on torch's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from retrograde.plan.fit import Highest
from retrograde.recurrent.call import Call
from retrograde.recurrent.weights import over_weights, stand_ins
from retrograde.sizes.ordinary import even_from, expanded, measure_pass, ordinary_curve
from retrograde.units import Memory


@dataclass(frozen=True)
class Ordinary:
    """The working bytes of ordinary backpropagation, for any length.

    Attributes:
        batch: the number of sequences.
        full: bytes by steps, if all sequences have all steps.
        single: for a packed batch, bytes by steps if only one sequence has them.
        gradient_copy: further bytes a step, where a kernel must copy the outputs' gradient.
    """

    batch: int
    full: Highest
    single: Highest | None = None
    gradient_copy: int = 0

    def is_certain(self, steps: int) -> bool:
        """Return whether the bytes of so many steps were measured, or follow from even growth."""
        measured = [self.full] if self.single is None else [self.full, self.single]
        return all(
            even_from(each) is not None or each.curves[0].points[-1][0] >= steps
            for each in measured
        )

    def __call__(self, steps: int, rows: int) -> int:
        """Return the bytes for so many steps; ``rows`` are those of a packed batch."""
        if self.single is None or self.batch == 1:
            return self.full(steps)
        least, most = self.single(steps), self.full(steps)
        return least + -(-(most - least) * (rows - steps) // (steps * (self.batch - 1)))


def measure_ordinary(call: Call, memory: Memory | None) -> Ordinary:
    """Measure torch's own module on short sequences; a packed batch has sequences of one length.
    Measurements of more than a few steps keep to the budget, too."""
    batch, packed, length = call.batch, call.sizes is not None, call.measured_length
    with _apart(call.x):
        full = ordinary_curve(_taker(call, batch), length, memory)
        single = ordinary_curve(_taker(call, 1), length, memory) if packed else None
        steps = full.curves[0].points[-1][0]
        more = max(0, max(_taker(call, batch, expanded)(steps)) - full(steps))
    return Ordinary(batch, full, single, -(-more // steps))


def measure_whole(call: Call) -> int:
    """Measure torch's own module on all steps of a call that is not packed."""
    with _apart(call.x):
        return max(_taker(call, call.batch)(call.length))


@contextmanager
def _apart(x: Tensor) -> Iterator[None]:
    """Record gradients, and leave the random state as it is."""
    with torch.enable_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        yield


def _taker(
    call: Call, batch: int, like: Callable[[Tensor], Tensor] = torch.ones_like
) -> Callable[[int], tuple[int, int]]:
    """Return what measures the first steps of a call, for its first ``batch`` sequences.

    ``like`` makes the gradient of an output.
    """
    x, packed = call.x, call.sizes is not None
    if packed:
        zeros = x.new_zeros(call.measured_length, call.batch, x.shape[1])
        x = zeros.requires_grad_(x.requires_grad)
    state = [s[:, :batch] for s in call.state] if call.given else []
    shell = over_weights(call.module, stand_ins(call.weights))

    def measured(steps: int) -> tuple[int, int]:
        given: Any = x[:steps, :batch].detach()
        leaf = given.flatten(0, 1) if packed else given
        leaf.requires_grad_(x.requires_grad)
        if packed:
            order = torch.arange(batch, device=x.device) if call.sorts else None
            sizes = torch.full((steps,), batch, device="cpu")
            given = PackedSequence(leaf, sizes, order, order)
        elif shell.batch_first:
            given = leaf.transpose(0, 1)
        handed: list[Any] = []  # the tensors that the caller would be handed

        def forward() -> None:
            kept = tuple(s.detach().clone().requires_grad_(s.requires_grad) for s in state)
            hx: Any = (kept if shell.mode == "LSTM" else kept[0]) if kept else None
            handed.extend((*shell.forward(given, hx), kept))

        def backward() -> None:
            outputs, final, kept = handed
            ends = final if isinstance(final, tuple) else (final,)
            roots = [t for t in (outputs.data if packed else outputs, *ends) if t.requires_grad]
            seeds = [like(t) for t in roots]
            wanted = [t for t in (leaf, *kept, *shell._flat_weights) if t.requires_grad]
            found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
            handed.extend((seeds, found))

        return measure_pass(forward, backward, handed.clear, x.device)

    return measured
