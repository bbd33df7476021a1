"""What ordinary backpropagation through torch's own module takes: what a fraction is of."""

from typing import Any

import torch
from torch import Tensor, nn

from retrograde.execute.layout import Rows
from retrograde.execute.measure import measure
from retrograde.execute.profile import ordinary_curve
from retrograde.execute.replay import muted_hooks
from retrograde.plan.fit import Curve

__all__ = ["ordinary_bytes"]

State = tuple[Tensor, ...]


def ordinary_bytes(module: nn.RNNBase, x: Tensor, state: State, layout: Rows) -> Curve:
    """The working bytes of a forward and a backward pass, by the rows of the inputs.

    Args:
        module: its kernel, options and parameters are used, and nothing else of it.
        x: inputs (T, B, I), or packed (rows, I), on whose first steps it is measured.
        state: the initial state: (h,), or (h, c), each (layers · directions, B, H).
        layout: where the steps lie in the inputs.

    Returns:
        A curve over rows; beyond the longest sequences measured it is affine.
    """

    def rows_of(steps: int) -> int:
        return int(layout.rows(slice(0, steps))[0].stop)

    def measured(steps: int) -> int:
        rows = rows_of(steps)
        sizes = None if layout.sizes is None else layout.sizes[:steps]
        given = x[:rows].detach().requires_grad_(x.requires_grad)
        return measure(lambda: _pass(module, given, state, sizes), device=x.device).working_bytes

    devices = [x.device] if x.is_cuda else []
    parameters = list(module.parameters())
    with torch.enable_grad(), muted_hooks(parameters), torch.random.fork_rng(devices):
        found = ordinary_curve(measured, layout.length)
    return Curve(tuple((rows_of(steps), size) for steps, size in found.points))


def _pass(module: nn.RNNBase, x: Tensor, state: State, sizes: Tensor | None) -> object:
    """Forward and backward; everything that the caller would be handed."""
    # Each pass differentiates: a parametrization's graph serves for one of them.
    module._update_flat_weights()  # type: ignore[no-untyped-call]
    state = tuple(s.detach().clone().requires_grad_(s.requires_grad) for s in state)
    wanted = [t for t in (x, *state, *module.parameters()) if t.requires_grad]
    outputs, *final = _forward(module, x, state, sizes)
    roots = [t for t in (outputs, *final) if t.requires_grad]
    seeds = [torch.ones((), dtype=t.dtype, device=t.device).expand_as(t) for t in roots[:1]]
    seeds += [torch.ones_like(t) for t in roots[1:]]
    return outputs, final, torch.autograd.grad(roots, wanted, seeds, allow_unused=True)


def _forward(
    module: nn.RNNBase, x: Tensor, state: State, sizes: Tensor | None
) -> tuple[Tensor, ...]:
    call = getattr(torch._VF, module.mode.lower())
    hx: Any = state if module.mode == "LSTM" else state[0]
    options: Any = (module._flat_weights, module.bias, module.num_layers, float(module.dropout))
    options += (module.training, module.bidirectional)
    found = call(x, hx, *options, False) if sizes is None else call(x, sizes, hx, *options)
    return tuple(found)
