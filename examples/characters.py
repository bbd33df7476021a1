"""A character model on sequences of 1,000 characters, in 5 % of the memory: a template to copy.

Two ways take turns on the same batches, from the same weights:

- ``full``: the gradient goes back through the whole sequence, and the LSTM keeps to ``--memory``;
- ``windows``: the sequence is cut. The state goes on from window to window, the gradient does not.

No data are needed: letters are made up. A letter begins with a name, and is signed with its initial
at the end. So ``windows`` guesses (25 % right, 2 bits), and ``full`` learns it. Ctrl-C ends the
iteration, saves, and says how to continue. A resumed run has the same bits.

    python examples/characters.py --memory 5% --report report
    python examples/characters.py --text book.txt --length 2000 --window 100
"""

import argparse
import copy
import hashlib
import math
import os
import signal
import statistics
import sys
import time
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrograde as rg
from retrograde import figures
from retrograde.units import format_bytes

EVERY, LAST = 25, 20  # iterations between checkpoints, and those that the report takes means of
TOO_LARGE = 4 * 2**30  # bytes: ordinary BPTT that takes more is not run for comparison
WAYS = {"full": "#0072B2", "windows": "#D55E00"}
SIZES = {"length": 1000, "window": 50, "batch": 16, "hidden": 64, "iterations": 200}


class Letters:
    """Letters that are made up. The initial weighs three times as much as all other characters."""

    NAMES = ("Ada", "Ben", "Cyd", "Dan")
    WORDS = "the old mill by a river and some grey cats sleep near it while rain falls on our roof"

    def __init__(self, length: int) -> None:
        self.what, self.digest, self.length = "initials of letters", "letters", length
        self.alphabet = sorted({*"".join(self.NAMES), *self.WORDS, *"! Yours,"})
        self.weights, self.scored = torch.full((length,), 1 / length), slice(length - 1, None)
        self.weights[-1] = 3.0

    def draw(self, random: Random) -> str:
        """Return a letter of one character more than a sequence: the first is no target."""
        name = random.choice(self.NAMES)
        end = f" Yours, {name[0]}"
        words = f"{name}! " * 8 + " ".join(random.choices(self.WORDS.split(), k=self.length))
        return words[: self.length + 1 - len(end)] + end


class Book:
    """A text from a file. Sequences begin anywhere in it, and every character counts alike."""

    def __init__(self, path: Path, length: int) -> None:
        try:
            self.text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}; give --text a file in UTF-8") from error
        if len(self.text) <= length:
            raise ValueError(f"{path} has {len(self.text)} characters: give a smaller --length")
        self.what, self.length = f"characters of {path.name}", length
        self.digest = hashlib.sha256(self.text.encode()).hexdigest()
        self.alphabet = sorted(set(self.text))
        self.weights, self.scored = torch.full((length,), 1 / length), slice(None)

    def draw(self, random: Random) -> str:
        start = random.randrange(len(self.text) - self.length)
        return self.text[start : start + self.length + 1]


