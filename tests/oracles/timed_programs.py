"""Programs whose time and memory are measured: a task over a long file, and checked iterations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import retrograde as rg

__all__ = ["CHECKED", "HIDDEN", "SAMPLES", "Task", "write_inputs"]

HIDDEN, SAMPLES, BLOCK = 64, 4, 256


def write_inputs(path: Path, length: int) -> np.memmap:
    """A file of ``length`` steps: slow waves with noise, written in pieces."""
    x = np.lib.format.open_memmap(path, "w+", np.float32, (length, SAMPLES, HIDDEN))
    rng = np.random.default_rng(0)
    speeds = rng.uniform(0.001, 0.1, (SAMPLES, HIDDEN))
    for start in range(0, length, 10_000):
        t = np.arange(start, min(start + 10_000, length))[:, None, None]
        noise = rng.standard_normal((len(t), SAMPLES, HIDDEN))
        x[start : start + len(t)] = np.sin(t * speeds) + 0.1 * noise
    x.flush()
    return np.load(path, mmap_mode="r")


class Task:
    """An LSTM that predicts the next input of a file."""

    def __init__(self, x: np.memmap) -> None:
        torch.manual_seed(0)
        self.x, self.lstm, self.head = x, nn.LSTM(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.losses = 0

    def loss(self, steps: range, y: Tensor) -> Tensor:
        """The squared error of a range, its inputs being read one step ahead."""
        self.losses += len(steps)
        target = torch.empty(y.shape)
        ahead = self.x[steps.start + 1 : steps.stop + 1]
        target.numpy()[: len(ahead)] = ahead
        target.numpy()[len(ahead) :] = self.x[-1]
        return (self.head(y) - target).square().sum() / len(self.x)

    def forward(self) -> float:
        """The loss of a plain forward pass, in blocks."""
        total, state = 0.0, None
        with torch.no_grad():
            for start in range(0, len(self.x), BLOCK):
                stop = min(start + BLOCK, len(self.x))
                y, state = self.lstm(torch.from_numpy(np.array(self.x[start:stop])), state)
                total += self.loss(range(start, stop), y).item()
        return total

    def parameters(self) -> list[Tensor]:
        """All that is trained."""
        return [*self.lstm.parameters(), *self.head.parameters()]

    def clear(self) -> None:
        """Forget the gradients."""
        for p in self.parameters():
            p.grad = None

    def bptt(self, memory: str, length: int | None = None) -> tuple[float, int]:
        """Ours: the loss, and the forward steps that were run."""
        self.clear()
        work = [0]

        def progress(done: int, all_: int) -> None:
            work[0] = done

        total, _ = rg.bptt(
            self.lstm, self.x, loss=self.loss, memory=memory, length=length, progress=progress
        )
        return float(total), work[0] - (length or len(self.x))


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        x = x + self.attend(z, z, z, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def blocks(width: int, batch: int, length: int, memory: str) -> Callable[[], Any]:
    net = rg.Sequential(*(Block(width) for _ in range(8)), memory=memory)
    x = torch.randn(batch, length, width)
    return lambda: net(x).square().mean().backward()


def cell(units: int, batch: int, steps: int, memory: str) -> Callable[[], Any]:
    gru = nn.GRUCell(units, units)
    x, h = torch.randn(steps, batch, units), torch.zeros(batch, units)

    def step(x_t: torch.Tensor, h: torch.Tensor) -> Any:
        h = gru(x_t, h)
        return h, h

    return lambda: rg.unroll(step, x, h, memory=memory)[0].square().mean().backward()


CHECKED: dict[str, Callable[[], Callable[[], Any]]] = {
    **{f"blocks of 64, {m}": lambda m=m: blocks(64, 4, 64, m) for m in ("50%", "30%")},
    **{f"blocks of 192, {m}": lambda m=m: blocks(192, 8, 128, m) for m in ("50%", "30%")},
    **{f"blocks of 384, {m}": lambda m=m: blocks(384, 4, 128, m) for m in ("50%", "30%")},
    **{f"GRUCell of 32, {m}": lambda m=m: cell(32, 8, 300, m) for m in ("50%", "10%")},
    **{f"GRUCell of 128, {m}": lambda m=m: cell(128, 32, 300, m) for m in ("50%", "10%")},
}
