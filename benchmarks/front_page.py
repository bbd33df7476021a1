"""Whole training iterations of the first pages: in torch, within a budget, and checkpointed.

python benchmarks/front_page.py iterations   # JSON into benchmarks/results/; three minutes
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from harness import Row, Run, Script, medians
from oracles.own_cells import MinimalGated, Own
from recurrent import SEGMENTS, in_segments

script = Script()


@dataclass(frozen=True)
class Network:
    """``plain``, ``ours`` and each of ``careful`` make the parts of the outputs of an iteration;
    ``fit`` tells what the budget counts. All parameters are those of the modules."""

    plain: Callable[[], list[Tensor]]
    ours: Callable[[], list[Tensor]]
    careful: dict[str, Callable[[], list[Tensor]]]
    fit: Callable[[], Any]
    modules: tuple[nn.Module, ...]

    def iteration(self, outputs: Callable[[], list[Tensor]]) -> Callable[[], None]:
        """Data, forward pass, loss, backward pass; gradients are forgotten at the end."""
        holds = outputs in self.careful.values()  # as loops over segments or layers do

        def run() -> None:
            parts = outputs()
            loss = loss_of(parts)
            if not holds:
                del parts
            loss.backward()
            for module in self.modules:
                module.zero_grad(set_to_none=True)

        return run


def loss_of(parts: list[Tensor]) -> Tensor:
    """The mean square of all outputs, in parts, whose temporaries are small on every side."""
    count = sum(y.numel() for y in parts)
    pieces = [piece for y in parts for piece in y.split(max(1, len(y) * len(parts) // 32))]
    return sum((piece.square().sum() / count for piece in pieces), start=torch.zeros(()))


def recurrent(
    kind: str, inputs: int, hidden: int, batch: int, steps: int, budget: str, **options: Any
) -> Network:
    """torch's recurrent module over data of the steps."""
    torch.manual_seed(0)
    theirs = getattr(nn, kind)(inputs, hidden, **options)
    mine = getattr(rg, kind)(inputs, hidden, memory=budget, **options)
    mine.load_state_dict(theirs.state_dict())
    data = partial(torch.randn, steps, batch, inputs)
    careful = {
        f"{n} segments": lambda n=n: in_segments(theirs, data(), None, n)
        for n in SEGMENTS
        if not options.get("bidirectional")
    }
    fit, modules = partial(mine.fit, data()), (theirs, mine)
    return Network(lambda: [theirs(data())[0]], lambda: [mine(data())[0]], careful, fit, modules)


def own_cell(
    inputs: int, size: int, batch: int, steps: int, budget: str, compile: bool = False
) -> Network:
    """A hand-written loop over a cell."""
    torch.manual_seed(0)
    cell, zeros = Own(MinimalGated(inputs, size)), torch.zeros(batch, size)
    data = partial(torch.randn, steps, batch, inputs)
    asked = {"memory": budget, "compile": compile}

    def loop(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for row in x:
            y, h = cell(row, h)
            outputs.append(y)
        return torch.stack(outputs), h

    careful = {f"{n} segments": lambda n=n: in_segments(loop, data(), zeros, n) for n in SEGMENTS}
    return Network(
        lambda: [loop(data(), zeros)[0]],
        lambda: [rg.unroll(cell, data(), zeros, **asked)[0]],
        careful,
        lambda: rg.fit(cell, data(), zeros, **asked),
        (cell,),
    )


def chain(budget: str) -> Network:
    """Twelve transformer layers."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True) for _ in range(12)]
    theirs, mine = nn.Sequential(*layers), rg.Sequential(*layers, memory=budget)
    data = partial(torch.randn, 16, 128, 256)

    def each() -> list[Tensor]:
        x = data()
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return [x]

    fit = lambda: mine.fit(data())  # noqa: E731
    careful = {"each layer": each}
    return Network(lambda: [theirs(data())], lambda: [mine(data())], careful, fit, (theirs,))


TWO = {"num_layers": 2}
NETWORKS: dict[str, tuple[str, Callable[[str], Network]]] = {
    "LSTM 256→256, B=64, T=1000": ("5%", partial(recurrent, "LSTM", 256, 256, 64, 1000)),
    "LSTM 64→64, B=16, T=1000": ("5%", partial(recurrent, "LSTM", 64, 64, 16, 1000)),
    "GRU 128→512, B=32, T=256": ("5%", partial(recurrent, "GRU", 128, 512, 32, 256)),
    "GRU 24→64, 2 layers, B=16, T=500": ("5%", partial(recurrent, "GRU", 24, 64, 16, 500, **TWO)),
    "LSTM 80→256, 2 layers, two directions, B=8, T=600": (
        "10%", partial(recurrent, "LSTM", 80, 256, 8, 600, bidirectional=True, **TWO)
    ),
    "own cell of 128, B=32, T=1000": ("5%", partial(own_cell, 16, 128, 32, 1000)),
    "own cell of 128, compiled, B=32, T=1000": (
        "5%", partial(own_cell, 16, 128, 32, 1000, compile=True)
    ),
    "12 transformer layers of 256, B=16, 128 tokens": ("20%", chain),
}  # fmt: skip


def measured(name: str, rounds: int) -> Row:
    """One row of the table: of checkpointing, the fastest way."""
    budget, make = NETWORKS[name]
    network = make(budget)
    ways = {"torch": network.plain, "ours": network.ours, **network.careful}
    calls = {way: network.iteration(outputs) for way, outputs in ways.items()}
    for call in calls.values():
        call(), call()
    found: Row = {k: {"total_bytes": rg.measure(call).peak_bytes} for k, call in calls.items()}
    for way, taken in medians(calls, rounds).items():
        found[way]["ms"] = round(1e3 * taken, 1)
    fit = network.fit()
    fastest = min(network.careful, key=lambda way: found[way]["ms"], default=None)
    return {
        "network": name,
        "budget": budget,
        "counted": {"torch": fit.ordinary_bytes, "ours": fit.budget_bytes},
        "torch": found["torch"],
        "ours": found["ours"],
        "checkpoint": None if fastest is None else {"way": fastest, **found[fastest]},
        "all": found,
    }


@script.table("front_page_cpu", rounds=5)
def iterations(run: Run) -> None:
    """Claim: the tables of README and the first page show whole iterations and the whole process.

    Each row is one training iteration: data, forward pass, loss, backward pass. It runs as torch
    runs it, within a budget, and with ``torch.utils.checkpoint`` used with care: around each layer,
    or over the fastest number of segments without a copy of the outputs. All take turns. *Total*
    bytes are everything that is alive at the peak except the weights. The budget's bytes are the
    working memory that it counts, without data, outputs and gradients that the caller keeps.
    """
    one = partial(measured, rounds=run.rounds)
    run.write(rows=run.rows(NETWORKS.keys(), one, "counted", "torch", "ours", "checkpoint"))


if __name__ == "__main__":
    script.main()
