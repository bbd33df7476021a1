"""Claim: beside two busy processes on two cores, a recurrent layer is at most 6× slower than alone.

At its end, a parallel region waits for its slowest thread, which is one whose core is taken by
another process. The layers of torch wait after each step. Ours notice it, and run on one thread for
a while. Six layers run forward and backward: alone, beside one busy process, and beside two. All
contenders take turns, and the table shows medians. Whoever has taken ten seconds has no more turns.

    python benchmarks/busy_machine.py   # JSON into benchmarks/results/
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import torch

import retrograde as rg
from retrograde.machine import machine_of, now

RESULTS = Path(__file__).parent / "results"
#: kind, inputs, hidden, batch, length
WORKS = [
    (kind, *shape)
    for shape in ((8, 64, 8, 400), (48, 128, 16, 200), (128, 256, 32, 200))
    for kind in ("LSTM", "GRU")
]
BUDGETS = ("100%", "20%")
ENOUGH = 10.0  # seconds
PAUSE = 6.0  # seconds; ours runs on one thread for up to five after it met others


def spin() -> None:
    """Keep a core busy, as a loader that decodes pictures does."""
    number = 0
    while True:
        number += 1


@contextmanager
def beside(count: int) -> Iterator[None]:
    """That many busy processes."""
    processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def contenders(kind: str, inputs: int, hidden: int, batch: int, length: int) -> dict[str, Any]:
    """torch's module, and ours."""
    torch.manual_seed(0)
    x = torch.randn(length, batch, inputs, requires_grad=True)
    theirs = getattr(torch.nn, kind)(inputs, hidden)
    nets = {"torch": theirs}
    for memory in BUDGETS:
        nets[memory] = getattr(rg, kind)(inputs, hidden, memory=memory)
        nets[memory].load_state_dict(theirs.state_dict())

    def call(net: torch.nn.Module) -> None:
        net(x)[0].sum().backward()
        x.grad = None
        net.zero_grad(set_to_none=True)

    return {name: lambda net=net: call(net) for name, net in nets.items()}


def seconds(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Medians, of contenders that take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if sum(times[name]) > ENOUGH:
                continue
            start = now(torch.device("cpu"))
            run()
            if number:
                times[name].append(now(torch.device("cpu")) - start)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Run each layer alone, beside one process and beside two; print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    for work in WORKS:
        runs = contenders(*work)
        told = "{} {}→{}, B={}, T={}".format(*work)
        alone: dict[str, float] = {}
        for busy in (0, 1, 2):
            sleep(PAUSE)  # the last load's effect is past
            with beside(busy):
                found = seconds(runs, options.rounds)
            alone = alone or found
            for name, time in found.items():
                row = {"work": told, "contender": name, "busy_processes": busy}
                row |= {"ms": round(time * 1e3, 1), "slowdown": round(time / alone[name], 2)}
                rows.append(row)
                print(
                    f"{told:<28}{name:<6} beside {busy}: {row['ms']:9} ms {row['slowdown']:8}×",
                    flush=True,
                )
    document = {"machine": machine_of("cpu"), "rows": rows}
    path = RESULTS / "busy_machine_cpu.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
