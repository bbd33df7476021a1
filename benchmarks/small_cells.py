"""Claim: a small cell within a budget takes little longer than the plain loop; compiled, less.

Most of the time of a small cell's step is Python. Cells of a few operations run forward and
backward by the plain loop, and by ``rg.unroll`` within fractions of their memory. The latter runs
with and without ``compile=True``. All take turns in one process. The table shows medians relative
to the plain loop, the times of first calls, the working bytes, and the largest relative difference
of any gradient.

    python benchmarks/small_cells.py   # JSON into benchmarks/results/; five minutes
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from alternating import medians, seconds
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
SHARES = (None, "50%", "10%", "5%")
INPUTS, ROUNDS = 16, 9


class Spiking(nn.Module):
    """A leaky neuron with a smooth threshold: a matrix product and six operations."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.net = nn.Linear(inputs, size)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        v, i = state
        i = 0.9 * i + self.net(x)
        v = 0.95 * v + i
        z = torch.sigmoid(4 * (v - 1))
        return z, (v - z, i)


class Own(nn.Module):
    """torch's cell, or a gated cell as one writes it by hand."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, h: Any) -> Any:
        h = self.cell(x, h)
        return (h[0] if isinstance(h, tuple) else h), h


class MinimalGated(nn.Module):
    """A gated unit by hand: two products and four operations."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.z, self.c = nn.Linear(inputs + size, size), nn.Linear(inputs + size, size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        xh = torch.cat([x, h], -1)
        z = torch.sigmoid(self.z(xh))
        return (1 - z) * h + z * torch.tanh(self.c(xh))


class Attending(nn.Module):
    """A decoder's cell: it attends to an encoder's outputs by keys that were computed from them,
    and captures both."""

    def __init__(self, inputs: int, size: int, batch: int, places: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs + size, size)
        self.encoder, self.key = nn.Linear(inputs, size), nn.Linear(size, size)
        self.text = torch.randn(batch, places, inputs)
        self.encode()

    def encode(self) -> None:
        """Run the encoder, once an iteration."""
        self.encoded = self.encoder(self.text)
        self.keys = self.key(self.encoded)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax((self.keys @ h.unsqueeze(2)).squeeze(2), -1)
        context = (weights.unsqueeze(1) @ self.encoded).squeeze(1)
        h = self.cell(torch.cat([x, context], -1), h)
        return h, h


def cases() -> dict[str, tuple[nn.Module, int, int, Any]]:
    """Cells by name: the cell, steps, samples, and the initial state."""

    def zeros(batch: int, size: int) -> Tensor:
        return torch.zeros(batch, size)

    return {
        "GRUCell 32, B=16, T=400": (Own(nn.GRUCell(INPUTS, 32)), 400, 16, zeros(16, 32)),
        "spiking 64, B=16, T=400": (Spiking(INPUTS, 64), 400, 16, (zeros(16, 64), zeros(16, 64))),
        "RNNCell 16, B=4, T=1000": (Own(nn.RNNCell(INPUTS, 16)), 1000, 4, zeros(4, 16)),
        "LSTMCell 64, B=32, T=403": (
            Own(nn.LSTMCell(INPUTS, 64)), 403, 32, (zeros(32, 64), zeros(32, 64)),
        ),
        "gated by hand 128, B=64, T=201": (Own(MinimalGated(INPUTS, 128)), 201, 64, zeros(64, 128)),
        "GRUCell 32, B=8, T=1600": (Own(nn.GRUCell(INPUTS, 32)), 1600, 8, zeros(8, 32)),
        "attending to 50 captured places, B=16, T=200": (
            Attending(INPUTS, 64, 16, 50), 200, 16, zeros(16, 64),
        ),
    }  # fmt: skip


def plain(cell: nn.Module, x: Tensor, state: Any) -> Tensor:
    outputs = []
    for row in x:
        y, state = cell(row, state)
        outputs.append(y)
    return torch.stack(outputs)


def contenders(
    cell: nn.Module, steps: int, batch: int, state: Any
) -> tuple[dict[str, Any], dict[str, Callable[[], tuple[Tensor, ...]]]]:
    """What the first calls took, and all calls by name."""
    torch.manual_seed(0)
    x = torch.randn(steps, batch, INPUTS, requires_grad=True)
    wanted = [x, *cell.parameters()]

    def iteration(run: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        def call() -> tuple[Tensor, ...]:
            if isinstance(cell, Attending):
                cell.encode()
            return torch.autograd.grad(run().square().sum(), wanted)

        return call

    calls = {"plain": iteration(lambda: plain(cell, x, state))}
    calls["plain"]()
    loop = statistics.median(seconds(calls["plain"]) for _ in range(3))
    row: dict[str, Any] = {"first_loops": {}, "refused": {}}
    for compile in (False, True):
        for share in SHARES if compile else SHARES[1:]:
            key = f"{'compiled' if compile else 'as it is'} {share or 'no budget'}"
            run = iteration(
                lambda s=share, c=compile: rg.unroll(cell, x, state, memory=s, compile=c)[0]  # type: ignore[misc]
            )
            try:
                row["first_loops"][key] = round(seconds(run) / loop, 2)
            except rg.BudgetError as refusal:
                row["refused"][key] = refusal.minimum_bytes
                continue
            except rg.CellError:  # a cell that captures computed tensors is not compiled
                row["refused"][key] = None
                continue
            calls[key] = run
    return row, calls


def measured(name: str, cell: nn.Module, steps: int, batch: int, state: Any) -> dict[str, Any]:
    """A row of the table."""
    found, calls = contenders(cell, steps, batch, state)
    return {"cell": name, **found, **compared(calls, ROUNDS)}


def compared(calls: dict[str, Callable[[], tuple[Tensor, ...]]], rounds: int) -> dict[str, Any]:
    """Times, bytes and gradients of calls, beside those of the plain loop."""
    row: dict[str, Any] = {}
    expected, taken = calls["plain"](), medians(calls, rounds)
    row["plain_ms"] = round(1e3 * taken["plain"], 2)
    row["ratios"] = {key: round(one / taken["plain"], 3) for key, one in taken.items()}
    row["bytes"] = {key: rg.measure(call).working_bytes for key, call in calls.items()}
    row["worst_difference"] = {
        key: max(float((a - b).norm() / b.norm()) for a, b in zip(call(), expected, strict=True))
        for key, call in calls.items()
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default="", help="part of a name; nothing is written")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    rows = []
    for name, case in cases().items():
        if only not in name:
            continue
        row = measured(name, *case)
        rows.append(row)
        print(f"{name:44} {row['plain_ms']:7.1f} ms")
        for key, ratio in row["ratios"].items():
            if key != "plain":
                first, differs = row["first_loops"][key], row["worst_difference"][key]
                kept = row["bytes"][key] / 2**20
                print(f"    {key:20} {ratio:5.2f}×  first call {first:6.1f} loops  "
                      f"{kept:6.2f} MiB  differs by {differs:.0e}", flush=True)  # fmt: skip
    for key in rows[0]["ratios"]:
        ratios = [row["ratios"][key] for row in rows if key in row["ratios"]]
        print(f"{key:20} worst {max(ratios):.2f}, mean {statistics.geometric_mean(ratios):.2f}")
    if only:
        return
    path = RESULTS / "small_cells_cpu.json"
    machine = machine_of(torch.device("cpu"))
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
