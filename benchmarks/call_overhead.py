"""Claim: the bookkeeping of a call costs microseconds a call, and nothing a step.

A call notes, compares and restores values. This cost shows in short iterations (forward and
backward). They are timed in this checkout and in another one, in turn, each in its own processes.

    git worktree add ../before e5a067e~1
    python benchmarks/call_overhead.py --against ../before   # JSON into benchmarks/results/
    python benchmarks/call_overhead.py   # this one alone; nothing is written
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
ROUNDS, REPEATS = 5, 25


def cases() -> dict[str, Any]:
    """Iterations, by what they show."""
    import torch
    from torch import nn

    import retrograde as rg

    torch.manual_seed(0)
    x, h = torch.randn(200, 4, 16), torch.zeros(4, 16)
    gru, schedule = nn.GRUCell(16, 16), rg.plan(200, 10)

    def cell(a: Any, h: Any) -> Any:
        h = gru(a, h)
        return h, h

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.layers = gru, nn.ModuleList(nn.Linear(16, 16) for _ in range(30))

        def forward(self, a: Any, h: Any) -> Any:
            h = self.gru(a, h)
            for layer in self.layers[:3]:
                h = torch.tanh(layer(h))
            return h, h

    parts, drop = Parts(), nn.Dropout(0.1)

    def dropped(a: Any, h: Any) -> Any:
        h = drop(gru(a, h))
        return h, h

    deep = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(50)]
    tight, whole = rg.Sequential(*deep, memory="60%"), rg.Sequential(*deep, memory="100%")
    images = torch.randn(64, 64)
    conv = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        for _ in range(12)
    ]
    pictures, convolutional = torch.randn(8, 8, 24, 24), rg.Sequential(*conv, memory="60%")
    lstm, plain = rg.LSTM(16, 16, memory="30%"), rg.LSTM(16, 16)

    def unrolled(cell: Any, steps: int, **asked: Any) -> None:
        rg.unroll(cell, x[:steps], h, **asked)[0].sum().backward()

    return {
        "unroll, a closure, 2 steps, 90 %": lambda: unrolled(cell, 2, memory="90%"),
        "unroll, a closure, 200 steps, 30 %": lambda: unrolled(cell, 200, memory="30%"),
        "unroll, a closure, 200 steps, a schedule": lambda: unrolled(cell, 200, schedule=schedule),
        "unroll, a module of 32 parts, 20 steps": lambda: unrolled(parts, 20, memory="50%"),
        "unroll, dropout, 50 steps": lambda: unrolled(dropped, 50, memory="90%"),
        "bptt, a closure, 200 steps, 30 %": lambda: rg.bptt(
            cell, x, h, loss=lambda t, y: y.sum(), memory="30%"
        ),
        "Sequential, 100 small layers, 60 %": lambda: tight(images).sum().backward(),
        "Sequential, 100 small layers, 100 %": lambda: whole(images).sum().backward(),
        "Sequential, 36 layers of a CNN, 60 %": lambda: convolutional(pictures).sum().backward(),
        "LSTM, 200 steps, 30 %": lambda: lstm(x)[0].sum().backward(),
        "LSTM, 200 steps, no option": lambda: plain(x)[0].sum().backward(),
    }


def measured() -> dict[str, list[float]]:
    """First calls, and the medians of later ones, in seconds."""
    found = {}
    for name, run in cases().items():
        start = time.perf_counter()
        run()
        first = time.perf_counter() - start
        run()
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        found[name] = [first, statistics.median(seconds)]
    return found


def of_checkout(root: Path) -> dict[str, list[float]]:
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore", __file__, "--here"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(measured()))
        return
    roots = {"now": ROOT, **({"before": asked.against} if asked.against else {})}
    rounds: dict[str, list[Any]] = {name: [] for name in roots}
    for _ in range(ROUNDS):
        for name, root in roots.items():
            rounds[name].append(of_checkout(root))
    rows = {}
    for case in rounds["now"][0]:
        row = {}
        for name, found in rounds.items():
            firsts, laters = zip(*(one[case] for one in found), strict=True)
            row[f"first_seconds_{name}"] = statistics.median(firsts)
            row[f"seconds_{name}"] = statistics.median(laters)
        rows[case] = row
        text = f"{case:<42}" + "".join(f"{row[f'seconds_{n}'] * 1e3:9.2f} ms {n}" for n in roots)
        if "before" in roots:
            firsts = [row[f"first_seconds_{name}"] for name in ("before", "now")]
            text += f"{row['seconds_now'] / row['seconds_before']:7.2f}"
            text += "   first call {:6.2f} s before {:6.2f} now".format(*firsts)
        print(text)
    if asked.against:
        from retrograde.machine import machine_of

        document = {
            "machine": machine_of("cpu"),
            "rounds": ROUNDS,
            "repeats": REPEATS,
            "rows": rows,
        }
        path = RESULTS / "call_overhead_cpu.json"
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