class Model(nn.Module):
    """Predicts each next character from all before it: embedding, LSTM, linear layer."""

    def __init__(self, characters: int, hidden: int, length: int, memory: str | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.lstm = rg.LSTM(hidden, hidden, memory=memory)
        self.linear = nn.Linear(hidden, characters)
        keep = torch.empty(hidden).uniform_(1, length).log1p()  # memories of all lengths at first
        self.lstm.bias_hh_l0.data.zero_()
        self.lstm.bias_ih_l0.data[: 2 * hidden] = torch.cat([-keep, keep])

    def forward(self, codes: Tensor, state: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs, state = self.lstm(self.embedding(codes), state)
        return self.linear(outputs), tuple(part.detach() for part in state)  # cuts the gradient


class Training:
    """Both ways: models, optimizers, and for each iteration that is done its results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, length, hidden = options, options.length, options.hidden
        self.task = Book(Path(options.text), length) if options.text else Letters(length)
        self.codes = {character: code for code, character in enumerate(self.task.alphabet)}
        self.reach = {"full": length, "windows": min(options.window, length)}
        self.models, self.optimizers = {}, {}
        for way in WAYS:
            torch.manual_seed(options.seed)
            memory = options.memory if way == "full" else None
            self.models[way] = Model(len(self.codes), hidden, length, memory)
            self.optimizers[way] = torch.optim.Adam(self.models[way].parameters(), lr=0.01)
        x = torch.empty(length, options.batch, hidden, requires_grad=True)
        self.fit = self.models["full"].lstm.fit(x)  # a budget that is too small is refused here
        self.rows: list[dict[str, list[float]]] = []  # by way: bits, share right, seconds

    def batch(self, iteration: int) -> Tensor:
        """Return sequences (length + 1, batch), which only seed and iteration decide."""
        random = Random(f"{self.options.seed} {iteration}")
        texts = (self.task.draw(random) for _ in range(self.options.batch))
        return torch.tensor([[self.codes[character] for character in text] for text in texts]).T

    def iterate(self) -> None:
        """Train each way on the next batch."""
        batch, row = self.batch(len(self.rows)), {}
        for way in WAYS:
            start = time.perf_counter()
            row[way] = [*self.step(way, batch[:-1], batch[1:]), time.perf_counter() - start]
        self.rows.append(row)

    def step(self, way: str, codes: Tensor, targets: Tensor) -> tuple[float, float]:
        """Update once; return bits and share of right answers, of the characters that count."""
        model, state, scored = self.models[way], None, self.task.scored
        losses, hits = torch.empty(2, *targets.shape)
        self.optimizers[way].zero_grad()
        for start in range(0, len(codes), self.reach[way]):
            part = slice(start, start + self.reach[way])
            logits, state = model(codes[part], state)
            loss = cross_entropy(logits.transpose(1, 2), targets[part], reduction="none")
            (self.task.weights[part] @ loss.mean(1)).backward()
            losses[part], hits[part] = loss.detach(), logits.argmax(-1) == targets[part]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizers[way].step()
        return losses[scored].mean().item() / math.log(2), hits[scored].mean().item()

    def save(self, path: Path) -> None:
        """Write a checkpoint, completely or not at all."""
        states = {way: (self.models[way].state_dict(), self.optimizers[way].state_dict())
                  for way in WAYS}  # fmt: skip
        options = {k: v for k, v in vars(self.options).items() if k not in ("report", "resume")}
        saved = {"options": options, "text": self.task.digest, "rows": self.rows, "states": states}
        torch.save(saved, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to where a checkpoint was saved."""
        if saved["text"] != self.task.digest:
            raise ValueError("--text is not the text that this run began with: give that one")
        for way, (model, optimizer) in saved["states"].items():
            self.models[way].load_state_dict(model)
            self.optimizers[way].load_state_dict(optimizer)
        self.rows += saved["rows"]


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, and run no code from it."""
    try:
        if zipfile.ZipFile(path).testzip() is None:  # torch reads changed bytes as changed weights
            saved = torch.load(path, weights_only=True)
            return {name: saved[name] for name in ("options", "text", "rows", "states")}
    except Exception:  # a file that is missing, damaged or foreign may raise anything
        pass
    raise ValueError(f"{path} is no whole checkpoint of this program: name a run's --report")


def compare(training: Training) -> dict[str, rg.Measurement[Any]]:
    """Measure an iteration of the LSTM in each way, and by ordinary BPTT if that is no risk."""
    model = training.models["full"]
    inputs, ordinary = model.embedding(training.batch(0)[:-1]).detach(), copy.deepcopy(model.lstm)
    ordinary.memory = None  # torch's own

    def measured(lstm: nn.Module, stop: int) -> rg.Measurement[Any]:
        x, above = inputs[:stop].requires_grad_(), torch.ones_like(inputs[:stop])

        def iteration() -> tuple[Tensor, ...]:  # what it returns is not counted
            outputs, _ = lstm(x)
            return outputs, *torch.autograd.grad(outputs, [x, *lstm.parameters()], above)

        return rg.measure(iteration)

    found = {"full": measured(model.lstm, len(inputs))}
    found["windows"] = measured(ordinary, training.reach["windows"])
    if training.fit.ordinary_bytes < TOO_LARGE:
        found["ordinary"] = measured(ordinary, len(inputs))
    return found


def write_report(training: Training, folder: Path) -> str:
    """Write ``report.md``, its two pictures and a page that links all; return the table."""
    found = compare(training)
    what, fit, rows = training.task.what, training.fit, training.rows
    ax = Figure(figsize=(7, 3.6), layout="constrained").add_subplot()
    ax.set(xlabel="iteration", ylabel=f"bits ({what})")
    lines = [f"| way | LSTM's memory | seconds | bits ({what}) | right |", "|" + " --- |" * 5]
    for way, colour in WAYS.items():
        bits, right, seconds = zip(*(row[way] for row in rows), strict=True)
        ax.plot(range(1, len(rows) + 1), bits, color=colour, label=way)
        size, usual = format_bytes(found[way].working_bytes), statistics.median(seconds)
        means = statistics.fmean(bits[-LAST:]), statistics.fmean(right[-LAST:])
        lines.append(f"| {way} | {size} | {usual:.3f} | {means[0]:.3f} | {means[1]:.0%} |")
    lines.append(f"| full, ordinary BPTT | {format_bytes(fit.ordinary_bytes)} | | | |")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    figures.save(ax.figure, folder, "learning")
    curves = {way: figures.Curve(one.times, one.working) for way, one in found.items()}
    memory = figures.draw_memory(curves["full"], fit.budget_bytes, curves.get("ordinary"))
    figures.save(memory, folder, "memory")
    table = "\n".join(lines)
    text = f"""# {len(rows)} iterations, {what}\n\n{table}\n
Bits and right answers are means over the last {LAST} iterations.\n
![Bits of each iteration](learning.png)\n
![Working memory of the LSTM in one iteration](memory.png)\n"""
    (folder / "report.md").write_text(text, encoding="utf-8")
    files = sorted(path.name for path in folder.iterdir() if path.suffix != ".html")
    links = "".join(f'<li><a href="{name}">{name}</a>' for name in files)
    page = f"<!doctype html><meta charset=utf-8><pre>{table}</pre><ul>{links}</ul>"
    (folder / "index.html").write_text(page, encoding="utf-8")
    return table


def parse(arguments: list[str] | None) -> Training:
    """Return the training that was asked for; exit with a message if that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", default="5%", help="of the LSTM, such as 5%% or 8MiB")
    parser.add_argument("--text", help="a file in UTF-8, instead of letters")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{size} by default")
    parser.add_argument("--report", type=Path, default="report", help="folder for what is written")
    parser.add_argument("--resume", action="store_true", help="continue the run in that folder")
    options = parser.parse_args(arguments)
    checkpoint = options.report / "checkpoint.pt"
    try:
        saved = load(checkpoint) if options.resume else None
        if saved:  # the run's own options apply, and only iterations may change
            parser.set_defaults(**saved["options"])
            options = parser.parse_args(arguments)
            for name in saved["options"].keys() - {"iterations", "text"}:
                if getattr(options, name) != saved["options"][name]:
                    raise ValueError(f"--{name} was {saved['options'][name]}: leave it out")
        for name in SIZES:
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} is {getattr(options, name)}: expected 1 or more")
        training = Training(options)
        options.report.mkdir(parents=True, exist_ok=True)
        if saved:
            training.restore(saved)
        elif checkpoint.exists():
            os.replace(checkpoint, checkpoint.with_suffix(".previous.pt"))
    except (rg.RetrogradeError, ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    return training


def main(arguments: list[str] | None = None) -> int:
    """Train to the end or to Ctrl-C, with checkpoints, and write the report."""
    training = parse(arguments)
    folder, total, rows = training.options.report, training.options.iterations, training.rows
    pressed: list[bool] = []

    def press(*_: object) -> None:  # ends the iteration; a second Ctrl-C ends the program
        pressed.append(True)
        signal.signal(signal.SIGINT, usual)

    usual = signal.signal(signal.SIGINT, press)
    try:
        with Progress() as progress:
            bar = progress.add_task("", total=total, completed=len(rows))
            while len(rows) < total and not pressed:
                training.iterate()
                if len(rows) % EVERY == 0:
                    training.save(folder / "checkpoint.pt")
                bits = ", ".join(f"{way} {rows[-1][way][0]:.3f} bits" for way in WAYS)
                progress.update(bar, completed=len(rows), description=f"{len(rows)}/{total} {bits}")
        training.save(folder / "checkpoint.pt")
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        print(f"stopped after {len(rows)} of {total}; continue with --resume --report {folder}")
        return 130
    print(f"{write_report(training, folder)}\n\nwhat was learned: open {folder}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
