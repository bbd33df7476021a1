"""Claim: the lean tape takes a third less memory for some percent of time, with the same bits.

Models of many kinds (``tests/oracles/lean_models.py``) make training steps with and without it, in
turn in one process: their peak of working memory, the median of their time, and every bit of
outputs, gradients and buffers, in training, in evaluation and with autocast.

    pip install transformers
    python benchmarks/lean.py                 # JSON into benchmarks/results/
    python benchmarks/lean.py --models GPT-2  # a quick look; nothing is written
    python benchmarks/lean.py --heap trimmed

The C library gives freed memory back to the system, and takes it page by page at the next step. How
often depends on which block lies last in the heap: the same step varies by a tenth. So times are
taken with a heap that is kept, as jemalloc and a GPU's allocator do; ``trimmed`` is as it comes.
"""

import argparse
import contextlib
import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import retrograde as rg
from oracles.lean_models import OTHERS, OWN, build
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
ROUNDS = 21
HEAP = {
    "MALLOC_TOP_PAD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_MAX_": "0",
}  # fmt: skip


def step(model: nn.Module, loss_of: Callable[[Any], Tensor], way: Any, bf16: bool = False) -> Any:
    """One training step but for the optimizer's; return all that it leaves behind."""
    torch.manual_seed(1)
    with way(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = loss_of(model)
    loss.backward()
    return loss.detach()


def left(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *model.buffers()]


def clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def same_bits(model: nn.Module, loss_of: Any, train: bool, bf16: bool) -> bool:
    """Whether a step and its traces are equal with and without the tape."""
    found = []
    torch.use_deterministic_algorithms(True)  # else ordinary gradients of embeddings differ too
    for way in (contextlib.nullcontext, rg.lean):
        net = copy.deepcopy(model).train(train)
        loss = step(net, loss_of, way, bf16)
        found.append([loss, *left(net)])
    torch.use_deterministic_algorithms(False)
    return all(map(torch.equal, *found))


def measured(name: str, model: nn.Module, loss_of: Any, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    row: dict[str, Any] = {"model": name}
    row["bits"] = {
        f"{mode}{', bf16' if bf16 else ''}": same_bits(model, loss_of, mode == "train", bf16)
        for mode in ("train", "eval")
        for bf16 in (False, True)
    }
    ways = {"ordinary": contextlib.nullcontext, "lean": rg.lean}
    for bf16 in (False, True):
        for key, way in ways.items():
            clear(model)
            size = rg.measure(partial(step, model, loss_of, way, bf16)).working_bytes
            row[f"{key}{'_bf16' if bf16 else ''}_bytes"] = size
    taken: dict[str, list[float]] = {key: [] for key in ways}
    for i in range(rounds):
        for key, way in list(ways.items())[:: 1 - 2 * (i % 2)]:  # who goes first has a warmer heap
            clear(model)
            start = time.perf_counter()
            step(model, loss_of, way)
            taken[key].append(time.perf_counter() - start)
    for key, seconds in taken.items():
        row[f"{key}_ms"] = round(1e3 * sorted(seconds)[rounds // 2], 2)
    row["memory"] = round(row["lean_bytes"] / row["ordinary_bytes"], 3)
    row["memory_bf16"] = round(row["lean_bf16_bytes"] / row["ordinary_bf16_bytes"], 3)
    row["time"] = round(row["lean_ms"] / row["ordinary_ms"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[*OWN, *OTHERS])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--heap", choices=["kept", "trimmed"], default="kept")
    options = parser.parse_args()
    if (
        options.heap == "kept" and not HEAP.keys() <= os.environ.keys()
    ):  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | HEAP)
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models:
        built = build(name, large=True)
        if built is None:
            print(f"{name:20} skipped: its library is not installed")
            continue
        row = measured(name, *built, options.rounds)
        rows.append(row)
        bits = "same bits" if all(row["bits"].values()) else f"OTHER BITS {row['bits']}"
        print(
            f"{name:20} {row['ordinary_bytes'] / 2**20:7.1f} MiB × {row['memory']:.2f}"
            f" (bf16 {row['memory_bf16']:.2f}), {row['ordinary_ms']:7.1f} ms × {row['time']:.2f},"
            f" {bits}",
            flush=True,
        )
    for key in ("memory", "memory_bf16", "time"):
        found = [row[key] for row in rows]
        print(f"{key}: {sum(found) / len(found):.3f} on average, {max(found):.3f} at worst")
    if options.models == [*OWN, *OTHERS] and len(rows) == len(options.models):
        path = RESULTS / f"lean_cpu{'_trimmed' if options.heap == 'trimmed' else ''}.json"
        machine = machine_of(torch.device("cpu"))
        path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
