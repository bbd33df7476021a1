"""The planner: how soon it answers, beside others; what its rule for ties saves; chains of layers.

All run on one core, with compiled code cached.

    python benchmarks/planner.py questions          # JSON into benchmarks/results/
    python benchmarks/planner.py questions --slow   # Mixed at 10,000 steps too: a minute each
    python benchmarks/planner.py questions --quick  # a tenth of the sizes; nothing is written
"""

import importlib.metadata
import importlib.util
import itertools
import os
import pickle
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

import retrograde as rg
from harness import Row, Run, Script
from oracles.first_best import first_best, rotor
from oracles.unequal_chains import network, random_chain
from retrograde.machine import processor_name
from retrograde.plan.chains import chain_minimum, plan_chain
from retrograde.plan.fit import fit
from retrograde.plan.footprint import Curve, Footprint
from retrograde.schedule import Verb

PEERS = ("checkpoint_schedules", "pyrevolve")
THREADS = ("OMP", "MKL", "OPENBLAS", "NUMBA")
script = Script()


def alone(*packages: str) -> Row:
    """Run this command anew on one core, unless it does; the machine, and versions of packages."""
    if any(os.environ.get(f"{name}_NUM_THREADS") != "1" for name in THREADS):
        one = os.environ | {f"{name}_NUM_THREADS": "1" for name in THREADS}
        raise SystemExit(subprocess.call([sys.executable, *sys.argv], env=one))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    versions = dict.fromkeys(packages, "not installed")
    for name in filter(importlib.util.find_spec, packages):
        versions[name] = importlib.metadata.version(name)
    device = f"{processor_name()}, one core"
    return {"device": device, "python": platform.python_version(), **versions}


@dataclass(frozen=True)
class Question:
    """A question to ours and to somebody else, of which a call may ask several."""

    name: str
    ours: Callable[[], object]
    target_seconds: float
    peer: Callable[[], object] | None = None
    peer_name: str = ""
    questions: int = 1
    most_rounds: int = 100


