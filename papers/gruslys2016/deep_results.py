"""What ``bench deep`` measures, and its JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retrograde.figures.memory import Curve

__all__ = ["Deep", "Held", "Side"]


@dataclass(frozen=True)
class Side:
    """One way of running an iteration, measured.

    Attributes:
        name: of the way: ``"ordinary"``, a budget as it was named, a number of segments.
        kind: ``"ordinary"``, ``"budget"``, or ``"segments"`` of ``torch.utils.checkpoint``.
        budget_bytes: the budget; 0 where there is none.
        peak_bytes: what forward and backward held, as a budget counts it.
        seconds: of an iteration, the least of some.
    """

    name: str
    kind: str
    budget_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Held:
    """Memory over time of one iteration.

    Attributes:
        planned: within the budget, as a schedule of the paper's appendix C foresees it.
        measured: the same, as it was run.
        ordinary_planned: of ordinary backpropagation.
        ordinary_measured: likewise.
    """

    planned: Curve
    measured: Curve
    ordinary_planned: Curve
    ordinary_measured: Curve


@dataclass(frozen=True)
class Deep:
    """One network, trained ordinarily and within budgets.

    Attributes:
        machine: what was trained on; ``"device"`` names it.
        settings: network, images, batch, learning rate and the like; ``"note"`` is for captions.
        chain: the layers as measured, as :meth:`retrograde.Chain.to_json` has them.
        ordinary_bytes: what ordinary backpropagation holds, as the chain foresees it.
        least_bytes: the least budget.
        ordinary_seconds: of an iteration, as the chain foresees it.
        losses: by way, of every iteration, in nats.
        difference: by budget, the greatest distance of a loss from the ordinary one.
        weights_difference: by budget, the same of weights and running statistics at the end.
        seconds: by way, of an iteration of training, the median.
        sides: one iteration, measured.
        refused: by budget, the error's text.
        curves: by policy, bytes and predicted seconds.
        held: by budget, memory over time.
    """

    machine: Mapping[str, str | int]
    settings: Mapping[str, str | int | float]
    chain: str
    ordinary_bytes: int
    least_bytes: int
    ordinary_seconds: float
    losses: Mapping[str, list[float]]
    difference: Mapping[str, float]
    weights_difference: Mapping[str, float]
    seconds: Mapping[str, float]
    sides: Sequence[Side]
    refused: Mapping[str, str]
    curves: Mapping[str, list[tuple[int, float]]]
    held: Mapping[str, Held]

    @property
    def name(self) -> str:
        """Of its files: ``"deep_vgg11"``."""
        return f"deep_{self.settings['network']}"

    def side(self, name: str) -> Side:
        """What was measured of one way."""
        return next(side for side in self.sides if side.name == name)

    def to_json(self) -> str:
        """The numbers as JSON, which :meth:`from_json` reads."""
        lines = [
            f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            for key, value in asdict(self).items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Deep":
        """The numbers that :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["sides"] = tuple(Side(**side) for side in values["sides"])
        values["curves"] = {
            policy: [(size, seconds) for size, seconds in points]
            for policy, points in values["curves"].items()
        }
        values["held"] = {name: _held(curves) for name, curves in values["held"].items()}
        return cls(**values)


def _held(curves: dict[str, Any]) -> Held:
    pairs = {
        name: Curve(tuple(curve["seconds"]), tuple(curve["held_bytes"]))
        for name, curve in curves.items()
    }
    return Held(**pairs)
