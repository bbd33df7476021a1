"""Training on long sequences in several ways, side by side: what the examples on real data share.

An example is a :class:`Task`: data, a model, a loss. The model is an LSTM and a linear layer, and
its loss is that of a range of steps. So one loss serves three ways:

- ``ordinary``: all steps at once, every one of them kept;
- ``budgeted``: ``rg.bptt``, the same gradient within a budget;
- ``truncated``: what people do instead. The sequence is cut into windows, and at the end of each
  the state is detached. Windows are as long as the budget has room for. A loss that comes only at
  the end is then learnt from the last window.

All start from the same weights and read the same batches in the same order. ``truncated`` runs as
many iterations as take the CPU time that ``budgeted`` takes, so both have equal memory and equal
time. Time is the CPU time of the gradient alone: what else the machine does hardly changes it.

With ``--save`` training is written to a file now and then, and a rerun goes on from there exactly.
With ``--out`` runs of several seeds are gathered in one file of numbers and one picture.
"""

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograde as rg
from retrograde.errors import RetrogradeError
from retrograde.figures.style import save
from retrograde.machine import machine_of
from retrograde.units import as_bytes
from sequences_results import WAYS, draw, gathered, report


class Model(nn.Module):
    """An LSTM, a linear layer, and the loss of the last step: cross entropy.

    Args:
        inputs: numbers a step.
        hidden: units of the LSTM.
        outputs: of the linear layer.
        steps: that units are to remember, at most, to begin with.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, steps: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden)
        self.head = nn.Linear(hidden, outputs)
        self.length, self.targets = 0, torch.empty(0)
        remember(self.lstm, steps)

    def aim(self, batch: "Batch") -> None:
        """Take the targets that the next losses are for."""
        self.length, self.targets = len(batch.inputs), batch.targets

    def loss(self, steps: range, y: Tensor) -> Tensor | None:
        """The loss of a range of steps, from the LSTM's outputs (steps, B, hidden)."""
        if steps.stop < self.length:
            return None
        return functional.cross_entropy(self.head(y[-1]), self.targets)

    def right(self, batch: "Batch") -> Tensor:
        """Whether each answer is right."""
        y, _ = self.lstm(batch.inputs)
        return self.head(y[-1]).argmax(-1) == batch.targets


@torch.no_grad()
def remember(lstm: nn.LSTM, steps: int) -> None:
    """Let units begin with memories of all lengths up to ``steps``.

    Tallec and Ollivier, *Can recurrent neural networks warp time?* (2018): a forget gate with bias
    log(n) forgets within some n steps; an input gate with the opposite bias lets in as much.
    """
    size = lstm.hidden_size
    lstm.bias_hh_l0.zero_()
    lstm.bias_ih_l0.zero_()
    bias = torch.empty(size).uniform_(1, steps - 1).log()
    lstm.bias_ih_l0[:size] = -bias
    lstm.bias_ih_l0[size : 2 * size] = bias


@dataclass(frozen=True)
class Batch:
    """Sequences side by side.

    Attributes:
        inputs: shape (T, B, numbers a step).
        targets: what the model's loss takes.
    """

    inputs: Tensor
    targets: Tensor


def with_slope(signal: Tensor) -> Tensor:
    """Samples (T, B), each beside its difference from the one before: (T, B, 2)."""
    return torch.stack([signal, 4 * signal.diff(dim=0, prepend=signal[:1])], -1)


class Task(Protocol):
    """What an example adds to this module.

    Attributes:
        title: of the picture.
        loss_label: what the loss is, and in what unit.
        learning_rate: of Adam, to begin with.
        iterations: of training that are enough to see it learn.
    """

    title: str
    loss_label: str
    learning_rate: float
    iterations: int

    def model(self) -> Model:
        """A fresh model."""

    def batch(self, iteration: int) -> Batch:
        """The batch of an iteration, the same whenever it is asked for."""

    def longest(self) -> Batch:
        """A batch of the longest sequences, to be measured."""

    def held_out(self) -> Sequence[Batch]:
        """What is not trained on."""


def ordinary(model: Model, x: Tensor) -> float:
    """All steps are kept."""
    y, _ = model.lstm(x)
    loss = model.loss(range(len(x)), y)
    assert loss is not None
    loss.backward()
    return loss.item()


def truncated(model: Model, x: Tensor, window: int) -> float:
    """Windows of so many steps are kept, one after the other; the gradient ends with each."""
    total, state = 0.0, None
    for start in range(0, len(x), window):
        loss, state = one_window(model, x, range(start, min(start + window, len(x))), state)
        total += loss
    return total


