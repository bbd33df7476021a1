"""Figures 5.1 and 5.3 of Wang, *BPPSA* (2020): losses of training in several ways.

The paper draws the loss over wall-clock time, where one way's curve is the other's squeezed. Beside
that stands the loss over iterations, where the curves have to lie on one another.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from retrograde.figures.style import tidy
from retrograde_papers.plates import Column, Plate, captioned, describe_machine, name_curves
from wang2020.results import Curves, Results, shipped
from wang2020.style import colour_of, label_of

__all__ = ["figure_5_1", "figure_5_3"]

_LOSS = "cross entropy (nats)"
_THIN, _STEP = 1.3, 1.7  # line widths, so that each of the curves on one another can be seen


def figure_5_1(results: Results | None = None) -> Plate:
    """Figure 5.1: losses of an RNN that learns to classify bitstreams.

    Example:
        >>> figure_5_1().name
        'figure_5_1'
    """
    (curves, *_) = (shipped("bitstream") if results is None else results).curves
    figure = Figure(figsize=(9.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    what = f"bitstreams of {curves.settings['length']:,} bits"
    _draw_seconds(left, curves, f"(a) {what}, over time")
    _draw_iterations(right, curves, "(b) the same, over iterations")
    right.set_ylabel("")
    note = f"{_described([curves])} {_outcome(curves)}"
    name_curves(figure, left, len(curves.ways))
    title = "loss of an RNN on bitstreams, over time"
    return captioned("figure_5_1", title, _table([curves]), figure, note)


def figure_5_3(results: Results | None = None) -> Plate:
    """Figure 5.3: losses of a GRU that learns to tell instruments apart.

    Example:
        >>> figure_5_3().name
        'figure_5_3'
    """
    sets = (shipped("instruments") if results is None else results).curves
    figure = Figure(figsize=(max(6.4, 3.4 * len(sets)), 6.8), layout="constrained")
    axes = figure.subplots(2, len(sets), sharey=True, squeeze=False)
    for column, curves in enumerate(sets):
        steps = f"set {curves.settings['data']}: T = {curves.settings['length']:,}"
        _draw_seconds(axes[0, column], curves, steps)
        _draw_iterations(axes[1, column], curves, steps)
        if column:
            for row in (0, 1):
                axes[row, column].set_ylabel("")
    outcomes = " ".join(f"{each.settings['data']}: {_outcome(each)}" for each in sets)
    note = f"{_described(sets)} {outcomes}"
    name_curves(figure, axes[0, 0], len(sets[0].ways))
    title = "loss of a GRU on recordings of instruments, over time"
    return captioned("figure_5_3", title, _table(sets), figure, note)


def _draw_seconds(axes: Axes, curves: Curves, title: str) -> None:
    for way in curves.ways:
        axes.plot(
            curves.seconds[way], curves.losses[way], color=colour_of(way), linewidth=1.6,
            label=label_of(way, curves.settings["cell"]),
        )  # fmt: skip
    axes.set_xlim(left=0)
    tidy(axes, title=title, x="wall-clock time of its own iterations (s)", y=_LOSS, grid="y")


def _draw_iterations(axes: Axes, curves: Curves, title: str) -> None:
    """All curves, one on the other, the one beneath the wider."""
    ends = _iterations(curves)
    for place, way in enumerate(curves.ways):
        width = _THIN + _STEP * (len(curves.ways) - 1 - place)
        axes.plot(ends, curves.losses[way], color=colour_of(way), linewidth=width)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    tidy(axes, title=title, x="iteration", y=_LOSS, grid="y")


def _iterations(curves: Curves) -> list[int]:
    """Iterations done at each point."""
    total = int(curves.settings["iterations"])
    points = len(curves.losses["torch"])
    return [min(total, curves.every * (place + 1)) for place in range(points)]


def _described(sets: Sequence[Curves]) -> str:
    settings, every = sets[0].settings, {each.every for each in sets}
    points = f"the mean of {max(every)} iterations" if max(every) > 1 else "an iteration"
    return (
        f"{str(settings['cell']).upper()} of {settings['hidden']} units, batch "
        f"{settings['batch']}, Adam at {settings['learning_rate']:g}; a point is {points}. "
        "The same weights at first and the same batches, the ways in turn in one process, on "
        f"{describe_machine(sets[0].machine)}. Greatest distance of any iteration's loss from "
        "torch's, speed-ups of an iteration (and of its backward pass), held-out accuracy"
        f"{', by set' * (len(sets) > 1)}:"
    )


def _outcome(curves: Curves) -> str:
    """Difference, speed-ups and accuracies, in the order in which the caption announces them."""
    others = curves.ways[1:]
    difference = max(curves.difference[way] for way in others)
    torch, backward = curves.whole("torch"), curves.backward["torch"]
    speed = ", ".join(
        f"{way} {torch / curves.whole(way):.2f}× ({backward / curves.backward[way]:.2f}×)"
        for way in others
    )
    shares = list(dict.fromkeys(f"{100 * curves.accuracy[way]:.1f}" for way in curves.ways))
    accuracy = (
        f"{shares[0]} % each"
        if len(shares) == 1
        else ", ".join(f"{way} {100 * curves.accuracy[way]:.1f} %" for way in curves.ways)
    )
    return f"{difference:.1g}; {speed}; {accuracy}."


def _table(sets: Sequence[Curves]) -> dict[str, Column]:
    table: dict[str, list[str | int | float]] = {"set": [], "iteration": []}
    for curves in sets:
        ends = _iterations(curves)
        table["set"] += [str(curves.settings["data"])] * len(ends)
        table["iteration"] += ends
        for way in curves.ways:
            table.setdefault(f"{way} (s)", []).extend(curves.seconds[way])
            table.setdefault(f"{way} (loss, nats)", []).extend(curves.losses[way])
    if not any(table["set"]):
        del table["set"]
    return table  # type: ignore[return-value]  # a column has one type of value
