"""Claim: recurrent networks train within 5 % of ordinary BPTT's memory at about its time.

Several ways to the same gradient alternate in one process. These are torch's own module (or the
plain loop over a cell), ours at each budget, and √T segments by ``torch.utils.checkpoint``. A timed
call is forward and backward with a ready-made output gradient; gradients of inputs and parameters
are included. Bytes are working bytes, which are released again within the call.

On a virtual machine, the speed of two cores can differ from process to process. So several
processes measure everything, and the table shows the median process, with the range.

    python benchmarks/recurrent_budget.py                # every case; JSON into benchmarks/results/
    python benchmarks/recurrent_budget.py --device cuda
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.machine import machine_of, now

RESULTS = Path(__file__).parent / "results"
ORDINARY = "ordinary"


@dataclass(frozen=True)
class Case:
    """One size of network, and the budgets to run it at."""

    network: str
    hidden: int
    batch: int
    budgets: tuple[str, ...] = ("5%",)
    length: int = 1000

    def __str__(self) -> str:
        return f"{self.network} {self.hidden}→{self.hidden}, B={self.batch}, T={self.length}"


CASES = [
    Case("LSTM", 256, 64, ("5%", "1%")),
    Case("LSTM", 64, 16, ("5%", "1%")),
    Case("LSTM", 64, 1),
    Case("GRU", 256, 64),
    Case("GRU", 64, 16, ("5%", "1%")),
    Case("RNN", 64, 16, ("5%", "2%")),
    Case("LSTMCell", 128, 16),
]


class Looped(torch.nn.Module):
    """An LSTM's cell, step by step: by the plain loop, or within a budget."""

    def __init__(self, inputs: int, size: int, memory: str | None = None, **options: Any) -> None:
        super().__init__()
        self.cell, self.memory = torch.nn.LSTMCell(inputs, size, **options), memory

    def step(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        """A step, as ``rg.unroll`` wants it."""
        h, c = self.cell(x, state)
        return h, (h, c)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """All steps."""
        if state is None:
            state = (x.new_zeros(x.shape[1], self.cell.hidden_size),) * 2
        if self.memory is not None:
            return rg.unroll(self.step, x, state, memory=self.memory)
        outputs = []
        for x_t in x.unbind():
            y, state = self.step(x_t, state)
            outputs.append(y)
        return torch.stack(outputs), state


def ways(case: Case, device: str) -> tuple[dict[str, Callable[[], Tensor]], list[Tensor]]:
    """The competitors, each with its own gradients, and the tensors whose gradients to clear."""
    torch.manual_seed(0)
    size = case.hidden
    x = torch.randn(case.length, case.batch, size, device=device, requires_grad=True)
    seed = torch.randn(case.length, case.batch, size, device=device)
    looped = case.network == "LSTMCell"
    theirs = Looped if looped else getattr(torch.nn, case.network)
    ours = Looped if looped else getattr(rg, case.network)
    ordinary = theirs(size, size, device=device)
    found: dict[str, Callable[[], Tensor]] = {}
    tensors: list[Tensor] = [x, *ordinary.parameters()]

    def add(name: str, run: Callable[[Tensor], Tensor]) -> None:
        def call() -> Tensor:
            for t in tensors:
                t.grad = None
            y = run(x)
            y.backward(seed)
            return y

        found[name] = call

    add(ORDINARY, lambda x: ordinary(x)[0])
    for budget in case.budgets:
        net = ours(size, size, memory=budget, device=device)
        net.load_state_dict(ordinary.state_dict())
        tensors += net.parameters()
        add(f"retrograde {budget}", lambda x, net=net: net(x)[0])
    segment = math.isqrt(case.length - 1) + 1

    def segments(x: Tensor) -> Tensor:
        outputs, state = [], None
        for piece in x.split(segment):
            y, state = checkpoint(ordinary, piece, state, use_reentrant=False)
            outputs.append(y)
        return torch.cat(outputs)

    add("checkpoint √T", segments)
    return found, tensors


def run(case: Case, device: str, rounds: int) -> dict[str, object]:
    """Bytes once each, then seconds in alternation; medians and ratios."""
    calls, tensors = ways(case, device)
    sizes = {}
    for name, call in calls.items():
        call()
        for t in tensors:
            t.grad = None
        sizes[name] = rg.measure(call, device=device).working_bytes
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = now(torch.device(device))
            call()
            seconds[name].append(now(torch.device(device)) - start)
    ordinary = statistics.median(seconds[ORDINARY])
    rows = {
        name: {
            "seconds": statistics.median(s),
            "seconds_least": min(s),
            "seconds_most": max(s),
            "time_against_ordinary": statistics.median(s) / ordinary,
            "working_bytes": sizes[name],
            "bytes_against_ordinary": sizes[name] / sizes[ORDINARY],
        }
        for name, s in seconds.items()
    }
    return {"case": asdict(case), "rounds": rounds, "ways": rows}


def main() -> None:
    """Run every case, print a table each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inner:
        print(json.dumps([run(case, arguments.device, arguments.rounds) for case in CASES]))
        return
    machine = {
        **machine_of(arguments.device),
        "python": platform.python_version(),
    }
    command = [sys.executable, __file__, "--inner", "--device", arguments.device]
    command += ["--rounds", str(arguments.rounds)]
    outputs = [subprocess.check_output(command) for _ in range(arguments.processes)]
    found = [median_process(results) for results in zip(*map(json.loads, outputs), strict=True)]
    for result in found:
        show(result)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"recurrent_budget_{arguments.device}.json"
    path.write_text(json.dumps({"machine": machine, "results": found}, indent=1) + "\n")
    print(f"written to {path}")


def median_process(results: Sequence[dict]) -> dict:
    """For each way the process of median ratio, with the ratios of all."""
    ways = {}
    for name in results[0]["ways"]:
        rows = sorted(
            (result["ways"][name] for result in results),
            key=lambda row: row["time_against_ordinary"],
        )
        ratios = [round(row["time_against_ordinary"], 3) for row in rows]
        ways[name] = rows[len(rows) // 2] | {"ratios_of_processes": ratios}
    return {"case": results[0]["case"], "rounds": results[0]["rounds"], "ways": ways}


def show(result: dict) -> None:
    """One case as a table."""
    print(Case(**result["case"]))
    for name, row in result["ways"].items():
        print(
            f"  {name:<16} {row['seconds'] * 1e3:8.1f} ms ({row['time_against_ordinary']:.2f}×, "
            f"{row['ratios_of_processes'][0]:.2f}–{row['ratios_of_processes'][-1]:.2f})  "
            f"{row['working_bytes'] / 2**20:8.1f} MiB ({row['bytes_against_ordinary']:.1%})"
        )


if __name__ == "__main__":
    main()
