"""Rollouts: models that run a whole step of layers again and again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg

__all__ = ["AROUND", "ROLLOUTS", "Rollout", "unrolled"]

AROUND = "steps", "layers", "both"  # what torch's checkpoints are around


class Rollout(nn.Module):
    """Steps of a model, and a loss: of each step, or of the last one. ``around`` says how it is
    checkpointed."""

    around, steps, each = "", 1, False

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for number in range(1, self.steps + 1):
            x = self.call(self.step, x, "steps")
            if self.each or number == self.steps:
                total = total + x.square().mean()
        return total

    def layer(self, module: nn.Module, x: Tensor) -> Tensor:
        return self.call(module, x, "layers")

    def call(self, function: Callable[[Tensor], Tensor], x: Tensor, what: str) -> Tensor:
        is_around = self.around in (what, "both")
        result: Tensor = checkpoint(function, x, use_reentrant=False) if is_around else function(x)
        return result

    def step(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def sample(self) -> Tensor:
        raise NotImplementedError


class Forecast(Rollout):
    """Blocks of a transformer that tell what a state changes to."""

    each = True

    def __init__(self, steps: int = 16, count: int = 12, width: int = 128) -> None:
        super().__init__()
        self.steps, self.width = steps, width
        options: Any = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        blocks = (nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(count))
        self.blocks = nn.ModuleList(blocks)

    def step(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = self.layer(block, y)
        return x + 0.1 * y

    def sample(self) -> Tensor:
        return torch.randn(4, self.width // 2, self.width)


class Residual(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        norms = nn.GroupNorm(4, given), nn.GroupNorm(4, made)
        first, second = (nn.Conv2d(n, made, 3, padding=1) for n in (given, made))
        self.inner = nn.Sequential(norms[0], nn.SiLU(), first, norms[1], nn.SiLU(), second)
        self.outer = nn.Conv2d(given, made, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(x) + self.inner(x)
        return result


class Sampler(Rollout):
    """A UNet that takes noise out of an image."""

    def __init__(self, steps: int = 20, width: int = 16, side: int = 32) -> None:
        super().__init__()
        self.steps, self.side, wide = steps, side, 2 * width
        self.head, self.tail = (
            nn.Conv2d(*sizes, 3, padding=1) for sizes in ((4, width), (width, 4))
        )
        self.down, self.lower = Residual(width, width), Residual(width, wide)
        self.shrinks = nn.ModuleList(nn.AvgPool2d(2) for _ in range(2))
        self.grows = nn.ModuleList(nn.Upsample(scale_factor=2) for _ in range(2))
        self.middle = Residual(wide, wide)
        self.raised, self.up = Residual(2 * wide, width), Residual(wide, width)

    def step(self, x: Tensor) -> Tensor:
        run = self.layer
        high = run(self.down, run(self.head, x))
        low = run(self.lower, run(self.shrinks[0], high))
        middle = run(self.middle, run(self.shrinks[1], low))
        up = run(self.raised, torch.cat([run(self.grows[0], middle), low], 1))
        up = run(self.up, torch.cat([run(self.grows[1], up), high], 1))
        return 0.95 * x - 0.05 * run(self.tail, up)

    def sample(self) -> Tensor:
        return torch.randn(4, 4, self.side, self.side)


class Automaton(Rollout):
    """A neural cellular automaton, of whose cells chance updates half."""

    def __init__(self, steps: int = 96, side: int = 32) -> None:
        super().__init__()
        self.steps, self.side = steps, side
        see = nn.Conv2d(16, 48, 3, padding=1, groups=16, bias=False)
        layers = see, nn.Conv2d(48, 64, 1), nn.ReLU(), nn.Conv2d(64, 16, 1)
        self.layers = nn.ModuleList(layers)

    def step(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = self.layer(layer, y)
        return x + 0.1 * y * (torch.rand(len(x), 1, *x.shape[2:]) < 0.5)

    def sample(self) -> Tensor:
        return torch.randn(4, 16, self.side, self.side)


ROLLOUTS: dict[str, Callable[..., Rollout]] = {
    "forecast: 16 steps of 12 blocks": Forecast,
    "sampler: 20 steps of a UNet": Sampler,
    "automaton: 96 steps of 4 layers": Automaton,
}


def unrolled(model: Rollout, memory: Any, x: Tensor) -> Tensor:
    """The same loss, by ``rg.unroll`` over the model's steps."""

    def step(_: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = model.step(x)
        return x.square().mean() if model.each else x.new_zeros(()), x

    losses, last = rg.unroll(step, torch.zeros(model.steps, 1), x, memory=memory)
    return sum(losses, x.new_zeros(())) if model.each else last.square().mean()
