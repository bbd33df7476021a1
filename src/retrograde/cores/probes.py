"""What a range is measured with: an emitter that keeps no output, and gradients of nothing real."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograde.run.core import Core, Emit, Gradients, Tape
from retrograde.run.layout import Straight

__all__ = ["Shapes", "gradients_like", "noting"]

Tensors = list[Tensor]
Shapes = list[tuple[torch.Size, torch.dtype]]


def noting(shapes: Shapes) -> Emit:
    """An emitter that keeps no output, only the shapes and dtypes."""

    def emit(start: int, stop: int, values: Tensors) -> None:
        shapes[:] = [(y.shape, y.dtype) for y in values]

    return emit


def gradients_like(
    core: Core,
    tape: Tape,
    shapes: Shapes,
    steps: int,
) -> Gradients:
    """Gradients of the layout that costs most: expanded scalars, which kernels must copy."""
    outputs = [
        torch.ones((), dtype=dtype, device=core.ambient.device).expand(shape)
        for shape, dtype in shapes
    ]
    return _Probe(
        outputs=outputs,
        states=[
            torch.ones_like(t) if passes else None
            for t, passes in zip(tape.state_after, tape.passes, strict=True)
        ],
        inputs=[
            torch.empty_like(x) if wanted else None
            for x, wanted in zip(tape.inputs, tape.wanted, strict=True)
        ],
        parameters=[
            torch.zeros_like(p) if total is None else total
            for p, total in zip(core.parameters, core.totals(), strict=True)
        ],
        length=tape.stop,
        layout=Straight(steps, core.fused),
        outside=torch.autocast(core.ambient.device.type, enabled=False),
    )


@dataclass
class _Probe(Gradients):
    """Gradients of one call, wherever its steps are."""

    layout: Straight

    def of_outputs(self, index: int | slice) -> Sequence[Tensor | None]:
        if not isinstance(index, slice) or self.layout.fused:
            return self.outputs
        steps = index.stop - index.start  # of a cell, recorded together
        return [None if t is None else t.expand(steps, *t.shape) for t in self.outputs]

    def of_inputs(self, index: int | slice) -> Sequence[Tensor | None]:
        return self.inputs

    def take_inputs(self, index: int | slice, shares: list[Tensor | None]) -> None:
        for total, share in zip(self.inputs, shares, strict=True):
            if total is not None and share is not None:
                total.copy_(share)
