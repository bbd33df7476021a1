"""What an experiment is asked for, checked before any work starts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from retrograde.errors import RetrogradeError

__all__ = [
    "CELLS",
    "SETS",
    "WAYS",
    "ExperimentError",
    "Options",
    "check_batch",
    "check_duration",
    "check_positive",
    "check_seed",
    "parse_choices",
    "parse_numbers",
]

WAYS = ("torch", "sequential", "scan")
SETS = ("s", "m", "l")
CELLS = {"bitstream": "rnn", "instruments": "gru"}

_LARGEST_SEED = 2**63 - 1  # which leaves torch room for the seeds that are counted up from it


class ExperimentError(RetrogradeError, ValueError):
    """An experiment cannot be run as asked."""


@dataclass(frozen=True)
class Options:
    """What decides an experiment, wherever its data come from.

    Attributes:
        experiment: ``"bitstream"`` or ``"instruments"``.
        batch: sequences side by side, in training.
        learning_rate: of Adam.
        iterations: that each way trains; none where ``epochs`` says it.
        epochs: the same in passes over the training data.
        seed: of weights, order and synthesised data.
        ways: that take turns; ``"torch"`` is what the others are compared with.
        batches: sizes at which seconds are measured.
        lengths: likewise, of bitstreams; training is at ``length``.
        length: of bitstreams, in training.
        rounds: at least so many times is each measured, after one time that is not.
        device: such as ``"cpu"`` or ``"cuda"``.
        hidden: size of the hidden state; 20 in the paper.

    Raises:
        ExperimentError: a number is not positive and finite, or a way is unknown.

    Example:
        >>> Options("bitstream", iterations=10).hidden
        20
    """

    experiment: str
    batch: int = 16
    learning_rate: float = 3e-5
    iterations: int | None = None
    epochs: int | None = None
    seed: int = 0
    ways: tuple[str, ...] = WAYS
    batches: tuple[int, ...] = (16,)
    lengths: tuple[int, ...] = ()
    length: int = 1000
    rounds: int = 5
    device: str = "cpu"
    hidden: int = 20

    def __post_init__(self) -> None:
        check_positive(self, "batch", "learning_rate", "iterations", "epochs", "length", "rounds")
        check_duration(self.iterations, self.epochs)
        check_seed(self.seed)
        _check_ways(self.ways)

    def iterations_of(self, samples: int) -> int:
        """``iterations``, or so many epochs of whole batches.

        Raises:
            ExperimentError: a batch is larger than the training data.

        Example:
            >>> Options("bitstream", epochs=50).iterations_of(32_000)
            100000
        """
        largest = max(self.batch, *self.batches)
        if largest > samples:
            raise ExperimentError(
                f"a batch of {largest:,}: there are {samples:,} training samples; name smaller "
                "--batch and --batches"
            )
        if self.iterations is not None:
            return self.iterations
        assert self.epochs is not None
        return self.epochs * (samples // self.batch)


def check_positive(options: object, *names: str) -> None:
    """Refuse attributes that are neither None nor positive and finite."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            option = "--" + name.replace("_", "-")
            raise ExperimentError(f"{option} is {value}: expected a number above 0")


def check_duration(iterations: int | None, epochs: int | None) -> None:
    """Refuse a training whose length is not given in one of the two, or in both."""
    if (iterations is None) == (epochs is None):
        given = "neither" if iterations is None else "both"
        raise ExperimentError(f"--iterations and --epochs: {given} given; name one of them")


def check_seed(seed: int) -> None:
    """Refuse a seed that not every generator of random numbers takes."""
    if not 0 <= seed <= _LARGEST_SEED:
        raise ExperimentError(
            f"--seed is {seed}: expected 0 or more, at most {_LARGEST_SEED:,}; name a seed in that "
            "range"
        )


def check_batch(batch: int, samples: int) -> None:
    """Refuse a batch that is larger than the training data."""
    if batch > samples:
        raise ExperimentError(
            f"a batch of {batch:,}: there are {samples:,} training images; name a smaller --batch"
        )


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers above 0 from a list with commas, in order, each once.

    Example:
        >>> parse_numbers("--lengths", "30, 10")
        (10, 30)
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    hint = f"{option} is {text!r}: expected whole numbers above 0, such as 10,30,100"
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ExperimentError(hint)
    numbers = sorted({int(part) for part in parts})
    if numbers[0] == 0:
        raise ExperimentError(hint)
    return tuple(numbers)


def parse_choices(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Some of the known names, or ``all``, from a list with commas, in the order of ``known``.

    Example:
        >>> parse_choices("--ways", "scan,torch", WAYS)
        ('torch', 'scan')
    """
    given = {part.strip().lower() for part in text.split(",") if part.strip()}
    if given == {"all"}:
        return tuple(known)
    unknown = sorted(given - set(known))
    if unknown or not given:
        wrong = f"{option} names {unknown[0]!r}" if unknown else f"{option} is empty"
        raise ExperimentError(f"{wrong}: expected some of {', '.join(known)}, or all")
    return tuple(name for name in known if name in given)


def _check_ways(ways: Sequence[str]) -> None:
    for way in ways:
        if way not in WAYS:
            raise ExperimentError(f"unknown way {way!r}: expected some of {', '.join(WAYS)}")
    if "torch" not in ways or len(ways) < 2:
        raise ExperimentError(
            f"--ways is {','.join(ways)}: expected torch, which is what the others are compared "
            "with, and one of the others at least"
        )
