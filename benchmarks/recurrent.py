"""Recurrent layers within a budget, beside torch's own and ``torch.utils.checkpoint``.

python benchmarks/recurrent.py grid                  # JSON into benchmarks/results/
python benchmarks/recurrent.py grid --machine avx2   # on a processor without AVX-512
python benchmarks/recurrent.py drawn --only packed   # such rows anew, the others as they were
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from harness import Run, Script, medians, summary

SHARES = ("100%", "50%", "20%", "10%", "5%", "1%")
SEGMENTS = (4, 8, 16, 32)
script = Script()


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


def in_segments(net: Callable[..., Any], x: Tensor, state: Any, count: int) -> list[Tensor]:
    """The outputs of checkpointed segments."""
    outputs = []
    for part in x.chunk(count):
        y, state = checkpoint(net, part, state, use_reentrant=False)
        outputs.append(y)
    return outputs


class Contest:
    """A workload's contenders, which compute the same gradient."""

    def __init__(self, work: Work, device: str = "cpu", shares: Sequence[str] = SHARES) -> None:
        torch.manual_seed(0)
        self.work, self.device = work, torch.device(device)
        self.options = {**work.options, "device": self.device}
        self.theirs = self._made(nn)
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
        self.least = self._least()
        if work.packed:
            self.runs["padded torch"] = lambda: self._call_padded(self.theirs)
        for share in shares:
            self._enter(share, share)

    def _made(self, of: Any, **asked: Any) -> Any:
        return getattr(of, self.work.kind)(
            self.work.inputs, self.work.hidden, **asked, **self.options
        )

    def _least(self) -> int:
        """The least budget, in bytes."""
        try:
            self._made(rg, memory=1).fit(self.x)
        except rg.BudgetError as error:
            return error.minimum_bytes
        return 1

    def _enter(self, name: str, memory: Any) -> None:
        work = self.work
        net = self._made(rg, memory=memory)
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
        outputs = in_segments(self.theirs, self.x, None, count)
        torch.autograd.backward(outputs, self.seed.split([len(y) for y in outputs]))
        return outputs

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
        return medians(self.runs, rounds, self.device, warm=1, after=self.forget)


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


@script.table("recurrent_grid_{machine}", rounds=5, machine="cpu")
def grid(run: Run) -> None:
    """Claim: a budget costs a recurrent layer little time, whatever its kind, size and options.

    Each workload runs forward and backward by torch's own module, and by ours within fractions of
    its memory. If it has one direction and no dropout, it also runs by ``torch.utils.checkpoint``
    over segments, whose outputs are backpropagated without a copy of the sequence; ours then gets
    the bytes of each number of segments too. All alternate in one process. Torch's module and ours
    also run packed batches as padded ones. Bytes are released again within the call.
    """
    tabled(run, GRID, segments=True)


def tabled(run: Run, works: Sequence[Work], *, segments: bool) -> None:
    """Measure workloads and write them."""
    one = partial(measured, rounds=run.rounds, segments=segments)
    rows = run.rows(works, one, "torch_ms", "least_share", "ratios", "over", "behind")
    run.write(rows=rows, summary=summary(rows, SHARES))


KINDS, DOUBLE = ("LSTM", "GRU", "RNN"), {"dtype": torch.float64}
SHORT = [(16, 64, 8, 1), (64, 256, 32, 4), (16, 64, 8, 16), (128, 256, 32, 20), (32, 64, 64, 40)]
SUMS = [(1, 8, 1, 4000), (8, 64, 8, 400), (16, 32, 32, 400), (8, 16, 64, 400)]
CORNERS = [
    *(Work(kind, *shape) for shape in SHORT for kind in KINDS),
    *(Work(kind, *shape, sums=True) for shape in SUMS for kind in KINDS),
    Work("LSTM", 256, 512, 16, 100, packed=True),
    Work("LSTM", 256, 600, 16, 60, DOUBLE),
    *(Work(kind, 64, 128, 16, 200, DOUBLE) for kind in KINDS),
]


@script.table("recurrent_corners_cpu", rounds=9)
def corners(run: Run) -> None:
    """Claim: where nobody measures, a budget costs little too.

    The workloads are corners that the grid does not have. Sequences have few steps. The loss is a
    sum, so that its gradient is one number for all outputs. Wide LSTMs are packed, or in double
    precision, where torch has no fast kernel. One sample has a few units.
    """
    tabled(run, CORNERS, segments=False)


# What torch takes stays within some seconds, and within some hundred MiB.
MOST_PRODUCTS, MOST_NUMBERS = 4e10, 1.5e8


def works_of(count: int, seed: int) -> list[Work]:
    """Workloads of drawn kinds, sizes and options; none takes torch more than some seconds."""
    draw, found = random.Random(seed), list[Work]()

    def size(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    while len(found) < count:
        kind, layers = draw.choice(["LSTM", "GRU", "RNN"]), draw.choice([1, 1, 2, 3])
        inputs, hidden, batch = size(1, 256), size(4, 512), size(1, 128)
        options: dict[str, Any] = {"num_layers": layers} if layers > 1 else {}
        if draw.random() < 0.25:
            options["bidirectional"] = True
        if layers > 1 and draw.random() < 0.3:
            options["dropout"] = 0.2
        if kind == "RNN" and draw.random() < 0.3:
            options["nonlinearity"] = "relu"
        length, packed = size(50, 5000), draw.random() < 0.25
        if not packed and len(found) % 2:  # the outputs' gradient then lies in memory by samples
            options["batch_first"] = True
        work = Work(kind, inputs, hidden, batch, length, options, packed)
        gates = {"LSTM": 4, "GRU": 3}.get(kind, 1) * layers * (1 + ("bidirectional" in options))
        numbers = gates * hidden * batch * work.length
        if numbers * max(inputs, hidden) < MOST_PRODUCTS and numbers < MOST_NUMBERS:
            found.append(work)
    return found


@script.table("recurrent_drawn_cpu", rounds=5, count=40, seed=0)
def drawn(run: Run) -> None:
    """Claim: what holds on the grid holds on workloads that nobody chose.

    Kinds, sizes, layers, directions, dropout, packing, batches of 1 to 128 and lengths of 50 to
    5,000 steps are drawn at random. Every second workload has the batch first, unless it is packed.
    """
    tabled(run, works_of(run.count, run.seed), segments=False)


if __name__ == "__main__":
    script.main()
