"""Claim: each phase of a recurrent layer runs near the rate of the machine's matrix products.

A layer runs forward and backward by torch, by ours with all gates kept, and by ours with none kept.
The latter has the least budget, and room for pieces of a thousand rows. A forward pass has F FLOPs,
a backward pass 2 F, and recomputed gates another F, where F = 2·T·B·K·H·(I + H). Beside the rate
of each phase is its limit: the best rate of the product of that shape, by MKL (``torch.mm``), by
oneDNN, or by our own tiles. The three kinds of products (x Wᵀ, g W and gᵀ x) are told for each.

    python benchmarks/recurrent_phases.py   # JSON into benchmarks/results/
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import retrograde as rg
from retrograde.kernels.cpu import products
from retrograde.machine import machine_of, now

RESULTS = Path(__file__).parent / "results"
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
    flops, cpu, found = 2 * rows * inner * columns, torch.device("cpu"), {}
    for kind, ways in calls.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, call in ways.items():
                start = now(cpu)
                call()
                times[way].append(now(cpu) - start)
        found[kind] = {
            way: round(flops / statistics.median(own[1:]) / 1e9, 1) for way, own in times.items()
        }
    return found


def phases(net: torch.nn.Module, x: torch.Tensor, seed: torch.Tensor) -> tuple[float, float, float]:
    """Seconds without gradients, forward with them, and backward."""
    cpu = torch.device("cpu")
    start = now(cpu)
    with torch.no_grad():
        net(x)
    middle = now(cpu)
    y, _ = net(x)
    recorded = now(cpu)
    y.backward(seed)
    end = now(cpu)
    x.grad = None
    net.zero_grad(set_to_none=True)
    return middle - start, recorded - middle, end - recorded


def measured(work: tuple[str, int, int, int, int], rounds: int) -> dict[str, Any]:
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
            found = phases(net, x, seed)
            if number:
                times[name].append(found)
    flops = 2 * length * batch * GATES[kind] * hidden * (inputs + hidden)
    rates_of = product_rates(length * batch, inputs + hidden, GATES[kind] * hidden, rounds)
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)]
        for name, found in times.items()
    }
    rates = {
        name: [flops / plain, flops / forward, 2 * flops / backward]
        for name, (plain, forward, backward) in medians.items()
    }
    again = medians["none kept"][2]
    return {
        "work": f"{kind} {inputs}→{hidden}, B={batch}, T={length}",
        "products_gflops": rates_of,
        "product_gflops": max(rates_of["x Wᵀ"].values()),
        "gflops": {
            name: dict(
                zip(
                    ("no gradient", "forward", "backward"),
                    (round(r / 1e9, 1) for r in found),
                    strict=True,
                )
            )
            for name, found in rates.items()
        },
        "backward_with_gates_again_gflops": round(3 * flops / again / 1e9, 1),
        "whole_over_torch": {
            name: round(sum(found[1:]) / sum(medians["torch"][1:]), 2)
            for name, found in medians.items()
        },
    }


def main() -> None:
    """Run all workloads, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    print(
        f"{'GFLOP/s':<30}{'product':>8}   torch: plain, forward, backward   ours: the same; again"
    )
    for work in WORKS:
        row = measured(work, options.rounds)
        rows.append(row)
        told = [
            " ".join(f"{rate:7.1f}" for rate in row["gflops"][name].values())
            for name in ("torch", "all kept")
        ]
        print(
            f"{row['work']:<30}{row['product_gflops']:8.1f}   {told[0]}   {told[1]}"
            f" {row['backward_with_gates_again_gflops']:7.1f}   ×{row['whole_over_torch']}",
            flush=True,
        )
        for name, ways in row["products_gflops"].items():
            share = ways["ours"] / max(ways.values())
            print(f"    {name:<8}{ways}   ours: {share:.0%} of the best", flush=True)
    document = {"machine": machine_of("cpu"), "rows": rows}
    path = RESULTS / "recurrent_phases_cpu.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
