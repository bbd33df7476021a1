"""Figures 3.1 and 3.3 and table 3.1 of Wang, *BPPSA* (2020): VGG-11's scan, and its Jacobians."""

import json
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from retrograde.figures.style import BLUE, GREEN, GREY, INK, ORANGE, tidy
from retrograde.scan.blelloch import most_levels, pairs
from retrograde.scan.sparse.csr import CSR
from retrograde.scan.sparse.transposed import transposed_jacobian
from retrograde_papers.networks import vgg11
from retrograde_papers.numbers import read_shipped
from retrograde_papers.plates import Column, Plate, captioned, describe_machine, name_curves

__all__ = ["figure_3_1", "figure_3_3", "table_3_1"]

_COLOURS = {"matrix": BLUE, "vector": ORANGE, "identity": GREEN, "unread": GREY}
_SQUARES = {
    "matrix": "transposed Jacobian",
    "vector": "gradient",
    "identity": "identity",
    "unread": "what no result reads",
}
_LINES = {
    "matrix product": (BLUE, "-"),
    "product of a matrix and a vector": (ORANGE, "-"),
    "move": (GREY, "--"),
}
_SHOWN = {
    "(a) convolution, 3×3": nn.Conv2d(2, 3, 3, padding=1),
    "(b) max-pooling, 2×2": nn.MaxPool2d(2),
    "(c) ReLU": nn.ReLU(),
}


def figure_3_1() -> Plate:
    """Figure 3.1: the levels of Blelloch's scan over the convolutional part of VGG-11.

    Example:
        >>> plate = figure_3_1()
        >>> plate.table["matrix products"][:4]
        [9, 4, 1, 0]
    """
    names = [type(layer).__name__ for layer in vgg11(width=4)[:-2]]
    rows = [["vector", *["matrix"] * (len(names) - 1), "unread"]]
    links: list[list[Link]] = []
    last = len(names)
    upward, downward = most_levels(last), last.bit_length()
    for level in range(upward):
        rows.append(_up(rows[-1], level, links))
    rows[-1][-1] = "identity"
    for level in reversed(range(downward)):
        rows.append(_down(rows[-1], level, links))
    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    axes = figure.add_subplot()
    _draw_levels(axes, rows, links, names)
    name_curves(figure, axes, 4)
    note = (
        f"Each row is the array after a level, from the top: {upward} levels up, then {downward} "
        "down. Only upward are matrices multiplied."
    )
    counts = [[link[2] for link in level] for level in links]
    table: dict[str, Column] = {
        "level": list(range(len(links))),
        "matrix products": [each.count("matrix") for each in counts],
        "vector products": [each.count("vector") for each in counts],
        "moves": [each.count("move") for each in counts],
    }
    return captioned("figure_3_1", "the scan's levels on VGG-11", table, figure, note)


Link = tuple[int, int, str]


def _up(kinds: list[str], level: int, links: list[list[Link]]) -> list[str]:
    """An up-sweep level, and what is joined in it: from, to, how."""
    found, joined = list(kinds), []
    for left, right in pairs(len(kinds) - 1, level):
        if kinds[right] == "unread":
            continue
        found[right] = kinds[left]
        joined.append((left, right, kinds[left]))
    links.append(joined)
    return found


def _down(kinds: list[str], level: int, links: list[list[Link]]) -> list[str]:
    found, joined = list(kinds), []
    for left, right in pairs(len(kinds) - 1, level):
        found[left] = kinds[right]
        moved = kinds[right] == "identity"
        found[right] = kinds[left] if moved else "vector"
        joined += [(left, right, "move" if moved else "vector"), (right, left, "move")]
    links.append(joined)
    return found


def _draw_levels(
    axes: Axes, rows: list[list[str]], links: list[list[Link]], names: list[str]
) -> None:
    for level, joined in enumerate(links):
        for start, end, how in joined:
            colour = GREY if how == "move" else _COLOURS[how]
            style = "--" if how == "move" else "-"
            axes.plot(
                [start, end], [level, level + 1], color=colour, linestyle=style, linewidth=1.5,
                zorder=1,
            )  # fmt: skip
            if how != "move":
                axes.plot([end, end], [level, level + 1], color=colour, linewidth=1.5, zorder=1)
    for level, kinds in enumerate(rows):
        for place, kind in enumerate(kinds):
            axes.plot(place, level, "s", color=_COLOURS[kind], markersize=7.5, zorder=2)
    for kind, label in _SQUARES.items():
        axes.plot([], [], "s", color=_COLOURS[kind], markersize=7.5, label=label)
    for label, (colour, style) in _LINES.items():
        axes.plot([], [], style, color=colour, linewidth=1.5, label=label)
    labels = ["∇x", *(f"{name}ᵀ" for name in reversed(names))]
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=7.5)
    axes.set_yticks([place + 0.5 for place in range(len(links))])
    axes.set_yticklabels([f"L{place}" for place in range(len(links))], fontsize=8)
    axes.invert_yaxis()
    tidy(axes, title="The scan over VGG-11's convolutional part", x="", y="level")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


