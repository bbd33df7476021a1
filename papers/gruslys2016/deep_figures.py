"""Deep networks within a budget: their losses, what they hold, and what other budgets would buy.

One network trained ordinarily and within each budget, on the same batches. The numbers are in
:mod:`gruslys2016.deep_results`; those that come with the library are drawn by ``DEEP``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gruslys2016.deep_results import Deep, Side
from gruslys2016.planned import draw_planned
from retrograde.figures.schedules import draw_schedule
from retrograde.figures.style import BLUE, GREEN, GREY, INK, ORANGE, figure_of, new_axes, tidy
from retrograde.plan.chains import plan_chain
from retrograde.schedule import Chain, simulate
from retrograde.units import format_bytes
from retrograde_papers.numbers import read_shipped
from retrograde_papers.plates import Column, Plate, captioned, describe_machine

__all__ = [
    "DEEP",
    "deep_losses",
    "deep_memory",
    "deep_schedule",
    "deep_trade_off",
]

_ORDINARY = "ordinary"
_MIB = 2**20
_PER_INCH = 15.2  # characters of a caption
_BELOW_LEGEND = 0.6  # the share of the height that points have; the legend has the rest
_PURPLE = "#CC79A7"
_COLOURS = (BLUE, _PURPLE, GREEN, INK)
_POLICIES = {"msm": (BLUE, 2.4, "-"), "hsm": (_PURPLE, 1.6, "--"), "ism": (INK, 1.4, ":")}


def deep_losses(found: Deep) -> Plate:
    """The losses of all ways, and what each held; the table has the loss of every iteration."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    iterations = list(range(1, len(found.losses[_ORDINARY]) + 1))
    _draw_losses(left, iterations, found)
    _draw_bars(right, found)
    table: dict[str, Column] = {"iteration": iterations}
    table |= {f"{way} (nats)": values for way, values in found.losses.items()}
    distance = max(found.difference.values())
    apart = max(found.weights_difference.values())
    note = (
        f"{_described(found)}, {found.settings['iterations']} iterations, SGD at "
        f"{found.settings['learning_rate']:g}, momentum {found.settings['momentum']:g}; "
        f"the same weights at first and the same batches. Greatest distance of any loss from the "
        f"ordinary one {distance:g}, of any weight in the end {apart:g}. Held: by forward and "
        f"backward pass of the network, counted at every allocation. {_refusals(found)}"
    )
    title = f"{_title(found)} trained ordinarily and within budgets"
    return captioned(f"{found.name}_losses", title, table, figure, note.strip(), _PER_INCH)


def _draw_losses(ax: Axes, iterations: list[int], found: Deep) -> None:
    for number, (way, values) in enumerate(found.losses.items()):
        # every curve is seen, each on the one before
        width, style = (5.0, "-") if way == _ORDINARY else (2.2 / number, (0, (4, 2 + number)))
        colour = ORANGE if way == _ORDINARY else _COLOURS[(number - 1) % len(_COLOURS)]
        label = "ordinary" if way == _ORDINARY else f"within {_share(way)}"
        ax.plot(
            iterations, values, color=colour, linewidth=width, linestyle=style, label=label,
            alpha=0.45 if way == _ORDINARY else 1,
        )  # fmt: skip
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="upper right", frameon=False, fontsize=9)
    tidy(ax, grid="y", title="(a) training loss", x="iteration", y="cross entropy (nats)")


