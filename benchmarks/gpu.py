"""Claims on a GPU, in one run of less than ten minutes: the tests, then the rest of docs/gpu.md.

    python benchmarks/gpu.py --device cuda     # `make gpu`; JSON into results/, and docs/gpu.md
    python benchmarks/gpu.py --device cuda --sections grid models   # only these anew
    python benchmarks/gpu.py --device cuda --resume   # what this commit has not measured yet
    python benchmarks/gpu.py --expected        # what counting tells: launches, bytes, FLOPs
    python benchmarks/gpu.py --quick --out F   # small and on the CPU: only to see that it runs

Each section is a process with a time limit of its own. A row is written as soon as it is measured.
One that fails, or that has no time left, says so, unless there is an older one. The script needs
torch, triton and numba. Without pytest it skips the tests, and says so.

- *drawn*: models drawn at random within five budgets each (``drawn.py``);
- *budgets*: the bytes that budgeted recurrent layers request, allocate and reserve;
- *grid*: recurrent layers within fractions of memory, beside cuDNN;
- *backward*: the backward pass from the states alone, beside cuDNN, up to 300,000 steps; cuDNN
  takes at most 65,535;
- *networks*: ten chains beside ``checkpoint_sequential`` and ``torch.compile`` with a budget;
- *models*: whole models by the lean tape and within budgets, beside ``checkpoint``.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import chains
import gpu_models
import recurrent
import retrograde as rg
import scans
from harness import RESULTS, ROOT, Row
from oracles import chained
from retrograde.kernels import LARGEST_SIZE
from retrograde.kernels.cells import GATES
from retrograde.machine import machine_of
from retrograde.recurrent.spans import scan_lengths, sequential_block
from retrograde_papers import networks
from retrograde_papers.limits import is_out_of_memory

# Seconds after which a section is stopped, in all less than ten minutes; it begins nothing new in
# the last tenth of them.
SECONDS = {
    "tests": 110, "drawn": 90, "budgets": 40, "grid": 50, "backward": 80, "networks": 130,
    "models": 90,
}  # fmt: skip

BUDGETS = [
    ("LSTM", 256, 64, 1000, "5%"),
    ("LSTM", 64, 16, 1000, "10%"),
    ("LSTM", 64, 16, 1000, "5%"),
    ("LSTM", 64, 256, 10_000, "1%"),
    ("GRU", 256, 64, 1000, "5%"),
    ("GRU", 64, 16, 1000, "10%"),
    ("GRU", 64, 16, 1000, "5%"),
    ("RNN", 64, 16, 1000, "20%"),
    ("RNN", 128, 128, 10_000, "1%"),
]
# Small rows of the CPU's grid, then what fills a card: from one to eighteen GiB.
GRID = [recurrent.GRID[number] for number in (0, 1, 8, 18)] + [
    recurrent.Work("LSTM", 64, 64, 256, 10_000),
    recurrent.Work("RNN", 128, 128, 128, 10_000),
    recurrent.Work("GRU", 128, 128, 128, 5_000),
    recurrent.Work("LSTM", 512, 512, 64, 2_000),
    recurrent.Work("LSTM", 1024, 1024, 32, 1_000),
]
SHARES = ("50%", "10%", "5%")
BACKWARD = [
    scans.Case(cell, length, 16 if length <= 10_000 else 1, 24, hidden)
    for length in (1000, 10_000, 100_000, 300_000)
    for hidden in (20, 64)
    for cell in ("RNN", "GRU", "LSTM")
]
# Wider than what a program can hold: one launch a step, in graphs of at most 32; no scan.
BACKWARD += [scans.Case(cell, 1000, 64, 256, 256) for cell in ("RNN", "GRU", "LSTM")]
GRAPH = 32
WAYS = ("torch", "100%", "scan")

NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    **chains.NETWORKS,
    "perceptron, 100 layers": (chained.perceptron, (4096, 512)),
    "pyramid": (chained.pyramid, (16_384, 2048)),
    "LeNet-5": (networks.lenet5, (2048, 3, 32, 32)),
    "ResNet-34": (networks.resnet34, (32, 3, 32, 32)),
    "30 convolutions": (chained.convolutions, (32, 3, 32, 32)),
    "transformer, 24 layers": (partial(chained.encoder, 24, 256, 0.0), (16, 128, 256)),
}


class Clock:
    """What is left of a section's time, and the rows that are ``done``."""

    def __init__(self, seconds: float, done: Collection[str] = ()) -> None:
        self.start, self.seconds, self.done = time.monotonic(), seconds, done

    def is_over(self, part: float = 1.0) -> bool:
        return time.monotonic() - self.start > part * self.seconds


