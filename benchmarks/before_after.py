"""Claim: what a change rebuilt is as fast as before, whatever the workload.

A workload of another script of this folder is set up in two processes: one runs the library of one
checkout, one that of the other. They time a call in turn, one call at a time, so a machine whose
pace changes slows both. Two processes of one checkout may differ by a quarter for as long as they
live. So there are several turns, each with new processes. A row is the median of the turns'
medians. The table shows the rows above the limit, and those that are above it in every turn.

    git worktree add ../before COMMIT   # and its kernels: python -m retrograde.precompile
    python benchmarks/before_after.py ../before .   # hours; JSON in results/
    python benchmarks/before_after.py ../before . --scripts recurrent_grid --only 17   # minutes
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LIMIT = 1.05
TURNS = 3  # pairs of processes: where a process lies in memory changes its pace too
SECONDS = 2.0  # for the pairs of one row and turn, but at least so many pairs, and at most
LEAST, MOST = 5, 51
SPIN = 5e-3  # seconds after which threads that wait in the other process no longer spin
Samples = dict[str, Callable[[], float]]


def of_front_page(n: int) -> Samples:
    import front_page as script
    from alternating import seconds

    row = script.ROWS[n]()

    def sample() -> float:
        taken = seconds(row.ours)
        row.forget()
        return taken

    return {f"{row.name}, {row.budget}": sample}


def of_recurrent_grid(n: int) -> Samples:
    import recurrent_grid as script
    from alternating import seconds

    contest = script.Contest(script.GRID[n])

    def sampled(run: Callable[[], object]) -> Callable[[], float]:
        def sample() -> float:
            taken = seconds(run)
            contest.forget()
            return taken

        return sample

    named = ((share, contest.runs.get(share)) for share in script.SHARES)
    return {f"{contest.work}, {share}": sampled(run) for share, run in named if run}


def of_small_cells(n: int) -> Samples:
    import small_cells as script
    from alternating import seconds

    name, case = [*script.cases().items()][n]
    row, calls = script.contenders(*case)
    return {f"{name}, {key}": lambda c=calls[key]: seconds(c) for key in row["first_loops"]}  # type: ignore[misc]


def of_chain_networks(n: int) -> Samples:
    import torch

    import chain_networks as script
    import retrograde as rg

    name = [*script.NETWORKS][n]
    make, shape = script.NETWORKS[name]
    torch.manual_seed(0)
    plain, x = torch.nn.Sequential(*make()), torch.randn(shape)
    seed = torch.randn_like(plain(x).detach())

    def way(net: Any) -> Any:
        return script.Way(net, list(plain.parameters()), x, seed)

    whole, samples = way(plain).peak(), {}
    for percent in (100, 65, 50, 30, 20):
        one = way(rg.Sequential(*plain, memory=whole * percent // 100))
        try:
            one.step()
        except rg.BudgetError:
            continue
        samples[f"{name}, {percent}%"] = one.seconds
    return samples


def of_first_call(n: int) -> Samples:
    import first_call as script

    def sampled(make: Any, share: str) -> Callable[[], float]:
        def sample() -> float:
            return script.of_cell(make, share, rounds=1)["first"]

        return sample

    name, make = [*script.CELLS.items()][n]
    return {f"first call of {name}, {share}": sampled(make, share) for share in script.SHARES}


SCRIPTS = {  # and how many workloads each has
    "front_page": (of_front_page, 8),
    "recurrent_grid": (of_recurrent_grid, 32),
    "small_cells": (of_small_cells, 7),
    "chain_networks": (of_chain_networks, 4),
    "first_call": (of_first_call, 2),  # the cells of this folder
}


def serve(script: str, n: int) -> None:
    """Set a workload up, tell its names, and time the one that each line of the input names."""
    import torch

    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    samples = SCRIPTS[script][0](n)
    print(json.dumps(list(samples)), file=answers, flush=True)
    for line in sys.stdin:
        time.sleep(SPIN)
        print(json.dumps(samples[json.loads(line)]()), file=answers, flush=True)


@contextmanager
def serving(tree: Path, script: str, n: int) -> Iterator[tuple[list[str], Callable[[str], float]]]:
    """The names of a workload's rows in a checkout, and what times one of them once."""
    paths = os.pathsep.join([str(tree / "src"), str(HERE.parents[1] / "papers")])
    with subprocess.Popen(
        [sys.executable, str(HERE), "--serve", script, str(n)],
        env={**os.environ, "PYTHONPATH": paths}, text=True, bufsize=1,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(name: str) -> float:
            questions.write(json.dumps(name) + "\n")
            return float(answers.readline())

        yield json.loads(answers.readline()), ask
        questions.close()


def paired(first: Callable[[], float], second: Callable[[], float]) -> tuple[float, float]:
    """Return the median seconds of one call, and the median of the other's by it, over pairs of
    calls whose order changes from pair to pair."""
    for ask in (first, second) * 2:
        ask()
    start, pairs = time.monotonic(), []
    while len(pairs) < LEAST or (time.monotonic() - start < SECONDS and len(pairs) < MOST):
        if len(pairs) % 2:
            after, before = second(), first()
        else:
            before, after = first(), second()
        pairs.append((before, after))
    ratios = [after / before for before, after in pairs]
    return statistics.median(pair[0] for pair in pairs), statistics.median(ratios)


def compare(before: Path, after: Path, script: str, which: list[int] | None) -> dict[str, Any]:
    """Every row of one script in both checkouts."""
    rows, only = {}, set[str]()
    for n in range(SCRIPTS[script][1]) if which is None else which:
        found: dict[str, list[tuple[float, float]]] = {}
        for turn in range(TURNS):
            trees = {"old": before, "new": after}
            with ExitStack() as stack:
                asks = {
                    key: stack.enter_context(serving(trees[key], script, n))
                    for key in (("old", "new") if turn % 2 == 0 else ("new", "old"))
                }
                (olds, old), (news, new) = asks["old"], asks["new"]
                only |= set(olds) ^ set(news)
                for name in [name for name in news if name in olds]:
                    pair = paired(partial(old, name), partial(new, name))
                    found.setdefault(name, []).append(pair)
        for name, turns in found.items():
            ratios = sorted(round(ratio, 3) for _, ratio in turns)
            ms = round(1e3 * statistics.median(seconds for seconds, _ in turns), 3)
            rows[name] = {"ratio": statistics.median(ratios), "turns": ratios, "before_ms": ms}
            if rows[name]["ratio"] > LIMIT:
                print(f"  {name}: {rows[name]}", flush=True)
    mean = statistics.geometric_mean(row["ratio"] for row in rows.values())
    return {"mean": round(mean, 3), "rows": rows, "in_one_only": sorted(only)}


def main() -> None:
    from retrograde.machine import machine_of

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--scripts", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--only", type=int, nargs="*", help="workloads; nothing is written")
    options = parser.parse_args()
    path = HERE.parent / "results" / "before_after_cpu.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    for script in options.scripts:
        found = compare(options.before.resolve(), options.after.resolve(), script, options.only)
        rows = found["rows"].values()
        above = [row for row in rows if row["ratio"] > LIMIT]
        surely = [row for row in above if row["turns"][0] > LIMIT]
        print(
            f"{script}: {len(rows)} rows, after by before {found['mean']:.3f} on average, worst "
            f"{max(row['ratio'] for row in rows):.3f}; {len(above)} above {LIMIT}, {len(surely)} "
            f"in every turn; in one only: {found['in_one_only']}",
            flush=True,
        )
        document[script] = {"machine": machine_of("cpu"), **found}
        if options.only is None:
            path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        main()
