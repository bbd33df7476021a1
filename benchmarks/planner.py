"""Claim: exact plans for a million steps take a second, of any policy; costs take microseconds.

The planner runs beside others, if these are installed: ``pyrevolve`` (Revolve in C++) and
``checkpoint_schedules`` (Revolve in Python; Maddison's mixed policy, for equal sizes only). Each of
these schedules is iterated to its end. The two sides take turns in one process, on one core, with
compiled code warm; times are medians. The additional time of a new process is measured in new
processes, with the compiled code cached.

    python benchmarks/planner.py                # JSON into benchmarks/results/
    python benchmarks/planner.py --slow         # Mixed at 10,000 steps too: about a minute each
    python benchmarks/planner.py --quick        # a tenth of the sizes, once; nothing is written
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import retrograde as rg
from retrograde.machine import processor_name
from retrograde.plan.fit import Curve, Footprint, fit

RESULTS = Path(__file__).parent / "results"
PEERS = ("checkpoint_schedules", "pyrevolve")
THREADS = ("OMP", "MKL", "OPENBLAS", "NUMBA")


@dataclass(frozen=True)
class Row:
    """One question, asked of both sides.

    Args:
        name: the question.
        ours: asks retrograde.
        target_seconds: what the median is to stay within, for one question.
        peer: asks somebody else; None where nobody can be asked.
        peer_name: whom.
        questions: how many a call asks.
        most_rounds: calls of each side, at most.
    """

    name: str
    ours: Callable[[], object]
    target_seconds: float
    peer: Callable[[], object] | None = None
    peer_name: str = ""
    questions: int = 1
    most_rounds: int = 100


def rows(tenth: int, slow: bool) -> Iterator[Row]:
    """Every question that this process can ask, at a tenth of the sizes where ``tenth`` is 10."""
    long, longest, middle = 10**5 // tenth, 10**6 // tenth, 10**4 // tenth
    lengths = range(long, long + 1000)
    yield Row(
        f"cost of t = {long:,} …, m = 1,000",
        lambda: [rg.cost(t, 1000) for t in lengths],
        1e-5,
        *revolve_costs(lengths),
        questions=len(lengths),
    )
    yield Row(
        f"costs of all t ≤ {long:,}, m < 1,000", partial(all_costs, long), 10.0, most_rounds=3
    )
    yield Row(
        "cost of MSM, t = 1,000,000,000, m = 1,000, α = 5",
        lambda: rg.cost(10**9, 1000, "msm", alpha=5),
        0.5,
    )
    for t, seconds in ((long, 0.2), (longest, 2.0)):
        yield Row(
            f"HSM, t = {t:,}, m = 1,000",
            partial(rg.plan, t, 1000),
            seconds,
            *iterated("MultistageCheckpointSchedule", t, 1000, 0),
            most_rounds=5 if t == long else 1,
        )
    for t, m, alpha, beta, seconds in (
        (middle, 100, 5, 4, 0.3),
        (middle, 100, 2, 1, 0.3),
        (middle, 1000, 5, 4, 1.0),
        (middle, 1000, 2, 1, 1.0),
        (long, 1000, 5, 4, 1.0),
        (long, 1000, 21, 20, 1.0),
        (longest, 1000, 5, 4, 1.0),
    ):
        yield Row(
            f"MSM, t = {t:,}, m = {m:,}, α = {alpha}, β = {beta}",
            partial(rg.plan, t, m, "msm", alpha=alpha, beta=beta),
            seconds,
            most_rounds=5 if t == middle else 3,
        )
    for t, m, seconds, rounds in ((2000 // tenth, 50, 0.3, 5), *[(middle, 100, 20.0, 1)] * slow):
        yield Row(
            f"best, equal sizes, t = {t:,}, m = {m:,}",
            partial(rg.plan, t, m, "best", alpha=1),
            seconds,
            *iterated("MixedCheckpointSchedule", t, m),
            most_rounds=rounds,
        )


def fits() -> Iterator[Row]:
    """Another length within a budget: an LSTM's bytes, 64 sequences and 256 units."""
    unit = 64 * 256 * 4
    sizes = Footprint(
        2 * unit,
        Curve.affine(6 * unit, 2 * unit),
        Curve.affine(2 * unit, 6 * unit),
        Curve.affine(6 * unit, 8 * unit),
        Curve.affine(8 * unit, 4 * unit),
        Curve.affine(4 * unit, 8 * unit),
        2 * unit,
        32 * 2**20,
        5.0,
        15.0,
    )
    lengths = itertools.count(1000)
    for share in ("5%", "20%"):
        yield Row(
            f"another length, about 1,000, in ranges within {share}",
            lambda share=share: fit(next(lengths), share, sizes),
            0.01,
        )


