"""Claim: a rank's Jacobian in closed form takes a fraction of a sweep for each of its columns.

A tree across ranks needs the Jacobian of each rank: the effect of its steps on any gradient. It is
found in two ways. One is a backward pass through the recorded steps for each column, side by side
where autograd allows it. The other is the closed form, from slopes. Both take turns in one process,
with one plain sweep for comparison.

    python benchmarks/rank_jacobians.py                 # JSON into benchmarks/results/
    python benchmarks/rank_jacobians.py --device cuda
    python benchmarks/rank_jacobians.py --quick         # small, and nothing is written
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import retrograde as rg
from retrograde.machine import machine_of, now
from retrograde.ranks.piece import Piece, flat, unflat
from retrograde.ranks.range_map import rows_of

RESULTS = Path(__file__).parent / "results"
SIDE_BY_SIDE = 64  # gradients that one backward pass takes
# Cell, layers, units, batch, steps.
POINTS = (
    ("GRU", 1, 32, 16, 200),
    ("LSTM", 1, 32, 16, 200),
    ("LSTM", 1, 32, 64, 250),
    ("GRU", 1, 8, 4, 2000),
    ("RNN", 1, 32, 1, 5000),
    ("GRU", 2, 32, 16, 200),
    ("LSTM", 2, 32, 16, 200),
    ("LSTM", 1, 128, 8, 200),
)


def by_columns(piece: Piece, dy: Tensor, apart: bool) -> Tensor:
    """The map of a piece's steps (B, n + 1, n): a sweep for the losses, and one a column."""
    zero = tuple(torch.zeros_like(s) for s in piece.after)
    offset = flat(piece.back(dy, zero, (), keep=True)[1])
    units = torch.eye(offset.shape[1], device=dy.device).unsqueeze(1).expand(-1, len(offset), -1)
    ends = [unflat(unit, piece.before) for unit in units]
    if apart:
        rows = [flat(piece.back(None, each, (), keep=True)[1]) for each in ends]
        return torch.stack([*rows, offset], 1)
    rows = []
    for start in range(0, len(ends), SIDE_BY_SIDE):
        some = [
            torch.stack(parts) for parts in zip(*ends[start : start + SIDE_BY_SIDE], strict=True)
        ]
        found = torch.autograd.grad(
            piece.after, piece.before, some, retain_graph=True, is_grads_batched=True
        )
        rows += [flat(state) for state in zip(*found, strict=True)]
    return torch.stack([*rows, offset], 1)


def measure(point: tuple[str, int, int, int, int], device: str, rounds: int) -> dict[str, Any]:
    """One point: medians of seconds, and how far the two lie apart."""
    cell, layers, units, batch, steps = point
    torch.manual_seed(0)
    net = getattr(rg, cell)(units, units, layers, device=device)
    x = torch.randn(steps, batch, units, device=device)
    dy = torch.randn(steps, batch, units, device=device)
    before = tuple(s.requires_grad_() for s in net._zeros(batch, x))
    outputs, after = net(x, before if cell == "LSTM" else before[0])
    piece = Piece(x, before, outputs, after if cell == "LSTM" else (after,))
    zero = tuple(torch.zeros_like(s) for s in piece.after)
    apart = cell == "LSTM" or device != "cpu"
    ways = {
        "sweep": lambda: piece.back(dy, zero, (), keep=True),
        "columns": lambda: by_columns(piece, dy, apart),
        "slopes": lambda: rows_of(net, x, before, dy),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for turn in range(1 + rounds):
        for name, call in ways.items():
            start = now(x.device)
            found[name] = call()
            if turn:
                seconds[name].append(now(x.device) - start)
    a, b = found["columns"], found["slopes"]
    far = [
        float((p - q).abs().max() / q.abs().max().clamp_min(1e-30))
        for p, q in ((a[:, :-1], b[:, :-1]), (a[:, -1], b[:, -1]))
    ]
    return {
        "cell": cell, "layers": layers, "units": units, "batch": batch, "steps": steps,
        **{f"{name}_seconds": statistics.median(each) for name, each in seconds.items()},
        "jacobian_difference": far[0], "offset_difference": far[1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    points = [("GRU", 2, 4, 2, 20)] if options.quick else POINTS
    rows = []
    for point in points:
        rows.append(row := measure(point, options.device, 1 if options.quick else 5))
        ratio = row["columns_seconds"] / row["slopes_seconds"]
        print(
            f"{row['cell']} of {row['layers']} × {row['units']}, batch {row['batch']}, "
            f"{row['steps']:,} steps: a sweep {row['sweep_seconds'] * 1e3:.3g} ms, all columns "
            f"{row['columns_seconds'] * 1e3:.4g} ms, from slopes "
            f"{row['slopes_seconds'] * 1e3:.3g} ms: {ratio:.1f} times as fast; apart by "
            f"{row['offset_difference']:.1e}",
            flush=True,
        )
    if not options.quick:
        machine = machine_of(torch.device(options.device))
        path = RESULTS / f"rank_jacobians_{options.device}.json"
        path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
