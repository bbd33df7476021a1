"""ECG across ranks: each holds a part of every 30 seconds, and none a whole sequence.

    torchrun --nproc-per-node 4 examples/train_time_sharded.py --data FOLDER

trains with the losses of one process, which is what it is without ``torchrun``. With ``--save`` the
state is written every few iterations, and training goes on from there, on any number of ranks.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.nn import functional

import retrograde as rg
from ecg import HIDDEN, NO_BEAT, Beats


class Training:
    """A network of which every rank has the same, and its own part of the steps.

    Args:
        options: what was asked.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.data = Beats(options.data)
        torch.manual_seed(0)
        lstm = rg.LSTM(2, HIDDEN, memory=options.memory)
        with torch.no_grad():
            lstm.bias_ih_l0[HIDDEN : 2 * HIDDEN] = 3.0  # to remember
        self.sharded = rg.TimeSharded(lstm, way=options.way)
        self.head = nn.Linear(HIDDEN, 1)
        self.whole = nn.ModuleDict({"lstm": lstm, "head": self.head})
        self.optimizer = torch.optim.Adam(self.whole.parameters(), Beats.learning_rate)
        self.iteration = 0

    def step(self) -> float:
        """One iteration: the mean loss over all beats of the batch, those of other ranks too."""
        batch = self.data.batch(self.iteration)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        x, targets = (part.tensor_split(size)[rank] for part in (batch.inputs, batch.targets))
        outputs, _ = self.sharded(x)
        loss = self.loss(outputs, targets) / (batch.targets != NO_BEAT).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.sharded.add_up(self.head)
        nn.utils.clip_grad_norm_(self.whole.parameters(), 1.0)
        self.optimizer.step()
        self.iteration += 1
        total = loss.detach().clone()
        distributed.all_reduce(total)
        return float(total)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum over the beats in this rank's steps."""
        told = targets != NO_BEAT
        answers, wanted = self.head(outputs[told])[:, 0], targets[told].to(outputs.dtype)
        return functional.binary_cross_entropy_with_logits(answers, wanted, reduction="sum")

    def save(self, folder: Path) -> None:
        """Write all that training needs to go on, from all ranks together."""
        checkpoint.save(self._state(), checkpoint_id=str(folder / f"{self.iteration:06}"))

    def resume(self, folder: Path) -> None:
        """Go on from the last state in a folder, if there is one."""
        saved = sorted(path for path in folder.glob("*") if (path / ".metadata").exists())
        if saved:
            for p in self.whole.parameters():
                p.grad = torch.zeros_like(p)
            self.optimizer.step()  # makes the optimizer's state, for the saved one to be put into
            state = self._state()
            checkpoint.load(state, checkpoint_id=str(saved[-1]))
            self.whole.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.iteration = int(saved[-1].name)

    def _state(self) -> dict:
        return {"net": self.whole.state_dict(), "optimizer": self.optimizer.state_dict()}


def join_ranks() -> None:
    """Join the ranks that torchrun has started; or be the only one."""
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())


def run(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses on the first rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of ecg.npz")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--way", default="linear", choices=["linear", "tree"])
    parser.add_argument("--memory", help="a budget for each rank's steps, such as 5%%")
    parser.add_argument("--save", type=Path, help="folder for what to go on from")
    parser.add_argument("--every", type=int, default=5, help="iterations between two saves")
    parser.add_argument("--losses", type=Path, help="write them here, as JSON")
    options = parser.parse_args(arguments)
    join_ranks()
    training = Training(options)
    if options.save:
        training.resume(options.save)
    losses = []
    while training.iteration < options.iterations:
        start = time.perf_counter()
        losses.append(training.step())
        if distributed.get_rank() == 0:
            seconds = time.perf_counter() - start
            print(f"{training.iteration:5}: loss {losses[-1]:.6f}, {seconds:.2f} s", flush=True)
        if options.save and training.iteration % options.every == 0:
            training.save(options.save)
    if options.losses and distributed.get_rank() == 0:
        options.losses.write_text(json.dumps(losses))
    distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    run()
