"""A simulator without inputs: the waves of a pond, and the depths that made them.

Each step of a simulator follows from its state alone, so ``rg.unroll`` gets the numbers of the
steps for inputs. The gradient of what three gauges saw goes back through all steps to the depths.

    python examples/recipes/simulator.py
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import retrograde as rg

AROUND = torch.tensor([[[[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]]])  # a Laplacian


def ways(steps: int = 400, size: int = 48) -> dict[str, Callable[[], list[Tensor]]]:
    """A loop over the steps, and ``rg.unroll`` within 5 percent of what the loop holds."""
    torch.manual_seed(0)
    depths = torch.full((1, 1, size, size), 0.3, requires_grad=True)
    still = torch.zeros(1, 1, size, size)
    drop = torch.zeros_like(still)
    drop[..., size // 2, size // 2] = 1.0

    def step(t: Tensor, waves: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        height, before = waves
        force = depths.sigmoid() * functional.conv2d(height, AROUND, padding=1)
        after = 2 * height - before + 0.4 * force
        return after[0, 0, size // 4, :: size // 3], (after, height)

    def gradients(seen: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad(seen.square().sum(), [depths])]

    def before() -> list[Tensor]:
        state, seen = (drop, still), []
        for t in torch.arange(steps):
            y, state = step(t, state)
            seen.append(y)
        return gradients(torch.stack(seen))

    def after() -> list[Tensor]:
        seen, _ = rg.unroll(step, torch.arange(steps), (drop, still), memory="5%")
        return gradients(seen)

    return {"loop": before, "rg.unroll within 5%": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
