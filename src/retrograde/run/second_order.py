"""Second derivatives: all steps again, in one graph, as ordinary autograd records them.

Under ``create_graph=True`` the gradients that a node returns must be functions that autograd knows.
So the steps run again from the tensors that the node saved, and autograd differentiates them. That
takes the memory of ordinary backpropagation, whatever the budget, and a warning says so.

The graph begins at gates. They are closed while the first gradients are computed: an input may
depend on a parameter, whose gradient here must come through the steps only. Afterwards they are
open, since second derivatives continue into the graph of the inputs.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from retrograde.replay.surroundings import Snapshot
from retrograde.replay.trees import Tensors
from retrograde.run.core import Core
from retrograde.run.layout import Layout

_BEYOND = (
    "create_graph=True: all steps are run again and kept, as in ordinary backpropagation, "
    "for second derivatives; the budget does not cover these"
)


class Gate:
    """Lets tensors into a graph, and gradients out of it only once it is open."""

    def __init__(self) -> None:
        self.open = False

    def __call__(self, tensors: Tensors) -> Tensors:
        """Return the same values, which pass no gradient on while the gate is closed."""
        return [
            _Differentiable.apply(self, t) if t.requires_grad else t  # type: ignore[no-untyped-call]
            for t in tensors
        ]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, t: Tensor) -> Tensor:
        ctx.gate = gate
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None]:
        return None, g if ctx.gate.open else None


def differentiable_gradients(
    core: Core,
    layout: Layout,
    inputs: Tensors,
    state: Tensors,
    given: tuple[Tensor | None, ...],
    before: Snapshot,
    *,
    budgeted: bool,
) -> list[Tensor | None]:
    """Return gradients of inputs, state and parameters that can be differentiated again.

    ``given`` are the gradients of the outputs and of the state after all steps, and ``before`` are
    the surroundings before them.
    """
    if budgeted:
        warnings.warn(_BEYOND, stacklevel=2)
    gate = Gate()
    x, first = gate(inputs), gate(state)
    with core.ambient.without_trace():
        core.ambient.restore(before)
        outputs, after, parameters = core.ordinary(layout, x, first, gate)
    pairs = [
        (y, g)
        for y, g in zip((*layout.joined(outputs), *after), given, strict=True)
        if g is not None and y.requires_grad
    ]
    everything = [*x, *first, *parameters]
    wanted = [t for t in everything if t.requires_grad]
    if not pairs or not wanted:
        return [None] * len(everything)
    roots, seeds = zip(*pairs, strict=True)
    found = torch.autograd.grad(roots, wanted, seeds, create_graph=True, allow_unused=True)
    gate.open = True
    shares = iter(found)
    return [next(shares) if t.requires_grad else None for t in everything]
