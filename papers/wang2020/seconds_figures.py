"""Figures 5.2 and 5.4 of Wang, *BPPSA* (2020): speed-ups over length and batch size, and what of
an iteration is forward pass, overhead and backward pass.

FP is the forward pass of torch's module, FO how much longer another's is, since it prepares the
transposed Jacobians, BP torch's backward pass, BPPSA another's.
"""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from retrograde.figures.style import BLUE, GREEN, GREY, INK, ORANGE, tidy
from retrograde_papers.curves import draw_level
from retrograde_papers.plates import Column, Plate, captioned, describe_machine, name_curves
from wang2020.results import Results, Timing, Timings, shipped
from wang2020.style import colour_of, label_of

__all__ = ["figure_5_2", "figure_5_4"]

_WIDEST = 3.0  # a bar of figure 5.4; a longer one is cut, and its length written on it
_PARTS = (
    ("FP: torch's forward pass", GREY),
    ("FO: what another takes beyond it", BLUE),
    ("BP: torch's backward pass", GREEN),
    ("BPPSA: another's backward pass", ORANGE),
)

Ratio = Callable[[Timing, str], float]


def figure_5_2(results: Results | None = None) -> Plate:
    """Figure 5.2: speed-up over torch's module, over the length and over the batch size.

    Example:
        >>> figure_5_2().name
        'figure_5_2'
    """
    timings = _timings(results, "bitstream")
    length, batch = timings.settings["length"], timings.settings["batch"]
    by_length = _sorted([p for p in timings.points if p.batch == batch], "length")
    by_batch = _sorted([p for p in timings.points if p.length == length], "batch")
    figure = Figure(figsize=(9.4, 7.4), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    for row, (what, ratio) in enumerate((("backward pass", _backward), ("iteration", _whole))):
        for column, (points, name) in enumerate(((by_length, "length"), (by_batch, "batch"))):
            _draw_ratios(axes[row, column], points, name, timings, ratio)
            fixed = f"B = {batch}" if name == "length" else f"T = {length:,}"
            tidy(
                axes[row, column],
                title=f"({'abcd'[row + 2 * column]}) {what}, {fixed}",
                x=("sequence length T (steps)" if name == "length" else "batch size B") * row,
                y=f"speed-up of the {what}" * (column == 0),
            )
        _mark_ratios(axes[row, 0])  # and of the other, which shares its axis
    name_curves(figure, axes[0, 0], 4)
    note = (
        f"Seconds of {label_of('torch', timings.settings['cell'])} divided by those of the same "
        f"network otherwise trained: {str(timings.settings['cell']).upper()} of "
        f"{timings.settings['hidden']} units on bitstreams. {_measured(timings)}"
    )
    title = "speed-up over length and batch size, RNN"
    return captioned("figure_5_2", title, _table(timings), figure, note)


def figure_5_4(results: Results | None = None) -> Plate:
    """Figure 5.4: forward pass, overhead and backward pass, torch's forward and backward being 1.

    Example:
        >>> figure_5_4().name
        'figure_5_4'
    """
    timings = _timings(results, "instruments")
    names = list(dict.fromkeys(point.name for point in timings.points))
    rows = max(sum(point.name == name for point in timings.points) for name in names)
    height = 2.0 + 0.24 * rows * (len(timings.ways) + 1)
    figure = Figure(figsize=(max(6.4, 3.5 * len(names)), height), layout="constrained")
    axes = figure.subplots(1, len(names), sharey=True, sharex=True, squeeze=False)[0]
    for each, name in zip(axes, names, strict=True):
        points = [point for point in timings.points if point.name == name]
        _draw_breakdown(each, points, timings.ways)
        tidy(each, title=f"set {name}: T = {points[0].length:,}", x="time / (FP + BP)", y="")
    axes[0].invert_yaxis()
    name_curves(figure, axes[0], 4)
    shorter = any(point.overhead(way) < 0 for point in timings.points for way in timings.ways)
    note = (
        f"GRU of {timings.settings['hidden']} units; torch.nn.GRU takes FP + BP. "
        f"{'Where a forward pass is shorter than FP, FP is drawn as short. ' * shorter}"
        f"{_measured(timings)}"
    )
    title = "forward, overhead and backward of a GRU on recordings of instruments"
    return captioned("figure_5_4", title, _table(timings), figure, note)


def _timings(results: Results | None, experiment: str) -> Timings:
    timings = (shipped(experiment) if results is None else results).timings
    assert timings is not None
    return timings


def _sorted(points: Sequence[Timing], by: str) -> list[Timing]:
    return sorted(points, key=lambda point: int(getattr(point, by)))


def _backward(point: Timing, way: str) -> float:
    return point.backward["torch"] / point.backward[way]


def _whole(point: Timing, way: str) -> float:
    return point.whole("torch") / point.whole(way)


def _draw_ratios(
    axes: Axes, points: Sequence[Timing], name: str, timings: Timings, ratio: Ratio
) -> None:
    """One curve a way on two logarithmic axes, over torch's level."""
    places = [getattr(point, name) for point in points]
    for way in timings.ways[1:]:
        axes.plot(
            places, [ratio(point, way) for point in points], color=colour_of(way), linewidth=1.8,
            marker="o", markersize=3.5, label=label_of(way, timings.settings["cell"]),
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.8)
    draw_level(axes, 1, label_of("torch", timings.settings["cell"]), below=True)


def _mark_ratios(axes: Axes) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, over the curves and at least from 0.5 to 2."""
    low, high = axes.get_ylim()
    low, high = min(low, 0.45), max(high, 2.2)
    known = [digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5)]
    axes.set_yticks([value for value in known if low <= value <= high])
    axes.set_ylim(low, high)


def _draw_breakdown(axes: Axes, points: Sequence[Timing], ways: Sequence[str]) -> None:
    """A bar a way and batch size, from left to right forward, overhead, backward."""
    place, places, labels = 0.0, [], []
    for point in points:
        unit = point.forward["torch"] + point.backward["torch"]
        for way in ways:
            forward = min(point.forward["torch"], point.forward[way]) / unit
            overhead = max(0.0, point.overhead(way)) / unit
            after = GREEN if way == "torch" else ORANGE
            axes.barh(place, forward, color=GREY)
            axes.barh(place, overhead, left=forward, color=BLUE)
            axes.barh(place, point.backward[way] / unit, left=forward + overhead, color=after)
            _cut(axes, place, (point.forward[way] + point.backward[way]) / unit)
            places.append(place)
            labels.append(f"B = {point.batch}, {way}" if way == ways[0] else way)
            place += 1
        place += 0.7  # a gap between batch sizes
    for name, colour in _PARTS:
        axes.barh(0, 0, color=colour, label=name)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (5, 3)))
    axes.set_yticks(places, labels)
    axes.grid(axis="x", color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)


def _cut(axes: Axes, place: float, length: float) -> None:
    """Keep one long bar from making all others short."""
    limit = max(axes.get_xlim()[1], 1.03 * min(length, _WIDEST))
    axes.set_xlim(0, min(limit, _WIDEST))
    if length > _WIDEST:
        axes.text(_WIDEST, place, f"{length:.1f} ▸", ha="right", va="center", color="white")


def _measured(timings: Timings) -> str:
    return (
        f"Medians of {timings.rounds} rounds or more, the ways in turn in one process, on "
        f"{describe_machine(timings.machine)}."
    )


def _table(timings: Timings) -> dict[str, Column]:
    points = timings.points
    table: dict[str, Column] = {} if not points[0].name else {"set": [p.name for p in points]}
    table |= {"length": [p.length for p in points], "batch": [p.batch for p in points]}
    for way in timings.ways:
        for part in ("forward", "backward", "update"):
            table[f"{way}, {part} (s)"] = [getattr(p, part)[way] for p in points]
    return table
