"""Claim: the checks of reruns cost some percent of an iteration, at most.

Each iteration (forward and backward) is timed as it is, and with fingerprints patched out, in turn
in one process. Without them nothing is hashed, noted or compared; all else is the same.

    python benchmarks/checks.py        # JSON into benchmarks/results/
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import retrograde as rg
from retrograde.machine import machine_of
from retrograde.models.rows import checks
from retrograde.models.rows import rerun_arguments as arguments
from retrograde.run import prints

ROUNDS = 25
RESULTS = Path(__file__).parent / "results"


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


CASES: dict[str, Callable[[], Callable[[], Any]]] = {
    **{f"blocks of 64, {m}": lambda m=m: blocks(64, 4, 64, m) for m in ("50%", "30%")},
    **{f"blocks of 192, {m}": lambda m=m: blocks(192, 8, 128, m) for m in ("50%", "30%")},
    **{f"blocks of 384, {m}": lambda m=m: blocks(384, 4, 128, m) for m in ("50%", "30%")},
    **{f"GRUCell of 32, {m}": lambda m=m: cell(32, 8, 300, m) for m in ("50%", "10%")},
    **{f"GRUCell of 128, {m}": lambda m=m: cell(128, 32, 300, m) for m in ("50%", "10%")},
}


@contextmanager
def unchecked() -> Iterator[None]:
    """Patch fingerprints out in a block: everything has the same, at no cost."""
    with ExitStack() as stack:
        for module in (arguments, checks, prints):
            # Not a Mock, whose call takes as long as a fingerprint.
            patch = mock.patch.multiple(module, fingerprint=lambda *_: 0, verify=lambda *_: None)
            stack.enter_context(patch)
        yield


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)
    rows = {}
    for name, make in CASES.items():
        run = make()
        run(), run()
        with_checks, without = [], []
        for _ in range(ROUNDS):
            with_checks.append(seconds(run))
            with unchecked():
                without.append(seconds(run))
        plain = statistics.median(without)
        ratios = [a / b for a, b in zip(with_checks, without, strict=True)]
        rows[name] = {
            "seconds": statistics.median(with_checks),
            "seconds_unchecked": plain,
            "ratio": statistics.median(ratios),
        }
        print(f"{name:24} {plain * 1e3:7.2f} ms unchecked, {rows[name]['ratio']:.3f} times checked")
    found = {"machine": machine_of("cpu"), "rounds": ROUNDS, "rows": rows}
    RESULTS.joinpath("checks_cpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
