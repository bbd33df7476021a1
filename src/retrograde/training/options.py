"""The options of a training run, and the one error for options that cannot be met."""

import math
from dataclasses import asdict, dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from retrograde.errors import RetrogradeError
from retrograde.units import parse_memory

__all__ = ["TrainingError", "TrainingOptions", "is_of_kind", "kind_name"]

_LARGEST_SEED = 2**63 - 1
_MOST_THREADS = 4096  # more than any machine has; beyond, torch crashes
_KINDS = {
    str: "a text", int: "a whole number", float: "a number", dict: "named values", list: "a list",
    NoneType: "none",
}  # fmt: skip


class TrainingError(RetrogradeError, ValueError):
    """A training run cannot start, continue or be resumed as asked."""


@dataclass(frozen=True)
class TrainingOptions:
    """The options that determine a run, to the last bit.

    Raises TrainingError for a number out of its range, or UnitError for the memory.

    Attributes:
        memory: the LSTM's budget, as :func:`retrograde.units.parse_memory` reads it.
        length: characters in a sequence: the steps that one gradient reaches back.
        batch: sequences in a batch.
        hidden: width of embedding and LSTM.
        iterations: in all, those before a resumption included.
        learning_rate: Adam's learning rate.
        text: path of the text; None for the embedded one.
        seed: seed of the initial weights.
        threads: torch's threads, whose number determines the order of additions.
    """

    memory: str = "5%"
    length: int = 1000
    batch: int = 64
    hidden: int = 256
    iterations: int = 60
    learning_rate: float = 0.01
    text: str | None = None
    seed: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        parse_memory(self.memory)
        for name in ("length", "batch", "hidden", "iterations", "learning_rate", "threads"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                option = "--" + name.replace("_", "-")
                raise TrainingError(f"{option} is {value}: expected a number above 0")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise TrainingError(
                f"--seed is {self.seed}: expected 0 or more, at most {_LARGEST_SEED:,}; name a "
                "seed in that range"
            )
        if self.threads > _MOST_THREADS:
            raise TrainingError(
                f"--threads is {self.threads}: expected at most {_MOST_THREADS:,}, and best no "
                "more than the machine has processors; name fewer"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return every option by its name, in plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingOptions":
        """Read the result of :meth:`as_dict`; TrainingError if another version wrote it."""
        expected = get_type_hints(cls)
        if values.keys() != expected.keys():
            raise TrainingError(
                f"the options are {sorted(map(str, values))}: expected {sorted(expected)}; another "
                "version of retrograde wrote them, so use that one, or start a new run"
            )
        for name, kind in expected.items():
            if not is_of_kind(values[name], kind):
                raise TrainingError(
                    f"the option {name} is {values[name]!r}: expected {kind_name(kind)}; another "
                    "version of retrograde wrote it, so use that one, or start a new run"
                )
        return cls(**values)


def is_of_kind(value: object, kind: type | UnionType) -> bool:
    """Return whether a value is of a kind; an int is a float too, and a bool is neither."""
    wanted = int | float if kind is float else kind
    return isinstance(value, wanted) and not isinstance(value, bool)


def kind_name(kind: type | UnionType) -> str:
    """Return a type, or a union of types, in words: "a whole number", "a text or none"."""
    return " or ".join(_KINDS.get(each, str(each)) for each in get_args(kind) or (kind,))
