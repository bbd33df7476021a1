"""Claim: a cell's first call takes at most 3 plain loops and 0.3 s; a chain's, 3 iterations.

The first call of a chain with another batch size takes 1.5 iterations. A first call tries, measures
and plans. Each is timed with a new module, in turn with the plain loop, in one process; the table
shows medians of rounds. With a budget, every iteration of a chain takes longer than a plain one. So
the table shows a later call beside the first one.

    python benchmarks/first_call.py   # JSON into benchmarks/results/; two minutes
    pip install ncps                  # for its LTC cell; skipped where it is absent
"""

import json
import statistics
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from alternating import seconds
from resident import chain
from retrograde.machine import machine_of
from small_cells import Own, Spiking, plain

RESULTS = Path(__file__).parent / "results"
SHARES = ("50%", "10%", "5%")
ROUNDS = 5
BUDGET, BATCH, OTHER, SIZE = 200 << 20, 16, 12, 96


def gru() -> tuple[nn.Module, Tensor, Any]:
    return Own(nn.GRUCell(16, 32)), torch.randn(1600, 8, 16), torch.zeros(8, 32)


def spiking() -> tuple[nn.Module, Tensor, Any]:
    return Spiking(16, 64), torch.randn(400, 16, 16), (torch.zeros(16, 64), torch.zeros(16, 64))


def liquid() -> tuple[nn.Module, Tensor, Any]:
    from ncps.torch.ltc_cell import LTCCell
    from ncps.wirings import AutoNCP

    wiring = AutoNCP(32, 8)
    wiring.build(4)

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = LTCCell(wiring)

        def forward(self, x: Tensor, h: Tensor) -> Any:
            return self.cell(x, h, 1.0)

    return Cell(), torch.randn(300, 16, 4), torch.zeros(16, 32)


CELLS: dict[str, Callable[[], tuple[nn.Module, Tensor, Any]]] = {
    "GRUCell 32, B=8, T=1600": gru,
    "spiking 64, B=16, T=400": spiking,
    "LTC of ncps 32, B=16, T=300": liquid,
}


def of_cell(
    make: Callable[[], tuple[nn.Module, Tensor, Any]], share: str, rounds: int = ROUNDS
) -> dict[str, float]:
    """Seconds of the plain loop, and of the first and a later call."""
    found: dict[str, list[float]] = {"plain": [], "first": [], "later": []}
    for _ in range(rounds):
        cell, x, state = make()

        def loop(cell: nn.Module = cell, x: Tensor = x, state: Any = state) -> None:
            plain(cell, x, state).square().sum().backward()

        def ours(cell: nn.Module = cell, x: Tensor = x, state: Any = state) -> None:
            rg.unroll(cell, x, state, memory=share)[0].square().sum().backward()

        loop()
        found["plain"].append(seconds(loop))
        found["first"].append(seconds(ours))
        found["later"].append(seconds(ours))
    return {key: statistics.median(taken) for key, taken in found.items()}


def of_chain() -> dict[str, float]:
    """Seconds of a plain iteration, of first calls with two batch sizes, and of later ones."""
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        layers = chain()
        nets = {"plain": nn.Sequential(*layers), "ours": rg.Sequential(*layers, memory=BUDGET)}
        nets["plain"](torch.randn(BATCH, 3, SIZE, SIZE)).square().sum().backward()
        for batch in (BATCH, OTHER):
            x = torch.randn(batch, 3, SIZE, SIZE)
            for key, name in (("plain", "plain"), ("first", "ours"), ("later", "ours")):
                net = nets[name]
                net.zero_grad(set_to_none=True)
                taken = seconds(lambda net=net, x=x: net(x).square().sum().backward())  # type: ignore[misc]
                found.setdefault(f"{key} {batch}", []).append(taken)
    return {key: statistics.median(taken) for key, taken in found.items()}


def row_of(what: str, budget: str, allowed: float, found: dict[str, float]) -> dict[str, Any]:
    """A row of the table, printed."""
    plain, first, later = found["plain"], found["first"], found["later"]
    print(
        f"{what:40} {budget:>7}: plain {plain:.2f} s, first {first:.2f} s of {allowed:.2f} s "
        f"allowed ({first / plain:.2f} ×), later {later:.2f} s ({later / plain:.2f} ×)",
        flush=True,
    )
    return {"what": what, "budget": budget, "allowed": allowed, **found}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    rows: list[dict[str, Any]] = []
    for name, make in CELLS.items():
        if "ncps" in name and not find_spec("ncps"):
            print(f"{name}: skipped, ncps is not installed")
            continue
        for share in SHARES:
            found = of_cell(make, share)
            rows.append(row_of(name, share, 3 * found["plain"] + 0.3, found))
    found = of_chain()
    for batch, loops, which in ((BATCH, 3.0, "first"), (OTHER, 1.5, "second")):
        one = {key: found[f"{key} {batch}"] for key in ("plain", "first", "later")}
        name = f"chain of 74 layers, {which} batch size, {batch}"
        rows.append(row_of(name, "200 MiB", loops * one["plain"], one))
    document = {"machine": machine_of(torch.device("cpu")), "rows": rows}
    path = RESULTS / "first_call_cpu.json"
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
