"""Claim: resident memory follows a budget if the C library returns or reuses released memory.

A chain of 74 layers (convolution, batch normalisation, ReLU; 96 by 96 pixels, 16 samples) is
trained in fresh processes: as torch runs it, and within 200 MiB. Each process has one allocator:
glibc's with its own settings, glibc's with other settings, or another library that is preloaded.
*Resident* is the peak growth of the resident set over iterations 3 to 8. It counts from the
resident set after tiny iterations of both kinds. Linux records the peak itself, so nothing is
sampled.

    python benchmarks/resident.py     # JSON into benchmarks/results/; six minutes
    apt-get install libjemalloc2 libtcmalloc-minimal4 libmimalloc2.0   # skipped where absent
"""

import json
import os
import statistics
import subprocess
import sys
import time
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import torch
from torch import nn

import retrograde as rg
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
BUDGET, CHANNELS, SIZE, BATCH = 200 << 20, 32, 96, 16
WARM, TIMED = 2, 6

_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
# How each allocator is chosen, by the environment; "preload" names a library.
ALLOCATORS: dict[str, dict[str, str]] = {
    "glibc": {},
    "glibc, large blocks mapped": _MAPPED,
    "glibc, large blocks mapped, huge pages": {**_MAPPED, "THP_MEM_ALLOC_ENABLE": "1"},
    "jemalloc": {"preload": "jemalloc"},
    "tcmalloc": {"preload": "tcmalloc_minimal"},
    "mimalloc": {"preload": "mimalloc"},
}


def chain() -> list[nn.Module]:
    """74 layers."""
    triples = (
        (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
        for _ in range(24)
    )
    first = nn.Conv2d(3, CHANNELS, 3, padding=1)
    return [first, *(layer for triple in triples for layer in triple), nn.AdaptiveAvgPool2d(1)]


def status(field: str) -> int:
    """Bytes that Linux tells of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{field} is not told here: expected Linux")


def trained(budget: int | None) -> dict[str, Any]:
    """Seconds and resident growth of iterations in this process."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    layers = chain()
    net: nn.Module = (
        nn.Sequential(*layers) if budget is None else rg.Sequential(*layers, memory=budget)
    )
    for tiny in (nn.Sequential(*layers), rg.Sequential(*layers, memory="60%")):
        tiny(torch.randn(2, 3, 16, 16)).sum().backward()  # libraries and kernels are loaded
    x = torch.randn(BATCH, 3, SIZE, SIZE)

    def iteration() -> float:
        net.zero_grad(set_to_none=True)
        start = time.perf_counter()
        net(x).square().sum().backward()
        return time.perf_counter() - start

    before = status("VmRSS")
    first = iteration()
    of_first = status("VmHWM") - before
    for _ in range(WARM - 1):
        iteration()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    seconds = [iteration() for _ in range(TIMED)]
    return {
        "seconds": statistics.median(seconds),
        "first_seconds": first,
        "resident_bytes": status("VmHWM") - before,
        "resident_bytes_of_first": of_first,
        "counted_bytes": rg.measure(iteration).working_bytes,
    }


def in_a_fresh_process(budget: int | None, environment: dict[str, str]) -> dict[str, Any]:
    own = {key: value for key, value in environment.items() if key != "preload"}
    if "preload" in environment:
        own["LD_PRELOAD"] = str(find_library(environment["preload"]))
    command = [sys.executable, __file__, str(budget or 0)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **own}
    )
    return dict(json.loads(run.stdout))


def main() -> None:
    rows: list[dict[str, Any]] = []
    chosen = {
        name: environment
        for name, environment in ALLOCATORS.items()
        if "preload" not in environment or find_library(environment["preload"])
    }
    for name in ALLOCATORS.keys() - chosen.keys():
        print(f"{name}: skipped, the library is not installed")
    for name, environment in chosen.items():
        sides = {"torch": None, "ours": BUDGET}
        found = {side: in_a_fresh_process(budget, environment) for side, budget in sides.items()}
        rows.append({"allocator": name, "environment": environment, **found})
        ours, plain = found["ours"], found["torch"]
        print(
            f"{name:40} resident {ours['resident_bytes'] / BUDGET:5.2f} × the budget, "
            f"in the first call {ours['resident_bytes_of_first'] / BUDGET:5.2f} × "
            f"(torch {plain['resident_bytes'] / 2**20:6.0f} MiB), "
            f"{ours['seconds'] / rows[0]['ours']['seconds']:.2f} × the seconds under glibc "
            f"(torch {plain['seconds'] / rows[0]['torch']['seconds']:.2f}), "
            f"counted {ours['counted_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    document = {"machine": machine_of(torch.device("cpu")), "budget_bytes": BUDGET, "rows": rows}
    path = RESULTS / "resident_cpu.json"
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(trained(int(sys.argv[1]) or None)))
    else:
        main()
