"""Claim: the fastest schedule of an unequal chain of hundreds of layers is found within seconds.

Random chains get 30 % of ordinary backpropagation's memory. Their sizes span two decades and have
no common divisor. Then long chains are planned for several budgets, with a certified gap: random
ones, and a network of convolutions, norms, activations and sums. The claim is 1,000 layers to
within 1 % in 10 seconds; 3,000 layers are shown for information.

For scale, the script also times the recurrence that others solve. It is rotor's (Beaumont et al.,
*Optimal checkpointing for heterogeneous chains*, 2019), written here in plain Python from the
mathematics. All run on one core, with compiled code cached. Times are medians; peak memory is that
of a new process.

    python benchmarks/chain_planner.py           # JSON into benchmarks/results/
    python benchmarks/chain_planner.py --slow    # plain Python at 100 × 100 too
    python benchmarks/chain_planner.py --quick   # the smallest sizes, once; nothing is written
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np

import retrograde as rg
from retrograde.machine import processor_name
from retrograde.plan.chain.search import plan_chain

RESULTS = Path(__file__).parent / "results"
THREADS = ("OMP", "MKL", "OPENBLAS", "NUMBA")
SHARE = 0.3
SIZES = (  # layers, levels, seconds allowed
    (100, 100, 0.05),
    (339, 500, 4.0),
    (500, 500, 10.0),
    (1000, None, 10.0),
    (3000, None, 30.0),
)
SHARES = (0.1, 0.2, 0.3, 0.5, 0.6, 0.8)
SEEDS = (1, 2, 3)
LONG = (1000, 3000)
CLAIM = (1000, 0.2, 10.0, 0.01)  # layers, from which share on, seconds, gap


def random_chain(length: int, seed: int = 1) -> rg.Chain:
    """Layers as unequal as real ones: most tapes refer to an input, some to nothing."""
    draw = np.random.default_rng(seed)
    output = (2 ** draw.uniform(14, 21, length)).astype(int)
    tape = (output * draw.choice([0, 0, 1, 2, 0.5], length)).astype(int)
    forward = 10 ** draw.uniform(-4, -2, length)

    def transient() -> list[int]:
        return (output * draw.uniform(0, 0.5, length)).astype(int).tolist()

    return rg.Chain(
        forward_seconds=forward.tolist(),
        backward_seconds=(forward * draw.uniform(1, 3, length)).tolist(),
        output_bytes=output.tolist(),
        internal_bytes=(output + tape).tolist(),
        forward_transient_bytes=transient(),
        backward_transient_bytes=transient(),
        record_transient_bytes=transient(),
        keeps_input=(draw.random(length) < 0.7).tolist(),
        keeps_output=(draw.random(length) < 0.4).tolist(),
    )


def network(length: int) -> rg.Chain:
    """Convolution, norm, activation, sum, and again; images shrink and channels grow in between.

    All sizes are multiples of 32 KiB, but for what a norm keeps of its own.
    """
    columns: dict[str, list] = {name: [] for name in (
        "forward_seconds", "backward_seconds", "output_bytes", "internal_bytes",
        "forward_transient_bytes", "keeps_input", "keeps_output",
    )}  # fmt: skip
    for k in range(length):
        block, kind = divmod(k, 4)
        size = (6 * 2**20 >> min(3, 4 * k // length)) - 2**15 * (block % 7)
        seconds = size / 2e9 * (12, 1.5, 1, 1.2)[kind]
        row = (
            seconds, seconds * (2 if kind < 2 else 1), size, size + 2**16 * (kind == 1),
            size // 2 if kind == 0 else 0, kind < 2, kind == 2,
        )  # fmt: skip
        for column, entry in zip(columns.values(), row, strict=True):
            column.append(entry)
    return rg.Chain(**columns)


def plain(length: int, levels: int) -> float:
    """Rotor's recurrence for a random chain of integers; no tape is smaller than its output."""
    draw = np.random.default_rng(length)
    seconds = draw.integers(1, 10, length).tolist()
    sizes = draw.integers(1, 5, length + 1).tolist()
    tapes = [size + int(draw.integers(0, 5)) for size in sizes[1:]]
    before = np.concatenate(([0], np.cumsum(seconds))).tolist()

    @cache
    def best(x: int, e: int, m: int) -> float:
        if m < tapes[x]:
            return np.inf
        if e == x + 1:
            return seconds[x]
        splits = (
            before[j] - before[x] + best(j, e, m - sizes[j]) + best(x, j, m)
            for j in range(x + 1, e)
            if m >= sizes[j]
        )
        return min(seconds[x] + best(x + 1, e, m - tapes[x]), min(splits, default=np.inf))

    for e in range(1, length + 1):  # so that the recursion stays shallow
        for x in range(e - 1, -1, -1):
            for m in range(levels):
                best(x, e, m)
    return best(0, length, levels - 1)


