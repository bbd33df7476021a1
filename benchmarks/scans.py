"""The backward pass in compiled loops and by scans; Jacobians and memory of ranks along time.

python benchmarks/scans.py backward                 # JSON into benchmarks/results/
python benchmarks/scans.py backward --device cuda
python benchmarks/scans.py rank_jacobians --quick   # small, and nothing is written
"""

import itertools
import statistics
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing

import retrograde as rg
from harness import Row, Run, Script, difference, fresh, medians
from oracles.rank_columns import by_columns
from retrograde.machine import now
from retrograde.ranks.crossing import Way
from retrograde.ranks.piece import Piece
from retrograde.ranks.range_map import rows_of

script = Script()
WAYS = ("torch", "100%", "scan")


@dataclass(frozen=True)
class Case:
    """One cell and its sizes."""

    cell: str
    length: int
    batch: int = 16
    inputs: int = 24
    hidden: int = 20
    memory: str | None = None


CASES = [
    Case("RNN", 1000),
    Case("GRU", 1000),
    Case("LSTM", 1000),
    Case("RNN", 10_000),
    Case("GRU", 1034),
    Case("GRU", 30_000, memory="5%"),
]


def modules(case: Case, device: str) -> dict[str, Any]:
    """The competitors, with the same weights."""
    torch.manual_seed(0)
    sizes = {"device": device}
    ordinary = getattr(torch.nn, case.cell)(case.inputs, case.hidden, **sizes)
    found = {"torch": ordinary}
    asked = {
        "100%": {"memory": case.memory or ("100%" if device == "cpu" else "99%")},  # never cuDNN's
        "scan": {"backward": "scan", "memory": case.memory},
    }
    for way in WAYS[1:]:
        ours = getattr(rg, case.cell)(case.inputs, case.hidden, **asked[way], **sizes)
        ours.load_state_dict(ordinary.state_dict())
        found[way] = ours
    return found


def passes(net: Any, x: Tensor, seed: Tensor) -> tuple[float, float]:
    """Seconds of one forward and one backward pass."""
    net.zero_grad()
    start = now(x.device)
    y = net(x)[0]
    middle = now(x.device)
    y.backward(seed)
    return middle - start, now(x.device) - middle


def bytes_of(net: Any, x: Tensor, seed: Tensor) -> dict[str, int]:
    """What is kept between the passes, and what they take, beyond what the caller is handed."""

    def call() -> object:
        y, state = net(x)
        y.backward(seed)
        return y, state

    found = rg.measure(lambda: net(x), device=x.device)
    outputs, state = found.value
    handed = [outputs, *(state if isinstance(state, tuple) else (state,))]
    kept = found.retained_bytes - sum(t.nbytes for t in handed)
    del found, outputs, state, handed
    net.zero_grad()
    working = rg.measure(call, device=x.device).working_bytes
    return {"kept_bytes": kept, "working_bytes": working}


def measured(number: int, rounds: int) -> Row:
    """All ways through one case: bytes once each, seconds in alternation, medians."""
    case = CASES[number]
    rounds = 2 if case.length >= 10_000 else rounds
    nets = modules(case, "cpu")
    x = torch.randn(case.length, case.batch, case.inputs)
    seed = torch.randn(case.length, case.batch, case.hidden)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in nets}
    for net in nets.values():
        passes(net, x, seed)
    for _ in range(rounds):
        for way, net in nets.items():
            seconds[way].append(passes(net, x, seed))
    reference = [p.grad for p in nets["torch"].parameters()]
    rows = {}
    for way, net in nets.items():
        forward, backward = (statistics.median(part) for part in zip(*seconds[way], strict=True))
        # Every event of a long run is too many for the profiler.
        counted = case.length <= 2000 or (case.memory is not None and way != "torch")
        differences = [
            float((p.grad - r).norm() / r.norm())
            for p, r in zip(net.parameters(), reference, strict=True)
        ]
        rows[way] = {
            "forward_seconds": forward,
            "backward_seconds": backward,
            **(bytes_of(net, x, seed) if counted else {}),
            "largest_difference_from_torch": max(differences),
        }
    if case.memory is not None:
        fit = nets["scan"].fit(x)
        rows["budget"] = {"bytes": fit.budget_bytes, "ordinary_bytes": fit.ordinary_bytes}
    return {"case": asdict(case), "rounds": rounds, "ways": rows}