def _draw_bars(ax: Axes, found: Deep) -> None:
    sides = [found.side(way) for way in found.losses]
    highest = max(side.peak_bytes for side in sides) / _MIB
    for row, side in enumerate(sides):
        colour = ORANGE if side.name == _ORDINARY else _COLOURS[(row - 1) % len(_COLOURS)]
        peak, budget = side.peak_bytes / _MIB, side.budget_bytes / _MIB
        ax.barh(row, peak, height=0.5, color=colour, alpha=0.45)
        text = format_bytes(side.peak_bytes)
        if side.budget_bytes:
            label = "" if ax.get_legend_handles_labels()[0] else "budget"
            ends = [row - 0.36, row + 0.36]
            ax.plot([budget, budget], ends, color=GREEN, linewidth=2.2, label=label)
            text += f" of {format_bytes(side.budget_bytes)}"
        if max(peak, budget) < 0.55 * highest:
            ax.text(max(peak, budget) + 0.02 * highest, row, text, va="center", fontsize=9)
        else:
            ax.text(0.02 * highest, row, text, va="center", fontsize=9, color=INK)
    names = ["ordinary" if side.name == _ORDINARY else _share(side.name) for side in sides]
    ax.set_yticks(range(len(sides)), names)
    ax.set_ylim(len(sides) - 0.2, -0.6)
    ax.legend(loc="lower right", frameon=False, fontsize=9)
    tidy(ax, title="(b) held at the peak", x="working memory (MiB)", y="")


def deep_memory(found: Deep) -> Plate:
    """Memory over time within the smallest budget, planned and measured."""
    name = min(found.held, key=lambda name: found.side(name).budget_bytes)
    held, budget = found.held[name], found.side(name).budget_bytes
    ordinary = held.ordinary_planned, held.ordinary_measured
    figure = draw_planned(held.planned, held.measured, budget, ordinary)
    names: list[str] = []
    seconds: list[float] = []
    sizes: list[int] = []
    for way, curve in {
        "ordinary, planned": ordinary[0], "ordinary, measured": ordinary[1],
        f"within {name}, planned": held.planned, f"within {name}, measured": held.measured,
    }.items():  # fmt: skip
        names += [way] * len(curve.seconds)
        seconds += curve.seconds
        sizes += curve.held_bytes
    note = (
        f"{_described(found)}; one iteration within {_share(name)} of ordinary backpropagation's "
        "memory. Planned: bytes and seconds of single layers, added up along the schedule of the "
        "paper's appendix C. Measured: every allocation and release of an iteration."
    )
    title = f"memory of one iteration of {_title(found)}, planned and measured"
    table: dict[str, Column] = {"curve": names, "seconds": seconds, "bytes": sizes}
    return captioned(f"{found.name}_memory", title, table, figure, note, _PER_INCH)


def deep_schedule(found: Deep) -> Plate:
    """The schedule of the smallest budget: which layers are run again, and what is kept."""
    name = min(found.held, key=lambda name: found.side(name).budget_bytes)
    schedule = plan_chain(Chain.from_json(found.chain), found.side(name).budget_bytes)
    replay, figure = simulate(schedule), draw_schedule(schedule)
    note = (
        f"{_described(found)}; within {_share(name)} of ordinary backpropagation's memory. "
        f"{schedule.cost} layers are run forward for {schedule.length}."
    )
    table: dict[str, Column] = {
        "action": list(map(str, schedule)),
        "most held (bytes)": replay.high.tolist(),
        "held after (bytes)": replay.kept.tolist(),
        "seconds": replay.clock.tolist(),
    }
    title = f"the schedule of {_title(found)} within {_share(name)}"
    return captioned(f"{found.name}_schedule", title, table, figure, note, _PER_INCH)


def deep_trade_off(found: Deep) -> Plate:
    """The seconds of an iteration over its memory, predicted and measured."""
    ax = new_axes(8.0, 5.0)
    rows: list[tuple[str, int, float]] = []
    for policy, points in found.curves.items():
        colour, width, style = _POLICIES[policy]
        curve = [(size, seconds / found.ordinary_seconds) for size, seconds in points]
        rows += [(f"{policy}, predicted", size, ratio) for size, ratio in curve]
        sizes, ratios = zip(*curve, strict=True)
        ax.plot(
            [size / _MIB for size in sizes], ratios, color=colour, linewidth=width,
            linestyle=style, label=f"{policy.upper()}, predicted", drawstyle="steps-post",
        )  # fmt: skip
    unit = found.side(_ORDINARY).seconds
    for kind, colour, marker, label in (
        ("ordinary", ORANGE, "s", "ordinary backpropagation, measured"),
        ("budget", BLUE, "o", "rg.Sequential within a budget, measured"),
        ("segments", GREY, "D", "checkpoint_sequential, number of segments, measured"),
    ):
        measured = [side for side in found.sides if side.kind == kind]
        rows += [(side.name, side.peak_bytes, side.seconds / unit) for side in measured]
        _draw_points(ax, measured, unit, colour, marker, label)
    _finish_trade_off(ax, found)
    note = (
        f"{_described(found)}. Curves: seconds and bytes of single layers, planned for each "
        "memory. Points: one iteration, bytes counted at every allocation, seconds the least of "
        f"{found.settings['rounds']}."
    )
    table: dict[str, Column] = {
        "way": [way for way, _, _ in rows],
        "bytes": [size for _, size, _ in rows],
        "seconds (ordinary = 1)": [ratio for _, _, ratio in rows],
    }
    title = f"what memory buys for {_title(found)}"
    return captioned(f"{found.name}_trade_off", title, table, figure_of(ax), note, _PER_INCH)


