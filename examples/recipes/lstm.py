"""From ``nn.LSTM`` to ``rg.LSTM``: one argument more, and the same parameters.

An LSTM keeps its gates at every step until the backward pass has used them. ``rg.LSTM`` keeps what
the budget has room for and computes the rest again. A ``state_dict`` goes from one to the other.

    python examples/recipes/lstm.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograde as rg


def ways(steps: int = 1000) -> dict[str, Callable[[], list[Tensor]]]:
    """Both ways to the gradients of a batch of random sequences."""
    torch.manual_seed(0)
    x = torch.randn(steps, 16, 64)  # (time, batch, features)

    before = nn.LSTM(64, 64)
    after = rg.LSTM(64, 64, memory="5%")  # the whole change
    after.load_state_dict(before.state_dict())

    def gradients(lstm: nn.LSTM) -> list[Tensor]:
        lstm.zero_grad()
        outputs, _ = lstm(x)
        outputs.square().mean().backward()
        return [p.grad for p in lstm.parameters()]

    fit = after.fit(x)  # asks what the budget buys; nothing is run
    print(f"at least {fit.minimum_bytes:,} bytes are needed; {fit.budget_bytes:,} are given")
    return {
        "nn.LSTM": lambda: gradients(before),
        "rg.LSTM within 5%": lambda: gradients(after),
    }


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
