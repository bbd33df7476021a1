"""Settings drawn by number, whose seconds ``rg.fit`` tells and an iteration takes."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import retrograde as rg


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


def _step_of(cell: Any) -> Any:
    def step(x: torch.Tensor, h: torch.Tensor) -> Any:
        h = cell(x, h).tanh()
        return h, h

    step.cell = cell  # type: ignore[attr-defined]
    return step


def read(number: int, rounds: int = 9) -> dict[str, Any]:
    """Draw a setting, and compare what is told with medians of iterations in turn."""
    rng = random.Random(number)
    torch.manual_seed(number)
    kind = ("layer", "cell", "chain")[number % 3]
    memory = rng.choice(["10%", "20%", "50%"])
    batch, width = rng.choice([8, 16, 32]), rng.choice([32, 64, 128])
    if kind == "chain":
        width, memory = rng.choice([64, 128, 256]), rng.choice(["40%", "60%"])
        conv = rng.random() < 0.4
        make = (lambda: _conv(width // 4)) if conv else (lambda: _Block(width))
        plain: Any = nn.Sequential(*(make() for _ in range(rng.randint(6, 20))))
        x = torch.randn(batch, width // 4, 24, 24) if conv else torch.randn(batch, 64, width)
        ours: Any = rg.Sequential(*plain, memory=memory)
        found = rg.fit(plain, x, memory=memory)
        runs = {"ordinary": lambda: plain(x), "told": lambda: ours(x)}
    elif kind == "layer":
        theirs = rng.choice([nn.LSTM, nn.GRU])(width, width, rng.choice([1, 2]))
        x = torch.randn(rng.randint(200, 1000), batch, width)
        ours = getattr(rg, type(theirs).__name__)(width, width, theirs.num_layers, memory=memory)
        found = rg.fit(theirs, x, memory=memory)
        runs = {"ordinary": lambda: theirs(x)[0], "told": lambda: ours(x)[0]}
    else:
        step, h = _step_of(nn.GRUCell(width, width)), torch.zeros(batch, width, requires_grad=True)
        x = torch.randn(rng.randint(100, 400), batch, width)
        found = rg.fit(step, x, h, memory=memory)

        def loop() -> torch.Tensor:
            s, ys = h, []
            for x_t in x:
                y, s = step(x_t, s)
                ys.append(y)
            return torch.stack(ys)

        runs = {"ordinary": loop, "told": lambda: rg.unroll(step, x, h, memory=memory)[0]}
    weights = [
        *(plain if kind == "chain" else theirs if kind == "layer" else step.cell).parameters()
    ]
    true = _medians(runs, [*weights, *(ours.parameters() if kind == "layer" else ())], rounds)
    return {
        "name": f"{number}: {kind} of {width}, {batch} samples, {memory}",
        "seconds": true["told"], "told": found.seconds / true["told"],
        "ordinary_seconds": true["ordinary"],
        "ordinary_told": found.ordinary_seconds / true["ordinary"],
    }  # fmt: skip


def _conv(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
    )


def _medians(
    runs: dict[str, Callable[[], torch.Tensor]], weights: list[torch.Tensor], rounds: int
) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            for p in weights:
                p.grad = None
            start = time.perf_counter()
            run().square().sum().backward()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in taken.items()}
