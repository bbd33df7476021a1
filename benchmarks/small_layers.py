"""Claim: a budget costs little where layers are small, and its first step takes a few iterations.

The first table has 64 layers, of 64 units for 64 samples, where Python takes more time than
arithmetic. Each share of ordinary backpropagation's memory is timed beside the plain layers, turn
by turn. The second table has larger models. It tells how many of their iterations it takes to make
an ``rg.Sequential`` or call ``rg.budget``, and to do the first step.

    python benchmarks/small_layers.py   # JSON into benchmarks/results/; a minute
"""

import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from called_layers import Loop, encoder
from chain_networks import resnet18
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
SHARES = (0.6, 0.3, 0.15)
ROUNDS = 60
MODELS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "24 encoder layers of 192": (lambda: encoder(24, 192), (4, 128, 192)),
    "8 encoder layers of 256": (lambda: encoder(8, 256), (8, 128, 256)),
    "ResNet-18": (resnet18, (32, 3, 32, 32)),
}


def iteration(net: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], x: Tensor) -> float:
    """Seconds of one iteration."""
    for p in parameters:
        p.grad = None
    start = time.perf_counter()
    net(x).sum().backward()
    return time.perf_counter() - start


def small() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(32) for layer in (nn.Linear(64, 64), nn.Tanh())]
    plain, x = nn.Sequential(*layers), torch.randn(64, 64)
    parameters = [*plain.parameters()]
    rows = []
    for share in SHARES:
        net = rg.Sequential(*layers, memory=share)
        fit = net.fit(x)
        taken = [
            [iteration(one, parameters, x) for one in (net, plain)] for _ in range(ROUNDS + 5)
        ][5:]
        ours, theirs = (statistics.median(side) for side in zip(*taken, strict=True))
        rows.append(
            {
                "share": share,
                "seconds": ours,
                "ordinary_seconds": theirs,
                "ratio": statistics.median(a / b for a, b in taken),
                "least": fit.minimum_bytes / fit.ordinary_bytes,
            }
        )
        print(rows[-1], flush=True)
    return rows


def first_steps() -> list[dict[str, Any]]:
    rows = []
    for name, (make, shape) in MODELS.items():
        torch.manual_seed(0)
        layers, x = make(), torch.randn(shape)
        plain = nn.Sequential(*copy.deepcopy(layers))
        ordinary = min(iteration(plain, [*plain.parameters()], x) for _ in range(4))
        for way in ("rg.Sequential", "rg.budget"):
            net: Any = copy.deepcopy(layers)
            start = time.perf_counter()
            if way == "rg.budget":
                net = Loop(net)
                rg.budget(net, "60%", x)
            else:
                net = rg.Sequential(*net, memory="60%")
            iteration(net, [*net.parameters()], x)
            taken = time.perf_counter() - start
            rows.append({"model": name, "way": way, "iterations": taken / ordinary})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    found = {"machine": machine_of("cpu"), "small": small(), "first": first_steps()}
    (RESULTS / "small_layers_cpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