LATE: Row = {"error": "not reached in time"}


def each(cases: Mapping[str, Any], measure: Callable[[Any], Row], clock: Clock) -> Iterator[Row]:
    """A row for each case by name that is not done, while there is time."""
    for name, case in cases.items():
        if name not in clock.done:
            yield {"name": name} | (LATE if clock.is_over() else told(partial(measure, case)))


def told(measure: Callable[[], Row]) -> Row:
    """A row, or why there is none; the error's first line is kept."""
    try:
        return measure()
    except Exception as error:
        name = "out of memory" if is_out_of_memory(error) else type(error).__name__
        return {"error": f"{name}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def budgets(device: str, quick: bool, clock: Clock) -> Iterator[Row]:
    """Requested, allocated and reserved bytes against the budget."""
    small = 8, 2, 200, "50%"
    named = {budget_name(*c): (c[0], *(small if quick else c[1:])) for c in BUDGETS}
    yield from each(named, lambda case: held(*case, device), clock)


def held(kind: str, hidden: int, batch: int, length: int, memory: str, device: str) -> Row:
    """One budgeted layer: by the measurement, and on a card by the allocator's own statistics."""
    torch.manual_seed(0)
    net = getattr(rg, kind)(hidden, hidden, memory=memory, device=device)
    x = torch.randn(length, batch, hidden, device=device, requires_grad=True)
    seed = torch.randn(length, batch, hidden, device=device)

    def call() -> list[Tensor]:
        y, state = net(x)
        y.backward(seed)
        return [y, *(state if isinstance(state, tuple) else (state,))]

    outputs = call()
    tensors = [x, *net.parameters()]
    handed = sum(t.nbytes for t in (*outputs, *(t.grad for t in tensors)))
    fit = net.fit(x)

    def forget() -> None:
        for t in tensors:
            t.grad = None

    forget()
    del outputs
    found = rg.measure(call, device=device).working_bytes
    forget()
    row = {
        "budget_bytes": fit.budget_bytes,
        "ordinary_bytes": fit.ordinary_bytes,
        "handed_bytes": handed,
        "working_bytes": found,
    }
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        call()
        after = torch.cuda.memory_stats()
        for key in ("requested", "allocated", "reserved"):
            first = before[f"{key}_bytes.all.current"]
            row[f"{key}_growth"] = after[f"{key}_bytes.all.peak"] - first
    return row


def grid(device: str, quick: bool, clock: Clock) -> Iterator[Row]:
    """Rows of the grid: times over torch's own."""

    def measure(work: recurrent.Work) -> Row:
        contest = recurrent.Contest(work, device, SHARES)
        held = {name: contest.bytes(name) for name in contest.runs}
        seconds = contest.seconds(3)
        return {
            "torch_ms": 1e3 * seconds["torch"],
            "ratios": {n: seconds[n] / seconds["torch"] for n in SHARES if n in seconds},
            "spans": {n: fit.calls for n, fit in contest.fits.items()},
            "over": [n for n, fit in contest.fits.items() if held[n] > fit.budget_bytes],
        }

    small = [recurrent.Work(work.kind, 4, 8, 2, 60) for work in GRID[:2]]
    named = zip(map(str, GRID), small if quick else GRID, strict=False)
    yield from each(dict(named), measure, clock)


def case_name(case: scans.Case) -> str:
    return f"{case.cell} {case.inputs}→{case.hidden}, B={case.batch}, T={case.length:,}"


def backward(device: str, quick: bool, clock: Clock) -> Iterator[Row]:
    """Seconds of the backward pass of each way, and the kernel that torch's spends most time in."""

    def measure(case: scans.Case) -> Row:
        small = scans.Case(case.cell, 60, 2, 3, 5) if quick else case
        ways = {way: way for way in (WAYS[:2] if case.hidden > LARGEST_SIZE else WAYS)}
        rows = each(ways, lambda way: one_way(small, way, device), Clock(clock.seconds))
        return {"ways": {row.pop("name"): row for row in rows}}

    cases = {case_name(case): case for case in (BACKWARD[:3] if quick else BACKWARD)}
    yield from each(cases, measure, clock)


def one_way(case: scans.Case, way: str, device: str) -> Row:
    """Medians of three passes; of torch's way also the name of its slowest kernel."""
    net = scans.modules(case, device)[way]
    x = torch.randn(case.length, case.batch, case.inputs, device=device)
    seed = torch.randn(case.length, case.batch, case.hidden, device=device)
    scans.passes(net, x, seed)
    seconds = [scans.passes(net, x, seed) for _ in range(3)]
    forward, back = (statistics.median(part) for part in zip(*seconds, strict=True))
    row: Row = {"forward_seconds": forward, "backward_seconds": back}
    if way == "torch" and case.length <= 10_000:
        row["kernel"] = slowest_kernel(net(x)[0], seed)
    return row


def slowest_kernel(y: Tensor, seed: Tensor) -> str:
    """What a backward pass spends most time in, which tells cuDNN's algorithm by its name."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = y.is_cuda
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as profiled:
        y.backward(seed)
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = profiled.key_averages()
    launched = [one for one in events if one.device_type.name == "CUDA"]  # not torch's operations
    name: str = max(launched or events, key=lambda event: getattr(event, key)).key
    return re.sub(r"[<(].*", "", name.removeprefix("void "))


def networks_of_layers(device: str, quick: bool, clock: Clock) -> Iterator[Row]:
    """Each chain within half and a quarter of its memory; torch.compile last, which takes long."""
    names = list(NETWORKS)[5:7] if quick else list(NETWORKS)
    rows = []
    for row in each({n: n for n in names}, lambda n: one_network(n, device, quick), clock):
        rows.append(row)
        yield row | {"compiled": LATE}
    for row in rows:
        if "error" not in row and not clock.is_over(0.75):  # one may take a minute
            row["compiled"] = told(partial(compiled, row["name"], device, quick))
            yield row


def models(device: str, quick: bool, clock: Clock) -> Iterator[Row]:
    """Whole models that call their layers themselves."""
    yield from each(
        {n: n for n in gpu_models.MODELS},
        lambda name: gpu_models.measured(name, device, quick),
        clock,
    )


def built(name: str, device: str, quick: bool) -> tuple[nn.Sequential, Tensor, Tensor]:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    plain = nn.Sequential(*make()).to(device)
    x = torch.randn(8 if quick else shape[0], *shape[1:], device=device)
    return plain, x, torch.randn_like(plain(x).detach())


def one_network(name: str, device: str, quick: bool) -> Row:
    plain, x, seed = built(name, device, quick)
    parameters = list(plain.parameters())
    segments = max(2, math.isqrt(len(plain)))
    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        "ordinary": plain,
        f"checkpoint {segments}": chains.checkpointed(plain, segments),
    }
    row: Row = {"refused": []}
    for share in ("50%", "25%"):
        ours = rg.Sequential(*plain, memory=share)
        try:
            row[f"budget {share}"] = ours.fit(x).budget_bytes
        except rg.BudgetError:
            row["refused"].append(share)
            continue
        contenders[share] = ours
    ways = {key: chains.Way(net, parameters, x, seed) for key, net in contenders.items()}
    row["bytes"] = {key: way.peak() for key, way in ways.items()}
    row["seconds"] = chains.middle(chains.in_turn(ways, 1 if quick else 5))
    return row


def compiled(name: str, device: str, quick: bool) -> Row:
    """torch.compile told to keep half of the activations; what it means by half is its own."""
    plain, x, seed = built(name, device, quick)
    fast = plain if quick else chains.compiled(plain, 0.5)
    way = chains.Way(fast, list(plain.parameters()), x, seed)
    return {"bytes": way.peak(), "seconds": statistics.median(way.seconds() for _ in range(5))}


def tests(device: str, quick: bool, clock: Clock) -> Iterator[Row]:
    """What pytest says in its last line."""
    if importlib.util.find_spec("pytest") is None:
        yield {"name": "pytest", "error": "pytest is not installed: the tests were not run"}
        return
    chosen = ["tests/kernels/test_cuda_limits.py", "-k", "stages"] if quick else ["-m", "gpu"]
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "--every", *workers, *chosen]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    last = run.stdout.strip().splitlines()[-1:] or [run.stderr[-200:]]
    yield {"name": "pytest", "result": last[0].strip("= "), "passed": run.returncode == 0}


def drawn(device: str, quick: bool, clock: Clock) -> Iterator[Row]:
    """What drawn models come to: none may be wrong, nor over its budget."""
    script = str(Path(__file__).parent / "drawn.py")
    models, processes = ("1", "1") if quick else ("40", "8")
    command = [sys.executable, script, "models", "--device", device, "--models", models]
    run = subprocess.run([*command, "--workers", processes], capture_output=True, text=True)
    counts = [line for line in run.stdout.splitlines() if "readings" in line] or [run.stderr[-200:]]
    bad = any(word in counts[0] for word in ("over", "wrong", "warned")) or run.returncode != 0
    told = [line for line in run.stdout.splitlines() if re.search("over|wrong|warned", line)]
    yield {"name": "drawn models", "result": counts[0], "passed": not bad, "bad": told[:20]}


SECTIONS: dict[str, Callable[[str, bool, Clock], Iterator[Row]]] = {
    "tests": tests,
    "drawn": drawn,
    "budgets": budgets,
    "grid": grid,
    "backward": backward,
    "networks": networks_of_layers,
    "models": models,
}
CHECKS = "tests", "drawn"  # sections that pass or fail


def expected() -> dict[str, list[Row]]:
    """What counting tells of each row, for a card: nothing here is measured."""
    return {section: expected_of(section) for section in SECTIONS if section not in CHECKS}


def expected_of(section: str) -> list[Row]:
    match section:
        case "budgets":
            return [
                {"name": budget_name(*case), "output_bytes": 4 * case[3] * case[2] * case[1]}
                for case in BUDGETS
            ]
        case "grid":
            return [{"name": str(work)} for work in GRID]
        case "backward":
            return [counted_backward(case) for case in BACKWARD]
        case "models":
            return [{"name": name} for name in gpu_models.MODELS]
    return [{"name": name} for name in NETWORKS]


def budget_name(kind: str, hidden: int, batch: int, length: int, memory: str) -> str:
    return f"{kind} {hidden}→{hidden}, B={batch}, T={length}, {memory}"


def counted_backward(case: scans.Case) -> Row:
    """The recurrence alone: launches, steps that wait for one another, FLOPs, bytes moved."""
    kind: Any = "RNN_TANH" if case.cell == "RNN" else case.cell
    gates, size, rows = GATES[kind], case.hidden, case.length * case.batch
    shape: Any = (case.batch, case.inputs, size, torch.float32, "cuda")
    swept = sequential_block(kind, *shape)
    scanned, chunk = scan_lengths(kind, case.length, *shape)
    state = size * (2 if gates == 4 else 1)
    whole, block = -(-case.length // scanned), min(case.length, scanned)
    row = {
        "name": case_name(case),
        "sequential_launches": -(-case.length // swept),
        "sequential_gflop": 2e-9 * rows * gates * size**2,
        "mib": 4 * rows * size * (2 * gates + (1 if gates == 1 else 4)) / 2**20,
    }
    if size > LARGEST_SIZE:
        block = min(case.length, swept)
        return row | {"sequential_launches": -(-case.length // block) * (2 + -(-block // GRAPH))}
    return row | {
        "scan_launches": 3 * whole,
        "scan_depth": whole * (2 * chunk + -(-block // chunk)),
        "scan_gflop": 2e-9 * rows * ((state + 1) * size**2 * (2 if gates == 4 else 1)
                                     + 2 * gates * size**2),
    }  # fmt: skip


def run_section(
    name: str, options: argparse.Namespace, done: list[str], keep: Callable[[Row], None]
) -> None:
    """A section in a process of its own: an error of the device, or a hang, ends there. ``keep``
    gets its rows, but for those that are ``done``."""
    command = [sys.executable, __file__, "--section", name, "--device", options.device]
    command += ["--quick"] if options.quick else []
    seconds = SECONDS[name] * (10 if options.quick else 1)
    print(f"{name} …", flush=True)
    # Without it torch's own products may have other bits each time.
    env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "DONE": json.dumps(done)}
    pipe: Any = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=env, **pipe) as run:
        stop = threading.Timer(seconds, os.killpg, (run.pid, signal.SIGKILL))  # and its children
        stop.start()
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("{"):
                keep(json.loads(line))
        ended = run.wait()
        stop.cancel()
    if ended:
        why = "stopped: its time was over" if ended == -signal.SIGKILL else f"ended with {ended}"
        passed = {"passed": False} if name in CHECKS else {}
        keep({"name": "the section", "error": why} | passed)


def commit() -> str:
    """The commit that is measured, by which rows are known."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--expected", action="store_true")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.section:
        clock = Clock(0.9 * SECONDS[options.section], json.loads(os.environ["DONE"]))
        for row in SECTIONS[options.section](options.device, options.quick, clock):
            print(json.dumps(row), flush=True)
        return 0
    if options.expected:
        document: Row = {"counted": True, "sections": expected()}
    else:
        if options.device == "cpu" and not options.quick:
            parser.error("on a CPU this only shows that it runs: use --quick --out FILE")
        document = {"machine": machine_of(options.device)}
    device = re.sub(r"\W+", "_", document.get("machine", {"device": "expected"})["device"]).lower()
    path = options.out or RESULTS / f"gpu_{device}.json"

    def write() -> None:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    if not options.expected:
        known = json.loads(path.read_text())["sections"] if path.exists() else {}
        document["sections"] = {n: known[n] for n in SECTIONS if n in known}
        at = commit()
        for section in options.sections:
            rows: dict[str, Row] = {row["name"]: row for row in known.get(section, [])}
            rows.pop("the section", None)

            def keep(row: Row, section: str = section, rows: dict[str, Row] = rows) -> None:
                if row.get("error") != LATE["error"] or row["name"] not in rows:
                    rows[row["name"]] = row | {"commit": at}
                document["sections"][section] = [*rows.values()]
                write()

            ours = {n: row for n, row in rows.items() if row.get("commit") == at}
            late = {n for n, row in ours.items() if LATE["error"] in json.dumps(row)}
            done = [n for n, row in ours.items() if "error" not in row and n not in late]
            run_section(section, options, done if options.resume else [], keep)
    write()
    print(f"written to {path}")
    if options.out is None:
        subprocess.run([sys.executable, ROOT / "benchmarks" / "render_numbers.py"], check=True)
    checked = [row for name in CHECKS for row in document["sections"].get(name, [])]
    return 0 if all(row.get("passed", True) for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
