"""Claim: cells of other libraries run within a budget, unchanged and exactly, at a known cost.

Each cell (``tests/oracles/third_party.py``) runs forward and backward by the plain loop, and by
``rg.unroll`` within fractions of its memory, in turn in one process. The table shows medians of
rounds relative to the plain loop, the first call's time, and the working bytes. It also shows
whether outputs and the inputs' gradients have the bits of the plain loop.

    pip install snntorch spikingjelly norse ncps torchdiffeq mambapy minGRU-pytorch dnc
    python benchmarks/other_people.py   # JSON into benchmarks/results/; what is absent is skipped
"""

import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alternating import medians, seconds

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import retrograde as rg
from oracles.third_party import CASES, INPUTS, Case, build
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
SHARES = ("50%", "10%", "5%")
BATCH, LENGTH, ROUNDS = 16, 200, 5


def iteration(case: Case, run: Callable[[], Tensor], x: Tensor) -> Callable[[], list[Tensor]]:
    """One pass forward and backward: the outputs and all gradients."""
    wanted = [x, *(p for p in case.module.parameters() if p.requires_grad)]

    def call() -> list[Tensor]:
        torch.manual_seed(1)
        y = run()
        found = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
        return [y.detach(), *(g for g in found if g is not None)]

    return call


def measured(name: str, case: Case) -> dict[str, Any]:
    """A row of the table."""
    x = torch.randn(LENGTH, BATCH, INPUTS, requires_grad=True)
    calls = {"plain": iteration(case, lambda: case.plain(x), x)}
    expected = calls["plain"]()
    loop = statistics.median(seconds(calls["plain"]) for _ in range(3))
    row: dict[str, Any] = {"cell": name, "plain_ms": round(1e3 * loop, 2), "refused": {}}
    first: dict[str, float] = {}
    for share in SHARES:
        call = iteration(case, lambda share=share: case.ours(x, memory=share), x)  # type: ignore[misc]
        try:
            first[share] = seconds(call)
        except rg.BudgetError as refusal:
            row["refused"][share] = refusal.minimum_bytes
            continue
        calls[share] = call
    taken = medians(calls, ROUNDS)
    row["ratios"] = {key: round(one / taken["plain"], 3) for key, one in taken.items()}
    row["first_ms"] = {share: round(1e3 * taken, 1) for share, taken in first.items()}
    row["bytes"] = {key: rg.measure(call).working_bytes for key, call in calls.items()}
    row["bitwise"] = all(
        torch.equal(a, b)
        for key, call in calls.items()
        for a, b in zip(call()[:2], expected[:2], strict=True)
        if key != "plain"
    )
    return row


def main() -> None:
    warnings.simplefilter("ignore")
    rows = []
    for name in CASES:
        case = build(name, BATCH)
        if case is None:
            print(f"{name:26} skipped: its library is not installed")
            continue
        row = measured(name, case)
        rows.append(row)
        told = "  ".join(
            f"{share}: {row['ratios'][share]:5.2f}× (first {row['first_ms'][share]:6.0f} ms)"
            if share in row["ratios"]
            else f"{share}: refused"
            for share in SHARES
        )
        bits = "the loop's bits" if row["bitwise"] else "NOT the loop's bits"
        print(f"{name:26} {row['plain_ms']:8.1f} ms  {told}  {bits}", flush=True)
    for share in SHARES:
        ratios = [row["ratios"][share] for row in rows if share in row["ratios"]]
        if ratios:
            print(f"{share:>4}: {len(ratios)} cells, worst {max(ratios):.2f}, "
                  f"geometric mean {statistics.geometric_mean(ratios):.2f}")  # fmt: skip
    path = RESULTS / "other_people_cpu.json"
    machine = machine_of(torch.device("cpu"))
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