def process_rows(tenth: int) -> Iterator[Row]:
    """What a new process waits for: the second of two statements, in its own seconds."""
    long, middle = 10**5 // tenth, 10**4 // tenth
    theirs = "from checkpoint_schedules import *"
    for name, statements, seconds, peer in (
        ("import", ("", "import retrograde"), 0.1, ("", theirs)),
        (
            f"first HSM, t = {long:,}, m = 1,000",
            ("import retrograde as rg", f"rg.plan({long}, 1000)"),
            1.5,
            (theirs, f"list(MultistageCheckpointSchedule({long}, 1000, 0))"),
        ),
        (
            f"first MSM, t = {middle:,}, m = 100, α = 5, β = 4",
            ("import retrograde as rg", f"rg.plan({middle}, 100, 'msm', alpha=5, beta=4)"),
            1.5,
            None,
        ),
    ):
        has_peer = peer is not None and importlib.util.find_spec("checkpoint_schedules")
        yield Row(
            f"in a new process: {name}",
            partial(in_a_new_process, *statements),
            seconds,
            partial(in_a_new_process, *peer) if has_peer else None,
            "checkpoint_schedules" if has_peer else "",
        )


def revolve_costs(lengths: range) -> tuple[Callable[[], object] | None, str]:
    """The same costs from pyrevolve, which does not count the steps of the working core."""
    if not importlib.util.find_spec("pyrevolve"):
        return None, ""
    from pyrevolve.crevolve import numforw

    assert numforw(lengths[0], 1000) + lengths[0] == rg.cost(lengths[0], 1000)
    return lambda: [numforw(t, 1000) for t in lengths], "pyrevolve numforw"


def iterated(name: str, *arguments: int) -> tuple[Callable[[], object] | None, str]:
    """All actions of a schedule of checkpoint_schedules, made and dropped; compiled beforehand."""
    if not importlib.util.find_spec("checkpoint_schedules"):
        return None, ""
    import checkpoint_schedules

    kind = getattr(checkpoint_schedules, name)
    deque(kind(9, 2, *arguments[2:]), maxlen=0)
    return lambda: deque(kind(*arguments), maxlen=0), f"checkpoint_schedules {name}"


def all_costs(longest: int) -> int:
    """Every cell of the table, row by row as a user would ask."""
    lengths = np.arange(1, longest + 1)
    return sum(int(rg.cost(lengths, m)[-1]) for m in range(1, 1000))


def in_a_new_process(before: str, timed: str) -> float:
    """Seconds that a statement takes after another, as that process measures it."""
    code = (
        f"{before}\nimport time\nstart = time.perf_counter()\n{timed}\n"
        "print(time.perf_counter() - start)"
    )
    return float(subprocess.check_output([sys.executable, "-c", code]))


def seconds_of(call: Callable[[], object]) -> float:
    """What a call takes, or what it says it took."""
    start = time.perf_counter()
    told = call()
    return told if isinstance(told, float) else time.perf_counter() - start


def ask(row: Row, rounds: int) -> dict[str, object]:
    """Both sides in turn."""
    ours: list[float] = []
    theirs: list[float] = []
    found: dict[str, object] = {"name": row.name, "target_seconds": row.target_seconds}
    try:
        for _ in range(min(rounds, row.most_rounds)):
            ours.append(seconds_of(row.ours) / row.questions)
            if row.peer:
                theirs.append(seconds_of(row.peer) / row.questions)
    except rg.ScheduleError as error:
        return found | {"refused": str(error)}
    found |= {"rounds": len(ours), **spread("seconds", ours)}
    if theirs:
        found |= {"peer": row.peer_name, **spread("peer_seconds", theirs)}
    return found


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    """The median, with the range."""
    median = statistics.median(seconds)
    return {name: median, f"{name}_least": min(seconds), f"{name}_most": max(seconds)}


def show(found: dict) -> None:
    """One row of the table."""
    if "refused" in found:
        print(f"{found['name']:<62} refused: {found['refused']}", flush=True)
        return
    mark = "✓" if found["seconds"] <= found["target_seconds"] else "✗"
    line = f"{found['name']:<62} {found['seconds']:9.3g} s {mark} {found['target_seconds']:g}"
    if "peer" in found:
        faster = found["peer_seconds"] / found["seconds"]
        line += f"   {found['peer']}: {found['peer_seconds']:.3g} s ({faster:.2g}×)"
    print(line, flush=True)


def machine() -> dict[str, object]:
    """What was measured on, and with which versions."""
    versions = {}
    for package in ("numpy", "numba", *PEERS):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "device": f"{processor_name()}, one core",
        "python": platform.python_version(),
        **versions,
    }


def main() -> None:
    """Ask everything, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="calls of each side, at most")
    parser.add_argument("--slow", action="store_true", help="Mixed at 10,000 steps too")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes, once")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    arguments = parser.parse_args()
    if any(os.environ.get(f"{name}_NUM_THREADS") != "1" for name in THREADS):
        alone = os.environ | {f"{name}_NUM_THREADS": "1" for name in THREADS}
        raise SystemExit(subprocess.call([sys.executable, *sys.argv], env=alone))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tenth, rounds = (10, 1) if arguments.quick else (1, arguments.rounds)
    found = machine()
    print(json.dumps(found))
    for name in PEERS:
        if found[name] == "not installed":
            print(f"{name} is not installed: its side is left out; pip install {name}")
    rg.plan(20, 8, "msm", alpha=3)  # loads what is compiled
    results = []
    for row in (*rows(tenth, arguments.slow), *fits(), *process_rows(tenth)):
        results.append(ask(row, rounds))
        show(results[-1])
    if arguments.quick:
        return
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "planner.json"
    path.write_text(json.dumps({"machine": found, "results": results}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
