"""Claim: ``retrograde.jax.scan`` is exact, keeps to its budget, and loses to no checkpointed scan.

GRUs, LSTMs and a wave equation run forward and backward, compiled, in four ways: ``jax.lax.scan``,
our scan within fractions of its memory, ``jax.checkpoint`` nested at two levels with several
segment lengths, and equinox's checkpointed scan. Beside nested segments, ours gets the memory that
these hold: one state a segment, and the recorded steps of one segment. Beside equinox's, it gets
the same number of checkpoints.

All take turns in one process. Bytes are what XLA allocates besides operands and results, so outputs
and their gradients are included. The expected time of a schedule is (steps / length + 2) / 3, where
steps are its forward steps, and ordinary backpropagation takes 1.

Then the script measures the compilation for 10³ and 10⁶ steps.

    python benchmarks/jax_scan.py            # JSON into benchmarks/results/; twenty minutes
    python benchmarks/jax_scan.py --only GRU
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import torch

import retrograde as rg
import retrograde.jax as rj
from alternating import medians
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
SHARES = ("50%", "20%", "10%", "5%", "1%")
INPUTS, BATCH = 16, 16
Scan = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A scanned function with weights in the open, its first carry, inputs, and their number."""

    name: str
    step: Callable[[Any], Callable[[Any, Any], tuple[Any, Any]]]
    weights: Any
    init: Any
    xs: Any
    length: int

    def gradient(self, scan: Scan) -> Callable[[], Any]:
        """The compiled gradient, and its compiled program under ``.program``."""

        def loss(weights: Any, init: Any, xs: Any) -> Any:
            _, ys = scan(self.step(weights), init, xs, self.length)
            return (ys**2).sum()

        return compiled(jax.value_and_grad(loss), self.weights, self.init, self.xs)

    def forward_bytes(self) -> int:
        """Temporary bytes of the forward pass alone."""

        def outputs(weights: Any, init: Any, xs: Any) -> Any:
            return jax.lax.scan(self.step(weights), init, xs, self.length)

        return temporary(compiled(outputs, self.weights, self.init, self.xs))

    def fit(self, memory: int | str) -> Any:
        """What a budget buys."""
        return rj.fit(self.step(self.weights), self.init, self.xs, self.length, memory=memory)


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    program = jax.jit(function).lower(*arguments).compile()

    def call() -> Any:
        return jax.block_until_ready(program(*arguments))

    call.program = program  # type: ignore[attr-defined]
    return call


def temporary(call: Any) -> int:
    """What XLA allocates beside operands and results."""
    return int(call.program.memory_analysis().temp_size_in_bytes)


