"""A neural ODE, integrated by torchdiffeq with fixed steps.

``odeint`` holds what autograd keeps of every step of the solver. Its adjoint method holds almost
nothing, but its gradient is another discretization's. ``rg.unroll`` over the same steps gives the
gradient of ``odeint`` itself, within a budget.

    python examples/recipes/rollout.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchdiffeq import odeint

import retrograde as rg


def ways(steps: int = 300) -> dict[str, Callable[[], list[Tensor]]]:
    """One call of ``odeint``, and a call for every step."""
    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    times = torch.linspace(0, 6, steps + 1)
    angle = torch.rand(64) * 6.28
    start = torch.stack([angle.cos(), angle.sin()], -1)
    wanted = torch.stack([(angle + t).cos() for t in times[1:]])  # circles

    def gradients(path: Tensor) -> list[Tensor]:
        loss = (path[..., 0] - wanted).square().mean()
        return [*torch.autograd.grad(loss, [*field.parameters()])]

    def before() -> list[Tensor]:
        return gradients(odeint(lambda t, y: field(y), start, times, method="rk4")[1:])

    def step(interval: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y = odeint(lambda t, y: field(y), y, interval, method="rk4")[-1]
        return y, y

    def after() -> list[Tensor]:
        intervals = torch.stack([times[:-1], times[1:]], -1)  # (steps, 2)
        path, _ = rg.unroll(step, intervals, start, memory="5%")
        return gradients(path)

    return {"odeint": before, "rg.unroll within 5%": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
