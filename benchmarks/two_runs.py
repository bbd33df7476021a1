"""Claim: with unequal pieces, every step of an LSTM runs twice at most in less memory.

An LSTM in one direction holds a mark before each piece of its steps. The marks of later pieces are
free when an early one goes back, so that one may be longer. For the LSTMs of ``recurrent_grid.py``
the script looks for the least memory in which every step runs forward twice at most: with pieces of
one length, and with unequal ones. It only plans, and so takes no times.

    python benchmarks/two_runs.py   # JSON into benchmarks/results/
"""

import json
from typing import Any
from unittest.mock import patch

import torch

import retrograde as rg
from recurrent_grid import GRID, RESULTS, Work
from retrograde.machine import machine_of
from retrograde.recurrent.plan import Planner


def least(net: Any, x: torch.Tensor) -> int:
    """The least bytes in which one range of all steps fits, by halving."""
    low, high = 0, net._fit_within("100%", x).ordinary_bytes
    while high - low > high // 500:
        middle = (low + high) // 2
        try:
            twice = len(net._fit_within(middle, x).schedule) <= 4
        except rg.BudgetError:
            twice = False
        low, high = (low, middle) if twice else (middle, high)
    return high


def row(work: Work) -> dict[str, Any]:
    """The least bytes of one workload."""
    net = getattr(rg, work.kind)(work.inputs, work.hidden, memory="100%", **work.options)
    x = torch.randn(work.length, work.batch, work.inputs, requires_grad=True)
    unequal, whole = least(net, x), net._fit_within("100%", x).ordinary_bytes
    net = getattr(rg, work.kind)(work.inputs, work.hidden, memory="100%", **work.options)
    with patch.object(Planner, "_unequal", lambda *_: None):
        equal = least(net, x)
    return {"work": str(work), "ordinary": whole, "equal": equal, "unequal": unequal}


def main() -> None:
    torch.set_num_threads(2)
    alone = [w for w in GRID if w.kind == "LSTM" and not w.packed]
    rows = [row(work) for work in alone if not work.options.get("bidirectional")]
    for one in rows:
        told = f"{one['equal'] / one['ordinary']:7.2%} → {one['unequal'] / one['ordinary']:.2%}"
        print(f"{one['work']:<52} {told}  {one['unequal'] / one['equal'] - 1:+.0%}")
    document = {"machine": machine_of("cpu"), "rows": rows}
    path = RESULTS / "two_runs_cpu.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