def gated(cell: str, size: int, length: int) -> Case:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[cell]
    keys = jax.random.split(jax.random.key(0), 3)
    bound = size**-0.5
    weights = [
        jax.random.uniform(keys[0], (INPUTS, gates * size), minval=-bound, maxval=bound),
        jax.random.uniform(keys[1], (size, gates * size), minval=-bound, maxval=bound),
        jnp.zeros(gates * size),
    ]

    def gru(weights: Any) -> Any:
        w, u, b = weights

        def step(h: Any, x: Any) -> tuple[Any, Any]:
            a, c = x @ w + b, h @ u
            r = jax.nn.sigmoid(a[:, :size] + c[:, :size])
            z = jax.nn.sigmoid(a[:, size : 2 * size] + c[:, size : 2 * size])
            n = jnp.tanh(a[:, 2 * size :] + r * c[:, 2 * size :])
            h = (1 - z) * n + z * h
            return h, h

        return step

    def lstm(weights: Any) -> Any:
        w, u, b = weights

        def step(state: Any, x: Any) -> tuple[Any, Any]:
            h, c = state
            i, f, g, o = jnp.split(x @ w + h @ u + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return step

    h = jnp.zeros((BATCH, size))
    xs = jax.random.normal(keys[2], (length, BATCH, INPUTS))
    step, init = (lstm, (h, h)) if cell == "LSTM" else (gru, h)
    return Case(f"{cell} {size}, T = {length:,}", step, weights, init, xs, length)


def wave(size: int, length: int) -> Case:
    """The wave equation on a square whose speeds are to be found from what one point receives."""
    source = jnp.sin(jnp.arange(length) / 8.0)

    def step(speed: Any) -> Any:
        def advance(fields: Any, push: Any) -> tuple[Any, Any]:
            now, before = fields
            around = sum(jnp.roll(now, shift, axis) for shift in (-1, 1) for axis in (0, 1))
            after = 2 * now - before + speed**2 * (around - 4 * now)
            after = after.at[size // 4, size // 4].add(push)
            return (after, now), after[-size // 4, -size // 4]

        return advance

    still = jnp.zeros((size, size))
    speed = jnp.full((size, size), 0.5)
    name = f"wave {size} × {size}, T = {length:,}"
    return Case(name, step, speed, (still, still), source, length)


def nested(segment: int) -> Scan:
    """Two levels by hand: segments of so many steps under ``jax.checkpoint``."""

    def scan(f: Any, init: Any, xs: Any, length: int) -> Any:
        @jax.checkpoint
        def run(carry: Any, part: Any) -> Any:
            return jax.lax.scan(f, carry, part)

        parts = jax.tree.map(lambda x: x.reshape(-1, segment, *x.shape[1:]), xs)
        last, ys = jax.lax.scan(run, init, parts)
        return last, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)

    return scan


def checkpointed(count: int) -> Scan:
    def scan(f: Any, init: Any, xs: Any, length: int) -> Any:
        return eqxi.scan(f, init, xs, length, kind="checkpointed", checkpoints=count)

    return scan


def within(**asked: Any) -> Scan:
    return lambda f, init, xs, length: rj.scan(f, init, xs, length, **asked)


def segments(length: int) -> list[int]:
    """Segment lengths about the square root that divide the number of steps."""
    divisors = [n for n in range(2, length // 2 + 1) if length % n == 0]
    root = length**0.5
    near = {min(divisors, key=lambda n, k=k: abs(n - k * root)) for k in (0.25, 0.5, 1, 2, 4)}
    return sorted(near)


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """All ways beside each other."""
    ways = {"lax": case.gradient(jax.lax.scan)}
    costs: dict[str, float] = {}

    def add(name: str, steps: int, **asked: Any) -> None:
        ways[name] = case.gradient(within(**asked))
        costs[name] = (steps / case.length + 2) / 3

    everything = case.fit("100%")
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(case.init))
    recorded = everything.ordinary_bytes / case.length

    for share in SHARES:
        try:
            add(share, case.fit(share).forward_steps, memory=share)
        except rg.BudgetError:
            print(f"    {share}: refused")
    for segment in segments(case.length):
        ways[f"nested {segment}"] = case.gradient(nested(segment))
        more = (case.length // segment - 1) * state + (segment - 1) * recorded
        memory = round(everything.minimum_bytes + more)
        add(f"as nested {segment}", case.fit(memory).forward_steps, memory=memory)
    for count in (10, round(case.length**0.5)):
        ways[f"equinox {count}"] = case.gradient(checkpointed(count))
        schedule = rg.plan(case.length, count, "hsm")
        add(f"{count} checkpoints", schedule.cost, schedule=schedule)
    expected = ways["lax"]()
    taken = medians(ways, rounds)
    return {
        "work": case.name,
        "lax_ms": round(1e3 * taken["lax"], 2),
        "forward_bytes": case.forward_bytes(),
        "ratios": {name: round(one / taken["lax"], 3) for name, one in taken.items()},
        "predicted": {name: round(cost, 3) for name, cost in costs.items()},
        "bytes": {name: temporary(call) for name, call in ways.items()},
        "worst_difference": {name: difference(call(), expected) for name, call in ways.items()},
    }


def difference(found: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def compiling() -> list[dict[str, Any]]:
    """Seconds that compiling a gradient takes, and the size of its program."""
    rows = []
    for length in (1_000, 1_000_000):
        case = gated("GRU", 20, length)
        for name, scan in (("lax", jax.lax.scan), ("1%", within(memory="1%"))):
            seconds = []
            for _ in range(3):
                jax.clear_caches()
                start = time.perf_counter()
                call = case.gradient(scan)
                seconds.append(time.perf_counter() - start)
            lines = call.program.as_text().count("\n")  # type: ignore[attr-defined]
            rows.append({"length": length, "way": name, "lines": lines,
                         "seconds": round(statistics.median(seconds), 2)})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


CASES = [
    *[lambda c=cell: gated(c, 20, 1_000) for cell in ("GRU", "LSTM")],
    *[lambda c=cell: gated(c, 20, 10_000) for cell in ("GRU", "LSTM")],
    *[lambda c=cell: gated(c, 20, 100_000) for cell in ("GRU", "LSTM")],
    *[lambda c=cell: gated(c, 64, 1_000) for cell in ("GRU", "LSTM")],
    *[lambda c=cell: gated(c, 64, 10_000) for cell in ("GRU", "LSTM")],
    *[lambda c=cell: gated(c, 256, 1_000) for cell in ("GRU", "LSTM")],
    lambda: wave(64, 1_000),
    lambda: wave(128, 2_000),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", help="part of a name; nothing is written")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    rows = []
    for make in CASES:
        case = make()
        if only and only not in case.name:
            continue
        print(f"{case.name}", flush=True)
        row = measured(case, 7 if case.length <= 10_000 else 3)
        rows.append(row)
        for name, ratio in row["ratios"].items():
            print(f"    {name:20} {ratio:5.2f}×  predicted {row['predicted'].get(name, 0):5.2f}  "
                  f"{row['bytes'][name] / 2**20:8.2f} MiB  "
                  f"differs by {row['worst_difference'][name]:.0e}", flush=True)  # fmt: skip
        jax.clear_caches()
    if only:
        return
    found = {"rows": rows, "compiling": compiling()}
    machine = {**machine_of(torch.device("cpu")), "jax": jax.__version__}
    path = RESULTS / "jax_scan_cpu.json"
    path.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
