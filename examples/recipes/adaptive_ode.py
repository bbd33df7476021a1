"""An ODE solver that chooses its steps: the gradient of the solver itself, within a budget.

A step of Heun's method compares two estimates, and takes half or twice the time next. How many
steps reach the end depends on the weights, so nobody knows it before.

    python examples/recipes/adaptive_ode.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograde as rg

END = 6.0
State = tuple[Tensor, float, float]  # the place (B, 2), the time, and the next step of time


def ways(samples: int = 64, size: int = 64) -> dict[str, Callable[[], list[Tensor]]]:
    """The loop, and ``rg.unroll`` until the time has come."""
    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(2, size), nn.Tanh(), nn.Linear(size, 2))
    turn = torch.tensor([[0.0, 3.0], [-3.0, 0.0]])
    begin: State = torch.randn(samples, 2), 0.0, 0.1

    def step(_: None, state: State) -> tuple[Tensor, State]:
        x, time, span = state
        span = min(span, END - time)
        slope = x @ turn + field(x)
        euler = x + span * slope
        heun = x + span / 2 * (slope + euler @ turn + field(euler))
        error = float((heun - euler).detach().abs().max())
        longer = 2.0 if error < 0.01 else 0.5 if error > 0.04 else 1.0
        return heun.square().sum(-1).mean(), (heun, time + span, span * longer)

    def arrived(_: Tensor, state: State) -> bool:
        return state[1] >= END - 1e-9

    def before() -> list[Tensor]:
        state, energies = begin, list[Tensor]()
        while not arrived(state[0], state):
            y, state = step(None, state)
            energies.append(y)
        return [*torch.autograd.grad(torch.stack(energies).mean(), [*field.parameters()])]

    def after() -> list[Tensor]:
        energies, _ = rg.unroll(step, None, begin, memory="512KiB", until=arrived)
        return [*torch.autograd.grad(energies.mean(), [*field.parameters()])]

    return {"loop": before, "rg.unroll until the end": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
