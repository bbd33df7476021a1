"""Claim: a budget costs a recurrent layer little time, whatever its kind, size and options.

Each workload of a grid runs forward and backward by torch's own module, and by ours within
fractions of its memory. If it has one direction and no dropout, it also runs by
``torch.utils.checkpoint`` over segments. Their outputs are backpropagated segment by segment,
without a copy of the sequence. Ours then gets the bytes of each number of segments too.

All alternate in one process. The table shows medians of rounds, and for every column the worst row
and the geometric mean. Torch's module and ours also run packed batches as padded ones.

Bytes are working bytes, which are released again within the call. The table also shows the least
time of one additional forward pass: (3 + 1) / 3, all at the rate of torch's own pass.

    python benchmarks/recurrent_grid.py            # JSON into benchmarks/results/, or for a
    python benchmarks/recurrent_grid.py --machine avx2   # processor without AVX-512
    python benchmarks/recurrent_grid.py --only 3   # one workload; nothing is written
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.machine import machine_of, now

RESULTS = Path(__file__).parent / "results"
SHARES = ("100%", "50%", "20%", "10%", "5%", "1%")
SEGMENTS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Work:
    """One workload: inputs → hidden, and a batch."""

    kind: str
    inputs: int
    hidden: int
    batch: int
    length: int
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    sums: bool = False  # whether the loss is the sum of the outputs

    def __str__(self) -> str:
        told = f"{self.kind} {self.inputs}→{self.hidden}, B={self.batch}, T={self.length}"
        names = {
            "num_layers": "layers",
            "bidirectional": "two directions",
            "dropout": "dropout",
            "batch_first": "batch first",
        }
        for name, value in self.options.items():
            told += f", {names.get(name, name)}" + ("" if value is True else f" {value}")
        return told + ", packed" * self.packed + ", of a sum" * self.sums


TWO, THREE = {"num_layers": 2}, {"num_layers": 3}
BOTH, DROPS = {"bidirectional": True}, {"dropout": 0.2}
GRID = [
    Work("LSTM", 256, 256, 64, 300),
    Work("LSTM", 128, 512, 32, 256),
    Work("LSTM", 128, 512, 32, 128, TWO | DROPS),
    Work("LSTM", 80, 256, 8, 600, TWO),
    Work("LSTM", 80, 256, 8, 600, TWO | BOTH),
    Work("LSTM", 40, 128, 16, 500),
    Work("LSTM", 40, 128, 16, 900, packed=True),
    Work("LSTM", 32, 32, 4, 1000),
    Work("LSTM", 64, 64, 16, 1000),
    Work("LSTM", 64, 64, 1, 4000),
    Work("LSTM", 32, 64, 64, 100),
    Work("LSTM", 128, 128, 32, 200, THREE | DROPS),
    Work("LSTM", 40, 128, 16, 500, BOTH),
    Work("LSTM", 256, 512, 8, 100),
    Work("LSTM", 32, 64, 16, 400, TWO | BOTH, packed=True),
    Work("GRU", 128, 512, 32, 256),
    Work("GRU", 24, 64, 16, 500, TWO),
    Work("GRU", 64, 256, 1, 1000),
    Work("GRU", 64, 64, 16, 1000),
    Work("GRU", 128, 128, 32, 300, THREE | DROPS),
    Work("GRU", 80, 256, 8, 400, BOTH),
    Work("GRU", 40, 128, 16, 900, packed=True),
    Work("GRU", 32, 32, 1, 4000),
    Work("GRU", 64, 512, 4, 200),
    Work("GRU", 256, 256, 64, 200),
    Work("RNN", 32, 128, 16, 500),
    Work("RNN", 32, 64, 16, 500, THREE),
    Work("RNN", 64, 512, 16, 300),
    Work("RNN", 32, 32, 4, 2000),
    Work("RNN", 40, 128, 16, 400, BOTH),
    Work("RNN", 40, 128, 16, 900, packed=True),
    Work("RNN", 64, 64, 32, 500, {"nonlinearity": "relu"}),
]


class Contest:
    """A workload's contenders, which compute the same gradient."""

    def __init__(self, work: Work, device: str = "cpu", shares: Sequence[str] = SHARES) -> None:
        torch.manual_seed(0)
        self.work, self.device = work, torch.device(device)
        self.options = {**work.options, "device": self.device}
        self.theirs = getattr(torch.nn, work.kind)(work.inputs, work.hidden, **self.options)
        shape = [work.length, work.batch]
        if work.options.get("batch_first"):
            shape.reverse()
        x: Any = torch.randn(
            *shape, work.inputs, device=self.device, dtype=work.options.get("dtype")
        )
        self.padded: Any = x.clone().requires_grad_() if work.packed else None
        if work.packed:
            lengths = torch.linspace(work.length, work.length / 4, work.batch).long()
            x = pack_padded_sequence(x, lengths)
            x = PackedSequence(x.data.requires_grad_(), x.batch_sizes)
        else:
            x.requires_grad_()
        self.x = x
        self.leaf: Tensor = x.data if work.packed else x
        y = self.theirs(x)[0]
        y = y.data if work.packed else y
        self.seed = y.new_ones(()).expand_as(y) if work.sums else torch.randn_like(y)
        if work.packed:
            self.padded_seed = torch.randn_like(self.theirs(self.padded)[0])
        self.runs: dict[str, Callable[[], object]] = {"torch": lambda: self._call(self.theirs)}
        self.fits: dict[str, Any] = {}
        self.nets = [self.theirs]
        self.least = self._budgeted(1)
        if work.packed:
            self.runs["padded torch"] = lambda: self._call_padded(self.theirs)
        for share in shares:
            self._enter(share, share)

    def _budgeted(self, memory: Any) -> int:
        """The least budget, in bytes."""
        net = getattr(rg, self.work.kind)(
            self.work.inputs, self.work.hidden, memory=memory, **self.options
        )
        try:
            net.fit(self.x)
        except rg.BudgetError as error:
            return error.minimum_bytes
        return 1

    def _enter(self, name: str, memory: Any) -> None:
        work = self.work
        net = getattr(rg, work.kind)(work.inputs, work.hidden, memory=memory, **self.options)
        net.load_state_dict(self.theirs.state_dict())
        try:
            self.fits[name] = net.fit(self.x)
        except rg.BudgetError:
            return
        self.nets.append(net)
        self.runs[name] = lambda: self._call(net)
        if work.packed:  # the same sequences, padded, in the same share of what that takes
            self.runs[f"padded {name}"] = lambda: self._call_padded(net)

    def _call(self, net: torch.nn.Module) -> object:
        y, state = net(self.x)
        (y.data if self.work.packed else y).backward(self.seed)
        return y, state

    def _call_padded(self, net: torch.nn.Module) -> object:
        y, state = net(self.padded)
        y.backward(self.padded_seed)
        return y, state

    def add_segments(self) -> None:
        """Enter ``torch.utils.checkpoint``, and ours in its bytes."""
        work = self.work
        if work.packed or {"bidirectional", "dropout", "batch_first"} & work.options.keys():
            return
        for count in SEGMENTS:
            self.runs[f"checkpoint {count}"] = lambda count=count: self._segmented(count)
            taken = self.bytes(f"checkpoint {count}")
            self._enter(f"as checkpoint {count}", taken)

    def _segmented(self, count: int) -> object:
        outputs, state = [], None
        for part in self.x.chunk(count):
            y, state = checkpoint(self.theirs, part, state, use_reentrant=False)
            outputs.append(y)
        torch.autograd.backward(outputs, self.seed.split([len(y) for y in outputs]))
        return outputs, state

    def forget(self) -> None:
        """Drop the gradients."""
        self.leaf.grad = None
        if self.work.packed:
            self.padded.grad = None
        for net in self.nets:
            net.zero_grad(set_to_none=True)

    def bytes(self, name: str) -> int:
        """Working bytes of a contender."""
        self.runs[name]()
        self.forget()
        found = rg.measure(self.runs[name], device=self.device).working_bytes
        self.forget()
        return found

    def seconds(self, rounds: int) -> dict[str, float]:
        """Medians, of contenders that take turns."""
        times: dict[str, list[float]] = {name: [] for name in self.runs}
        for number in range(rounds + 1):
            for name, run in self.runs.items():
                start = now(self.device)
                run()
                if number:
                    times[name].append(now(self.device) - start)
                self.forget()
        return {name: statistics.median(found) for name, found in times.items()}


