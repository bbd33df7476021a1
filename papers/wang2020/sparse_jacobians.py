"""Claims: analytic Jacobians, and products that are planned beforehand, are faster by far.

Table 3.1 of Wang, *BPPSA* (2020): the transposed Jacobians of VGG-11's first convolution, ReLU and
max-pooling on a 32×32 image. The analytic ones are compared with autograd, which takes one backward
pass for each column, that is, for each output.

Then Jacobians are multiplied at VGG-11's shapes, pruned to 3 % and not pruned, for a batch. The
numeric phase of a plan is compared with the product of ``scipy.sparse``, sample by sample, since
that has no batches. Both sides take turns in one process; times are medians.

    python -m wang2020.sparse_jacobians          # JSON into benchmarks/results/
    python -m wang2020.sparse_jacobians --ship   # and into papers/, for the figures
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.machine import machine_of
from retrograde.scan.sparse.csr import CSR
from retrograde.scan.sparse.transposed import transposed_jacobian
from retrograde_papers.networks import vgg11
from wang2020.pruning import prune_weights

ROOT = Path(__file__).parents[2]
SHIPPED = Path(__file__).parent / "data" / "jacobians.json"
OPERATORS = {
    "convolution": (nn.Conv2d(3, 64, 3, padding=1), (3, 32, 32)),
    "ReLU": (nn.ReLU(), (64, 32, 32)),
    "max-pooling": (nn.MaxPool2d(2), (64, 32, 32)),
}
SLOW = 20.0  # seconds, from which on scipy's product is not repeated


def seconds(fn: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def generation(layer: nn.Module, shape: Sequence[int], rounds: int, columns: int) -> dict[str, Any]:
    """One operator's Jacobian, both ways."""
    x = torch.randn(1, *shape)
    cold = seconds(lambda: transposed_jacobian(layer, x))
    known = transposed_jacobian(layer, x)  # holds the pattern, as a training does
    whole = statistics.median(seconds(lambda: transposed_jacobian(layer, x)) for _ in range(rounds))
    values = values_of(layer, x)
    values()
    analytic, column = [], []
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    outputs = y.numel()
    places = torch.randint(outputs, (columns,)).tolist()
    for place in range(rounds):
        analytic += [seconds(values) for _ in range(3)]
        part = places[place * columns // rounds : (place + 1) * columns // rounds]
        column.append(seconds(partial(one_by_one, y, leaf, part)) / len(part))
    ours, theirs = statistics.median(analytic), statistics.median(column) * outputs
    return {
        "shape": list(known.pattern.shape),
        "nnz": known.nnz,
        "sparsity": known.pattern.sparsity,
        "first_seconds": cold,
        "call_seconds": whole,
        "analytic_seconds": ours,
        "autograd_seconds": theirs,
        "columns_timed": columns,
        "ratio": theirs / ours,
    }


def values_of(layer: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """What a training does in each iteration: the values, of a layer that was run."""
    from retrograde.scan.sparse.composition import observe

    with torch.enable_grad():
        _, path = observe(layer, x.clone().requires_grad_())
    (piece,) = path.pieces()
    assert piece.values is not None
    return piece.values


def one_by_one(y: Tensor, x: Tensor, places: Sequence[int]) -> None:
    """Some columns of the transposed Jacobian, by autograd."""
    for place in places:
        seed = torch.zeros_like(y)
        seed.view(-1)[place] = 1
        torch.autograd.grad(y, x, seed, retain_graph=True)


def jacobians(samples: int, share: float) -> list[tuple[str, CSR]]:
    """Those of VGG-11's convolutional part, first to last."""
    torch.manual_seed(0)
    net = nn.Sequential(*vgg11())
    if share:
        prune_weights(net, share)
    x = torch.randn(samples, 3, 32, 32)
    found = []
    for number, layer in enumerate(list(net)[:-2]):
        found.append((f"{number} {type(layer).__name__}", transposed_jacobian(layer, x)))
        with torch.no_grad():
            x = layer(x)
    return found


def products(samples: int, share: float, rounds: int, most_terms: float) -> list[dict[str, Any]]:
    """Products of neighbours, and of products of neighbours, as the first levels make them."""
    layers: list[tuple[str, CSR] | None] = [*jacobians(samples, share)]
    found = []
    for level in range(3):
        joined: list[tuple[str, CSR] | None] = []
        for left, right in zip(layers[::2], layers[1::2], strict=False):
            joined.append(None)
            if left is None or right is None:
                continue
            (name, a), (other, b) = left, right
            if a.pattern.product(b.pattern).terms * samples > most_terms:
                continue
            row = product(a, b, samples, rounds)
            found.append({"level": level, "what": f"{name} · {other}", **row})
            show(found[-1])
            joined[-1] = f"({name} · {other})", a @ b
        layers = joined
    return found


def product(a: CSR, b: CSR, samples: int, rounds: int) -> dict[str, Any]:
    """One product, by its plan and by scipy."""
    start = time.perf_counter()
    plan = a.pattern.product(b.pattern)
    result = a @ b  # compiles, and writes indices out
    planning = time.perf_counter() - start
    pairs = [(a.to_scipy(i), b.to_scipy(i)) for i in range(samples)]
    ours, theirs = [], []
    for _ in range(rounds):
        # Three at a time: in a training one product follows the other, and threads are awake.
        ours += [seconds(lambda: a @ b) for _ in range(3)]
        theirs.append(seconds(lambda: [x @ y for x, y in pairs]))
        if theirs[-1] > SLOW:
            break
    expected = pairs[-1][0] @ pairs[-1][1]
    difference = abs(result.to_scipy(samples - 1) - expected).max()
    ours_seconds, theirs_seconds = statistics.median(ours), statistics.median(theirs)
    return {
        "shape": list(result.pattern.shape),
        "way": plan.method,
        "terms": plan.terms,
        "nnz": result.nnz,
        "samples": samples,
        "planning_seconds": planning,
        "plan_seconds": ours_seconds,
        "scipy_seconds": theirs_seconds,
        "ratio": theirs_seconds / ours_seconds,
        "difference": float(difference / max(abs(expected).max(), 1e-30)),
    }


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    print(
        f"L{row['level']} {row['what']:<60} {row['way']:<9} {row['terms']:>13,} terms "
        f"{1e3 * row['plan_seconds']:>9.2f} ms, scipy {1e3 * row['scipy_seconds']:>10.1f} ms, "
        f"{row['ratio']:>7.1f}x  ({row['difference']:.0e})",
        flush=True,
    )


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--columns", type=int, default=4096, help="timed, of 16,384 and 65,536")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--most-terms", type=float, default=4e8, help="of all samples")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder"
    )
    parser.add_argument("--ship", action="store_true", help="replace what is drawn")
    arguments = parser.parse_args()
    operators = {}
    for name, (layer, shape) in OPERATORS.items():
        row = operators[name] = generation(layer, shape, arguments.rounds, arguments.columns)
        print(
            f"{name:<12} {row['sparsity']:.5f}  first {1e3 * row['first_seconds']:.1f} ms, call "
            f"{1e3 * row['call_seconds']:.3f} ms, values {1e6 * row['analytic_seconds']:.1f} µs, "
            f"autograd {row['autograd_seconds']:.1f} s: {row['ratio']:.2g}x",
            flush=True,
        )
    document = {"machine": machine_of("cpu"), "rounds": arguments.rounds, "operators": operators}
    rows = []
    for share in (0.97, 0.0):
        for samples in arguments.samples:
            print(f"{100 * share:.0f} % pruned, {samples} samples")
            found = products(samples, share, arguments.rounds, arguments.most_terms)
            rows += [{"pruned": share, **row} for row in found]
    document["products"] = rows
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "sparse_jacobians_cpu.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    if arguments.ship:
        shipped = {key: value for key, value in document.items() if key != "products"}
        SHIPPED.write_text(json.dumps(shipped, indent=1) + "\n", encoding="utf-8")
        print(f"written to {SHIPPED}")


if __name__ == "__main__":
    main()