def one_window(
    model: Model, x: Tensor, steps: range, state: tuple[Tensor, Tensor] | None
) -> tuple[float, tuple[Tensor, Tensor]]:
    """The loss of a window, zero if it has none, and the state after it, detached."""
    y, (h, c) = model.lstm(x[steps.start : steps.stop], state)
    loss = model.loss(steps, y)
    if loss is not None:
        loss.backward()
    return 0.0 if loss is None else loss.item(), (h.detach(), c.detach())


def budgeted(model: Model, x: Tensor, memory: str) -> float:
    """What the budget has room for is kept, the rest is computed again."""
    return rg.bptt(model.lstm, x, loss=model.loss, memory=memory)[0].item()


@dataclass(eq=False)
class Run:
    """A model in training, one way.

    Attributes:
        way: one of :data:`WAYS`.
        model: in training.
        gradient: puts the gradients of a batch into ``.grad``, and returns its loss.
        losses: one an iteration, before its update.
        seconds: of CPU time that all gradients took.
        optimizer: of the model's parameters.
    """

    way: str
    model: Model
    gradient: Callable[[Model, Tensor], float]
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, task: Task, rate: float) -> None:
        """One iteration, on the batch that is next."""
        batch = task.batch(len(self.losses))
        self.model.aim(batch)
        self.optimizer.zero_grad()
        start = time.process_time()
        loss = self.gradient(self.model, batch.inputs)
        self.seconds += time.process_time() - start
        self.losses.append(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """All that training needs to go on."""
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "losses": self.losses, "seconds": self.seconds,
        }  # fmt: skip

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds = state["losses"], state["seconds"]

    def done(self, iterations: int, seconds: float) -> float:
        """The share of its training that is done: of the seconds, or of the iterations if 0."""
        return self.seconds / seconds if seconds else len(self.losses) / iterations

    def working_bytes(self, batch: Batch) -> int:
        """The measured peak of one iteration, beside inputs, parameters and their gradients."""
        self.model.aim(batch)
        self.gradient(self.model, batch.inputs)  # what is measured and planned once for a shape
        self.optimizer.zero_grad()
        return rg.measure(lambda: self.gradient(self.model, batch.inputs)).working_bytes

    @torch.no_grad()
    def accuracy(self, batches: Sequence[Batch]) -> float:
        """The share of answers that are right."""
        return torch.cat([self.model.right(batch) for batch in batches]).float().mean().item()


def ordinary_bytes(model: Model, batch: Batch) -> int:
    """What ordinary BPTT takes, without taking it: each further step takes as much as another.

    Measured on a sixteenth and on an eighth of the steps, the last ones, which have a loss.
    """
    model = copy.deepcopy(model)
    model.aim(batch)
    length = len(batch.inputs)

    def last(count: int) -> int:
        model.zero_grad()
        steps = range(length - count, length)

        def run() -> None:
            loss = model.loss(steps, model.lstm(batch.inputs[steps.start :])[0])
            assert loss is not None
            loss.backward()

        return rg.measure(run).working_bytes

    few, more = math.ceil(length / 16), math.ceil(length / 8)
    least, most = last(few), last(more)
    return round(most + (most - least) / (more - few) * (length - more))


def runs_of(model: Model, memory: str, share: float) -> list[Run]:
    """One run a way, all from the same weights."""

    def truncated_to_share(model: Model, x: Tensor) -> float:
        return truncated(model, x, max(1, int(share * len(x))))

    gradients = {
        "ordinary": ordinary,
        "budgeted": lambda model, x: budgeted(model, x, memory),
        "truncated": truncated_to_share,
    }
    return [Run(way, copy.deepcopy(model), gradients[way]) for way in WAYS]


def train(task: Task, runs: Sequence[Run], ways: Sequence[str], saved: "Saved") -> None:
    """Train some of the runs, one after the other, and print the losses as they fall.

    The truncated one has the seconds that the budgeted one has taken, if that was trained; every
    other has the iterations. The learning rate falls to nothing meanwhile, for all alike.
    """
    saved.resume(runs)
    seconds = {run.way: run for run in runs}["budgeted"].seconds
    for run in runs:
        limit = seconds if run.way == "truncated" else 0.0
        while run.way in ways and (done := run.done(saved.iterations, limit)) < 1:
            run.step(task, task.learning_rate * (1 - done))
            if len(run.losses) % saved.every == 0:
                loss = np.mean(run.losses[-saved.every :])
                print(f"{run.way}, iteration {len(run.losses):5d}: loss {loss:.4f}", flush=True)
                saved.write(runs)
        seconds = run.seconds if run.way == "budgeted" else seconds
    saved.write(runs)


