"""Claim: the lean tape takes a third less memory for some percent of time, with the same bits.

Models of many kinds (``tests/oracles/lean_models.py``) make training steps with and without it, in
turn in one process: their peak of working memory, the median of their time, and every bit of
outputs, gradients and buffers, in training, in evaluation and with autocast.

    pip install transformers
    python benchmarks/lean.py                 # JSON into benchmarks/results/
    python benchmarks/lean.py --models GPT-2  # a quick look; nothing is written

The C library gives freed memory back to the system, and takes it page by page at the next step. How
often depends on which block lies last in the heap: the same step varies by a tenth. So times are
taken with a heap that is kept, as jemalloc and a GPU's allocator do.
Ratios still vary by some percent from process to process: each is the median of three processes.
"""

import argparse
import contextlib
import copy
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import retrograde as rg
from alternating import medians
from oracles.lean_models import OTHERS, OWN, build
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
ROUNDS, PROCESSES = 11, 3
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


def times(model: nn.Module, loss_of: Any, rounds: int) -> dict[str, float]:
    """Median milliseconds of both ways, in turn."""
    ways = {"ordinary": contextlib.nullcontext, "lean": rg.lean}
    taken: dict[str, list[float]] = {key: [] for key in ways}
    for i in range(rounds):
        for key, way in list(ways.items())[:: 1 - 2 * (i % 2)]:  # who goes first has a warmer heap
            clear(model)
            start = time.perf_counter()
            step(model, loss_of, way)
            taken[key].append(time.perf_counter() - start)
    return {key: 1e3 * sorted(seconds)[rounds // 2] for key, seconds in taken.items()}


def median_times(name: str, rounds: int) -> dict[str, float]:
    """The times in the process whose ratio is the median of some processes."""
    command = [sys.executable, __file__, "--times-of", name, "--rounds", str(rounds)]
    found = []
    for _ in range(PROCESSES):
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append(json.loads(told.splitlines()[-1]))
    return sorted(found, key=lambda taken: taken["lean"] / taken["ordinary"])[PROCESSES // 2]


def measured(name: str, model: nn.Module, loss_of: Any, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    row: dict[str, Any] = {"model": name}
    row["bits"] = {
        f"{mode}{', bf16' if bf16 else ''}": same_bits(model, loss_of, mode == "train", bf16)
        for mode in ("train", "eval")
        for bf16 in (False, True)
    }
    for bf16 in (False, True):
        end = "_bf16" if bf16 else ""
        for key, way in (("ordinary", contextlib.nullcontext), ("lean", rg.lean)):
            clear(model)
            size = rg.measure(partial(step, model, loss_of, way, bf16)).working_bytes
            row[f"{key}{end}_bytes"] = size
        row[f"memory{end}"] = round(size / row[f"ordinary{end}_bytes"], 3)
    taken = median_times(name, rounds)
    row |= {f"{key}_ms": round(taken[key], 2) for key in taken}
    row["time"] = round(taken["lean"] / taken["ordinary"], 3)
    return row


def is_small(module: nn.Module) -> bool:
    """Whether a module is a normalisation or an activation."""
    name = type(module).__name__
    return any(part in name for part in ("Norm", "GELU", "SiLU", "ReLU", "Activation"))


def is_block(module: nn.Module, parent: nn.Module | None) -> bool:
    """Whether a module is one of several alike, of some size, in a list."""
    listed = isinstance(parent, (nn.ModuleList, nn.Sequential)) and not is_small(module)
    return listed and len(list(module.children())) > 1


def keep_products(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy of selective checkpointing: products, convolutions and attention are kept."""
    name = func.__name__.partition(".")[0]
    dear = ("mm", "addmm", "bmm", "baddbmm", "convolution")
    kept = name in dear or "attention" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(model: nn.Module, which: Callable[..., bool], **options: Any) -> nn.Module:
    """A copy of a model whose chosen modules are checkpointed."""
    model = copy.deepcopy(model)
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    for module in [m for m in model.modules() if which(m, parents.get(m))]:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **options)
    return model


def beside(name: str, model: nn.Module, loss_of: Any, rounds: int) -> dict[str, Any]:
    """Memory and time of other ways to less memory, all in turn; ordinary autograd is 1."""
    selective = partial(create_selective_checkpoint_contexts, keep_products)
    compiled = copy.deepcopy(model)
    compiled.compile()
    ways: dict[str, tuple[nn.Module, Any]] = {
        "ordinary": (model, contextlib.nullcontext),
        "lean": (model, rg.lean),
        "selective checkpoint": (
            checkpointed(model, is_block, context_fn=selective),
            contextlib.nullcontext,
        ),
        "checkpoint of blocks": (checkpointed(model, is_block), contextlib.nullcontext),
        "checkpoint by hand": (
            checkpointed(model, lambda m, parent: is_small(m)),
            contextlib.nullcontext,
        ),
        "torch.compile": (compiled, contextlib.nullcontext),
    }
    calls = {}
    for key, (net, way) in ways.items():

        def call(net: nn.Module = net, way: Any = way) -> None:
            clear(net)
            step(net, loss_of, way)

        with contextlib.suppress(RuntimeError):  # a ReLU in place may not be checkpointed
            call()
            calls[key] = call
    sizes = {key: rg.measure(call).working_bytes for key, call in calls.items()}
    median = medians(calls, rounds)
    row: dict[str, Any] = {"model": name}
    for key in calls:
        memory, slower = sizes[key] / sizes["ordinary"], median[key] / median["ordinary"]
        row[key] = {"memory": round(memory, 3), "time": round(slower, 3)}
        print(f"{name:12} {key:22} memory {memory:.2f}, time {slower:.2f}", flush=True)
    return row


def overhead() -> dict[str, float]:
    """Microseconds that the tape itself takes, on tensors that take none, and for tiny layers."""
    x = torch.randn(4, 64, requires_grad=True)
    sizes = {"call": lambda: x.shape, "saved tensor": lambda: torch.sin(x)}
    found = {}
    for key, one in sizes.items():
        each: dict[Any, list[float]] = {contextlib.nullcontext: [], rg.lean: []}
        for _ in range(15):
            for way, seconds in each.items():
                with way():
                    start = time.perf_counter()
                    for _ in range(2000):
                        one()
                    seconds.append((time.perf_counter() - start) / 2000)
        plain, lean = (sorted(seconds)[7] for seconds in each.values())
        found[f"{key}_us"] = round(1e6 * (lean - plain), 2)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(20)))
    batch = torch.randn(32, 64)
    taken = times(net, lambda net: net(batch).square().mean(), 201)
    found["tiny_layers_time"] = round(taken["lean"] / taken["ordinary"], 3)
    wide = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(20)))
    batch = torch.randn(1024, 64)
    taken = times(wide, lambda net: net(batch).square().mean(), 101)
    gone = taken["lean"] - taken["ordinary"]
    found["let_go_us"] = round(1e3 * gone / 19, 1)  # the recomputation of 256 KiB too
    print(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[*OWN, *OTHERS])
    parser.add_argument("--beside", nargs="*", default=["Encoder", "GPT-2", "Llama", "ResNet-18"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--times-of", help="print the times of one model in this process")
    options = parser.parse_args()
    if not options.times_of and not HEAP.keys() <= os.environ.keys():
        # They are read when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | HEAP)
    warnings.simplefilter("ignore")
    if options.times_of:
        print(json.dumps(times(*build(options.times_of, large=True), options.rounds)))
        return
    path = RESULTS / "lean_cpu.json"
    whole = options.models == [*OWN, *OTHERS]
    result = {"machine": machine_of(torch.device("cpu")), "rows": []}
    for name in options.models:
        built = build(name, large=True)
        if built is None:
            print(f"{name:20} skipped: its library is not installed")
            whole = False
            continue
        row = measured(name, *built, options.rounds)
        result["rows"].append(row)
        bits = "same bits" if all(row["bits"].values()) else f"OTHER BITS {row['bits']}"
        print(
            f"{name:20} {row['ordinary_bytes'] / 2**20:7.1f} MiB × {row['memory']:.2f}"
            f" (bf16 {row['memory_bf16']:.2f}), {row['ordinary_ms']:7.1f} ms × {row['time']:.2f},"
            f" {bits}",
            flush=True,
        )
    for key in ("memory", "memory_bf16", "time"):
        found = [row[key] for row in result["rows"]]
        print(f"{key}: {sum(found) / len(found):.3f} on average, {max(found):.3f} at worst")
    result["overhead"] = overhead()
    result["beside"] = []
    for name in options.beside:
        result["beside"].append(beside(name, *build(name, large=True), 9))
        if whole:
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"written to {path}")


if __name__ == "__main__":
    main()
