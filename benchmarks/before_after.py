"""Claim: what a change rebuilt is as fast as before, whatever the workload.

Runs scripts of this folder in two checkouts, in turn, each with its own library and its own script.
Every row's time is divided by that of torch's way in the same process. The table shows the median
of that over turns, after by before, and every row above the limit.

    git worktree add ../before COMMIT; git worktree add ../after
    python benchmarks/before_after.py ../before ../after   # an hour and a half; JSON in results/
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
LIMIT = 1.05
Rows = Iterator[tuple[str, float]]


def front_page(found: Any) -> Rows:
    for row in found["rows"]:
        yield row["network"], row["ours"]["ms"] / row["torch"]["ms"]


def recurrent_grid(found: Any) -> Rows:
    for row in found["rows"]:
        for name, ratio in row["ratios"].items():
            if name.endswith("%"):
                yield f"{row['work']} at {name}", ratio


def small_cells(found: Any) -> Rows:
    for row in found["rows"]:
        for name, ratio in row["ratios"].items():
            if name != "plain":
                yield f"{row['cell']}, {name}", ratio


def chain_networks(found: Any) -> Rows:
    for name, network in found["networks"].items():
        for k, row in enumerate(network["budgets"]):
            yield f"{name}, budget {k}", row["to_ordinary"]


def first_call(found: Any) -> Rows:
    for row in found["rows"]:
        yield f"{row['what']} at {row['budget']}", row["first"] / row["plain"]


SCRIPTS: dict[str, Callable[[Any], Rows]] = {
    each.__name__: each
    for each in (front_page, recurrent_grid, small_cells, chain_networks, first_call)
}


def run(tree: Path, script: str) -> dict[str, float]:
    """The rows of one run in a checkout."""
    paths = os.pathsep.join(str(tree / name) for name in ("src", "papers", "benchmarks"))
    command = [sys.executable, f"benchmarks/{script}.py"]
    subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": paths}, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    text = (tree / "benchmarks" / "results" / f"{script}_cpu.json").read_text()
    return dict(SCRIPTS[script](json.loads(text)))


def compare(before: Path, after: Path, script: str, turns: int) -> dict[str, Any]:
    """Every row of one script in both checkouts."""
    times: dict[Path, dict[str, list[float]]] = {
        before: defaultdict(list), after: defaultdict(list)
    }  # fmt: skip
    for turn in range(turns):
        for tree in (before, after) if turn % 2 == 0 else (after, before):
            for name, ratio in run(tree, script).items():
                times[tree][name].append(ratio)
    rows = {
        name: {
            "before": [round(r, 3) for r in times[before][name]],
            "after": [round(r, 3) for r in times[after][name]],
            "ratio": round(
                statistics.median(times[after][name]) / statistics.median(times[before][name]), 3
            ),
        }
        for name in times[before]
        if name in times[after]
    }
    mean = statistics.geometric_mean(row["ratio"] for row in rows.values())
    only = sorted(times[before].keys() ^ times[after].keys())
    return {"mean": round(mean, 3), "rows": rows, "in_one_only": only}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    path = RESULTS / "before_after_cpu.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    for script in options.scripts:
        found = compare(options.before.resolve(), options.after.resolve(), script, options.turns)
        slower = {n: r for n, r in found["rows"].items() if r["ratio"] > LIMIT}
        print(
            f"{script}: {len(found['rows'])} rows, after by before {found['mean']:.3f} on average; "
            f"{len(slower)} above {LIMIT}; in one only: {found['in_one_only']}",
            flush=True,
        )
        for name, row in sorted(slower.items(), key=lambda item: -item[1]["ratio"]):
            print(f"  {row['ratio']:.3f}  {name}: {row['before']} → {row['after']}", flush=True)
        document[script] = {"machine": machine_of("cpu"), "turns": options.turns, **found}
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