def ask(length: int, levels: int | None, allowed: float, rounds: int) -> dict[str, object]:
    """Plan one chain: the time, what it says, and how far it may be from the best."""
    chain = random_chain(length)
    plan = partial(plan_chain, chain, SHARE, levels=levels)
    times = timed(plan, rounds * (5 if length <= 100 else 1))
    start = time.perf_counter()
    schedule = plan_chain(chain, SHARE, levels=levels, certify=True)
    certified = time.perf_counter() - start
    return {
        "layers": length,
        "levels": levels or "default",
        "target_seconds": allowed,
        "seconds": statistics.median(times),
        "seconds_least": min(times),
        "seconds_most": max(times),
        "certified_seconds": certified,
        "of_ordinary": schedule.seconds / chain.ordinary_seconds,
        "of_budget": schedule.peak / schedule.memory,
        "gap": schedule.gap,
        "peak_rss_bytes": peak_of_a_new_process(length, levels),
    }


def certify(name: str, chain: rg.Chain, share: float) -> dict[str, object]:
    """Plan one long chain and prove how good that is, in one call."""
    start = time.perf_counter()
    schedule = plan_chain(chain, share, certify=True)
    seconds = time.perf_counter() - start
    layers, lowest, allowed, close = CLAIM
    claimed = len(chain) == layers and share >= lowest
    found: dict[str, object] = {
        "name": name,
        "layers": len(chain),
        "share": share,
        "seconds": seconds,
        "of_ordinary": schedule.seconds / chain.ordinary_seconds,
        "of_budget": schedule.peak / schedule.memory,
        "gap": schedule.gap,
        "claimed": claimed,
        "reached": seconds <= allowed and schedule.gap <= close,
    }
    mark = ("✓" if found["reached"] else "✗") if claimed else " "
    print(
        f"{len(chain):5} layers, {name:9} {share:4.0%}  {seconds:7.3g} s {mark}  "
        f"{found['of_ordinary']:.4f} of ordinary, gap {100 * schedule.gap:.3g} %   "
        f"{found['of_budget']:.4f} of the budget",
        flush=True,
    )
    return found


def timed(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def peak_of_a_new_process(length: int, levels: int | None) -> int:
    """The most that planning one chain ever held, Python and numba included."""
    code = (
        "import resource, chain_planner as here\n"
        f"here.plan_chain(here.random_chain({length}), {SHARE}, levels={levels})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    where = Path(__file__).parent
    return int(subprocess.check_output([sys.executable, "-c", code], cwd=where))


def show(found: dict) -> None:
    """One row of the table."""
    mark = "✓" if found["seconds"] <= found["target_seconds"] else "✗"
    print(
        f"{found['layers']:5} layers, {found['levels']!s:>7} levels  {found['seconds']:7.3g} s "
        f"{mark} {found['target_seconds']:g}   certified in {found['certified_seconds']:7.3g} s   "
        f"{found['of_ordinary']:.4f} of ordinary, gap {100 * found['gap']:.3g} %   "
        f"{found['of_budget']:.4f} of the budget   RSS {found['peak_rss_bytes'] / 2**20:.0f} MiB",
        flush=True,
    )


def main() -> None:
    """Ask everything, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="calls of each size")
    parser.add_argument("--slow", action="store_true", help="plain Python at 100 × 100 too")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, once")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    arguments = parser.parse_args()
    if any(os.environ.get(f"{name}_NUM_THREADS") != "1" for name in THREADS):
        alone = os.environ | {f"{name}_NUM_THREADS": "1" for name in THREADS}
        raise SystemExit(subprocess.call([sys.executable, *sys.argv], env=alone))
    machine = {
        "device": f"{processor_name()}, one core",
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in ("numpy", "numba")},
    }
    print(json.dumps(machine))
    plan_chain(random_chain(20), "90%", levels=20, certify=True)  # loads what is compiled
    results: list[dict[str, object]] = []
    for length, levels, allowed in SIZES[:1] if arguments.quick else SIZES:
        results.append(ask(length, levels, allowed, 1 if arguments.quick else arguments.rounds))
        show(results[-1])
    for length in () if arguments.quick else LONG:
        chains = {f"random {seed}": random_chain(length, seed) for seed in SEEDS}
        for name, chain in (chains | {"network": network(length)}).items():
            results += [certify(name, chain, share) for share in SHARES]
    for size in (30, 100) if arguments.slow else (30,):
        seconds = timed(lambda size=size: plain(size, size), 1)[0]
        results.append({"name": "plain Python", "layers": size, "levels": size, "seconds": seconds})
        print(f"{size:5} layers, {size:7} levels  {seconds:7.3g} s in plain Python", flush=True)
    if arguments.quick:
        return
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "chain_planner.json"
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
