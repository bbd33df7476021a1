"""What runs of the examples on real data come to: their numbers in one file, printed and drawn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from retrograde.errors import RetrogradeError
from retrograde.figures.style import BLUE, GREY, INK, ORANGE, tidy
from retrograde.units import format_bytes

WAYS = ("ordinary", "budgeted", "truncated")
LABELS = {
    "ordinary": "ordinary BPTT",
    "budgeted": "within the budget",
    "truncated": "truncated BPTT",
}
STYLES = {
    "ordinary": {"color": GREY, "linewidth": 2.5},
    "budgeted": {"color": BLUE, "linewidth": 1.5},
    "truncated": {"color": ORANGE, "linewidth": 1.5},
}


def gathered(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """What was found, and beside it the runs of other seeds or ways that the file has.

    Raises:
        RetrogradeError: the file is of a training with other settings.
    """
    runs = {(run["way"], run["seed"]): run for run in found["runs"]}
    if path.exists():
        before = json.loads(path.read_text())
        for key in (key for key in found if key != "runs" and found[key] != before.get(key)):
            raise RetrogradeError(
                f"{path} has {before.get(key)} as {key}, and this training {found[key]}: name "
                "another folder"
            )
        runs = {(run["way"], run["seed"]): run for run in before["runs"]} | runs
    ordered = sorted(runs, key=lambda key: (WAYS.index(key[0]), key[1]))
    return {**found, "runs": [runs[key] for key in ordered]}


def report(found: dict[str, Any]) -> None:
    """Print what was found."""
    usual, runs = found["ordinary_bytes_extrapolated"], found["runs"]
    budget = format_bytes(found["budget_bytes"])
    print(
        f"T = {found['length']}: ordinary BPTT takes {format_bytes(usual)}, the budget is {budget}"
    )
    for run in runs:
        peak = run["working_bytes"]
        print(
            f"{run['way']:9}: measured peak {format_bytes(peak)} ({peak / usual:.1%}), "
            f"{run['iterations']} iterations in {run['seconds']:.1f} s of CPU time, held-out "
            f"accuracy {run['accuracy']:.1%}"
        )
    base, *others = runs
    for run in others:
        apart = differences(base, run)
        print(
            f"losses of {run['way']} and {base['way']} differ by at most {max(apart):.1g} in the "
            f"first {len(apart)} iterations"
        )


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """How far the first losses of two runs are apart, one number an iteration."""
    return [abs(a - b) for a, b in zip(one["first_losses"], other["first_losses"], strict=False)]


def draw(found: dict[str, Any]) -> Figure:
    """The losses, and the measured peaks."""
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    draw_losses(left, found)
    draw_peaks(right, found)
    ways = dict.fromkeys(run["way"] for run in found["runs"])
    handles = [Line2D([], [], label=told(found, way), **STYLES[way]) for way in ways]
    machine = found["machine"]
    where = f"{machine['device']}, threads: {machine['threads']}, torch {machine['torch']}"
    if "ordinary" not in ways:
        handles.insert(0, Line2D([], [], label="ordinary BPTT: not trained", **STYLES["ordinary"]))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9,
        title=f"Held-out accuracy after training. {where}", title_fontsize=9, alignment="left",
    )  # fmt: skip
    return figure


def draw_losses(axes: Axes, found: dict[str, Any]) -> None:
    """A line a run: each of its points is a mean of a fiftieth of the iterations."""
    for run in found["runs"]:
        losses = run["losses"]
        minutes = np.arange(1, len(losses) + 1) / len(losses) * run["seconds"] / 60
        axes.plot(minutes, losses, **STYLES[run["way"]])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    x = "CPU time of the gradients (minutes)"
    tidy(axes, title=found["title"], x=x, y=found["loss"], grid="y")


def draw_peaks(axes: Axes, found: dict[str, Any]) -> None:
    """A bar a way, with its size beside it."""
    usual = found["ordinary_bytes_extrapolated"]
    shown = {"ordinary": usual} | {run["way"]: run["working_bytes"] for run in found["runs"]}
    sizes = [size / 2**20 for size in shown.values()]
    bars = axes.barh(range(len(shown)), sizes, color=[STYLES[way]["color"] for way in shown])
    labels = [
        format_bytes(size) if way == "ordinary" else f"{format_bytes(size)} ({size / usual:.1%})"
        for way, size in shown.items()
    ]
    axes.bar_label(bars, labels, padding=4, color=INK, fontsize=9)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max(sizes))
    tidy(axes, title=f"Peak, T = {found['length']:,}", x="working memory (MiB)", y="")


def told(found: dict[str, Any], way: str) -> str:
    """A way's name, its accuracy over seeds, and how many seeds there are."""
    runs = [run for run in found["runs"] if run["way"] == way]
    shares = [100 * run["accuracy"] for run in runs]
    low, high = f"{min(shares):.1f}", f"{max(shares):.1f}"
    seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
    return f"{LABELS[way]}: {low if low == high else f'{low} to {high}'} % right ({seeds})"
