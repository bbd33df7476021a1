"""What the experiments of Wang, *BPPSA* (2020), 5.1 and 5.2, measure, and its JSON.

``bench bitstream`` and ``bench instruments`` write such a file; figures 5.1
to 5.4 are drawn from the two under ``data/`` unless others are given. Everything is kept by *way*:
``"torch"`` is torch's own module, ``"sequential"`` one compiled sweep, ``"scan"`` the scan.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from retrograde.errors import RetrogradeError
from retrograde_papers.numbers import read_shipped

__all__ = ["Curves", "Machine", "Results", "ResultsError", "Timing", "Timings", "shipped"]

Machine = Mapping[str, str | int]
Settings = Mapping[str, str | int | float]
Seconds = Mapping[str, float]
_DIGITS = 6


class ResultsError(RetrogradeError, ValueError):
    """A file is not one that the experiments write."""


@dataclass(frozen=True)
class Curves:
    """Losses of one network trained in several ways, side by side.

    Attributes:
        machine: what was measured on; ``"device"`` names it.
        settings: what was trained: cell, data, length, batch, learning rate, seed, iterations.
        every: iterations that a point of a curve is the mean of.
        seconds: by way, at each point, what the iterations up to it have taken.
        losses: by way, the mean cross entropy of each point, in nats.
        forward: by way, median seconds of an iteration's forward pass, loss included.
        backward: likewise of its backward pass.
        update: likewise of the optimizer's step.
        first: by way, seconds of the first call, which trains nothing and is not in ``seconds``:
            there kernels are compiled.
        difference: by way, the greatest distance of a single iteration's loss from torch's.
        accuracy: by way, share of the held-out sequences that are classified rightly in the end.
    """

    machine: Machine
    settings: Settings
    every: int
    seconds: Mapping[str, tuple[float, ...]]
    losses: Mapping[str, tuple[float, ...]]
    forward: Seconds
    backward: Seconds
    update: Seconds
    first: Seconds
    difference: Seconds
    accuracy: Seconds

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways, torch first."""
        return tuple(self.losses)

    def whole(self, way: str) -> float:
        """Median seconds of an iteration: forward, backward and update."""
        return self.forward[way] + self.backward[way] + self.update[way]

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "Curves":
        """The curves from plain containers."""
        for name in ("seconds", "losses"):
            document[name] = {way: tuple(values) for way, values in document[name].items()}
        return cls(**document)


@dataclass(frozen=True)
class Timing:
    """Median seconds of an iteration, at one length and one batch size.

    Attributes:
        name: of the data set; empty for bitstreams.
        length: steps of a sequence.
        batch: sequences side by side.
        forward: by way, of the forward pass, loss included.
        backward: by way, of the backward pass.
        update: by way, of the optimizer's step.
    """

    name: str
    length: int
    batch: int
    forward: Seconds
    backward: Seconds
    update: Seconds

    def whole(self, way: str) -> float:
        """Seconds of an iteration: forward, backward and update."""
        return self.forward[way] + self.backward[way] + self.update[way]

    def overhead(self, way: str) -> float:
        """Seconds by which a forward pass is longer than torch's: FO of figure 5.4."""
        return self.forward[way] - self.forward["torch"]


@dataclass(frozen=True)
class Timings:
    """Seconds over lengths and batch sizes.

    Attributes:
        machine: what was measured on; ``"device"`` names it.
        settings: what was measured: cell, batch and length that stay when the other varies.
        rounds: times that each was measured at least, all ways in turn.
        points: one for each pair of length and batch size.
    """

    machine: Machine
    settings: Settings
    rounds: int
    points: tuple[Timing, ...]

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways, torch first."""
        return tuple(self.points[0].forward) if self.points else ()

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "Timings":
        """The timings from plain containers."""
        points = tuple(Timing(**point) for point in document["points"])
        return cls(**document | {"points": points})


@dataclass(frozen=True)
class Results:
    """All that one experiment has measured.

    Attributes:
        experiment: ``"bitstream"`` or ``"instruments"``.
        curves: of figure 5.1, or of figure 5.3, one for each data set.
        timings: of figure 5.2, or of figure 5.4.

    Example:
        >>> results = Results("bitstream")
        >>> Results.from_json(results.to_json()) == results
        True
    """

    experiment: str
    curves: tuple[Curves, ...] = ()
    timings: Timings | None = None

    def over(self, earlier: "Results") -> "Results":
        """These, and of curves and timings what only earlier results have."""
        return replace(
            self,
            curves=self.curves or earlier.curves,
            timings=earlier.timings if self.timings is None else self.timings,
        )

    def to_json(self) -> str:
        """The numbers as JSON, to six digits, which :meth:`from_json` reads."""
        return json.dumps(_rounded(asdict(self)), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Results":
        """The numbers that :meth:`to_json` wrote; ResultsError for anything else."""
        try:
            document = json.loads(text)
            curves = tuple(Curves.from_dict(each) for each in document["curves"])
            timings = document["timings"]
            return cls(
                experiment=document["experiment"],
                curves=curves,
                timings=None if timings is None else Timings.from_dict(timings),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsError(
                "these are not results of `bench bitstream` or `bench instruments` "
                f"({type(error).__name__}: {error})"
            ) from error


def shipped(experiment: str) -> Results:
    """The results that come with this package, of ``"bitstream"`` or ``"instruments"``.

    Example:
        >>> shipped("bitstream").curves[0].ways[0]
        'torch'
    """
    return Results.from_json(read_shipped("wang2020", experiment))


def _rounded(value: Any) -> Any:
    """Every float in plain containers to six digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