def figure_3_3() -> Plate:
    """Figure 3.3: where the transposed Jacobians of three operators may be non-zero.

    Example:
        >>> figure_3_3().name
        'figure_3_3'
    """
    torch.manual_seed(0)
    figure = Figure(figsize=(10.2, 3.9), layout="constrained")  # its height decides, for all three
    table: dict[str, list[Any]] = {"operator": [], "row": [], "column": []}
    jacobians = {
        title: transposed_jacobian(layer, torch.randn(1, 2, 6, 6))
        for title, layer in _SHOWN.items()
    }
    widths = [max(0.6, jacobian.shape[-1] / 72) for jacobian in jacobians.values()]
    for (title, jacobian), axes in zip(
        jacobians.items(), figure.subplots(1, 3, width_ratios=widths), strict=True
    ):
        _draw_pattern(axes, title, jacobian)
        pattern = jacobian.pattern
        table["operator"] += [title[4:]] * pattern.nnz
        table["row"] += pattern.row_of.tolist()
        table["column"] += pattern.indices.tolist()
    note = (
        "Each of an input of two channels, 6×6; rows are inputs, columns outputs, channels one "
        "after another. Dots are what the layer does not guarantee to be zero."
    )
    return captioned("figure_3_3", "patterns of three transposed Jacobians", table, figure, note)


def _draw_pattern(axes: Axes, title: str, jacobian: CSR) -> None:
    rows, columns = jacobian.pattern.shape
    axes.plot(
        jacobian.pattern.indices, jacobian.pattern.row_of, "s", color=ORANGE, markersize=1.6
    )  # fmt: skip
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_aspect("equal")
    share = f"{100 * jacobian.pattern.sparsity:.1f} % zeros"
    tidy(axes, title=f"{title}\n{rows}×{columns}, {share}", x="output element", y="input element")
    axes.spines[["top", "right"]].set_visible(True)
    axes.spines[["top", "right"]].set_color(INK)


def table_3_1() -> Plate:
    """Table 3.1: sparsity of VGG-11's first operators, and how fast their Jacobians are made.

    Sparsities and bytes are computed as it is drawn; seconds are those that come with this package.

    Example:
        >>> [round(share, 5) for share in table_3_1().table["guaranteed zeros"]]
        [0.99157, 0.99998, 0.99994]
    """
    measured = json.loads(read_shipped("wang2020", "jacobians"))
    operators = {
        "convolution": (nn.Conv2d(3, 64, 3, padding=1), torch.zeros(1, 3, 32, 32)),
        "ReLU": (nn.ReLU(), torch.zeros(1, 64, 32, 32)),
        "max-pooling": (nn.MaxPool2d(2), torch.zeros(1, 64, 32, 32)),
    }
    rows = []
    for name, (layer, x) in operators.items():
        pattern = transposed_jacobian(layer, x).pattern
        seconds = measured["operators"][name]
        dense = pattern.shape[0] * pattern.shape[1] * 4
        rows.append(
            (name, str(pattern), pattern.sparsity, dense / 2**20, pattern.nnz * 4 / 2**20,
             seconds["analytic_seconds"], seconds["autograd_seconds"], seconds["ratio"])
        )  # fmt: skip
    heads = (
        "operator", "shape", "guaranteed zeros", "dense (MiB)", "CSR values (MiB)",
        "analytic (s)", "autograd, a column at a time (s)", "ratio",
    )  # fmt: skip
    table: dict[str, Any] = {
        head: list(column) for head, column in zip(heads, zip(*rows, strict=True), strict=True)
    }
    figure = Figure(figsize=(11.2, 2.1), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    texts = [
        [name, shape, f"{zeros:.5f}", f"{dense:,.0f}", f"{values:.3g}", _two_digits(1e6 * ours),
         f"{theirs:.3g}", f"{_two_digits(ratio)}×"]
        for name, shape, zeros, dense, values, ours, theirs, ratio in rows
    ]  # fmt: skip
    shown = [head.replace("analytic (s)", "analytic (µs)") for head in heads]
    drawn = axes.table(texts, colLabels=shown, loc="center", cellLoc="right")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8.5)
    drawn.scale(1, 1.6)
    drawn.auto_set_column_width(list(range(len(heads))))
    for cell in drawn.get_celld().values():
        cell.set_linewidth(0.4)
    note = (
        "Of VGG-11's first operators on a 32×32 image, float32. Analytic: the values, the pattern "
        "being known. By autograd 4,096 columns are timed, and scaled up to all. Medians, on "
        f"{describe_machine(measured['machine'])}."
    )
    title = "sparsity of transposed Jacobians, and the speed of making them"
    return captioned("table_3_1", title, table, figure, note)


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"
