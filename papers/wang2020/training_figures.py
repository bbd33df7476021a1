"""Figure 3.4 of Wang, *BPPSA* (2020): losses of LeNet-5 trained by the scan and by torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from retrograde.figures.style import tidy
from retrograde_papers.curves import BLUE, RED
from retrograde_papers.numbers import read_shipped, to_json
from retrograde_papers.plates import Column, Plate, captioned, describe_machine, name_curves

__all__ = ["Convergence", "figure_3_4"]

_COLOURS = {"torch": RED, "scan": BLUE}
_LABELS = {"torch": "torch.nn.Sequential", "scan": 'rg.Sequential(backward="scan")'}


@dataclass(frozen=True)
class Convergence:
    """Losses of one network trained in two ways on the same batches.

    Attributes:
        machine: what was trained on; ``"device"`` names it.
        settings: what was trained: network, algorithm, batch, learning rate, momentum, seed,
            epochs, images.
        every: iterations from a point of the curves to the next.
        training: by way, the mean loss of the iterations up to each point, in nats.
        testing: by way, the loss on the images held out, at each point.
        difference: the greatest distance of a single iteration's training loss between the ways.
        test_difference: the same of the test losses.
        accuracy: by way, share of the images held out that are classified rightly in the end.
        seconds: by way, median of an iteration.

    Example:
        >>> one = Convergence({}, {}, 1, {"torch": [2.0]}, {"torch": [2.1]}, 0.0, 0.0, {}, {})
        >>> Convergence.from_json(one.to_json()) == one
        True
    """

    machine: Mapping[str, str | int]
    settings: Mapping[str, str | int | float]
    every: int
    training: Mapping[str, list[float]]
    testing: Mapping[str, list[float]]
    difference: float
    test_difference: float
    accuracy: Mapping[str, float]
    seconds: Mapping[str, float]

    def to_json(self) -> str:
        """The numbers as JSON, which :meth:`from_json` reads."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Convergence":
        """The numbers that :meth:`to_json` wrote."""
        return cls(**json.loads(text))


def figure_3_4(found: Convergence | None = None) -> Plate:
    """Figure 3.4: training and test loss of LeNet-5 on CIFAR-10.

    Example:
        >>> figure_3_4().name
        'figure_3_4'
    """
    if found is None:
        found = Convergence.from_json(read_shipped("wang2020", "lenet"))
    figure = Figure(figsize=(9.4, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    points = len(found.training["torch"])
    iterations = [found.every * (point + 1) for point in range(points)]
    table: dict[str, Column] = {"iteration": iterations}
    sides = (("training", left, found.training), ("test", right, found.testing))
    for place, (name, axes, losses) in enumerate(sides):
        _draw(axes, iterations, losses, f"({'ab'[place]}) {name} loss")
        table |= {f"{way}, {name} (nats)": values for way, values in losses.items()}
    name_curves(figure, left, 2)
    note = _described(found)
    title = "loss of LeNet-5 on CIFAR-10, trained by torch and by the scan"
    return captioned("figure_3_4", title, table, figure, note)


def _draw(axes: Axes, iterations: list[int], losses: Mapping[str, list[float]], title: str) -> None:
    styles = {"torch": (3.4, "-"), "scan": (1.4, (0, (4, 2)))}  # both are seen, one on the other
    for way, values in losses.items():
        width, style = styles[way]
        axes.plot(
            iterations, values, color=_COLOURS[way], linewidth=width, linestyle=style,
            label=_LABELS[way],
        )  # fmt: skip
    label = "cross entropy (nats)" * (title[1] == "a")
    tidy(axes, grid="y", title=title, x="iteration", y=label)


def _described(found: Convergence) -> str:
    settings = found.settings
    shares = ", ".join(f"{way} {100 * share:.1f} %" for way, share in found.accuracy.items())
    return (
        f"{settings['training']:,} images, {settings['testing']:,} held out; batch "
        f"{settings['batch']}, SGD at {settings['learning_rate']:g} with a momentum of "
        f"{settings['momentum']:g}, {settings['epochs']} epochs; algorithm "
        f"{settings['algorithm']!r}. The same weights at first and the same batches, on "
        f"{describe_machine(found.machine)}. A point is the mean of {found.every} iterations. "
        f"Greatest distance of any iteration's training loss {found.difference:.2g}, of any test "
        f"loss {found.test_difference:.2g}; accuracy on the images held out {shares}."
    )
