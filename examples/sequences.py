"""Training on long sequences in several ways, side by side: what the examples on real data share.

An example is a :class:`Task`: data, a model, a loss. The model is an LSTM and a linear layer, and
its loss is that of a range of steps. So one loss serves three ways:

- ``ordinary``: all steps at once, every one of them kept;
- ``budgeted``: ``rg.bptt``, the same gradient within a budget;
- ``truncated``: what people do instead. The sequence is cut into windows, and at the end of each
  the state is detached. Windows are as long as the budget has room for. A loss that comes only at
  the end is then learnt from the last window.

A fourth is a control. Over hundreds of iterations training amplifies any rounding, so curves that
agree at first part at last, ``budgeted`` from ``ordinary`` too. ``nudged`` is ``ordinary`` from
weights that differ in their last bit: how far it parts is what rounding alone does.

All start from the same weights, read the same batches and take turns at each of them, so that what
the machine does meanwhile meets them all.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

import retrograde as rg
from retrograde.figures.style import BLUE, GREY, INK, ORANGE, save, tidy
from retrograde.machine import machine_of
from retrograde.units import as_bytes, format_bytes

RESULTS = Path(__file__).parent / "results"
WAYS = ("ordinary", "nudged", "budgeted", "truncated")
LABELS = {
    "ordinary": "ordinary BPTT",
    "nudged": "the same, nudged by a rounding",
    "budgeted": "within the budget",
    "truncated": "truncated BPTT",
}
STYLES = {
    "ordinary": {"color": GREY, "linewidth": 4.5},
    "nudged": {"color": INK, "linewidth": 1.0, "linestyle": (0, (1, 1.5))},
    "budgeted": {"color": BLUE, "linewidth": 1.5},
    "truncated": {"color": ORANGE, "linewidth": 1.5},
}


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
        optimizer: of the model's parameters.
        rate: its learning rate, which falls to nothing.
        losses: one an iteration, before its update.
        seconds: of the gradient, one an iteration.
    """

    way: str
    model: Model
    gradient: Callable[[Model, Tensor], float]
    optimizer: torch.optim.Optimizer
    rate: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        """One iteration."""
        self.model.aim(batch)
        self.optimizer.zero_grad()
        start = time.perf_counter()
        loss = self.gradient(self.model, batch.inputs)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.rate.step()

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


def runs_of(
    model: Model, ways: Sequence[str], memory: str, share: float, rates: tuple[float, int]
) -> list[Run]:
    """One run a way, all from the same weights; the learning rate falls in so many iterations."""
    start, iterations = rates

    def truncated_to_share(model: Model, x: Tensor) -> float:
        return truncated(model, x, max(1, int(share * len(x))))

    gradients = {
        "ordinary": ordinary,
        "nudged": ordinary,
        "budgeted": lambda model, x: budgeted(model, x, memory),
        "truncated": truncated_to_share,
    }
    runs = []
    for way in ways:
        twin = copy.deepcopy(model)
        if way == "nudged":
            nudge(twin)
        optimizer = torch.optim.Adam(twin.parameters(), lr=start)
        rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, iterations)
        runs.append(Run(way, twin, gradients[way], optimizer, rate))
    return runs


@torch.no_grad()
def nudge(model: Model) -> None:
    """Change every weight by about its last bit."""
    for weight in model.parameters():
        weight.mul_(1 + torch.finfo(weight.dtype).eps)


