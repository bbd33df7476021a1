"""Claim: on a CPU where torch draws masks number by number, dropout's masks are drawn faster here.

Masks of several sizes and types are drawn by torch and by this library, in turn in one process.
So are the forward passes of an encoder layer, and of one without dropout. Times are medians. All
masks and outputs are compared bit for bit, and so are the states of the generator afterwards.

    python benchmarks/masks.py   # JSON into benchmarks/results/; some seconds
"""

import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from retrograde.machine import machine_of
from retrograde.models.draws import Draws

RESULTS = Path(__file__).parent / "results"
NUMBERS = (10_000, 100_000, 1_000_000)
TYPES = (torch.float32, torch.bfloat16, torch.float64)
ROUNDS = 51


def compared(name: str, call: Callable[[], Any], ours: Callable[[], Any] = Draws) -> dict[str, Any]:
    """A row: milliseconds by torch and here, and whether bits and generators are the same."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    found, after = {}, {}
    for _ in range(ROUNDS):
        for here in taken:
            torch.manual_seed(1)
            with ours() if here else nullcontext():
                start = time.perf_counter()
                found[here] = call()
                taken[here].append(1e3 * (time.perf_counter() - start))
            after[here] = torch.get_rng_state()
    torchs, own = (statistics.median(taken[here]) for here in (False, True))
    same = torch.equal(found[False], found[True]) and torch.equal(after[False], after[True])
    row = {"call": name, "torch_ms": torchs, "ours_ms": own, "same": same}
    print(f"{name:44} {torchs:7.3f} → {own:7.3f} ms, {torchs / own:4.1f}×, {same=}", flush=True)
    return row


def main() -> None:
    rows = []
    for dtype in TYPES:
        for count in NUMBERS:
            x = torch.ones(count, dtype=dtype)
            name = f"dropout of {count} {str(dtype).removeprefix('torch.')}"
            rows.append(compared(name, lambda x=x: functional.dropout(x, 0.1)))
    q = torch.randn(4, 4, 256, 64)
    rows.append(
        compared(
            "attention, 4×4 heads, 256 tokens",
            lambda: functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
        )
    )
    x = torch.randn(4, 256, 256)
    for p in (0.1, 0.0):
        layer = nn.TransformerEncoderLayer(256, 4, 1024, p, batch_first=True)
        name = f"encoder layer of 256, 4×256 tokens, dropout {p}"
        rows.append(compared(name, lambda layer=layer: layer(x).detach()))
    path = RESULTS / "masks_cpu.json"
    document = {"machine": machine_of("cpu"), "rounds": ROUNDS, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
