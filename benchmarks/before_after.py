"""Claim: what a change rebuilt is as fast as before, whatever the workload.

Takes workloads of other scripts of this folder in two checkouts, each with its own library and its
own script. Each workload runs in a fresh process, the checkouts in turn, before the next workload:
a machine whose pace changes within minutes then slows both. Every time is divided by that of
torch's way in the same process. The table shows the median of that over turns, after by before, and
every row above the limit.

    git worktree add ../before COMMIT; git worktree add ../after
    python benchmarks/before_after.py ../before ../after   # an hour; JSON in results/
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
LIMIT = 1.05
Rows = Iterator[tuple[str, float]]


@dataclass(frozen=True)
class Script:
    """How to ask a script ``m``: for the number of its workloads, for that of number ``n``, and for
    the rows of what that found."""

    count: str
    measure: str
    rows: Callable[[Any], Rows]


def of_iterations(found: Any) -> Rows:
    yield found["network"], found["ours"]["ms"] / found["torch"]["ms"]


def of_layers(found: Any) -> Rows:
    for name, seconds in found["seconds"].items():
        if name.endswith("%") and not name.startswith("padded"):
            yield f"{found['work']} at {name}", seconds / found["seconds"]["torch"]


def of_cells(found: Any) -> Rows:
    for name, ratio in found["ratios"].items():
        if name != "plain":
            yield f"{found['cell']}, {name}", ratio


def of_chains(found: Any) -> Rows:
    for k, row in enumerate(found["budgets"]):
        yield f"{found['name']}, budget {k}", row["to_ordinary"]


def of_first_calls(found: Any) -> Rows:
    for share, seconds in found["shares"].items():
        yield f"{found['what']} at {share}", seconds["first"] / seconds["plain"]


SCRIPTS = {
    "front_page": Script(
        "len(m.ROWS)", "m.measured(dataclasses.replace(m.ROWS[n](), careful={}))", of_iterations
    ),
    "recurrent_grid": Script(
        "len(m.GRID)",
        "{'work': str(m.GRID[n]), 'seconds': m.Contest(m.GRID[n]).seconds(5)}",
        of_layers,
    ),
    "small_cells": Script(
        "len(m.cases())", "[m.measured(k, *c) for k, c in [[*m.cases().items()][n]]][0]", of_cells
    ),
    "chain_networks": Script(
        "len(m.NETWORKS)",
        "[{'name': k, **m.compare(k, torch.device('cpu'), 5, 5, False)}"
        " for k in [[*m.NETWORKS][n]]][0]",
        of_chains,
    ),
    "first_call": Script(
        "2",  # the cells of this folder
        "[{'what': k, 'shares': {s: m.of_cell(c, s) for s in m.SHARES}}"
        " for k, c in [[*m.CELLS.items()][n]]][0]",
        of_first_calls,
    ),
}


def ask(tree: Path, script: str, question: str) -> Any:
    """What a script answers in a checkout."""
    code = (
        f"import dataclasses, json, sys, warnings, torch, {script} as m; n = int(sys.argv[1])\n"
        f"warnings.simplefilter('ignore'); torch.set_num_threads(2); found = {question}\n"
        "print(); print(json.dumps(found))"
    )
    paths = os.pathsep.join(str(tree / name) for name in ("src", "papers", "benchmarks"))

    def answer(n: int = 0) -> Any:
        command, own = [sys.executable, "-c", code, str(n)], {**os.environ, "PYTHONPATH": paths}
        run = subprocess.run(command, cwd=tree, env=own, check=True, stdout=subprocess.PIPE)
        return json.loads(run.stdout.splitlines()[-1])

    return answer


def compare(before: Path, after: Path, script: str, turns: int) -> dict[str, Any]:
    """Every row of one script in both checkouts."""
    how, rows, only = SCRIPTS[script], {}, set()
    for n in range(ask(after, script, how.count)()):
        times: dict[Path, dict[str, list[float]]] = {
            before: defaultdict(list), after: defaultdict(list)
        }  # fmt: skip
        for turn in range(turns):
            for tree in (before, after) if turn % 2 == 0 else (after, before):
                for name, ratio in how.rows(ask(tree, script, how.measure)(n)):
                    times[tree][name].append(ratio)
        only |= times[before].keys() ^ times[after].keys()
        for name in times[before].keys() & times[after].keys():
            old, new = times[before][name], times[after][name]
            rows[name] = {
                "before": [round(r, 3) for r in old],
                "after": [round(r, 3) for r in new],
                "ratio": round(statistics.median(new) / statistics.median(old), 3),
            }
    mean = statistics.geometric_mean(row["ratio"] for row in rows.values())
    return {"mean": round(mean, 3), "rows": rows, "in_one_only": sorted(only)}


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
