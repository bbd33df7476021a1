"""Claim: the fastest schedule of an unequal chain of 400 layers is found within seconds.

Random chains, whose sizes span two decades and have no common divisor, and a network of
convolutions, norms, activations and sums, are planned for several budgets, with a certified gap.

For scale, the script also times the recurrence that others solve. It is rotor's (Beaumont et al.,
*Optimal checkpointing for heterogeneous chains*, 2019), written here in plain Python from the
mathematics. All run on one core, with compiled code cached. Peak memory is that of a new process.

    python benchmarks/chain_planner.py           # JSON into benchmarks/results/
    python benchmarks/chain_planner.py --quick   # the smallest size; nothing is written
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np

import retrograde as rg
from retrograde.machine import processor_name
from retrograde.plan.chains import chain_minimum, plan_chain

RESULTS = Path(__file__).parent / "results"
THREADS = ("OMP", "MKL", "OPENBLAS", "NUMBA")
SHARE = 0.3
LAYERS = (50, 100, 200, 400)
SHARES = (0.1, 0.3, 0.5, 0.8)


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


def ask(name: str, chain: rg.Chain, share: float) -> dict[str, object] | None:
    """Plan one chain, and prove how good that is; None where the share is too small."""
    if share * plan_chain(chain, "100%").peak < chain_minimum(chain):
        return None
    start = time.perf_counter()
    plan_chain(chain, share)
    planned = time.perf_counter()
    schedule = plan_chain(chain, share, certify=True)
    certified = time.perf_counter() - planned
    found: dict[str, object] = {
        "name": name,
        "layers": len(chain),
        "share": share,
        "seconds": planned - start,
        "certified_seconds": certified,
        "of_ordinary": schedule.seconds / chain.ordinary_seconds,
        "of_budget": schedule.peak / schedule.memory,
        "gap": schedule.gap,
    }
    print(
        f"{len(chain):5} layers, {name:9} {share:4.0%}  {planned - start:7.3g} s, certified "
        f"{certified:7.3g} s   {found['of_ordinary']:.4f} of ordinary, "
        f"gap {100 * schedule.gap:.3g} %   {found['of_budget']:.4f} of the budget",
        flush=True,
    )
    return found


def peak_of_a_new_process(length: int) -> int:
    """The most that planning one chain ever held, Python and numba included."""
    code = (
        "import resource, chain_planner as here\n"
        f"here.plan_chain(here.random_chain({length}), {SHARE})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    where = Path(__file__).parent
    return int(subprocess.check_output([sys.executable, "-c", code], cwd=where))


def main() -> None:
    """Ask everything, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest size")
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
    plan_chain(random_chain(20), "90%", certify=True)  # loads what is compiled
    results: list[dict[str, object]] = []
    for length in LAYERS[:1] if arguments.quick else LAYERS:
        for name, chain in (("random", random_chain(length)), ("network", network(length))):
            results += [found for share in SHARES if (found := ask(name, chain, share))]
    memory = {length: peak_of_a_new_process(length) for length in LAYERS[-1:]}
    start = time.perf_counter()
    plain(30, 30)
    others = {"plain Python, 30 layers, 30 levels": time.perf_counter() - start}
    print(memory, others)
    if arguments.quick:
        return
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "chain_planner.json"
    document = {
        "machine": machine, "results": results, "peak_rss_bytes": memory, "others": others,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
