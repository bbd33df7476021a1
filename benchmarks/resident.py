"""What the process holds: of a chain by allocators, of a million steps, of the library itself; what
checks cost.

python benchmarks/resident.py chain           # JSON into benchmarks/results/
python benchmarks/resident.py million_steps --length 20000   # a quick look
apt-get install libjemalloc2 libtcmalloc-minimal4 libmimalloc2.0   # skipped where absent
"""

import ctypes
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes.util import find_library
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import retrograde as rg
from harness import Row, Run, Script, fresh, seconds
from oracles.chained import layers_of_74
from oracles.timed_programs import CHECKED, HIDDEN, SAMPLES, Task, write_inputs
from retrograde.machine import machine_of

script = Script()
BUDGET, SIZE, BATCH = 200 << 20, 96, 16
WARM, TIMED = 2, 6
_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
# How each allocator is chosen, by the environment; "preload" names a library.
ALLOCATORS: dict[str, dict[str, str]] = {
    "glibc": {},
    "glibc, large blocks mapped": _MAPPED,
    "glibc, large blocks mapped, huge pages": {**_MAPPED, "THP_MEM_ALLOC_ENABLE": "1"},
    "jemalloc": {"preload": "jemalloc"},
    "tcmalloc": {"preload": "tcmalloc_minimal"},
    "mimalloc": {"preload": "mimalloc"},
}


def status(field: str) -> int:
    """Bytes that Linux tells of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{field} is not told here: expected Linux")


def trained(budget: int | None) -> dict[str, Any]:
    """Seconds and resident growth of iterations in this process."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    layers = layers_of_74()
    net: nn.Module = (
        nn.Sequential(*layers) if budget is None else rg.Sequential(*layers, memory=budget)
    )
    for tiny in (nn.Sequential(*layers), rg.Sequential(*layers, memory="60%")):
        tiny(torch.randn(2, 3, 16, 16)).sum().backward()  # libraries and kernels are loaded
    x = torch.randn(BATCH, 3, SIZE, SIZE)

    def iteration() -> None:
        net(x).square().sum().backward()

    def timed() -> float:
        net.zero_grad(set_to_none=True)
        return seconds(iteration)

    before = status("VmRSS")
    first = timed()
    of_first = status("VmHWM") - before
    for _ in range(WARM - 1):
        timed()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    taken = [timed() for _ in range(TIMED)]
    return {
        "seconds": statistics.median(taken),
        "first_seconds": first,
        "resident_bytes": status("VmHWM") - before,
        "resident_bytes_of_first": of_first,
        "counted_bytes": rg.measure(timed).working_bytes,
    }


def by_allocator(name: str) -> Row | None:
    """Both sides in fresh processes with one allocator, if it is installed."""
    environment = ALLOCATORS[name]
    own = {key: value for key, value in environment.items() if key != "preload"}
    if "preload" in environment:
        own["LD_PRELOAD"] = str(find_library(environment["preload"]) or "")
        if not own["LD_PRELOAD"]:
            return None
    found = {way: fresh(trained, size, **own) for way, size in (("torch", None), ("ours", BUDGET))}
    return {"allocator": name, "environment": environment, **found}


@script.table("resident_cpu")
def chain(run: Run) -> None:
    """Claim: resident memory follows a budget if the C library returns or reuses freed memory.

    A chain of 74 layers is trained in fresh processes: as torch runs it, and within 200 MiB. Each
    process has one allocator: glibc's with its own settings or others, or a library that is
    preloaded. *Resident* is the peak growth of the resident set over iterations 3 to 8, from its
    size after tiny iterations of both kinds. Linux records the peak itself.
    """
    run.write(budget_bytes=BUDGET, rows=run.rows(ALLOCATORS.keys(), by_allocator, "torch", "ours"))


_LAYERS = "*(nn.Linear(32, 32), nn.Tanh()) * 4"
WEIGHED = {  # torch's own layer, and ours
    "LSTM 32": ("nn.LSTM(32, 32)", "rg.LSTM(32, 32, memory='20%')"),
    "chain of 8": (f"nn.Sequential({_LAYERS})", f"rg.Sequential({_LAYERS}, memory='70%')"),
}
_ALONE = """
import time, torch; from pathlib import Path; from torch import nn
start = time.perf_counter()
{load}
y = {layer}(torch.randn(100, 40, 32, requires_grad=True))
(y[0] if type(y) is tuple else y).sum().backward()
resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
print('{{"seconds": %f, "resident_bytes": %d}}' % (time.perf_counter() - start, resident))
"""


def weighed(name: str, rounds: int) -> Row:
    """Medians of processes that run one layer once, forward and back; a first one compiles."""
    row: Row = {"layer": name}
    for way, layer in zip(("torch", "ours"), WEIGHED[name], strict=True):
        code = _ALONE.format(load="import retrograde as rg" * (way == "ours"), layer=layer)
        told = (subprocess.check_output([sys.executable, "-c", code]) for _ in range(rounds + 1))
        runs = [json.loads(line) for line in told][1:]
        row[way] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return row


