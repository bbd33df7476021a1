"""Claim: ``backward="auto"`` is within 10 % of the best way, over a grid of cells and sizes.

At every point of the grid, four ways take turns in one process, forward and backward together. They
are the pass of ``torch.nn``, the sequential sweep, the scan, and ``"auto"``. The latter decides by
its own calibration, made afresh in a folder of its own. The table shows the time of the chosen way
relative to the best one, both as measured here. The cost of ``"auto"`` beyond its chosen way has a
column of its own.

    python benchmarks/scan_choice.py                 # JSON into benchmarks/results/
    python benchmarks/scan_choice.py --device cuda
"""

import argparse
import itertools
import json
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import retrograde as rg
from retrograde.machine import machine_of, now

RESULTS = Path(__file__).parent / "results"
WAYS = ("torch", "sequential", "scan")
GRIDS = {
    "cpu": {"hidden": (20, 64, 128, 256), "length": (100, 1000), "batch": (1, 16, 64)},
    "cuda": {
        "hidden": (20, 64, 128, 256),
        "length": (100, 1000, 10_000),
        "batch": (1, 16, 64),
    },
}
CELLS = ("RNN", "GRU", "LSTM")
INPUTS = 24
LONG_SECONDS = 1.0  # of calls to a point, beyond which it gets no further rounds


def measure(cell: str, hidden: int, length: int, batch: int, device: str, rounds: int) -> Any:
    """One point of the grid."""
    torch.manual_seed(0)
    options: Any = {"device": device}
    nets: dict[str, Any] = {"torch": getattr(torch.nn, cell)(INPUTS, hidden, **options)}
    for way in (*WAYS[1:], "auto"):
        nets[way] = getattr(rg, cell)(INPUTS, hidden, backward=way, **options)
        nets[way].load_state_dict(nets["torch"].state_dict())
    x = torch.randn(length, batch, INPUTS, device=device)
    seed = torch.randn(length, batch, hidden, device=device)

    def call(net: Any) -> float:
        net.zero_grad()
        start = now(x.device)
        net(x)[0].backward(seed)
        return now(x.device) - start

    found = rg.explain(nets["auto"], x)
    spent = sum(call(net) for net in nets.values())  # and whatever a first call sets up
    seconds: dict[str, list[float]] = {way: [] for way in nets}
    for _ in range(rounds):
        for way, net in nets.items():
            seconds[way].append(call(net))
        spent += sum(taken[-1] for taken in seconds.values())
        if spent > LONG_SECONDS and len(seconds["auto"]) >= 3:
            break
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    best = min(WAYS, key=lambda way: medians[way])
    return {
        "cell": cell,
        "hidden": hidden,
        "length": length,
        "batch": batch,
        "seconds": medians,
        "expected_seconds": found.seconds,
        "choice": found.choice,
        "best": best,
        "choice_against_best": medians[found.choice] / medians[best],
        "auto_against_choice": medians["auto"] / medians[found.choice],
    }


def main() -> None:
    """Measure the grid, print a line a point, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    grid = GRIDS[arguments.device]
    points = []
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for cell, hidden, length, batch in itertools.product(CELLS, *grid.values()):
            point = measure(cell, hidden, length, batch, arguments.device, arguments.rounds)
            points.append(point)
            ms = "  ".join(f"{way} {s * 1e3:8.2f}" for way, s in point["seconds"].items())
            print(
                f"{cell:<4} H={hidden:<4} T={length:<6} B={batch:<3} {ms} ms  "
                f"{point['choice']:<10} {point['choice_against_best']:.2f}",
                flush=True,
            )
    ratios = sorted(point["choice_against_best"] for point in points)
    within = sum(ratio <= 1.1 for ratio in ratios)
    print(f"{within} of {len(ratios)} points within 10 % of the best way; worst {ratios[-1]:.2f}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"scan_choice_{arguments.device}.json"
    content = {"machine": machine_of(arguments.device), "points": points}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
