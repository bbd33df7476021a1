"""Measures how far below ordinary backpropagation's memory chains of layers can train.

Networks get batches of 16 images of 32 × 32. The table shows the memory of ordinary
backpropagation, the measured peaks within half and a quarter of it, and the least budget that fits.
Only bytes are measured. What a convolution takes for a moment depends on the processor.

    python benchmarks/chain_least.py   # JSON into benchmarks/results/; a minute
"""

import json
from pathlib import Path
from typing import Any

import torch

import retrograde as rg
from retrograde.machine import machine_of
from retrograde_papers.networks import resnet18, resnet34, vgg11

RESULTS = Path(__file__).parent / "results"
NETWORKS = {"VGG-11": vgg11, "ResNet-18": resnet18, "ResNet-34": resnet34}


def measured(name: str) -> dict[str, Any]:
    """What a network takes by budgets."""
    torch.manual_seed(0)
    net = rg.Sequential(*NETWORKS[name](), memory="100%")
    x = torch.randn(16, 3, 32, 32)

    def iteration() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    found = net.fit(x)
    row = {"network": name, "ordinary": found.ordinary_bytes, "least": found.minimum_bytes}
    for share in ("50%", "25%"):
        net.memory = share
        try:
            iteration()
            row[share] = rg.measure(iteration).working_bytes
        except rg.BudgetError:
            row[share] = None
    return row


def main() -> None:
    rows = []
    for name in NETWORKS:
        rows.append(measured(name))
        print(rows[-1], flush=True)
    found = {"machine": machine_of("cpu"), "rows": rows}
    (RESULTS / "chain_least_cpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
