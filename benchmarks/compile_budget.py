"""Claim: torch.compile's activation budget is a wish, and with dropout it changes the gradient.

A compiled nn.TransformerEncoder trains under ``torch._functorch.config.activation_memory_budget``,
without and with dropout. ``rg.budget`` gets the same share on the same model, not compiled. Each
row is a process of its own, with no compile cache. A row has working bytes and the time beside
the model as it is, in turn. It has the largest relative difference of a gradient from that of
the same compiled model at a budget of 1 (ours: from the model as it is), and that of the outputs.
The number of tensors that the compiled graph saves shows whether the setting was taken.

    python benchmarks/compile_budget.py   # JSON into benchmarks/results/; needs a C++ compiler
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config

import retrograde as rg
from alternating import medians
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
SHARES = (1.0, 0.7, 0.5, 0.3, 0.1)
DROPOUTS = (0.0, 0.1)
LAYERS, WIDTH, SAMPLES, TOKENS = 6, 192, 4, 128
ROUNDS = 9

Step = Callable[[], list[Tensor]]


def model_and_input(dropout: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 4 * WIDTH, dropout, "gelu", batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return model, torch.randn(SAMPLES, TOKENS, WIDTH)


def step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Step:
    """A training step: the outputs, and the gradients of all parameters."""

    def call() -> list[Tensor]:
        torch.manual_seed(1)
        y = run(x)
        y.square().mean().backward()
        found = [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found

    return call


def measured(share: float, dropout: float, folder: Path) -> dict[str, Any]:
    """One row; the compiled model's gradients at 1 are in ``folder``."""
    model, x = model_and_input(dropout)
    plain, ours = step(model, model, x), copy.deepcopy(model)
    reference = folder / f"at_1_{dropout}.pt"
    saved: list[int] = []
    with config.patch(activation_memory_budget=share):
        run = step(torch.compile(model, fullgraph=True), model, x)
        with torch.autograd.graph.saved_tensors_hooks(_counting(saved), lambda t: t):
            found = run()
    if share == 1:
        torch.save(found, reference)
    expected = torch.load(reference)
    row: dict[str, Any] = {"share": share, "dropout": dropout, "saved_bytes": sum(saved)}
    row["outputs_differ"] = _difference(found[:1], expected[:1])
    row["gradients_differ"] = _difference(found[1:], expected[1:])
    calls = {"plain": plain, "compiled": run}
    try:
        rg.budget(ours, share, x)
        calls["budget"] = step(ours, ours, x)
        row["ours_differ"] = _difference(calls["budget"](), plain())
    except rg.BudgetError as refusal:
        row["least_share"] = refusal.minimum_bytes / rg.measure(plain).working_bytes
    row["bytes"] = {name: rg.measure(call).working_bytes for name, call in calls.items()}
    taken = medians(calls, ROUNDS)
    row["ratios"] = {name: round(one / taken["plain"], 3) for name, one in taken.items()}
    return row


def _counting(saved: list[int]) -> Callable[[Tensor], Tensor]:
    def keep(t: Tensor) -> Tensor:
        saved.append(t.nbytes)
        return t

    return keep


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().amax() / b.abs().amax()) for a, b in pairs)


def main() -> None:
    if sys.argv[1:]:
        share, dropout, folder = sys.argv[1:]
        print(json.dumps(measured(float(share), float(dropout), Path(folder))))
        return
    rows = []
    fresh = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for dropout in DROPOUTS:
            for share in SHARES:
                command = [sys.executable, __file__, str(share), str(dropout), folder]
                found = subprocess.run(command, env=fresh, check=True, capture_output=True)
                row = json.loads(found.stdout)
                rows.append(row)
                print(f"dropout {dropout}, asked {share:.0%}:")
                for name, ratio in row["ratios"].items():
                    size = row["bytes"][name] / row["bytes"]["plain"]
                    print(f"    {name:>8}: {size:6.1%} of the memory, {ratio:5.2f}× the time")
                print(
                    f"    compiled saves {row['saved_bytes'] / 2**20:.1f} MiB; differs from 1 by "
                    f"{row['outputs_differ']:.1e} (outputs), {row['gradients_differ']:.1e} "
                    f"(gradients); ours from ordinary by {row.get('ours_differ', 'refused')}",
                    flush=True,
                )
    path = RESULTS / "compile_budget_cpu.json"
    path.write_text(json.dumps({"machine": machine_of("cpu"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
