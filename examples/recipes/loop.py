"""From a loop over time steps to ``rg.unroll``.

The cell below is written by hand: a gated unit with layer norm. Any ``cell(x_t, state)`` that
returns ``(y_t, state)`` will do. The loop holds what autograd keeps of every step; ``rg.unroll``
holds a few states and runs the steps between them again.

    python examples/recipes/loop.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograde as rg


class GatedCell(nn.Module):
    """A gated recurrent unit with layer norm; its output is its state."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(inputs, 2 * size), nn.Linear(size, 2 * size)
        self.norm = nn.LayerNorm(2 * size)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        gate, new = self.norm(self.into(x) + self.back(h)).chunk(2, -1)
        h = torch.lerp(h, torch.tanh(new), torch.sigmoid(gate))
        return h, h


def ways(steps: int = 500) -> dict[str, Callable[[], list[Tensor]]]:
    """The loop, and ``rg.unroll`` within 5 percent of what the loop holds."""
    torch.manual_seed(0)
    cell, h0 = GatedCell(32, 64), torch.zeros(16, 64)
    x = torch.randn(steps, 16, 32)

    def before() -> list[Tensor]:
        h, outputs = h0, []
        for x_t in x:
            y, h = cell(x_t, h)
            outputs.append(y)
        loss = torch.stack(outputs).square().mean()
        return [*torch.autograd.grad(loss, list(cell.parameters()))]

    def after() -> list[Tensor]:
        outputs, _ = rg.unroll(cell, x, h0, memory="5%")
        loss = outputs.square().mean()
        return [*torch.autograd.grad(loss, list(cell.parameters()))]

    return {"loop": before, "rg.unroll within 5%": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
