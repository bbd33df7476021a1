"""Claim: the table and the picture of README show whole training iterations and the whole process.

Each row is one training iteration: data, forward pass, loss, backward pass. It runs in three ways:
as torch runs it, within a budget, and with ``torch.utils.checkpoint`` used with care. The latter
checkpoints each layer, or segments of the sequence without a copy of the outputs: the fastest of 4,
8, 16 and 32 segments. All take turns in one process, and the table shows medians of rounds.

*Total* bytes are everything that is alive at the peak except the weights: data, outputs, gradients
and temporaries. The budget's bytes are the working memory that it counts, without data, outputs and
gradients that the caller keeps.

The picture is the resident memory of two fresh processes over three iterations each.

    python benchmarks/front_page.py   # JSON into benchmarks/results/; three minutes
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from alternating import medians
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
SEGMENTS = (4, 8, 16, 32)
ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One network: ``plain``, ``ours`` and each of ``careful`` make a training iteration; ``fit``
    tells what the budget counts."""

    name: str
    budget: str
    plain: Callable[[], object]
    ours: Callable[[], object]
    careful: dict[str, Callable[[], object]]
    forget: Callable[[], None]
    fit: Callable[[], Any]


def loss_of(parts: list[Tensor]) -> Tensor:
    """The mean square of all outputs, in parts, whose temporaries are small on every side."""
    count = sum(y.numel() for y in parts)
    pieces = [piece for y in parts for piece in y.split(max(1, len(y) * len(parts) // 32))]
    return sum((piece.square().sum() / count for piece in pieces), start=torch.zeros(()))


def recurrent(kind: str, inputs: int, hidden: int, batch: int, steps: int, budget: str,
              **options: Any) -> Row:  # fmt: skip
    """torch's recurrent module over data of the steps."""
    torch.manual_seed(0)
    theirs = getattr(nn, kind)(inputs, hidden, **options)
    mine = getattr(rg, kind)(inputs, hidden, memory=budget, **options)
    mine.load_state_dict(theirs.state_dict())

    def iteration(net: nn.Module) -> Callable[[], None]:
        return lambda: loss_of([net(torch.randn(steps, batch, inputs))[0]]).backward()

    def segmented(count: int) -> None:
        outputs, state = [], None
        for part in torch.randn(steps, batch, inputs).chunk(count):
            y, state = checkpoint(theirs, part, state, use_reentrant=False)
            outputs.append(y)
        loss_of(outputs).backward()

    def forget() -> None:
        theirs.zero_grad(set_to_none=True)
        mine.zero_grad(set_to_none=True)

    careful: dict[str, Callable[[], object]] = {}
    if not options.get("bidirectional"):
        careful = {f"{n} segments": lambda n=n: segmented(n) for n in SEGMENTS}  # type: ignore[misc]
    layers = f", {options['num_layers']} layers" if "num_layers" in options else ""
    both = ", two directions" if options.get("bidirectional") else ""
    name = f"{kind} {inputs}→{hidden}{layers}{both}, B={batch}, T={steps}"
    sample = torch.randn(steps, batch, inputs)
    fit = lambda: mine.fit(sample)  # noqa: E731
    return Row(name, budget, iteration(theirs), iteration(mine), careful, forget, fit)


class Gated(nn.Module):
    """A cell of one's own, called step by step."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.z, self.c = nn.Linear(inputs + size, size), nn.Linear(inputs + size, size)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        xh = torch.cat([x, h], -1)
        z = torch.sigmoid(self.z(xh))
        h = (1 - z) * h + z * torch.tanh(self.c(xh))
        return h, h


def own_cell(inputs: int, size: int, batch: int, steps: int, budget: str, compile: bool) -> Row:
    """A hand-written loop over a cell."""
    torch.manual_seed(0)
    cell = Gated(inputs, size)
    zeros = torch.zeros(batch, size)

    def loop(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for row in x:
            y, h = cell(row, h)
            outputs.append(y)
        return torch.stack(outputs), h

    def segmented(count: int) -> None:
        outputs, h = [], zeros
        for part in torch.randn(steps, batch, inputs).chunk(count):
            y, h = checkpoint(loop, part, h, use_reentrant=False)
            outputs.append(y)
        loss_of(outputs).backward()

    def ours() -> None:
        x = torch.randn(steps, batch, inputs)
        loss_of([rg.unroll(cell, x, zeros, memory=budget, compile=compile)[0]]).backward()

    return Row(
        f"own cell of {size}{', compiled' if compile else ''}, B={batch}, T={steps}",
        budget,
        lambda: loss_of([loop(torch.randn(steps, batch, inputs), zeros)[0]]).backward(),
        ours,
        {f"{n} segments": lambda n=n: segmented(n) for n in SEGMENTS},  # type: ignore[misc]
        lambda: cell.zero_grad(set_to_none=True),
        lambda: rg.fit(
            cell, torch.randn(steps, batch, inputs), zeros, memory=budget, compile=compile
        ),
    )


def chain(budget: str) -> Row:
    """Twelve transformer layers."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True) for _ in range(12)
    ]
    theirs, mine = nn.Sequential(*layers), rg.Sequential(*layers, memory=budget)

    def each() -> None:
        x = torch.randn(16, 128, 256)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        loss_of([x]).backward()

    return Row(
        "12 transformer layers of 256, B=16, 128 tokens",
        budget,
        lambda: loss_of([theirs(torch.randn(16, 128, 256))]).backward(),
        lambda: loss_of([mine(torch.randn(16, 128, 256))]).backward(),
        {"each layer": each},
        lambda: theirs.zero_grad(set_to_none=True),
        lambda: mine.fit(torch.randn(16, 128, 256)),
    )


ROWS: list[Callable[[], Row]] = [
    lambda: recurrent("LSTM", 256, 256, 64, 1000, "5%"),
    lambda: recurrent("LSTM", 64, 64, 16, 1000, "5%"),
    lambda: recurrent("GRU", 128, 512, 32, 256, "5%"),
    lambda: recurrent("GRU", 24, 64, 16, 500, "5%", num_layers=2),
    lambda: recurrent("LSTM", 80, 256, 8, 600, "10%", num_layers=2, bidirectional=True),
    lambda: own_cell(16, 128, 32, 1000, "5%", compile=False),
    lambda: own_cell(16, 128, 32, 1000, "5%", compile=True),
    lambda: chain("20%"),
]


def measured(row: Row) -> dict[str, Any]:
    """One row of the table: of checkpointing, the fastest way."""
    calls = {"torch": row.plain, "ours": row.ours, **row.careful}

    def alone(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            call()
            row.forget()

        return run

    for call in calls.values():
        alone(call)()
        alone(call)()
    found = {}
    for name, call in calls.items():
        found[name] = {"total_bytes": rg.measure(alone(call)).peak_bytes}
    for name, taken in medians({k: alone(c) for k, c in calls.items()}, ROUNDS).items():
        found[name]["ms"] = round(1e3 * taken, 1)
    fit = row.fit()
    fastest = min(row.careful, key=lambda name: found[name]["ms"], default=None)
    return {
        "network": row.name,
        "budget": row.budget,
        "counted": {"torch": fit.ordinary_bytes, "ours": fit.budget_bytes},
        "torch": found["torch"],
        "ours": found["ours"],
        "checkpoint": None if fastest is None else {"way": fastest, **found[fastest]},
        "all": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    for make in ROWS:
        found = measured(make())
        rows.append(found)
        sides = {"torch": found["torch"], f"ours, {found['budget']}": found["ours"]}
        if found["checkpoint"]:
            sides[found["checkpoint"]["way"]] = found["checkpoint"]
        print(found["network"], {k: f"{v / 2**20:.1f} MiB" for k, v in found["counted"].items()})
        for name, one in sides.items():
            size = f"{one['total_bytes'] / 2**20:7.1f} MiB"
            print(f"    {name:12} {one['ms']:8.1f} ms  in total {size}", flush=True)
    ratio = statistics.geometric_mean(r["ours"]["ms"] / r["torch"]["ms"] for r in rows)
    print(f"geometric mean of times: {ratio:.2f}")
    document = {"machine": machine_of(torch.device("cpu")), "rows": rows}
    path = RESULTS / "front_page_cpu.json"
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
