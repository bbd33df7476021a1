"""Claim: where nobody measures, a budget costs little too.

The workloads are corners that the grid of ``recurrent_grid.py`` does not have. Sequences have few
steps. The loss is a sum, so that its gradient is one number for all outputs. Wide LSTMs are packed,
or in double precision, where torch has no fast kernel. One sample has a few units. Each runs by
torch's own module and by ours within fractions of its memory, in turn in one process.

    python benchmarks/recurrent_corners.py   # JSON into benchmarks/results/; two minutes
"""

import json

import torch

from recurrent_grid import RESULTS, Work, measured, show, summary
from retrograde.machine import machine_of

KINDS, DOUBLE = ("LSTM", "GRU", "RNN"), {"dtype": torch.float64}
SHORT = [(16, 64, 8, 1), (64, 256, 32, 4), (16, 64, 8, 16), (128, 256, 32, 20), (32, 64, 64, 40)]
SUMS = [(1, 8, 1, 4000), (8, 64, 8, 400), (16, 32, 32, 400), (8, 16, 64, 400)]
WORK = [
    *(Work(kind, *shape) for shape in SHORT for kind in KINDS),
    *(Work(kind, *shape, sums=True) for shape in SUMS for kind in KINDS),
    Work("LSTM", 256, 512, 16, 100, packed=True),
    Work("LSTM", 256, 600, 16, 60, DOUBLE),
    *(Work(kind, 64, 128, 16, 200, DOUBLE) for kind in KINDS),
]


def main() -> None:
    """Run the corners, print them, and write the JSON."""
    torch.set_num_threads(2)
    rows = []
    for work in WORK:
        rows.append(measured(work, 9, segments=False))
        show(rows[-1])
    document = {"machine": machine_of("cpu"), "rows": rows, "summary": summary(rows)}
    path = RESULTS / "recurrent_corners_cpu.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
