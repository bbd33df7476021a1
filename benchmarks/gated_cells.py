"""Claim: a cell of one's own as a formula runs at the speed of compiled loops, at any budget.

Five cells, each a few lines of ``rg.GatedCell``, run forward and backward over five shapes: by the
plain loop, by ``torch.compile`` (``compile=True``), and by compiled loops within shares of the
plain loop's memory. All take turns in one process. The table shows medians relative to the plain
loop, what the first call took, working bytes, and the largest relative difference of a gradient.

    python benchmarks/gated_cells.py   # JSON into benchmarks/results/; six minutes
"""

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import retrograde as rg
from alternating import seconds
from retrograde.machine import machine_of
from small_cells import compared, plain

RESULTS = Path(__file__).parent / "results"
SHARES = "100%", "50%", "20%", "10%", "5%"
SHAPES = (
    (1, 8, 1, 1000),
    (16, 32, 8, 400),
    (40, 96, 4, 600),
    (32, 128, 32, 200),
    (64, 256, 64, 200),
)
ROUNDS = 7


class PeepholeLSTM(rg.GatedCell):
    """Gers and Schmidhuber 2000."""

    gates, states, units = 4, 2, 3

    @staticmethod
    def step(i, f, g, o, h, c, p_i, p_f, p_o):  # type: ignore[no-untyped-def]
        """Return h and c after the step."""
        i, f = torch.sigmoid(i + p_i * c), torch.sigmoid(f + p_f * c)
        c = f * c + i * torch.tanh(g)
        return torch.sigmoid(o + p_o * c) * torch.tanh(c), c


class MGU(rg.GatedCell):
    """Zhou et al. 2016, with the gate applied after the product."""

    gates, split = 2, 1

    @staticmethod
    def step(f, x, u, h):  # type: ignore[no-untyped-def]
        """Return h after the step."""
        f = torch.sigmoid(f)
        return (1 - f) * h + f * torch.tanh(x + f * u)


class LIF(rg.GatedCell):
    """Spiking neurons with a surrogate slope, and a time constant for each unit."""

    gates, states, units = 1, 2, 1

    @staticmethod
    def step(i, s, v, beta):  # type: ignore[no-untyped-def]
        """Return the spikes and the potential after the step."""
        v = torch.sigmoid(beta) * v * (1 - s) + i
        soft = torch.sigmoid(4 * (v - 1))
        return torch.heaviside((v - 1).detach(), (0 * v).detach()) + (soft - soft.detach()), v


class GRU(rg.GatedCell):
    """torch's GRU."""

    gates, split = 3, 1

    @staticmethod
    def step(r, z, x, u, h):  # type: ignore[no-untyped-def]
        """Return h after the step."""
        n = torch.tanh(x + torch.sigmoid(r) * u)
        return n + torch.sigmoid(z) * (h - n)


class MemoryUnit(rg.GatedCell):
    """An RNN with two more states: a slow average of h, and a fast one."""

    gates, states, units = 2, 3, 2

    @staticmethod
    def step(a, b, h, slow, fast, p, q):  # type: ignore[no-untyped-def]
        """Return h and its averages after the step."""
        new = torch.tanh(a + p * slow) * torch.sigmoid(b - q * fast)
        return new, 0.99 * slow + 0.01 * new, 0.5 * fast + 0.5 * new


CELLS = PeepholeLSTM, MGU, LIF, GRU, MemoryUnit


def measured(kind: type[rg.GatedCell], shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """A row of the table."""
    inputs, size, batch, steps = shape
    torch.manual_seed(0)
    cell, x = kind(inputs, size), torch.randn(steps, batch, inputs, requires_grad=True)
    wanted, row = [x, *cell.parameters()], {"refused": {}, "first_seconds": {}}

    def of(**asked: Any) -> Any:
        def call() -> tuple[Tensor, ...]:
            y = rg.unroll(cell, x, **asked)[0] if asked else plain(cell, x, cell.zeros(x[0]))
            return torch.autograd.grad(y.square().sum(), wanted)

        return call

    calls = {"plain": of()}
    for share in SHARES:
        calls[share] = of(memory=share)
    calls["compiled"] = of(memory="100%", compile=True)
    for key in [*calls]:
        try:
            row["first_seconds"][key] = round(seconds(calls[key]), 2)
        except rg.BudgetError as refusal:
            row["refused"][key] = refusal.minimum_bytes
            del calls[key]
    return {"cell": kind.__name__, "shape": shape, **row, **compared(calls, ROUNDS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default="", help="part of a cell's name; nothing is written")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    rows = []
    for kind in CELLS:
        for shape in SHAPES if only in kind.__name__ else ():
            row = measured(kind, shape)
            rows.append(row)
            ratios = {key: ratio for key, ratio in row["ratios"].items() if key != "plain"}
            told = "  ".join(f"{key} {ratio:.2f}" for key, ratio in ratios.items())
            worst = max(row["worst_difference"].values())
            print(f"{kind.__name__:12} {shape!s:20} {row['plain_ms']:7.1f} ms  {told}  "
                  f"refused {[*row['refused']]}  differs by {worst:.0e}", flush=True)  # fmt: skip
    for key in (*SHARES, "compiled"):
        ratios = [row["ratios"][key] for row in rows if key in row["ratios"]]
        mean = statistics.geometric_mean(ratios)
        print(f"{key:10} worst {max(ratios):.2f}, mean {mean:.2f}, {len(ratios)} of {len(rows)}")
    if not only:
        path = RESULTS / "gated_cells_cpu.json"
        machine = machine_of(torch.device("cpu"))
        path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        print(f"written to {path.name}")


if __name__ == "__main__":
    main()
