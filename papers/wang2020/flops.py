"""Figure 5.5 of Wang, *BPPSA* (2020): FLOPs of each step for a pruned VGG-11."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from retrograde.figures.style import BLUE, GREEN, INK, ORANGE, tidy
from retrograde_papers.numbers import read_shipped, to_json
from retrograde_papers.plates import Plate, captioned

__all__ = ["Counted", "Point", "Pruning", "figure_5_5"]

_COLOURS = {"vector": ORANGE, "matrix": BLUE, "ordinary": GREEN}
_LABELS = {
    "vector": "scan: matrix · vector",
    "matrix": "scan: matrix · matrix",
    "ordinary": "ordinary backpropagation",
}


@dataclass(frozen=True)
class Point:
    """One product of the scan, or one layer of the ordinary backward pass.

    Attributes:
        kind: ``"vector"``, ``"matrix"`` or ``"ordinary"``.
        level: of the scan; of the ordinary pass, the layer.
        what: the operands' shapes, or the layer.
        dense: multiplications if nothing were sparse.
        flops: counted.
        critical: whether it is on the critical path.
    """

    kind: str
    level: int
    what: str
    dense: int
    flops: int
    critical: bool


@dataclass(frozen=True)
class Counted:
    """A scan with some levels.

    Attributes:
        levels: swept upward, and as many downward.
        steps: products on the critical path.
        flops: of all products.
        critical_flops: of those on the critical path.
        largest_flops: of one product.
    """

    levels: int
    steps: int
    flops: int
    critical_flops: int
    largest_flops: int


@dataclass(frozen=True)
class Pruning:
    """What training, pruning, and counting came to.

    Attributes:
        machine: what was trained on.
        settings: of the training.
        accuracy: share of the images held out that are classified rightly: ``"trained"``,
            ``"pruned"``, ``"retrained"``.
        losses: mean cross entropy of each epoch.
        kept: by layer, the share of weights that are left.
        levels: of the scan that the points are of.
        points: of one sample.
        scans: for each number of levels.
        unpruned: likewise for the network before pruning.
        ordinary_flops: of the ordinary backward pass, which does not see the zeros.

    Example:
        >>> one = Pruning({}, {}, {"trained": 0.9}, (2.0,), {}, 3, (), (), (), 7)
        >>> Pruning.from_json(one.to_json()) == one
        True
    """

    machine: Mapping[str, str | int]
    settings: Mapping[str, str | int | float]
    accuracy: Mapping[str, float]
    losses: tuple[float, ...]
    kept: Mapping[str, float]
    levels: int
    points: tuple[Point, ...]
    scans: tuple[Counted, ...]
    unpruned: tuple[Counted, ...]
    ordinary_flops: int

    def to_json(self) -> str:
        """The numbers as JSON, which :meth:`from_json` reads."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Pruning":
        """The numbers that :meth:`to_json` wrote."""
        document = json.loads(text)
        document["losses"] = tuple(document["losses"])
        document["points"] = tuple(Point(**point) for point in document["points"])
        for name in ("scans", "unpruned"):
            document[name] = tuple(Counted(**each) for each in document[name])
        return cls(**document)

    @classmethod
    def shipped(cls) -> "Pruning":
        """The numbers that come with this package.

        Example:
            >>> Pruning.shipped().levels
            3
        """
        return cls.from_json(read_shipped("wang2020", "vgg11"))


def figure_5_5(found: Pruning | None = None) -> Plate:
    """Figure 5.5: FLOPs of each step over what they would be if nothing were sparse.

    Example:
        >>> figure_5_5().name
        'figure_5_5'
    """
    found = Pruning.shipped() if found is None else found
    figure = Figure(figsize=(7.6, 5.4), layout="constrained")
    axes = figure.add_subplot()
    for kind, label in _LABELS.items():
        for critical in (False, True):
            points = [p for p in found.points if (p.kind, p.critical) == (kind, critical)]
            axes.scatter(
                [p.dense for p in points],
                [p.flops for p in points],
                s=46,
                facecolors=_COLOURS[kind] if critical else "none",
                edgecolors=_COLOURS[kind],
                linewidths=1.4,
                alpha=0.85,
                label=label if critical else None,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(color=INK, alpha=0.1, linewidth=0.8)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    tidy(
        axes,
        title="Steps of one sample's backward pass, VGG-11 pruned",
        x="multiplications if nothing were sparse",
        y="FLOPs",
    )
    note = _described(found)
    title = "FLOPs of each step for a pruned VGG-11"
    return captioned("figure_5_5", title, _table(found.points), figure, note)


def _described(found: Pruning) -> str:
    settings, accuracy = found.settings, found.accuracy
    chosen = next(each for each in found.scans if each.levels == found.levels)
    by_levels = ", ".join(f"{each.levels}: {each.critical_flops:.3g}" for each in found.scans)
    return (
        f"Filled: on the critical path. Convolutional part of VGG-11, "
        f"{100 * float(settings['share']):.0f} % of every layer's weights pruned by magnitude; "
        f"{settings['epochs']} epochs of training, as many of retraining, on "
        f"{settings['training']:,} images: accuracy {100 * accuracy['trained']:.1f} %, "
        f"{100 * accuracy['pruned']:.1f} % pruned, {100 * accuracy['retrained']:.1f} % retrained. "
        f"Up-sweep of {found.levels} levels, linear, down-sweep: {chosen.critical_flops:.3g} FLOPs "
        f"on the critical path; ordinary backward pass {found.ordinary_flops:.3g}. The scan's by "
        f"number of levels: {by_levels}."
    )


def _table(points: Sequence[Point]) -> dict[str, list[str] | list[int]]:
    return {
        "kind": [p.kind for p in points],
        "level": [p.level for p in points],
        "what": [p.what for p in points],
        "multiplications if dense": [p.dense for p in points],
        "flops": [p.flops for p in points],
        "critical": [int(p.critical) for p in points],
    }