@dataclass(frozen=True)
class Saved:
    """Training in a file, to go on from.

    Attributes:
        path: of the file; None for none.
        every: so many iterations it is written.
        iterations: of the training in all.
        seed: of the first weights.
        memory: the budget.
    """

    path: Path | None
    every: int
    iterations: int
    seed: int
    memory: str

    def write(self, runs: Sequence[Run]) -> None:
        """Write all runs, whole or not at all."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            state = {"settings": self._settings(), "runs": {run.way: run.state() for run in runs}}
            torch.save(state, partial := self.path.with_suffix(".partial"))
            os.replace(partial, self.path)

    def resume(self, runs: Sequence[Run]) -> None:
        """Go on from the file, if there is one.

        Raises:
            RetrogradeError: it is of another training.
        """
        if self.path is not None and self.path.exists():
            state = torch.load(self.path)
            if state["settings"] != self._settings():
                raise RetrogradeError(
                    f"{self.path} has {state['settings']}, and this training "
                    f"{self._settings()}: name another file"
                )
            for run in runs:
                run.resume(state["runs"][run.way])

    def _settings(self) -> dict[str, Any]:
        return {"iterations": self.iterations, "seed": self.seed, "memory": self.memory}


def result_of(run: Run, task: Task, seed: int) -> dict[str, Any]:
    """What is told of one run: its losses are means of a fiftieth of its iterations each."""
    parts = np.array_split(np.array(run.losses), min(50, len(run.losses)))
    return {
        "seed": seed,
        "way": run.way,
        "working_bytes": run.working_bytes(task.longest()),
        "iterations": len(run.losses),
        "seconds": round(run.seconds, 3),
        "accuracy": run.accuracy(task.held_out()),
        "losses": [float(f"{part.mean():.5g}") for part in parts],
        "first_losses": [float(f"{loss:.8g}") for loss in run.losses[:20]],
    }


def tell(name: str, task: Task, options: argparse.Namespace) -> None:
    """Train, print and write as the command line asks."""
    torch.manual_seed(options.seed)
    model, longest = task.model(), task.longest()
    usual = ordinary_bytes(model, longest)
    budget = as_bytes(options.memory, usual)
    iterations = task.iterations if options.steps is None else options.steps
    found: dict[str, Any] = {
        "machine": machine_of("cpu"),
        "title": task.title,
        "loss": task.loss_label,
        "length": len(longest.inputs),
        "batch": longest.inputs.shape[1],
        "hidden": model.lstm.hidden_size,
        "iterations": iterations,
        "memory": options.memory,
        "budget_bytes": budget,
        "ordinary_bytes_extrapolated": usual,
        "runs": [],
    }
    path = options.out and options.out / f"{name}.json"
    if path:
        gathered(path, found)  # refuses before any training
    ways = [way for way in WAYS if way in options.way or "all" in options.way]
    runs = runs_of(model, options.memory, budget / usual)
    saved = Saved(options.save, options.every, iterations, options.seed, options.memory)
    train(task, runs, ways, saved)
    found["runs"] = [result_of(run, task, options.seed) for run in runs if run.way in ways]
    report(found)
    if path:
        found = gathered(path, found)
        save(draw(found), options.out, name)
        path.write_text(json.dumps(found) + "\n")


def main(
    name: str, make: Callable[[Path], Task], summary: str, arguments: Sequence[str] | None = None
) -> None:
    """The command line of an example.

    Args:
        name: of the example, and of the files it writes.
        make: the task from the folder of its data.
        summary: what the example does.
        arguments: of the command line; None for those that were given.
    """
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data")
    parser.add_argument("--steps", type=int, help="iterations of training")
    parser.add_argument("--memory", default="5%", help="the budget, such as 5%% or 2MiB")
    parser.add_argument("--way", choices=(*WAYS, "all"), nargs="+", default=["all"])
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    parser.add_argument("--out", type=Path, help="a folder for the numbers and the picture")
    parser.add_argument("--save", type=Path, help="a file to write training to, and to go on from")
    parser.add_argument("--every", type=int, default=100, help="iterations between two writes")
    options = parser.parse_args(arguments)
    try:
        task = make(options.data)
    except FileNotFoundError as error:
        parser.error(f"{error.filename} is not there: see docs/examples.md for what it holds")
    try:
        tell(name, task, options)
    except RetrogradeError as error:
        parser.error(str(error))
