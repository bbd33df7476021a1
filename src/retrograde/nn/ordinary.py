"""What ordinary backpropagation through torch's own module takes: what a fraction is of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.execute.measure import measure
from retrograde.execute.profile import ordinary_curve
from retrograde.execute.replay import muted_hooks
from retrograde.plan.fit import Curve

__all__ = ["Ordinary", "measure_ordinary"]

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Ordinary:
    """The working bytes of ordinary backpropagation, for any length.

    Attributes:
        batch: how many sequences there are.
        full: bytes by steps, if all sequences have all of them.
        single: of a packed batch, bytes by steps if but one sequence has them.
        gradient_copy: bytes a step on top, where a kernel must copy the outputs' gradient.
    """

    batch: int
    full: Curve
    single: Curve | None = None
    gradient_copy: int = 0

    def __call__(self, steps: int, rows: int) -> int:
        """The bytes for so many steps, and so many steps of sequences in all if packed."""
        if self.single is None or self.batch == 1:
            return self.full(steps)
        least, most = self.single(steps), self.full(steps)
        return least + -(-(most - least) * (rows - steps) // (steps * (self.batch - 1)))


def measure_ordinary(
    module: nn.RNNBase, x: Tensor, state: State | None, length: int, packed: bool, sorts: bool
) -> Ordinary:
    """Measure torch's own module on short sequences.

    Args:
        module: what is run, by torch's own forward.
        x: inputs (T, B, I).
        state: the initial state: (h,), or (h, c), each (layers · directions, B, H); None for zeros.
        length: T.
        packed: whether the inputs are to be packed.
        sorts: whether a packed batch has to be sorted.

    Returns:
        What it takes.
    """
    devices = [x.device] if x.is_cuda else []

    def taker(batch: int, expanded: bool = False) -> Callable[[int], int]:
        kept = None if state is None else tuple(s[:, :batch] for s in state)

        def measured(steps: int) -> int:
            given = x[:steps, :batch].detach()
            if packed:
                given = given.flatten(0, 1)
            given.requires_grad_(x.requires_grad)
            sizes = torch.full((steps,), batch) if packed else None
            found = measure(
                lambda: _pass(module, given, kept, sizes, sorts, expanded), device=x.device
            )
            return found.working_bytes

        return measured

    parameters, batch = list(module.parameters()), x.shape[1]
    with torch.enable_grad(), muted_hooks(parameters), torch.random.fork_rng(devices):
        full = ordinary_curve(taker(batch), length)
        single = ordinary_curve(taker(1), length) if packed else None
        steps, size = full.points[-1]
        more = max(0, taker(batch, expanded=True)(steps) - size)
    return Ordinary(batch, full, single, -(-more // steps))


def _pass(
    module: nn.RNNBase,
    x: Tensor,
    state: State | None,
    sizes: Tensor | None,
    sorts: bool,
    expanded: bool,
) -> object:
    """Forward and backward; everything that the caller would be handed."""
    # Each pass differentiates: a parametrization's graph serves for one of them.
    module._update_flat_weights()  # type: ignore[no-untyped-call]
    kept = () if state is None else state
    kept = tuple(s.detach().clone().requires_grad_(s.requires_grad) for s in kept)
    hx: Any = None if state is None else kept if module.mode == "LSTM" else kept[0]
    outputs, final = _torch_type(module).forward(module, _given(module, x, sizes, sorts), hx)
    y = outputs.data if isinstance(outputs, PackedSequence) else outputs
    roots = [t for t in (y, *(final if isinstance(final, tuple) else (final,))) if t.requires_grad]
    seeds = [torch.ones_like(t) for t in roots]
    if expanded:
        seeds = [torch.ones((), dtype=t.dtype, device=t.device).expand_as(t) for t in roots]
    wanted = [t for t in (x, *kept, *module.parameters()) if t.requires_grad]
    return outputs, final, seeds, torch.autograd.grad(roots, wanted, seeds, allow_unused=True)


def _given(module: nn.RNNBase, x: Tensor, sizes: Tensor | None, sorts: bool) -> Any:
    """The inputs as a caller gives them."""
    if sizes is None:
        return x.transpose(0, 1) if module.batch_first else x
    order = torch.arange(int(sizes[0]), device=x.device) if sorts else None
    return PackedSequence(x, sizes, order, order)


def _torch_type(module: nn.RNNBase) -> Any:
    """torch's class of a module of ours."""
    return next(c for c in type(module).__mro__ if c in (nn.RNN, nn.GRU, nn.LSTM))
