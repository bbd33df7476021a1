"""What ``bench ranks`` measures, and its JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from retrograde_papers.numbers import read_shipped, to_json
from wang2020.ranks_model import RankModel

__all__ = ["Crossing", "Ranks"]


@dataclass(frozen=True)
class Crossing:
    """A backward pass across the ranks that are at hand, one way.

    Attributes:
        way: ``"linear"`` or ``"tree"``.
        seconds: until the last rank was through, the median.
    """

    way: str
    seconds: float


@dataclass(frozen=True)
class Ranks:
    """What was measured on a few ranks.

    Attributes:
        machine: what was measured on.
        settings: ranks, the module's sizes, rounds and the like; ``"note"`` is for captions.
        model: of more ranks, with what was measured.
        sum_seconds: of adding up the parameters' gradients, which every way does besides.
        crossings: a backward pass, by way.

    Example:
        >>> one = Ranks({}, {"ranks": 2}, RankModel(1, 1, 1, 1, 1, 1, 1, 1), 0.5, ())
        >>> Ranks.from_json(one.to_json()) == one
        True
    """

    machine: Mapping[str, str | int]
    settings: Mapping[str, str | int]
    model: RankModel
    sum_seconds: float
    crossings: tuple[Crossing, ...]

    def expected_seconds(self, way: str) -> float:
        """What the model says of the ranks at hand, the sum of gradients included."""
        ranks = int(self.settings["ranks"])
        return float(self.model.seconds(way, ranks)) + self.sum_seconds

    def to_json(self) -> str:
        """The numbers as JSON, which :meth:`from_json` reads."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Ranks":
        """The numbers that :meth:`to_json` wrote."""
        document = json.loads(text)
        document["model"] = RankModel(**document["model"])
        document["crossings"] = tuple(Crossing(**each) for each in document["crossings"])
        return cls(**document)

    @classmethod
    def shipped(cls) -> "Ranks":
        """The numbers that come with this package.

        Example:
            >>> [each.way for each in Ranks.shipped().crossings]
            ['linear', 'tree']
        """
        return cls.from_json(read_shipped("wang2020", "ranks"))
