"""Adaptive computation time (Graves 2016): a network thinks until all samples have halted.

python examples/recipes/adaptive_time.py
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograde as rg

State = tuple[Tensor, Tensor]  # the thought (B, H), and the chance (B, 1) of still going on


class Thinker(nn.Module):
    """A step of thought; its answer is weighted by the chance of halting there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.think = nn.GRUCell(size, size)
        self.answer, self.halt = nn.Linear(size, 4), nn.Linear(size, 1)
        nn.init.constant_(self.halt.bias, -4.0)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        thought, left = self.think(x, state[0]), state[1]
        halts = left * torch.sigmoid(self.halt(thought))
        return halts * self.answer(thought), (thought, left - halts)


def ways(samples: int = 32, size: int = 64) -> dict[str, Callable[[], list[Tensor]]]:
    """The loop, and ``rg.unroll`` until the predicate holds."""
    torch.manual_seed(0)
    net, x = Thinker(size), torch.randn(samples, size)
    first = torch.zeros(samples, size), torch.ones(samples, 1)

    def sure(_: Tensor, state: State) -> bool:
        return bool((state[1] < 0.01).all())

    def before() -> list[Tensor]:
        state, answers = first, list[Tensor]()
        while not sure(x, state):
            y, state = net(x, state)
            answers.append(y)
        loss = torch.stack(answers).sum(0).square().mean()
        return [*torch.autograd.grad(loss, [*net.parameters()])]

    def after() -> list[Tensor]:
        inputs = itertools.repeat(x)
        answers, _ = rg.unroll(net, inputs, first, memory="512KiB", until=sure)
        return [*torch.autograd.grad(answers.sum(0).square().mean(), [*net.parameters()])]

    return {"loop": before, "rg.unroll until sure": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
