"""What a training run is asked for, and the one error that says a request cannot be met."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from retrograde.errors import RetrogradeError
from retrograde.units import parse_memory

__all__ = ["TrainingError", "TrainingOptions"]


class TrainingError(RetrogradeError, ValueError):
    """A training run cannot start, go on or be taken up again as asked."""


@dataclass(frozen=True)
class TrainingOptions:
    """What decides a run, to the last bit.

    Attributes:
        memory: the LSTM's budget, as :func:`retrograde.units.parse_memory` reads it.
        length: characters in a sequence: steps that one gradient reaches back.
        batch: sequences side by side.
        hidden: width of embedding and LSTM.
        iterations: how many in all, those before a resumption included.
        learning_rate: of Adam.
        text: path of the text; none is the embedded one.
        seed: of the first weights.
        threads: that torch computes with; another number adds in another order.

    Raises:
        TrainingError: a number is not positive and finite.
        UnitError: the memory cannot be read.

    Example:
        >>> TrainingOptions(length=40, batch=4).memory
        '5%'
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

    def as_dict(self) -> dict[str, Any]:
        """Every option by its name, plain values only.

        Returns:
            What :meth:`from_dict` reads.
        """
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingOptions":
        """The options that :meth:`as_dict` wrote.

        Args:
            values: by name; a name too many or too few is an error.

        Returns:
            The options.

        Raises:
            TrainingError: these are the options of another version.
        """
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            raise TrainingError(
                f"the options are {sorted(values)}: expected {sorted(expected)}; another version "
                "of retrograde wrote them, so take that one, or start anew"
            )
        return cls(**values)
