"""Claim: any program keeps to its budget, from its first call on.

A seed draws the programs: cells under ``rg.unroll`` and ``rg.bptt``, and chains under
``rg.Sequential``. Each program is built anew for each of four budgets: the least, one in between,
50 %, and more than enough. The table shows the worst ratio of the measured peak to the budget, and
the program that has it:

- for the first call, its measurements included;
- for the first call's own work, without its measurements;
- for the second call.

The table also lists the refused programs, with the reasons, and every faulty reading. A reading is
faulty if the peak is over the budget. It is also faulty if results, gradients, buffers or random
states differ from those of the plain loop.

    python benchmarks/budget_sweep.py                         # JSON into benchmarks/results/
    python benchmarks/budget_sweep.py --cells 20 --chains 10  # a quick look; nothing is written
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from oracles import strangers
from oracles.strangers import Reading, Trial, draw_cell, draw_chain, readings
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
CELLS, CHAINS = 300, 100
PEAKS = {
    "first": "first call",
    "apart": "first call, apart from measurements",
    "later": "second call",
}


def streamed(longest: int, seed: int) -> Trial:
    return draw_cell(seed, longest).streamed()


def unrolled(longest: int, seed: int) -> Trial:
    return draw_cell(seed, longest).unrolled()


def sweep(draw: Callable[[int], Trial], seeds: range) -> dict[str, Any]:
    """All programs of a kind, within all budgets."""
    start, found = time.perf_counter(), []
    for seed in seeds:
        for reading in readings(partial(draw, seed)):
            found.append(reading)
            if reading.wrong or not reading.kept:
                print(f"  {reading}", flush=True)
    refused = {r.program: r.refused for r in found if r.refused}
    told = [r for r in found if not (r.refused or r.wrong)]
    return {
        "programs": len(seeds),
        "readings": len(found),
        "refused": refused,
        "wrong": [asdict(r) for r in found if r.wrong],
        "over": [asdict(r) for r in told if not r.kept],
        "beyond": [asdict(r) for r in told if r.first_bytes > r.measuring_bytes],
        "peaks": {name: worst(told, f"{name}_bytes") for name in PEAKS},
        "seconds": round(time.perf_counter() - start, 1),
    }


def worst(found: list[Reading], name: str) -> dict[str, Any]:
    """The largest peak over its budget, whose it is, and how many are over their budget."""

    def share(reading: Reading) -> float:
        return getattr(reading, name) / reading.budget_bytes

    one = max(found, key=share)
    over = [r for r in found if getattr(r, name) > r.budget_bytes + strangers.SLACK_BYTES]
    return {
        "worst": round(share(one), 4),
        "program": one.program,
        "label": one.label,
        "budget_bytes": one.budget_bytes,
        "bytes": getattr(one, name),
        "over": len(over),
        "over_by_label": dict(Counter(r.label for r in over)),
    }


def show(kind: str, found: dict[str, Any]) -> None:
    """One kind as a table."""
    print(
        f"{kind}: {found['programs']} programs, {found['readings']} readings, "
        f"{len(found['refused'])} refused, {len(found['wrong'])} wrong, "
        f"{len(found['over'])} over, in {found['seconds']:.0f} s"
    )
    for name, peak in found["peaks"].items():
        print(
            f"  {PEAKS[name]:<36} at most {peak['worst']:8.3f} of the budget, "
            f"{peak['over']:4d} over; {peak['program']} within {peak['label']}"
        )
    print(
        f"  first calls that measure by more than docs/first_call.md allows: {len(found['beyond'])}"
    )
    for reading in found["beyond"]:
        print(
            f"    {reading['program']} within {reading['label']}: {reading['first_bytes']} bytes, "
            f"allowed are {reading['measuring_bytes']}"
        )
    for program, why in found["refused"].items():
        print(f"  refused: {program}: {why}")


def main() -> None:
    """Run every kind, print a table each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--chains", type=int, default=CHAINS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=strangers.LONGEST, help="steps of a cell")
    parser.add_argument("--deepest", type=int, default=strangers.DEEPEST, help="layers of a chain")
    options = parser.parse_args()
    first, longest = options.first_seed, options.longest
    chains = partial(draw_chain, deepest=options.deepest)
    kinds = {
        "unroll": (partial(unrolled, longest), range(first, first + options.cells)),
        "bptt": (partial(streamed, longest), range(first, first + options.cells)),
        "Sequential": (chains, range(first, first + options.chains)),
    }
    found = {}
    for kind, (draw, seeds) in kinds.items():
        found[kind] = sweep(draw, seeds)
        show(kind, found[kind])
    if options.cells >= CELLS and options.chains >= CHAINS:
        document = {
            "machine": machine_of("cpu"),
            "first_seed": first,
            "longest": longest,
            "deepest": options.deepest,
            "slack_bytes": strangers.SLACK_BYTES,
            "kinds": found,
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / "budget_sweep_cpu.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
