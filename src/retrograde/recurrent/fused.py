"""Recurrent layers as a function of a range of steps that autograd differentiates.

Several layers of one direction are one call of a kernel. With dropout between them they run one
after the other, because a mask belongs to its step (``dropout.py``). The kernels of torch
(``vendor.py``) support every kind of layer. Our own is :func:`run_held`.
"""

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from retrograde.plan.fit import in_one_range
from retrograde.recurrent.bytes import Backend
from retrograde.recurrent.core import HeldLayers
from retrograde.recurrent.dropout import Dropout
from retrograde.recurrent.plan import HeldPlan
from retrograde.recurrent.spans import scan_lengths, sequential_block
from retrograde.recurrent.vendor import Kernel, Layers, one_by_one, run_alive, run_torch
from retrograde.replay.surroundings import Surroundings
from retrograde.replay.trees import Tensors
from retrograde.run.autograd import run_schedule
from retrograde.run.autograd_core import AutogradCore
from retrograde.run.layout import Rows


class Fused(AutogradCore):
    """Layers of one direction, where one call runs a range of steps. A call's leaves are those of
    :class:`retrograde.run.layout.Rows`: inputs, then step numbers if there is dropout, then sizes
    if the batch is packed."""

    aliases = (None,)

    def __init__(
        self, net: Layers, kernel: Kernel = run_torch, dropout: Dropout | None = None
    ) -> None:
        self.net, self.kernel, self.dropout = net, kernel, dropout
        self.surroundings = Surroundings(net.weights[0].device)

    @cached_property
    def parameters(self) -> Tensors:
        return [w for w in self.net.weights if w.requires_grad]

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        leaves, run = iter(inputs), self.kernel
        x = next(leaves)
        if self.dropout:
            run = partial(one_by_one, run, self.dropout, next(leaves))
        y, after = run_alive(run, self.net, x, state, next(leaves, None))
        return [y], after

    def next_state(self, inputs: Tensors, state: Tensors) -> Tensors:
        return self(inputs, state)[1]


def has_slopes(net: Layers) -> bool:
    """Return whether held layers can run these: they need no projections and no autocast."""
    plain = len(net.parts[0].weights) == (4 if net.bias else 2)
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
    net: Layers, x: Tensor, state: Tensors, sizes: Tensor | None, *, scans: bool = False,
    lightly: bool = False,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """Run held layers over all steps, and backpropagate by steps or by a scan. This is a
    :data:`retrograde.recurrent.vendor.Kernel`. On a CPU it may take as little memory as there is a
    way to."""
    rows, batch = Rows(len(x) if sizes is None else len(sizes), sizes), state[0].shape[1]
    plan = held_plan(net, rows.length, batch, scans=scans)
    if lightly:
        placed: Backend = "in place"
        plan = HeldPlan(batch, forward_by=placed, backward_by=(placed,) * net.count)
    core = HeldLayers(net, rows, batch, plan)
    if not torch.is_grad_enabled() and not net.both:
        (y,) = outputs = core.room(rows.read([x]))
        (after,) = core.advance(rows.read([x], outputs), 0, [rows.length], state, lambda *_: None)
        return y, after
    schedule = in_one_range(rows.length)
    (y,), after = run_schedule(core, schedule, [x], state, rows)
    return y, after