def train(task: Task, runs: Sequence[Run], iterations: int) -> None:
    """Train all runs on the same batches, in turns, and print the losses as they fall."""
    every = max(1, iterations // 10)
    for iteration in range(iterations):
        batch = task.batch(iteration)
        turn = iteration % len(runs)
        for run in (*runs[turn:], *runs[:turn]):
            run.step(batch)
        if (iteration + 1) % every == 0:
            means = (f"{run.way} {np.mean(run.losses[-every:]):.4f}" for run in runs)
            print(f"iteration {iteration + 1:4d}: {', '.join(means)}", flush=True)


def results_of(task: Task, runs: Sequence[Run], memory: str, usual: int) -> dict[str, Any]:
    """All that is told of the runs, as JSON has it."""
    longest, held_out = task.longest(), task.held_out()
    ways = {
        run.way: {
            "working_bytes": run.working_bytes(longest),
            "seconds": statistics.median(run.seconds),
            "accuracy": run.accuracy(held_out),
            "losses": [float(f"{loss:.7g}") for loss in run.losses],
        }
        for run in runs
    }
    found: dict[str, Any] = {
        "machine": machine_of("cpu"),
        "title": task.title,
        "loss": task.loss_label,
        "length": len(longest.inputs),
        "batch": longest.inputs.shape[1],
        "hidden": runs[0].model.lstm.hidden_size,
        "iterations": len(runs[0].losses),
        "memory": memory,
        "budget_bytes": as_bytes(memory, usual),
        "ordinary_bytes_extrapolated": usual,
        "ways": ways,
    }
    found["differences"] = {
        run.way: [
            float(f"{abs(a - b):.2g}") for a, b in zip(runs[0].losses, run.losses, strict=True)
        ]
        for run in runs[1:]
    }
    return found


def report(found: dict[str, Any]) -> None:
    """Print what was found."""
    usual, ways = found["ordinary_bytes_extrapolated"], found["ways"]
    budget = format_bytes(found["budget_bytes"])
    print(
        f"T = {found['length']}: ordinary BPTT takes {format_bytes(usual)}, the budget is {budget}"
    )
    for way, one in ways.items():
        peak = one["working_bytes"]
        print(
            f"{way:9}: measured peak {format_bytes(peak)} ({peak / usual:.1%}), "
            f"{one['seconds']:.3f} s an iteration, held-out accuracy {one['accuracy']:.1%}"
        )
    base, *_ = ways
    for way, apart in found["differences"].items():
        few = apart[:20]
        print(
            f"losses of {way} and {base} differ by at most {max(few):.1g} in the first {len(few)} "
            f"iterations, and {max(apart):.1g} in all"
        )


def draw(found: dict[str, Any]) -> Figure:
    """The losses, and the measured peaks."""
    figure = Figure(figsize=(9.4, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    draw_losses(left, found)
    draw_peaks(right, found)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower left", ncols=len(found["ways"]),
        frameon=False, fontsize=9,
    )  # fmt: skip
    return figure


def draw_losses(axes: Axes, found: dict[str, Any]) -> None:
    """Each point is a mean of some iterations."""
    every = max(1, found["iterations"] // 50)
    for way, one in found["ways"].items():
        losses = one["losses"]
        means = [np.mean(losses[i : i + every]) for i in range(0, len(losses), every)]
        ends = [min(i + every, len(losses)) for i in range(0, len(losses), every)]
        axes.plot(ends, means, label=LABELS[way], **STYLES[way])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    of = "" if every == 1 else f", means of {every}"
    tidy(axes, title=found["title"], x=f"iteration{of}", y=found["loss"])


def draw_peaks(axes: Axes, found: dict[str, Any]) -> None:
    """A bar a way, with its size beside it."""
    shown = [way for way in found["ways"] if way != "nudged"] or ["nudged"]
    ways = {way: found["ways"][way] for way in shown}
    sizes = [one["working_bytes"] / 2**20 for one in ways.values()]
    bars = axes.barh(range(len(ways)), sizes, color=[STYLES[way]["color"] for way in ways])
    usual = found["ordinary_bytes_extrapolated"]
    labels = [
        format_bytes(size) if way == "ordinary" else f"{format_bytes(size)} ({size / usual:.1%})"
        for way, size in ((way, one["working_bytes"]) for way, one in ways.items())
    ]
    axes.bar_label(bars, labels, padding=4, color=INK, fontsize=9)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max(sizes))
    tidy(axes, title=f"Peak, T = {found['length']:,}", x="working memory (MiB)", y="")


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
    options = parser.parse_args(arguments)
    try:
        task = make(options.data)
    except FileNotFoundError as error:
        parser.error(f"{error.filename} is not there: see docs/examples.md for what it holds")
    torch.manual_seed(options.seed)
    model = task.model()
    usual = ordinary_bytes(model, task.longest())
    share = as_bytes(options.memory, usual) / usual
    iterations = task.iterations if options.steps is None else options.steps
    ways = [way for way in WAYS if way in options.way or "all" in options.way]
    runs = runs_of(model, ways, options.memory, share, (task.learning_rate, iterations))
    train(task, runs, iterations)
    found = results_of(task, runs, options.memory, usual)
    report(found)
    if options.out is not None:
        save(draw(found), options.out, name)
        (options.out / f"{name}.json").write_text(json.dumps(found) + "\n")
