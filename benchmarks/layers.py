"""Recurrent layers by their phases, their kernels, and beside busy processes.

python benchmarks/layers.py phases   # JSON into benchmarks/results/; so do the other tables
pip install torchrl                  # for a part of the table of resets
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import sleep
from typing import Any, cast

import torch
from torch import Tensor, nn

import retrograde as rg
from harness import Row, Run, Script, medians, seconds
from retrograde.kernels.cpu import products
from retrograde.recurrent.fastest import candidates
from retrograde.recurrent.fused import Fused, run_held
from retrograde.recurrent.vendor import Layers
from retrograde.run.layout import Straight
from retrograde.sizes.timing import time_steps

script = Script()
Shape = tuple[str, int, int, int, int]  # kind, inputs, hidden, batch, length


def name_of(work: Shape) -> str:
    return "{} {}→{}, B={}, T={}".format(*work)


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
#: kind, inputs, hidden, batch, length
WORKS = [
    ("LSTM", 256, 256, 64, 300),
    ("LSTM", 128, 512, 32, 256),
    ("LSTM", 80, 256, 8, 600),
    ("LSTM", 256, 512, 8, 100),
    ("LSTM", 40, 128, 16, 500),
    ("GRU", 128, 512, 32, 256),
    ("GRU", 64, 512, 4, 200),
    ("GRU", 80, 256, 8, 400),
    ("RNN", 64, 512, 16, 300),
]


def product_rates(rows: int, inner: int, columns: int, rounds: int) -> dict[str, dict[str, float]]:
    """GFLOPs a second of x Wᵀ, g W and gᵀ x: medians of calls that take turns.

    oneDNN is called as torch calls it, with a result of its own for each call.
    """
    x, w, g = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(rows, columns)
    out, dx, total = torch.empty(rows, columns), torch.empty(rows, inner), torch.zeros_like(w)
    turned, by_onednn = w.t().contiguous(), torch.ops.mkldnn._linear_pointwise
    rest = None, "none", [], ""
    calls = {
        "x Wᵀ": {
            "MKL": lambda: torch.mm(x, w.t(), out=out),
            "oneDNN": lambda: by_onednn(x, w, *rest),
            "ours": lambda: products.linear(x, w, None, out),
        },
        "g W": {
            "MKL": lambda: torch.mm(g, w, out=dx),
            "oneDNN": lambda: by_onednn(g, turned, *rest),
            "ours": lambda: products.times(g, w, dx),
        },
        "gᵀ x": {
            "MKL": lambda: total.addmm_(g.t(), x),
            "oneDNN": lambda: by_onednn(g.t(), x.t(), *rest),
            "ours": lambda: products.add_outer(g, x, total),
        },
    }
    gflop, found = 2e-9 * rows * inner * columns, {}
    for kind, ways in calls.items():
        taken = medians(ways, rounds, warm=1)
        found[kind] = {way: round(gflop / own, 1) for way, own in taken.items()}
    return found


def in_phases(net: nn.Module, x: Tensor, seed: Tensor) -> tuple[float, float, float]:
    """Seconds without gradients, forward with them, and backward."""
    outputs: list[Tensor] = []
    with torch.no_grad():
        plain = seconds(lambda: net(x))
    forward = seconds(lambda: outputs.append(net(x)[0]))
    backward = seconds(lambda: outputs[0].backward(seed))
    x.grad = None
    net.zero_grad(set_to_none=True)
    return plain, forward, backward


def rates(work: Shape, rounds: int) -> Row:
    """One row; all take turns."""
    kind, inputs, hidden, batch, length = work
    torch.manual_seed(0)
    x = torch.randn(length, batch, inputs, requires_grad=True)
    theirs = getattr(torch.nn, kind)(inputs, hidden)
    nets = {"torch": theirs}
    for name, memory in (("all kept", "100%"), ("none kept", 0)):
        net = getattr(rg, kind)(inputs, hidden, memory=memory or "100%")
        net.load_state_dict(theirs.state_dict())
        if not memory:  # the least budget, and room for pieces of a thousand rows
            rows = max(1024, 2 * batch)
            net.memory = net.fit(x).minimum_bytes + 4 * rows * (8 * hidden + inputs)
        nets[name] = net
    seed = torch.randn(length, batch, hidden)
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in nets}
    for number in range(rounds + 1):
        for name, net in nets.items():
            found = in_phases(net, x, seed)
            if number:
                times[name].append(found)
    flops = 2 * length * batch * GATES[kind] * hidden * (inputs + hidden)
    rates_of = product_rates(length * batch, inputs + hidden, GATES[kind] * hidden, rounds)
    medians_of = {
        name: [statistics.median(column) for column in zip(*found, strict=True)]
        for name, found in times.items()
    }
    names = ("no gradient", "forward", "backward")
    gflops = {
        name: {
            n: round(k * flops / s / 1e9, 1) for n, k, s in zip(names, (1, 1, 2), own, strict=True)
        }
        for name, own in medians_of.items()
    }
    again = medians_of["none kept"][2]
    return {
        "work": name_of(work),
        "products_gflops": rates_of,
        "product_gflops": max(rates_of["x Wᵀ"].values()),
        "gflops": gflops,
        "backward_with_gates_again_gflops": round(3 * flops / again / 1e9, 1),
        "whole_over_torch": {
            name: round(sum(own[1:]) / sum(medians_of["torch"][1:]), 2)
            for name, own in medians_of.items()
        },
    }


@script.table("recurrent_phases_cpu", rounds=7)
def phases(run: Run) -> None:
    """Claim: each phase of a recurrent layer runs near the rate of the machine's matrix products.

    A layer runs forward and backward by torch, by ours with all gates kept, and by ours with none
    kept, in room for pieces of a thousand rows. A forward pass has F FLOPs, a backward pass 2 F,
    and recomputed gates another F, where F = 2·T·B·K·H·(I + H). Beside them are the rates of the
    three products (x Wᵀ, g W and gᵀ x) of that shape by MKL, by oneDNN and by our own tiles.
    """
    works = {name_of(work): work for work in WORKS}
    run.write(rows=run.rows(works, partial(rates, rounds=run.rounds), "gflops", "products_gflops"))


SIZES = [(16, 1), (64, 1), (256, 1), (16, 16), (64, 16), (256, 16), (64, 64), (256, 64)]
KINDS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN_TANH": torch.nn.RNN}
LENGTH = 64


def costs_of(kind: Any) -> list[Row]:
    """One row a size and a kernel."""
    return [row for size, batch in SIZES for row in kernels_of(kind, size, batch)]


def kernels_of(kind: str, size: int, batch: int) -> list[Row]:
    torch.manual_seed(0)
    net = KINDS[kind](size, size)
    layers = Layers(kind, net._flat_weights, 1, True)
    x = torch.randn(LENGTH, batch, size, requires_grad=True)
    state = [torch.zeros(1, batch, size) for _ in range(2 if kind == "LSTM" else 1)]
    rows = []
    for core, costs in candidates(layers, batch):
        times = [
            time_steps(core, Straight(len(x), fused=True).read([x]), state, repeats=9)
            for _ in range(3)
        ]

        step_time = costs["step_time"]

        def least(part: str, what: str, times: list = times) -> float:
            found = statistics.median(getattr(getattr(p, part), what) for p in times)
            return round(found * 1e6, 2)

        step, call = least("forward", "step_seconds"), least("forward", "call_seconds")
        parts = ("record", "backward")
        rows.append(
            {
                "kind": kind,
                "hidden": size,
                "batch": batch,
                "kernel": "held layers" if cast(Fused, core).kernel is run_held else "run_torch",
                "step": step,
                "call": call,
                "recorded_step": round(sum(least(p, "step_seconds") for p in parts), 2),
                "recorded_call": round(sum(least(p, "call_seconds") for p in parts), 2),
                "nominal_step": round(step_time, 2),
                "nominal_call": round(step_time * costs["call_steps"], 2),
                "nominal_recorded_step": round(step_time * (1 + costs["backward_steps"]), 2),
                "nominal_recorded_call": round(step_time * costs["record_steps"], 2),
            }
        )
    return rows


@script.table("range_costs_cpu")
def range_costs(run: Run) -> None:
    """The cost of a call and of a step of every kernel, as in ``sizes/nominal.py``.

    The executor runs ranges of 1 and of 64 steps: forward without keeping anything, and recorded
    and backpropagated. The cost of a step is the time of one more step, and the cost of a call is
    the rest. Values are medians, in microseconds.
    """
    run.write(
        rows=run.rows(list(KINDS), costs_of, "hidden", "batch", "kernel", "step", "nominal_step")
    )


BUSY = [
    (kind, *shape)
    for shape in ((8, 64, 8, 400), (48, 128, 16, 200), (128, 256, 32, 200))
    for kind in ("LSTM", "GRU")
]
ENOUGH = 10.0  # seconds
PAUSE = 6.0  # seconds; ours runs on one thread for up to five after it met others


def spin() -> None:
    """Keep a core busy, as a loader that decodes pictures does."""
    number = 0
    while True:
        number += 1


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
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
    for memory in ("100%", "20%"):
        nets[memory] = getattr(rg, kind)(inputs, hidden, memory=memory)
        nets[memory].load_state_dict(theirs.state_dict())

    def call(net: torch.nn.Module) -> None:
        net(x)[0].sum().backward()
        x.grad = None
        net.zero_grad(set_to_none=True)

    return {name: lambda net=net: call(net) for name, net in nets.items()}


def medians_in_time(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Medians, of contenders that take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if sum(times[name]) > ENOUGH:
                continue
            taken = seconds(run)
            times[name] += [taken] * (number > 0)
    return {name: statistics.median(found) for name, found in times.items()}


def slowed(work: Shape, rounds: int) -> list[Row]:
    """A layer alone, beside one process and beside two."""
    runs, rows, alone = contenders(*work), list[Row](), dict[str, float]()
    for busy in (0, 1, 2):
        sleep(PAUSE)  # the last load's effect is past
        with busy_processes(busy):
            found = medians_in_time(runs, rounds)
        alone = alone or found
        for name, time in found.items():
            row = {"work": name_of(work), "contender": name, "busy_processes": busy}
            rows.append(
                row | {"ms": round(time * 1e3, 1), "slowdown": round(time / alone[name], 2)}
            )
    return rows


@script.table("busy_machine_cpu", rounds=9)
def busy_machine(run: Run) -> None:
    """Claim: beside two busy processes on two cores, a layer is at most 6× slower than alone.

    A parallel region waits for its slowest thread, whose core another process has. Torch's layers
    wait after each step; ours run on one thread for a while. All take turns, for ten seconds each.
    """
    works = {name_of(work): work for work in BUSY}
    one = partial(slowed, rounds=run.rounds)
    run.write(rows=run.rows(works, one, "contender", "busy_processes", "ms", "slowdown"))


if __name__ == "__main__":
    script.main()
