"""Claim: what holds on the grid of ``recurrent_grid.py`` holds on workloads that nobody chose.

Kinds, sizes, layers, directions, dropout, packing, batches of 1 to 128 and lengths of 50 to 5,000
steps are drawn at random. Every second workload has the batch first, unless it is packed. Each runs
by torch's own module and by ours within fractions of its memory, in turn in one process. The table
shows the mean and the worst of every fraction.

    python benchmarks/recurrent_drawn.py   # JSON into benchmarks/results/; ten minutes
"""

import argparse
import json
import math
import random
from typing import Any

import torch

from recurrent_grid import RESULTS, Work, measured, show, summary
from retrograde.machine import machine_of

# What torch takes stays within some seconds, and within some hundred MiB.
MOST_PRODUCTS, MOST_NUMBERS = 4e10, 1.5e8


def drawn(count: int, seed: int) -> list[Work]:
    """Workloads of drawn kinds, sizes and options; none takes torch more than some seconds."""
    draw, found = random.Random(seed), list[Work]()

    def size(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    while len(found) < count:
        kind, layers = draw.choice(["LSTM", "GRU", "RNN"]), draw.choice([1, 1, 2, 3])
        inputs, hidden, batch = size(1, 256), size(4, 512), size(1, 128)
        options: dict[str, Any] = {"num_layers": layers} if layers > 1 else {}
        if draw.random() < 0.25:
            options["bidirectional"] = True
        if layers > 1 and draw.random() < 0.3:
            options["dropout"] = 0.2
        if kind == "RNN" and draw.random() < 0.3:
            options["nonlinearity"] = "relu"
        length, packed = size(50, 5000), draw.random() < 0.25
        if not packed and len(found) % 2:  # the outputs' gradient then lies in memory by samples
            options["batch_first"] = True
        work = Work(kind, inputs, hidden, batch, length, options, packed)
        gates = {"LSTM": 4, "GRU": 3}.get(kind, 1) * layers * (1 + ("bidirectional" in options))
        numbers = gates * hidden * batch * work.length
        if numbers * max(inputs, hidden) < MOST_PRODUCTS and numbers < MOST_NUMBERS:
            found.append(work)
    return found


def main() -> None:
    """Run drawn workloads, print them, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="part of a name: such rows anew, the others as they were")
    options = parser.parse_args()
    torch.set_num_threads(2)
    path, rows = RESULTS / "recurrent_drawn_cpu.json", list[dict[str, Any]]()
    for number, work in enumerate(drawn(options.count, options.seed)):
        if options.only is not None and options.only not in str(work):
            rows.append(json.loads(path.read_text())["rows"][number])
            continue
        rows.append(measured(work, options.rounds, segments=False))
        show(rows[-1])
    found = summary(rows)
    for share, told in found.items():
        print(f"{share:>5}: {told['rows']} of {len(rows)}, worst {told['worst']:.2f} "
              f"({told['whose']}), geometric mean {told['mean']:.2f}")  # fmt: skip
    document = {"machine": machine_of("cpu"), "rows": rows, "summary": found}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
