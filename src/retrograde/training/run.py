"""A training run: the state that changes from one iteration to the next.

:meth:`Run.snapshot` has all that determines the rest of a run. A resumed run continues bit for bit,
given the same machine and number of threads.
"""

import math
import os
import time
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrograde.training.checkpoint import check_snapshot
from retrograde.training.options import TrainingError, TrainingOptions
from retrograde.training.task import CharacterModel, Text, embedded_text, read_text

__all__ = ["Run"]

_CLIP = 1.0


class Run:
    """A character model in training; ``text`` None means the one that the options name.

    ``losses`` are bits per character and ``seconds`` are times, one for each finished iteration.
    Raises TrainingError if the text cannot be read or is shorter than a sequence.
    """

    def __init__(self, options: TrainingOptions, text: Text | None = None) -> None:
        self.options = options
        self.text = _text_of(options) if text is None else text
        self.text.check_length(options.length)
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.model = CharacterModel(len(self.text.vocabulary), options.hidden, options.memory)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.learning_rate)
        self.state: tuple[Tensor, Tensor] | None = None
        self.losses: list[float] = []
        self.seconds: list[float] = []

    @property
    def done(self) -> int:
        """The number of finished iterations."""
        return len(self.losses)

    @property
    def position(self) -> int:
        """The number of characters that every stream has read."""
        return self.done * self.options.length

    def sequences(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of the next iteration, each ``(length, batch)``."""
        return self.text.sequences(self.position, self.options.length, self.options.batch)

    def step(self) -> float:
        """Run one iteration and return its loss, in bits per character. Raises TrainingError if the
        loss is not finite, before the weights change, or BudgetError."""
        start = time.perf_counter()
        codes, targets = self.sequences()
        logits, state = self.model(codes, self.state)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        del logits  # backward does not need them, and the LSTM needs the memory
        bits = loss.item() / math.log(2)
        if not math.isfinite(bits):
            raise TrainingError(
                f"the loss is {bits} in iteration {self.done + 1}: expected a finite number; start "
                f"a new run with a --learning-rate below {self.options.learning_rate:g}"
            )
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        self.state = (state[0].detach(), state[1].detach())
        self.losses.append(bits)
        self.seconds.append(time.perf_counter() - start)
        return bits

    def snapshot(self) -> dict[str, Any]:
        """Return all that determines the rest of the run, in tensors and plain containers."""
        live = {
            "options": self.options.as_dict(),
            "text": {"source": self.text.source, "sha256": self.text.digest},
            "vocabulary": self.text.vocabulary,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "position": self.position,
            "state": self.state,
            "losses": self.losses,
            "seconds": self.seconds,
        }
        return deepcopy(live)  # training continues in place, in the optimizer's tensors too

    @classmethod
    def resumed(
        cls, snapshot: dict[str, Any], iterations: int | None = None, text: str | None = None
    ) -> "Run":
        """Return the run of a snapshot, at the iteration where it was made. ``iterations`` and
        ``text`` replace the snapshot's total and path unless None. Raises TrainingError if the text
        is another one, or the snapshot is not complete or of another version."""
        options = check_snapshot(snapshot)
        snapshot = deepcopy(snapshot)
        options = replace(
            options,
            iterations=options.iterations if iterations is None else iterations,
            text=options.text if text is None else os.path.abspath(text),
        )
        found = _text_of(options)
        _check_text(found, options, snapshot)
        run = cls(options, found)
        run.model.load_state_dict(snapshot["model"])
        run.optimizer.load_state_dict(snapshot["optimizer"])
        run.state = snapshot["state"]
        run.losses, run.seconds = snapshot["losses"], snapshot["seconds"]
        torch.set_rng_state(snapshot["random"])
        return run


def _check_text(found: Text, options: TrainingOptions, snapshot: dict[str, Any]) -> None:
    began, vocabulary = snapshot["text"], snapshot["vocabulary"]
    if (found.digest, found.vocabulary) == (began["sha256"], vocabulary):
        return
    remedy = (
        "use the version of Python that it began with, since the text is its documentation"
        if options.text is None
        else "give that one with --text"
    )
    raise TrainingError(
        f"the text {found.source} is not the one that this run began with: it has "
        f"{len(found.vocabulary)} different characters and the SHA-256 {found.digest:.8}…, "
        f"expected {len(vocabulary)} and {began['sha256']:.8}…, as {began['source']} had; "
        f"{remedy}, or start a new run without --resume"
    )


def _text_of(options: TrainingOptions) -> Text:
    return embedded_text() if options.text is None else read_text(options.text)