def _draw_points(
    ax: Axes, sides: Sequence[Side], unit: float, colour: str, marker: str, label: str
) -> None:
    if not sides:
        return
    places = [(side.peak_bytes / _MIB, side.seconds / unit) for side in sides]
    named = sides[0].kind == "segments"
    ax.plot(
        *zip(*places, strict=True), linestyle="", marker=marker, markersize=10 if named else 7,
        color=colour, markeredgecolor=INK, markeredgewidth=0.8, label=label, zorder=4,
    )  # fmt: skip
    for side, place in zip(sides, places, strict=True) if named else ():
        ax.annotate(
            side.name.split()[0], place, ha="center", va="center_baseline", fontsize=7, color=INK,
            zorder=5,
        )  # fmt: skip


def _finish_trade_off(ax: Axes, found: Deep) -> None:
    highest = ax.get_ylim()[1]
    ax.axvline(found.least_bytes / _MIB, color=GREEN, linewidth=1.2, linestyle=(0, (5, 3)))
    ax.annotate(
        f"least budget\n{format_bytes(found.least_bytes)}\n"
        f"({100 * found.least_bytes / found.ordinary_bytes:.3g} %)",
        (found.least_bytes / _MIB, 0.97), xycoords=("data", "axes fraction"), xytext=(-5, 0),
        textcoords="offset points", ha="right", va="top", fontsize=9, color=GREEN,
    )  # fmt: skip
    ax.set_xlim(0, 1.05 * ax.get_xlim()[1])
    lowest = min(0.9, ax.get_ylim()[0])
    ax.set_ylim(lowest, lowest + (highest - lowest) / _BELOW_LEGEND)
    ax.legend(loc="upper right", frameon=False, fontsize=9)
    tidy(
        ax,
        grid="both",
        title=f"What memory buys for {_title(found)}",
        x="working memory of an iteration (MiB)",
        y="seconds of an iteration, ordinary = 1",
    )


def _title(found: Deep) -> str:
    return str(found.settings["title"])


def _share(memory: str) -> str:
    return memory.replace("%", " %")


def _described(found: Deep) -> str:
    settings = found.settings
    note = f" ({settings['note']})" if settings.get("note") else ""
    return (
        f"{_title(found)} on {settings['images']}, batch {settings['batch']}, on "
        f"{describe_machine(found.machine)}{note}"
    )


def _refusals(found: Deep) -> str:
    if not found.refused:
        return ""
    shares = ", ".join(map(_share, found.refused))
    least = 100 * found.least_bytes / found.ordinary_bytes
    return f"Refused: {shares}, for {format_bytes(found.least_bytes)} ({least:.3g} %) is the least."


def _bundled(network: str, draw: Callable[[Deep], Plate]) -> Plate:
    """A plate of the numbers that come with this package."""
    return draw(Deep.from_json(read_shipped("gruslys2016", f"deep_{network}")))


DEEP: Mapping[str, Callable[[], Plate]] = MappingProxyType(
    {
        f"deep_{network}_{name}": partial(_bundled, network, draw)
        for network in ("vgg11", "resnet18", "resnet34")
        for name, draw in (
            ("losses", deep_losses),
            ("memory", deep_memory),
            ("schedule", deep_schedule),
            ("trade_off", deep_trade_off),
        )
    }
)
