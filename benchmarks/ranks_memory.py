"""Claim: if a sequence is divided along time among p ranks, each holds a p-th of the memory.

One long sequence goes through an LSTM on 1, 2, 4 and 8 processes of this machine. The table shows
the peak memory of a rank in a forward and backward pass, by a line and by a tree. Ranks run without
a budget, and within 10 % each. The gradients are those of one process.

    python benchmarks/ranks_memory.py            # JSON into benchmarks/results/
    python benchmarks/ranks_memory.py --quick    # short, and nothing is written
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing

import retrograde as rg
from retrograde.machine import machine_of
from retrograde.ranks.crossing import Way

RESULTS = Path(__file__).parent / "results"
SIZES = (1, 2, 4, 8)
WAYS: tuple[Way, ...] = ("linear", "tree")
HIDDEN, BATCH, FEATURES = 64, 8, 8


def of_a_rank(rank: int, size: int, steps: int, memory: str | None, way: Way, folder: str) -> None:
    """One rank: what it holds, and the gradient of a weight."""
    torch.set_num_threads(1)
    url = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    torch.manual_seed(0)
    net = rg.TimeSharded(rg.LSTM(FEATURES, HIDDEN, memory=memory), way=way)
    torch.manual_seed(1)
    x = torch.randn(steps, BATCH, FEATURES).tensor_split(size)[rank]

    def call() -> Tensor:
        outputs, _ = net(x)
        outputs.square().sum().backward()
        return outputs.detach()

    call()
    net.zero_grad()
    held = rg.measure(call).working_bytes
    torch.save((held, net.rnn.weight_hh_l0.grad), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def on_ranks(size: int, steps: int, memory: str | None, way: Way) -> tuple[list[int], Tensor]:
    """What each rank held, and the gradient."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(of_a_rank, (size, steps, memory, way, folder), nprocs=size)
        found = [torch.load(f"{folder}/{rank}.pt") for rank in range(size)]
    return [held for held, _ in found], found[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    steps, sizes = (400, (1, 2)) if options.quick else (20_000, SIZES)
    rows = []
    for memory, way in itertools.product((None, "10%"), WAYS):
        alone: tuple[int, Tensor] | None = None
        for size in sizes:
            held, gradient = on_ranks(size, steps, memory, way)
            alone = alone or (max(held), gradient)
            share = max(held) * size / alone[0]
            error = float((gradient - alone[1]).abs().max() / alone[1].abs().max())
            rows.append(
                {"ranks": size, "memory": memory, "way": way, "held_bytes": held,
                 "times_ranks": share, "gradient_difference": error}
            )  # fmt: skip
            print(
                f"{size} ranks, {way}, memory={memory}: at most {max(held) / 2**20:.1f} MiB each, "
                f"{share:.3f} of one rank's in all; gradients differ by {error:.1e}",
                flush=True,
            )
    if not options.quick:
        document = {
            "machine": machine_of(torch.device("cpu")),
            "settings": {"steps": steps, "batch": BATCH, "hidden": HIDDEN, "features": FEATURES},
            "rows": rows,
        }
        path = RESULTS / "ranks_memory_cpu.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