def rows(tenth: int, slow: bool) -> Iterator[Question]:
    """Every question that this process can ask, at a tenth of the sizes where ``tenth`` is 10."""
    long, longest, middle = 10**5 // tenth, 10**6 // tenth, 10**4 // tenth
    lengths = range(long, long + 1000)
    yield Question(
        f"cost of t = {long:,} …, m = 1,000",
        lambda: [rg.cost(t, 1000) for t in lengths],
        1e-5,
        *revolve_costs(lengths),
        questions=len(lengths),
    )
    yield Question(
        f"costs of all t ≤ {long:,}, m < 1,000", partial(all_costs, long), 10.0, most_rounds=3
    )
    yield Question(
        "cost of MSM, t = 1,000,000,000, m = 1,000, α = 5",
        lambda: rg.cost(10**9, 1000, "msm", alpha=5),
        0.5,
    )
    for t, seconds in ((long, 0.2), (longest, 2.0)):
        yield Question(
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
        yield Question(
            f"MSM, t = {t:,}, m = {m:,}, α = {alpha}, β = {beta}",
            partial(rg.plan, t, m, "msm", alpha=alpha, beta=beta),
            seconds,
            most_rounds=5 if t == middle else 3,
        )
    for t, m, seconds, rounds in ((2000 // tenth, 50, 0.3, 5), *[(middle, 100, 20.0, 1)] * slow):
        yield Question(
            f"best, equal sizes, t = {t:,}, m = {m:,}",
            partial(rg.plan, t, m, "best", alpha=1),
            seconds,
            *iterated("MixedCheckpointSchedule", t, m),
            most_rounds=rounds,
        )


def fits() -> Iterator[Question]:
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
        yield Question(
            f"another length, about 1,000, in ranges within {share}",
            lambda share=share: fit(next(lengths), share, sizes),
            0.01,
        )


def process_rows(tenth: int) -> Iterator[Question]:
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
        yield Question(
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


def ask(row: Question, rounds: int) -> Row:
    """Both sides in turn."""
    ours: list[float] = []
    theirs: list[float] = []
    found: Row = {"name": row.name, "target_seconds": row.target_seconds}
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


@script.table("planner", rounds=7, slow=False, quick=False)
def questions(run: Run) -> None:
    """Claim: exact plans for a million steps take a second, of any policy; costs microseconds.

    The planner runs beside others, if these are installed: ``pyrevolve`` (Revolve in C++) and
    ``checkpoint_schedules`` (Revolve in Python; Maddison's mixed policy, for equal sizes only),
    each iterated to its end. The two sides take turns, with compiled code warm; times are medians.
    What a new process waits for is measured in new processes, with the compiled code cached.
    """
    machine = alone("numpy", "numba", *PEERS)
    tenth, rounds = (10, 1) if run.quick else (1, run.rounds)
    rg.plan(20, 8, "msm", alpha=3)  # loads what is compiled
    asked = (*rows(tenth, run.slow), *fits(), *process_rows(tenth))
    one = partial(ask, rounds=rounds)
    cases = {question.name: question for question in asked}
    shown = ("seconds", "target_seconds", "peer", "peer_seconds", "refused")
    run.write(machine, results=run.rows(cases, one, *shown, part="results"))


LENGTH = 1000
TIES = [
    ("hsm", 10, None),
    ("hsm", 50, None),
    ("hsm", 500, None),
    ("ism", 10, None),
    ("ism", 50, None),
    ("ism", 500, None),
    ("ism", 1000, None),
    ("msm", 50, 5),
    ("msm", 300, 5),
    ("msm", 2000, 5),
    ("msm", 4000, 5),
]


def tied(case: tuple[str, int, int | None]) -> Row:
    """The actions by the paper's rule, and by ours; the launches of ours."""
    policy, memory, alpha = case
    sizes = {} if alpha is None else {"alpha": alpha}
    theirs = first_best(LENGTH, memory, policy, alpha)
    ours = rg.plan(LENGTH, memory, policy, **sizes)
    assert theirs.cost == ours.cost
    assert theirs.peak <= memory
    launches = int(np.isin(ours.kind, [Verb.ADVANCE, Verb.RECORD, Verb.BACKWARD]).sum())
    return {
        "policy": policy, "alpha": alpha, "length": LENGTH, "memory": memory, "cost": ours.cost,
        "actions_first_y": len(theirs), "actions": len(ours),
        "launches_step_by_step": ours.cost + LENGTH, "launches": launches,
    }  # fmt: skip


@script.table("ties")
def ties(run: Run) -> None:
    """Claim: of equally cheap schedules, the planner's has no more actions than the paper's rule.

    Algorithm 1 of Gruslys et al. (2016) takes the first best y, and prefers hidden states. Counted
    are the actions of both, with adjacent ranges merged, and our launches, one for each range.
    """
    shown = ("cost", "actions_first_y", "actions", "launches_step_by_step", "launches")
    cases = {"{}, m = {}, α = {}".format(*case): case for case in TIES}
    run.write(run.rows(cases, tied, *shown))


LAYERS, SHARE, SHARES = (50, 100, 200, 400), 0.3, (0.1, 0.3, 0.5, 0.8)


def planned(case: tuple[str, int]) -> list[Row]:
    """Plan a chain for some budgets, and prove how good that is."""
    name, length = case
    chain = {"random": random_chain, "network": network}[name](length)
    rows = []
    for share in SHARES:
        if share * plan_chain(chain, "100%").peak < chain_minimum(chain):
            continue
        start = time.perf_counter()
        plan_chain(chain, share)
        middle = time.perf_counter()
        schedule = plan_chain(chain, share, certify=True)
        certified = time.perf_counter() - middle
        rows.append({
            "name": name, "layers": len(chain), "share": share, "seconds": middle - start,
            "certified_seconds": certified, "gap": schedule.gap,
            "of_ordinary": schedule.seconds / chain.ordinary_seconds,
            "of_budget": schedule.peak / schedule.memory,
        })  # fmt: skip
    return rows


def peak_of_planning(chain: rg.Chain) -> int:
    """The most that a process which plans a chain ever held, Python and numba included."""
    code = (
        "import pickle, resource, sys; from retrograde.plan.chains import plan_chain\n"
        f"plan_chain(pickle.load(sys.stdin.buffer), {SHARE})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, input=pickle.dumps(chain), stdout=-1, check=True).stdout)


@script.table("chain_planner", quick=False)
def chains(run: Run) -> None:
    """Claim: the fastest schedule of an unequal chain of 400 layers is found within seconds.

    Random chains, whose sizes have no common divisor, and a network of convolutions, norms,
    activations and sums, are planned with a certified gap. For scale, rotor's recurrence is timed
    in plain Python (Beaumont et al., 2019). Peak memory is that of a new process.
    """
    machine = alone("numpy", "numba")
    plan_chain(random_chain(20), "90%", certify=True)  # loads what is compiled
    lengths = LAYERS[:1] if run.quick else LAYERS
    cases = {f"{n} of {size}": (n, size) for size in lengths for n in ("random", "network")}
    shown = ("share", "seconds", "certified_seconds", "of_ordinary", "of_budget", "gap")
    results = run.rows(cases, planned, *shown, part="results")
    memory = {LAYERS[-1]: peak_of_planning(random_chain(LAYERS[-1]))}
    start = time.perf_counter()
    rotor(30, 30)
    others = {"plain Python, 30 layers, 30 levels": time.perf_counter() - start}
    run.write(machine, results=results, peak_rss_bytes=memory, others=others)


if __name__ == "__main__":
    script.main()