def against_torch(rows: dict[str, Any], way: str) -> dict[str, float]:
    """How many times faster a way is than torch's own, and what share of its bytes it keeps."""
    ours, theirs = rows[way], rows["torch"]
    total = {
        name: row["forward_seconds"] + row["backward_seconds"]
        for name, row in (("ours", ours), ("theirs", theirs))
    }
    return {
        "backward_speedup": theirs["backward_seconds"] / ours["backward_seconds"],
        "step_speedup": total["theirs"] / total["ours"],
        **{
            f"{kind}_share": ours[f"{kind}_bytes"] / max(1, theirs[f"{kind}_bytes"])
            for kind in ("kept", "working")
            if f"{kind}_bytes" in theirs
        },
    }


def of_processes(number: int, asked: Run) -> Row:
    """For each way the process of median backward speed-up, with the range over all."""
    results = [fresh(measured, number, asked.rounds) for _ in range(asked.processes)]
    ways = {}
    for way in WAYS:
        ranked = sorted(
            (r["ways"][way] | against_torch(r["ways"], way) for r in results),
            key=lambda row: row["backward_speedup"],
        )
        ratios = [round(row["backward_speedup"], 2) for row in ranked]
        ways[way] = ranked[len(ranked) // 2] | {"backward_speedup_of_processes": ratios}
    return results[0] | {"ways": ways} | {"budget": results[0]["ways"].get("budget")}


@script.table("scan_backward_cpu", rounds=9, processes=3)
def backward(run: Run) -> None:
    """Claim: the backward pass in compiled loops, by steps or a scan, is faster than torch's.

    The RNN, GRU and LSTM of ``torch.nn`` alternate with ours under ``memory="100%"`` and
    ``backward="scan"``. Of bytes, those are told that are kept between the passes, besides those
    that the caller holds anyway. The sizes are those of Wang (BPPSA, 2020): H = 20, B = 16. Two
    cores of a virtual machine can differ from process to process. So several processes measure, and
    the table has the median process, by the ratio of the backward passes.
    """
    cases = {f"{c.cell} {c.length} {c.memory or ''}": n for n, c in enumerate(CASES)}
    results = run.rows(cases, partial(of_processes, asked=run), "ways", part="results")
    run.write(processes=run.processes, results=results)


# Cell, layers, units, batch, steps.
POINTS = (
    ("GRU", 1, 32, 16, 200),
    ("LSTM", 1, 32, 16, 200),
    ("LSTM", 1, 32, 64, 250),
    ("GRU", 1, 8, 4, 2000),
    ("RNN", 1, 32, 1, 5000),
    ("GRU", 2, 32, 16, 200),
    ("LSTM", 2, 32, 16, 200),
    ("LSTM", 1, 128, 8, 200),
)


def measure(point: tuple[str, int, int, int, int], device: str, rounds: int) -> dict[str, Any]:
    """One point: medians of seconds, and how far the two lie apart."""
    cell, layers, units, batch, steps = point
    torch.manual_seed(0)
    net = getattr(rg, cell)(units, units, layers, device=device)
    x = torch.randn(steps, batch, units, device=device)
    dy = torch.randn(steps, batch, units, device=device)
    before = tuple(s.requires_grad_() for s in net._zeros(batch, x))
    outputs, after = net(x, before if cell == "LSTM" else before[0])
    piece = Piece(x, before, outputs, after if cell == "LSTM" else (after,))
    zero = tuple(torch.zeros_like(s) for s in piece.after)
    apart = cell == "LSTM" or device != "cpu"
    ways = {
        "sweep": lambda: piece.back(dy, zero, (), keep=True),
        "columns": lambda: by_columns(piece, dy, apart),
        "slopes": lambda: rows_of(net, x, before, dy),
    }
    seconds = medians(ways, rounds, x.device, warm=1)
    found = {name: ways[name]() for name in ("columns", "slopes")}
    a, b = found["columns"], found["slopes"]
    return {
        "cell": cell, "layers": layers, "units": units, "batch": batch, "steps": steps,
        **{f"{name}_seconds": each for name, each in seconds.items()},
        "jacobian_difference": difference([a[:, :-1]], [b[:, :-1]]),
        "offset_difference": difference([a[:, -1]], [b[:, -1]]),
    }  # fmt: skip


@script.table("rank_jacobians_{device}", rounds=5, device="cpu", quick=False)
def rank_jacobians(run: Run) -> None:
    """Claim: a rank's Jacobian in closed form takes a fraction of a sweep for each column.

    A tree across ranks needs the Jacobian of each rank: the effect of its steps on any gradient. It
    is found by a backward pass for each column, side by side where autograd allows it, and in
    closed form, from slopes. Both take turns, with one plain sweep for comparison.
    """
    points = [("GRU", 2, 4, 2, 20)] if run.quick else POINTS
    kinds = {cell: [point for point in points if point[0] == cell] for cell, *_ in points}

    def rows_of_kind(points: list[tuple[str, int, int, int, int]]) -> list[Row]:
        return [measure(point, run.device, 1 if run.quick else run.rounds) for point in points]

    shown = ("sweep_seconds", "columns_seconds", "slopes_seconds", "offset_difference")
    run.write(rows=run.rows(kinds, rows_of_kind, *shown))


HIDDEN, BATCH, FEATURES = 64, 8, 8


def of_a_rank(rank: int, size: int, steps: int, memory: str | None, way: Way, folder: str) -> None:
    """One rank: what it holds, and the gradient of a weight."""
    torch.set_num_threads(1)
    url = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    torch.manual_seed(0)
    net = rg.TimeSharded(rg.LSTM(FEATURES, HIDDEN, memory=memory), way=way)
    torch.manual_seed(1)
    x = torch.randn(steps, BATCH, FEATURES).tensor_split(size)[rank]

    def call() -> Tensor:
        outputs, _ = net(x)
        outputs.square().sum().backward()
        return outputs.detach()

    call()
    net.zero_grad()
    held = rg.measure(call).working_bytes
    torch.save((held, net.rnn.weight_hh_l0.grad), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def on_ranks(size: int, steps: int, memory: str | None, way: Way) -> tuple[list[int], Tensor]:
    """What each rank held, and the gradient."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(of_a_rank, (size, steps, memory, way, folder), nprocs=size)
        found = [torch.load(f"{folder}/{rank}.pt") for rank in range(size)]
    return [held for held, _ in found], found[0][1]


@script.table("ranks_memory_cpu", steps=20_000, most=8)
def ranks_memory(run: Run) -> None:
    """Claim: if a sequence is divided along time among p ranks, each holds a p-th of the memory.

    One long sequence goes through an LSTM on 1, 2, 4 and 8 processes of this machine, by a line and
    by a tree, without a budget and within 10 % each. The table has the peak memory of a rank.
    """
    rows = []
    ways: tuple[Way, ...] = ("linear", "tree")
    for memory, way in itertools.product((None, "10%"), ways):
        alone: tuple[int, Tensor] | None = None
        for size in (size for size in (1, 2, 4, 8) if size <= run.most):
            held, gradient = on_ranks(size, run.steps, memory, way)
            alone = alone or (max(held), gradient)
            share = max(held) * size / alone[0]
            rows.append({
                "ranks": size, "memory": memory, "way": way, "held_bytes": held,
                "times_ranks": share, "gradient_difference": difference([gradient], [alone[1]]),
            })  # fmt: skip
            print(rows[-1], flush=True)
    sizes = {"steps": run.steps, "batch": BATCH, "hidden": HIDDEN, "features": FEATURES}
    run.write(settings=sizes, rows=rows)


if __name__ == "__main__":
    script.main()
