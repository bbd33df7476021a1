"""Held layers as a function of a range that autograd differentiates, for cores that need one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograde.plan.fit import in_one_range
from retrograde.recurrent.core import HeldLayers
from retrograde.recurrent.pieces import scan_lengths, sequential_block
from retrograde.recurrent.plan import HeldPlan
from retrograde.recurrent.vendor import Layers
from retrograde.run.autograd import run_schedule
from retrograde.run.layout import Rows

__all__ = ["RunHeld", "has_slopes", "held_plan", "run_held"]

Tensors = list[Tensor]


def has_slopes(net: Layers) -> bool:
    """Return whether held layers can run these: they need no projections and no autocast."""
    plain = len(net.weights) == net.count * (4 if net.bias else 2)
    return plain and not torch.is_autocast_enabled(net.weights[0].device.type)


def held_plan(net: Layers, steps: int, samples: int, *, scans: bool = False) -> HeldPlan:
    """Return a plan that keeps all gates, in blocks that suit the machine."""
    w, u = net.weights[:2]
    shape: Any = (samples, w.shape[1], u.shape[1], w.dtype, w.device.type)
    if scans:
        block, chunk = scan_lengths(net.mode, steps, *shape)
        return HeldPlan(block * samples, steps, chunk=chunk)
    return HeldPlan(sequential_block(net.mode, *shape) * samples, steps)


def run_held(
    nets: tuple[Layers, ...], rows: Rows, x: Tensor, state: Tensors, plan: HeldPlan
) -> tuple[Tensor, Tensors]:
    """Run all steps in one range. Return the outputs, and the state after.

    x has the layout that ``rows`` describes; each part of the state is (layers, B, H).
    """
    core = HeldLayers(nets, rows, state[0].shape[1], plan)
    if not torch.is_grad_enabled() and len(nets) == 1:
        (y,) = outputs = core.room(rows.read([x]))
        (after,) = core.advance(rows.read([x], outputs), 0, [rows.length], state, lambda *_: None)
        return y, after
    schedule = in_one_range(rows.length)
    (y,), after = run_schedule(core, schedule, [x], state, rows, budgeted=False)
    return y, after


@dataclass(frozen=True)
class RunHeld:
    """A kernel that runs held layers over a range, and backpropagates by steps or by a scan."""

    scans: bool = False

    def __call__(
        self, net: Layers, x: Tensor, state: Tensors, sizes: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Run a range with the arguments of :func:`retrograde.recurrent.vendor.run_torch`."""
        rows = Rows(len(x) if sizes is None else len(sizes), sizes)
        plan = held_plan(net, rows.length, state[0].shape[1], scans=self.scans)
        return run_held((net,), rows, x, state, plan)
