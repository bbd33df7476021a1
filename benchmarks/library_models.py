"""Claim: models of other libraries train within a budget, unchanged and exactly, at a known cost.

Each model (``tests/oracles/library_models.py``) makes training steps in several ways, in turn in
one process: unchanged, with one ``torch.utils.checkpoint`` around each block, and by ``rg.budget``.
The budgets are fractions of its memory, and its least. The table shows medians of rounds relative
to the unchanged model, and the working bytes of a step besides the parameters' gradients. It also
shows the cost of ``rg.budget`` itself, and whether all gradients have the same bits.

    pip install transformers timm torchvision
    python benchmarks/library_models.py         # JSON into benchmarks/results/; what is absent is
    python benchmarks/library_models.py U-Net   # skipped; some models anew, the others as they were
"""

import copy
import functools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from alternating import medians, seconds

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import retrograde as rg
from oracles.library_models import MODELS, Case, build
from retrograde.machine import machine_of, now

RESULTS = Path(__file__).parent / "results"
SHARES = ("65%", "50%", "30%", "20%", "10%")
ROUNDS = 7


def step(case: Case, model: nn.Module) -> Callable[[], list[Tensor]]:
    """One training step but for the optimizer's: the loss, and all gradients."""
    parameters = [*model.parameters()]

    def call() -> list[Tensor]:
        torch.manual_seed(1)
        loss = case.loss(model)
        loss.backward()
        found = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            p.grad = None
        return [loss.detach(), *found]

    return call


def checkpointed(case: Case) -> nn.Module:
    """The model with a checkpoint around each block."""
    model: nn.Module = copy.deepcopy(case.model)
    names = {id(module): name for name, module in case.model.named_modules()}
    for block in case.blocks:
        ours: Any = model.get_submodule(names[id(block)])
        ours.forward = functools.partial(checkpoint, ours.forward, use_reentrant=False)
    return model


def outside(case: Case, beside: int, elsewhere: int) -> int:
    """Bytes that a step holds beside what is budgeted: by the rest of the model, or for its loss,
    which holds the output and its gradient."""
    sample = case.sample
    with torch.no_grad():
        y = (
            case.model(**sample)
            if isinstance(sample, dict)
            else (case.model(*sample) if isinstance(sample, tuple) else case.model(sample))
        )
    output = sum(t.nbytes for t in pytree.tree_leaves(y) if isinstance(t, Tensor))
    return max(beside, elsewhere) + 2 * output


def measured(name: str, case: Case) -> dict[str, Any]:
    """A row of the table."""
    plain = step(case, case.model)
    expected = plain()
    calls = {"plain": plain}
    if case.blocks:
        calls["checkpoint"] = step(case, checkpointed(case))
    row: dict[str, Any] = {"model": name, "plain_ms": round(1e3 * seconds(plain), 1)}
    row |= {"refused": [], "budget_ms": {}}
    try:
        rg.budget(copy.deepcopy(case.model), 1, case.sample)
    except rg.BudgetError as refusal:
        least = refusal.minimum_bytes
    allowed = {}
    for share in (*SHARES, "least"):
        model = copy.deepcopy(case.model)
        try:
            start = now(torch.device("cpu"))
            division = rg.budget(model, least if share == "least" else share, case.sample)
            row["budget_ms"][share] = round(1e3 * (now(torch.device("cpu")) - start))
        except rg.BudgetError:
            row["refused"].append(share)
            continue
        row["ordinary"], row["least"] = division.ordinary_bytes, least
        row["elsewhere"] = division.elsewhere_bytes
        calls[share], allowed[share] = step(case, model), division.total_bytes
    row["bytes"] = {key: rg.measure(call).working_bytes for key, call in calls.items()}
    rest = outside(case, row["bytes"]["plain"] - row["ordinary"], row["elsewhere"])
    row["allowed"] = {key: size + rest for key, size in allowed.items()}
    row["bitwise"] = [
        key
        for key, call in calls.items()
        if all(torch.equal(a, b) for a, b in zip(call(), expected, strict=True))
    ]
    taken = medians(calls, ROUNDS)
    row["ratios"] = {key: round(one / taken["plain"], 3) for key, one in taken.items()}
    return row


def main() -> None:
    warnings.simplefilter("ignore")
    path, only = RESULTS / "library_models_cpu.json", sys.argv[1:]
    rows = []
    before = {row["model"]: row for row in json.loads(path.read_text())["rows"]} if only else {}
    for name in MODELS:
        if only and not any(part in name for part in only):
            rows += [before[name]] if name in before else []
            continue
        case = build(name, large=True)
        if case is None:
            print(f"{name:24} skipped: its library is not installed")
            continue
        row = measured(name, case)
        rows.append(row)
        print(f"{name} ({row['plain_ms']} ms, {row['bytes']['plain'] / 2**20:.0f} MiB)")
        for key, ratio in row["ratios"].items():
            size = row["bytes"][key] / row["bytes"]["plain"]
            bits = "same bits" if key in row["bitwise"] else "OTHER BITS"
            print(f"    {key:>10}: {size:6.1%} of the memory, {ratio:5.2f}× the time, {bits}")
        covered = row["ordinary"] / (row["ordinary"] + row["elsewhere"])
        print(
            f"    refused: {', '.join(row['refused']) or 'none'}; covered {covered:.0%}", flush=True
        )
    machine = machine_of(torch.device("cpu"))
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
