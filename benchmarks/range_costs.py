"""Measures the cost of a call and of a step of every kernel, as in ``recurrent/fastest.py``.

The executor runs ranges of 1 and of 64 steps: forward without keeping anything, and recorded and
backpropagated. The cost of a step is the time of one more step, and the cost of a call is the rest.
Values are medians, in microseconds.

    python benchmarks/range_costs.py          # JSON into benchmarks/results/
"""

import json
import statistics
from pathlib import Path
from typing import cast

import torch

from retrograde.machine import machine_of
from retrograde.recurrent.fastest import candidates
from retrograde.recurrent.fused import Fused, run_held
from retrograde.recurrent.vendor import Layers
from retrograde.run.core import Core
from retrograde.run.layout import Straight
from retrograde.sizes.timing import time_steps

RESULTS = Path(__file__).parent / "results"
SIZES = [(16, 1), (64, 1), (256, 1), (16, 16), (64, 16), (256, 16), (64, 64), (256, 64)]
KINDS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN_TANH": torch.nn.RNN}
LENGTH = 64


def name_of(core: Core) -> str:
    """What runs a core, by name."""
    return "held layers" if cast(Fused, core).kernel is run_held else "run_torch"


def rows_of(kind: str, size: int, batch: int) -> list[dict]:
    """One row a kernel."""
    torch.manual_seed(0)
    net = KINDS[kind](size, size)
    layers = Layers(kind, net._flat_weights, 1, True)
    x = torch.randn(LENGTH, batch, size, requires_grad=True)
    state = [torch.zeros(1, batch, size) for _ in range(2 if kind == "LSTM" else 1)]
    rows = []
    for core, costs in candidates(layers, batch):
        times = [
            time_steps(core, Straight(len(x), fused=True).read([x]), state, repeats=9)
            for _ in range(3)
        ]

        step_time = costs["step_time"]

        def least(part: str, what: str, times: list = times) -> float:
            found = statistics.median(getattr(getattr(p, part), what) for p in times)
            return round(found * 1e6, 2)

        step, call = least("forward", "step_seconds"), least("forward", "call_seconds")
        parts = ("record", "backward")
        rows.append(
            {
                "kind": kind,
                "hidden": size,
                "batch": batch,
                "kernel": name_of(core),
                "step": step,
                "call": call,
                "recorded_step": round(sum(least(p, "step_seconds") for p in parts), 2),
                "recorded_call": round(sum(least(p, "call_seconds") for p in parts), 2),
                "nominal_step": round(step_time, 2),
                "nominal_call": round(step_time * costs["call_steps"], 2),
                "nominal_recorded_step": round(step_time * (1 + costs["backward_steps"]), 2),
                "nominal_recorded_call": round(step_time * costs["record_steps"], 2),
            }
        )
    return rows


def main() -> None:
    """Print a table and write the JSON."""
    rows = [row for kind in KINDS for size in SIZES for row in rows_of(kind, *size)]
    print(f"{'µs, measured (nominal)':<34}{'step':>16}{'call':>16}{'recorded':>18}{'call':>16}")
    for row in rows:
        name = f"{row['kind']} {row['hidden']} B={row['batch']} {row['kernel']}"
        cells = [
            f"{row[key]:.0f} ({row['nominal_' + key]:.0f})"
            for key in ("step", "call", "recorded_step", "recorded_call")
        ]
        print(f"{name:<34}" + "".join(f"{cell:>16}" for cell in cells))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "range_costs_cpu.json"
    path.write_text(json.dumps({"machine": machine_of("cpu"), "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
