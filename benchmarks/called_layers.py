"""Claim: layers that a model calls itself are faster within a budget than in ``checkpoint``.

Models call their layers in a loop: 24 encoder layers of 192, 8 of 256, ResNet-18 on images of
32×32, and 64 blocks of 64 units, where Python is most of the time. Each runs ordinarily, with
``torch.utils.checkpoint`` around every layer and nested around groups of three, and by
``rg.budget`` within shares of ordinary backpropagation's memory and within the very bytes that
``checkpoint`` takes. All take turns in one process. The table shows measured peaks and medians of
the ratio to the ordinary iteration of the same round. Gradients are compared bit for bit.

    python benchmarks/called_layers.py   # JSON into benchmarks/results/; six minutes
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from alternating import seconds
from chain_networks import resnet18
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
SHARES = (0.65, 0.5, 0.3, 0.2, 0.11, 0.08)
GROUP = 3
FIRST = "budget_and_first_step_in_iterations"


class Loop(nn.Module):
    """Layers in a loop; ``nested`` says how they are checkpointed: not, each, or in groups."""

    def __init__(self, layers: list[nn.Module], nested: int = 0) -> None:
        super().__init__()
        self.layers, self.nested = nn.ModuleList(layers), nested

    def forward(self, x: Tensor) -> Tensor:
        return self.run(0, len(self.layers), x, self.nested)

    def run(self, start: int, stop: int, x: Tensor, nested: int) -> Tensor:
        if nested > 1:
            for a in range(start, stop, GROUP):
                b = min(a + GROUP, stop)
                x = checkpoint(self.run, a, b, x, 1, use_reentrant=False)
            return x
        for layer in self.layers[start:stop]:
            x = checkpoint(layer, x, use_reentrant=False) if nested else layer(x)
        return x


def tiny() -> list[nn.Module]:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    return [rg.Residual(block()) for _ in range(64)]


def encoder(count: int, width: int) -> list[nn.Module]:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
    return [copy.deepcopy(layer) for _ in range(count)]


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "24 encoder layers of 192, B=4, 128 tokens": (lambda: encoder(24, 192), (4, 128, 192)),
    "8 encoder layers of 256, B=8, 128 tokens": (lambda: encoder(8, 256), (8, 128, 256)),
    "ResNet-18, B=32, 32×32": (resnet18, (32, 3, 32, 32)),
    "64 blocks of 64 units, B=64": (tiny, (64, 64)),
}


def measured(name: str, rounds: int) -> dict[str, Any]:
    """One model in all ways."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    plain, x = Loop(make()), torch.randn(shape)
    before = copy.deepcopy(plain.state_dict())

    def step(model: nn.Module) -> list[Tensor | None]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters()]

    def peak(model: nn.Module) -> int:
        step(model)
        return rg.measure(lambda: step(model)).working_bytes

    expected = step(plain)
    ways: dict[str, nn.Module] = {"ordinary": plain}
    for nested, way in ((1, "checkpoint"), (2, f"checkpoint, groups of {GROUP}")):
        ways[way] = copy.deepcopy(plain)
        ways[way].nested = nested  # type: ignore[assignment]
    peaks = {way: peak(model) for way, model in ways.items()}
    budgets: dict[str, float | int] = {f"{share:.0%}": share for share in SHARES}
    budgets |= {f"as {way}": peaks[way] for way in peaks if way != "ordinary"}
    refused, differ, taken_first = {}, [], {}
    iteration = statistics.median(seconds(lambda: step(plain)) for _ in range(3))
    for way, memory in budgets.items():
        model = copy.deepcopy(plain)
        model.load_state_dict(before)
        start = time.perf_counter()
        try:
            rg.budget(model, memory, x)
        except rg.BudgetError as error:
            refused[way] = error.minimum_bytes
            continue
        found = step(model)
        taken_first[way] = round((time.perf_counter() - start) / iteration, 1)
        if not all(
            a is b or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(expected, found, strict=True)
        ):
            differ.append(way)
        ways[way], peaks[way] = model, peak(model)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, model in ways.items():
            taken[way].append(seconds(lambda model=model: step(model)))
    ratios = {
        way: statistics.median(a / b for a, b in zip(each, taken["ordinary"], strict=True))
        for way, each in taken.items()
    }
    return {
        "model": name,
        "ordinary_ms": round(statistics.median(taken["ordinary"]) * 1e3, 1),
        "ordinary_bytes": peaks["ordinary"],
        "share": {way: round(size / peaks["ordinary"], 4) for way, size in peaks.items()},
        FIRST: taken_first,
        "ratio": {way: round(ratio, 3) for way, ratio in ratios.items()},
        "refused_least_bytes": refused,
        "other_bits": differ,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = []
    for name in MODELS:
        rows.append(row := measured(name, options.rounds))
        print(f"{name}: {row['ordinary_bytes'] / 2**20:.1f} MiB, {row['ordinary_ms']} ms")
        for way, ratio in row["ratio"].items():
            print(f"  {way:<28} peak {row['share'][way]:7.2%}  {ratio:.3f}×", flush=True)
        print(f"  iterations until the first step is done: {row[FIRST]}")
        print(f"  refused: {row['refused_least_bytes']}; other bits: {row['other_bits']}")
    path = RESULTS / "called_layers_cpu.json"
    document = {"machine": machine_of("cpu"), "rounds": options.rounds, "rows": rows}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
