"""``retrograde.jax.scan`` beside ``lax.scan``, nested checkpoints and equinox's scan.

python benchmarks/jax_scan.py scan            # JSON into benchmarks/results/; twenty minutes
python benchmarks/jax_scan.py scan --only GRU   # such rows anew, the others as they were
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp

import retrograde as rg
import retrograde.jax as rj
from harness import Row, Run, Script, medians
from oracles.scanned import Scanned, gated, wave
from retrograde.machine import machine_of

script = Script()
Scan = Callable[..., Any]


class Case(Scanned):
    """A scanned function, differentiated and measured."""

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


def measured(case: Case, rounds: int) -> Row:
    """All ways beside each other."""
    ways = {"lax": case.gradient(jax.lax.scan)}
    costs: dict[str, float] = {}

    def add(name: str, steps: int, **asked: Any) -> None:
        ways[name] = case.gradient(within(**asked))
        costs[name] = (steps / case.length + 2) / 3

    everything = case.fit("100%")
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(case.init))
    recorded = everything.ordinary_bytes / case.length

    for share in ("50%", "20%", "10%", "5%", "1%"):
        try:
            add(share, case.fit(share).forward_steps, memory=share)
        except rg.BudgetError:
            continue
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
        case = Case(*gated("GRU", 20, length))
        for name, scan in (("lax", jax.lax.scan), ("1%", within(memory="1%"))):
            taken = []
            for _ in range(3):
                jax.clear_caches()
                start = time.perf_counter()
                call: Any = case.gradient(scan)
                taken.append(time.perf_counter() - start)
            lines = call.program.as_text().count("\n")
            rows.append({"length": length, "way": name, "lines": lines,
                         "seconds": round(statistics.median(taken), 2)})  # fmt: skip
    return rows


SIZES = [(20, 1_000), (20, 10_000), (20, 100_000), (64, 1_000), (64, 10_000), (256, 1_000)]
CASES: dict[str, Callable[[], Scanned]] = {
    f"{cell} {size}, T = {length:,}": partial(gated, cell, size, length)
    for size, length in SIZES
    for cell in ("GRU", "LSTM")
} | {
    f"wave {size} × {size}, T = {length:,}": partial(wave, size, length)
    for size, length in ((64, 1_000), (128, 2_000))
}


@script.table("jax_scan_cpu", rounds=7)
def scan(run: Run) -> None:
    """Claim: ``retrograde.jax.scan`` is exact, keeps its budget, and loses to no checkpointed scan.

    GRUs, LSTMs and a wave equation run forward and backward, compiled: by ``jax.lax.scan``, by our
    scan within fractions of its memory, by ``jax.checkpoint`` nested at two levels, and by
    equinox's checkpointed scan. Ours also gets the memory that nested segments hold, one state a
    segment and the recorded steps of one, and as many checkpoints as equinox. All take turns. Bytes
    are what XLA allocates besides operands and results. The expected time of a schedule is
    (steps / length + 2) / 3, where steps are its forward steps. Compilation is measured too.
    """

    def row(make: Callable[[], Scanned]) -> Row:
        case = Case(*make())
        found = measured(case, run.rounds if case.length <= 10_000 else min(3, run.rounds))
        jax.clear_caches()
        return found

    rows = run.rows(CASES, row, "ratios", "predicted", "worst_difference")
    machine = {**machine_of("cpu"), "jax": jax.__version__}
    run.write(machine, rows=rows, compiling=run.also("compiling", compiling))


if __name__ == "__main__":
    script.main()