def measured(work: Work, rounds: int, *, segments: bool = True) -> dict[str, Any]:
    """One row."""
    contest = Contest(work)
    if segments:
        contest.add_segments()
    taken = {name: contest.bytes(name) for name in contest.runs}
    seconds = contest.seconds(rounds)
    row = {
        "work": str(work),
        "torch_ms": round(seconds["torch"] * 1e3, 2),
        "torch_bytes": taken["torch"],
        "least_share": round(contest.least / taken["torch"], 5),
        "ratios": {name: round(t / seconds["torch"], 3) for name, t in seconds.items()},
        "bytes": taken,
        "budgets": {name: fit.budget_bytes for name, fit in contest.fits.items()},
    }
    row["over"] = [name for name, size in row["budgets"].items() if taken[name] > size]
    row["behind"] = [
        count
        for count in SEGMENTS
        if row["ratios"].get(f"as checkpoint {count}", 0)
        > row["ratios"].get(f"checkpoint {count}", 9)
    ]
    if work.packed:
        row["behind_padded"] = [
            share
            for share in SHARES
            if row["ratios"].get(share, 0) > row["ratios"].get(f"padded {share}", 9)
        ]
    return row


def show(row: dict[str, Any]) -> None:
    """One row, in a line."""
    ratios = row["ratios"]
    shares = "  ".join(f"{ratios[s]:5.2f}" if s in ratios else "    –" for s in SHARES)
    pairs = [
        (count, ratios[f"checkpoint {count}"], ratios.get(f"as checkpoint {count}", 0.0))
        for count in SEGMENTS
        if f"checkpoint {count}" in ratios
    ]
    told = "  ".join(f"{count}: {theirs:.2f}/{ours:.2f}" for count, theirs, ours in pairs)
    if "padded torch" in ratios:
        padded = "  ".join(f"{ratios.get(f'padded {s}', 0.0):.2f}" for s in ("torch", *SHARES))
        told += f"padded: {padded}"
    over = f"  OVER {row['over']}" if row["over"] else ""
    print(
        f"{row['work']:<58}{row['torch_ms']:8.1f} ms  {shares}  "
        f"least {row['least_share']:6.2%}  {told}{over}",
        flush=True,
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every share, the worst row and the geometric mean."""
    found = {}
    for share in SHARES:
        ratios = {r["work"]: r["ratios"][share] for r in rows if share in r["ratios"]}
        if not ratios:
            continue
        worst = max(ratios, key=lambda name: ratios[name])
        found[share] = {
            "rows": len(ratios),
            "worst": ratios[worst],
            "whose": worst,
            "mean": round(statistics.geometric_mean(ratios.values()), 3),
        }
    return found


def main() -> None:
    """Run the grid, print it, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of workloads")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", default="cpu", help="cpu or avx2: which JSON to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = GRID if options.only is None else [GRID[number] for number in options.only]
    rows = []
    for work in chosen:
        rows.append(measured(work, options.rounds))
        show(rows[-1])
    found = summary(rows)
    for share, told in found.items():
        print(
            f"{share:>5}: {told['rows']} rows, worst {told['worst']:.2f} ({told['whose']}), "
            f"geometric mean {told['mean']:.2f}"
        )
    behind = [f"{row['work']} ({count} segments)" for row in rows for count in row["behind"]]
    print(f"behind torch.utils.checkpoint at its bytes: {len(behind)}: {'; '.join(behind)}")
    if options.only is None:
        document = {"machine": machine_of("cpu"), "rows": rows, "summary": found}
        path = RESULTS / f"recurrent_grid_{options.machine}.json"
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
