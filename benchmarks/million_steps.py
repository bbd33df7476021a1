"""Claim: a million steps of an LSTM are backpropagated within 4 MiB, each step run under 3 times.

An LSTM 64→64 at batch 4 runs over 10⁶ steps of a memory-mapped file, and its loss predicts the next
input. One process runs two things in sequence. The first is a plain forward pass without gradients,
in blocks, over the same file with the same loss. The second is ``retrograde.bptt`` within the
budget. The results are:

- the seconds of both. The first call of ``bptt`` also measures and plans, the second does not;
- forward steps a step, counted from the progress that ``bptt`` reports, and how often the loss of a
  step was computed;
- bytes, as follows.

The profiler follows every allocation and keeps an event for each, which is too many for 10⁶ steps.
So the exact peak is measured on ``--exact`` steps within the same budget, where the schedule fills
the same memory. At full length, the resident set of the process is sampled instead. It is counted
from its size after a warm-up of some thousand steps, when the C library has returned its free
pages.

The resident set also includes memory that torch's allocators do not provide: the schedule, Python's
objects, and free pages between others. In the first call it includes the planning. It does not
include pages of the file.

    python benchmarks/million_steps.py                  # JSON into benchmarks/results/
    python benchmarks/million_steps.py --length 20000   # a quick look
"""

import argparse
import ctypes
import gc
import json
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.machine import machine_of
from retrograde.units import format_bytes

RESULTS = Path(__file__).parent / "results"
HIDDEN, BATCH, BLOCK = 64, 4, 256


def write_inputs(path: Path, length: int) -> np.memmap:
    """A file of ``length`` steps: slow waves with noise, written in pieces."""
    x = np.lib.format.open_memmap(path, "w+", np.float32, (length, BATCH, HIDDEN))
    rng = np.random.default_rng(0)
    speeds = rng.uniform(0.001, 0.1, (BATCH, HIDDEN))
    for start in range(0, length, 10_000):
        t = np.arange(start, min(start + 10_000, length))[:, None, None]
        noise = rng.standard_normal((len(t), BATCH, HIDDEN))
        x[start : start + len(t)] = np.sin(t * speeds) + 0.1 * noise
    x.flush()
    return np.load(path, mmap_mode="r")


class Task:
    """An LSTM that predicts the next input of a file."""

    def __init__(self, x: np.memmap) -> None:
        torch.manual_seed(0)
        self.x, self.lstm, self.head = x, nn.LSTM(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.losses = 0

    def loss(self, steps: range, y: Tensor) -> Tensor:
        """The squared error of a range, its inputs being read one step ahead."""
        self.losses += len(steps)
        target = torch.empty(y.shape)
        ahead = self.x[steps.start + 1 : steps.stop + 1]
        target.numpy()[: len(ahead)] = ahead
        target.numpy()[len(ahead) :] = self.x[-1]
        return (self.head(y) - target).square().sum() / len(self.x)

    def forward(self) -> float:
        """The loss of a plain forward pass, in blocks."""
        total, state = 0.0, None
        with torch.no_grad():
            for start in range(0, len(self.x), BLOCK):
                stop = min(start + BLOCK, len(self.x))
                y, state = self.lstm(torch.from_numpy(np.array(self.x[start:stop])), state)
                total += self.loss(range(start, stop), y).item()
        return total

    def parameters(self) -> list[Tensor]:
        """All that is trained."""
        return [*self.lstm.parameters(), *self.head.parameters()]

    def clear(self) -> None:
        """Forget the gradients."""
        for p in self.parameters():
            p.grad = None

    def bptt(self, memory: str, length: int | None = None) -> tuple[float, int]:
        """Ours: the loss, and the forward steps that were run."""
        self.clear()
        work = [0]

        def progress(done: int, all_: int) -> None:
            work[0] = done

        total, _ = rg.bptt(
            self.lstm, self.x, loss=self.loss, memory=memory, length=length, progress=progress
        )
        return float(total), work[0] - (length or len(self.x))


def resident_bytes() -> int:
    """Return the resident bytes of this process, without the pages of mapped files.

    Swapped pages are included: a system short of memory swaps pages out, and a garbage collection
    brings them back.
    """
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    found = [int(line[1]) for line in lines if line[0] in ("RssAnon:", "VmSwap:")]
    if not found:
        raise RuntimeError("no RssAnon in /proc/self/status: this benchmark runs on Linux")
    return sum(found) * 1024


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
    start = time.perf_counter()
    try:
        value = call()
    finally:
        seconds = time.perf_counter() - start
        stop.set()
        watcher.join()
    return value, seconds, most[0], trimmed_bytes() - before


def run(length: int, memory: str, exact: int, path: Path) -> dict[str, object]:
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
        "batch": BATCH,
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


def main() -> None:
    """Run, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=10**6)
    parser.add_argument("--memory", default="4MiB")
    parser.add_argument("--exact", type=int, default=20_000, help="steps to follow every byte of")
    arguments = parser.parse_args()
    machine = {**machine_of("cpu"), "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as folder:
        found = run(arguments.length, arguments.memory, arguments.exact, Path(folder) / "x.npy")
    print(
        f"LSTM {HIDDEN}→{HIDDEN}, B={BATCH}, T={arguments.length}, within {arguments.memory}\n"
        f"  forward only  {found['forward_seconds']:8.1f} s\n"
        f"  bptt          {found['bptt_seconds']:8.1f} s ({found['time_against_forward']:.2f}×; "
        f"first call {found['bptt_first_call_seconds']:.1f} s)\n"
        f"  forward steps a step {found['forward_steps_per_step']:.3f}\n"
        f"  peak of {found['exact_steps']} steps {format_bytes(found['exact_peak_bytes'])}; "
        f"resident set grew by {format_bytes(found['resident_growth_bytes'])} "
        f"({format_bytes(found['resident_growth_bytes_of_first_call'])} with planning), "
        f"and by {found['resident_growth_bytes_after_trim'] / 2**20:.1f} MiB in the end, once the "
        "C library's free pages are given back"
    )
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "million_steps_cpu.json"
    path.write_text(json.dumps({"machine": machine, "results": found}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
