"""Claim: beside a process that keeps one of two cores busy, a recurrent layer is at most 4× slower.

At its end, a parallel loop waits for its slowest thread, which is one whose core is taken by
another process. The LSTM of torch waits after each step. Ours waits only after a piece of many
steps. An LSTM and a GRU 40→128 (B = 16, T = 500) run forward and backward: alone, beside one busy
process, and beside two. All contenders take turns, and the table shows medians of rounds.

    python benchmarks/busy_machine.py   # JSON into benchmarks/results/
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import retrograde as rg
from retrograde.machine import machine_of, now

RESULTS = Path(__file__).parent / "results"
OPTIONS = {
    "50%": {"memory": "50%"},
    "10%": {"memory": "10%"},
    "100%": {"memory": "100%"},
}


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


def contenders(kind: str) -> dict[str, Callable[[], None]]:
    """torch's module, and ours."""
    torch.manual_seed(0)
    x = torch.randn(500, 16, 40, requires_grad=True)
    theirs = getattr(torch.nn, kind)(40, 128)
    nets = {"torch": theirs}
    for name, options in OPTIONS.items():
        nets[name] = getattr(rg, kind)(40, 128, **options)
        nets[name].load_state_dict(theirs.state_dict())

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
            start = now(torch.device("cpu"))
            run()
            if number:
                times[name].append(now(torch.device("cpu")) - start)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Run each kind alone, beside one process and beside two; print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    for kind in ("LSTM", "GRU"):
        runs = contenders(kind)
        alone: dict[str, float] = {}
        for busy in (0, 1, 2):
            with beside(busy):
                found = seconds(runs, options.rounds)
            alone = alone or found
            for name, time in found.items():
                slower = time / alone[name]
                rows.append(
                    {
                        "work": f"{kind} 40→128, B=16, T=500",
                        "contender": name,
                        "busy_processes": busy,
                        "ms": round(time * 1e3, 1),
                        "slowdown": round(slower, 2),
                    }
                )
                print(f"{kind:<5}{name:<12}beside {busy}: {time * 1e3:9.1f} ms  {slower:6.2f}×")
    document = {"machine": machine_of("cpu"), "rows": rows}
    path = RESULTS / "busy_machine_cpu.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
