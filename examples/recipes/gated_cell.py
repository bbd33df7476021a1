"""From a cell written by hand to ``rg.GatedCell``, whose steps are compiled loops.

The cell is an LSTM with peepholes: its gates see c. Numbers and one static method define it. The
method takes the four gates, the state, and three numbers of each unit; autograd's loop runs the
same cell without a budget.

    python examples/recipes/gated_cell.py
"""

from collections.abc import Callable

import torch
from torch import Tensor

import retrograde as rg


class PeepholeLSTM(rg.GatedCell):
    """Gers and Schmidhuber 2000; the last gate sees the new c."""

    gates, states, units = 4, 2, 3

    @staticmethod
    def step(i, f, g, o, h, c, p_i, p_f, p_o):  # type: ignore[no-untyped-def]
        """Return h and c after the step; all arguments are numbers of one unit."""
        i, f = torch.sigmoid(i + p_i * c), torch.sigmoid(f + p_f * c)
        c = f * c + i * torch.tanh(g)
        return torch.sigmoid(o + p_o * c) * torch.tanh(c), c


def ways(steps: int = 500) -> dict[str, Callable[[], list[Tensor]]]:
    """The loop, and the compiled one within 5 percent of what the loop holds."""
    torch.manual_seed(0)
    cell = PeepholeLSTM(32, 64)
    x = torch.randn(steps, 16, 32)

    def before() -> list[Tensor]:
        state, outputs = None, []
        for x_t in x:
            y, state = cell(x_t, state)
            outputs.append(y)
        loss = torch.stack(outputs).square().mean()
        return [*torch.autograd.grad(loss, list(cell.parameters()))]

    def after() -> list[Tensor]:
        outputs, _ = rg.unroll(cell, x, memory="5%")
        loss = outputs.square().mean()
        return [*torch.autograd.grad(loss, list(cell.parameters()))]

    return {"loop": before, "rg.unroll within 5%": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