@script.table("weight_cpu", rounds=7)
def weight(run: Run) -> None:
    """Claim: the library itself takes little memory and time in a process that runs one layer.

    Processes import torch, and run a small layer once forward and back: torch's own, or ours, whose
    kernels were compiled before. The seconds begin after torch's import.
    """
    rows = run.rows(WEIGHED.keys(), partial(weighed, rounds=run.rounds), "torch", "ours")
    run.write(rows=rows)


def resident_bytes() -> int:
    """Return the resident bytes of this process, without the pages of mapped files.

    Swapped pages are included: a system short of memory swaps pages out, and a garbage collection
    brings them back.
    """
    return status("RssAnon:") + status("VmSwap:")


def trimmed_bytes() -> int:
    """Return the resident bytes after the C library has returned its free pages."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes()


def sampled(call: Callable[[], object]) -> tuple[object, float, int, int]:
    """Return a call's result, its seconds, and the growth of the resident set.

    The growth is given twice: at its most, and at the end, when free pages are returned.
    """
    stop, most = threading.Event(), [0]
    before = trimmed_bytes()

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], resident_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    value: list[object] = []
    try:
        taken = seconds(lambda: value.append(call()))
    finally:
        stop.set()
        watcher.join()
    return value[0], taken, most[0], trimmed_bytes() - before


def streamed(length: int, memory: str, exact: int, path: Path) -> dict[str, object]:
    """Return all results for one file."""
    task = Task(write_inputs(path, length))
    exact = min(exact, length)
    task.bptt(memory, min(3000, length - 1))  # what is loaded and compiled once
    plain, plain_seconds, plain_growth, _ = sampled(task.forward)
    (total, forward_steps), first_seconds, first_growth, _ = sampled(lambda: task.bptt(memory))
    first = [p.grad for p in task.parameters()]
    task.losses = 0
    _, seconds, growth, left = sampled(lambda: task.bptt(memory))
    losses = task.losses / length
    assert all(torch.equal(a, p.grad) for a, p in zip(first, task.parameters(), strict=True))
    task.bptt(memory, exact)
    task.clear()
    exact_bytes = rg.measure(lambda: task.bptt(memory, exact)).working_bytes
    return {
        "length": length,
        "hidden": HIDDEN,
        "batch": SAMPLES,
        "memory": memory,
        "input_bytes": task.x.nbytes,
        "loss": total,
        "loss_of_forward": plain,
        "forward_seconds": plain_seconds,
        "bptt_seconds": seconds,
        "bptt_first_call_seconds": first_seconds,
        "time_against_forward": seconds / plain_seconds,
        "forward_steps_per_step": forward_steps / length,
        "losses_per_step": losses,
        "exact_steps": exact,
        "exact_peak_bytes": exact_bytes,
        "resident_growth_bytes": growth,
        "resident_growth_bytes_after_trim": left,
        "resident_growth_bytes_of_first_call": first_growth,
        "resident_growth_bytes_of_forward": plain_growth,
    }


@script.table("million_steps_cpu", length=10**6, memory="4MiB", exact=20_000)
def million_steps(run: Run) -> None:
    """Claim: a million steps of an LSTM go back within 4 MiB, each step run under 3 times.

    An LSTM runs over 10⁶ steps of a memory-mapped file, and its loss predicts the next input: a
    plain forward pass, then ``retrograde.bptt``. The first call of that also measures and plans.
    The profiler keeps an event for each allocation, which is too many for 10⁶ steps. So the exact
    peak is measured on ``--exact`` steps within the same budget, where the schedule fills the same
    memory. At full length, the resident set is sampled instead, counted from its size after a
    warm-up. It also has the schedule, Python's objects, and free pages between others.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = streamed(run.length, run.memory, run.exact, Path(folder) / "x.npy")
    print(found)
    run.write({**machine_of("cpu"), "python": platform.python_version()}, results=found)


@contextmanager
def unchecked() -> Iterator[None]:
    """Patch fingerprints out in a block: everything has the same, at no cost."""
    from retrograde.models.rows import arguments, checks
    from retrograde.run import prints

    with ExitStack() as stack:
        for module in (arguments, checks, prints):
            # Not a Mock, whose call takes as long as a fingerprint.
            patch = mock.patch.multiple(module, fingerprint=lambda *_: 0, verify=lambda *_: None)
            stack.enter_context(patch)
        yield


@script.table("checks_cpu", rounds=25)
def checks(run: Run) -> None:
    """Claim: the checks of reruns cost some percent of an iteration, at most.

    Each iteration (forward and backward) is timed as it is, and with fingerprints patched out, in
    turn in one process. Without them nothing is hashed, noted or compared; all else is the same.
    """
    rows = run.old().get("rows", {})
    for name, make in CHECKED.items():
        if run.only in name:
            torch.manual_seed(0)
            rows[name] = both(make(), run.rounds)
            print(name, rows[name], flush=True)
    run.write(rounds=run.rounds, rows=rows)


def both(call: Callable[[], Any], rounds: int) -> Row:
    """An iteration with its checks and without, in turn."""
    call(), call()
    checked, plain = [], []
    for _ in range(rounds):
        checked.append(seconds(call))
        with unchecked():
            plain.append(seconds(call))
    return {
        "seconds": statistics.median(checked),
        "seconds_unchecked": statistics.median(plain),
        "ratio": statistics.median(a / b for a, b in zip(checked, plain, strict=True)),
    }


if __name__ == "__main__":
    script.main()
