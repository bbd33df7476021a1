"""A plate: one figure of a paper, with its title, its caption and the numbers it is drawn from.

What is drawn can be checked only beside its numbers, so the two travel together: a plate is saved
as ``name.svg``, ``name.png`` and ``name.csv``. All three are the same bytes for the same plate.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from retrograde.figures.style import INK, save
from retrograde_papers.files import aside

__all__ = [
    "Column",
    "Plate",
    "captioned",
    "describe_machine",
    "name_curves",
    "save_plate",
    "write_plate",
]

Column = Sequence[int] | Sequence[float] | Sequence[str]

_CHARACTERS_PER_INCH = 16  # of a caption, in its size


@dataclass(frozen=True, eq=False)
class Plate:
    """A figure and what it is drawn from.

    Attributes:
        name: of its files, such as ``"figure_2a"``.
        title: what it shows, in a line.
        table: its numbers, column by column, all of one length; the names carry the units.
        figure: the picture.
        note: what else a reader must know, as the caption under the picture says it.

    Example:
        >>> Plate("empty", "Nothing", {"length": [1, 2]}, Figure()).note
        ''
    """

    name: str
    title: str
    table: Mapping[str, Column]
    figure: Figure
    note: str = ""


def save_plate(plate: Plate, folder: str | Path) -> tuple[Path, Path, Path]:
    """Write a plate as SVG, PNG and CSV, and return the three paths in that order.

    Example:
        >>> import tempfile
        >>> plate = Plate("empty", "Nothing", {"length": [1, 2], "share": [0.5, 1 / 3]}, Figure())
        >>> print(save_plate(plate, tempfile.mkdtemp())[2].read_text(), end="")
        length,share
        1,0.5
        2,0.333333
    """
    svg, png = save(plate.figure, folder, plate.name)
    path = Path(folder) / f"{plate.name}.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(plate.table)
        for row in zip(*plate.table.values(), strict=True):
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])
    return svg, png, path


def write_plate(plate: Plate, folder: Path) -> None:
    """Write a plate as :func:`save_plate` does, all three files whole or all as they were."""
    with aside(*(folder / f"{plate.name}.{end}" for end in ("svg", "png", "csv"))) as place:
        save_plate(plate, place)


def captioned(
    name: str,
    title: str,
    table: Mapping[str, Column],
    figure: Figure,
    note: str,
    per_inch: float = _CHARACTERS_PER_INCH,
) -> Plate:
    """A plate whose note stands under its picture, in lines of so many characters an inch.

    Example:
        >>> figure = Figure(figsize=(4, 3), layout="constrained")
        >>> captioned("empty", "Nothing", {}, figure, "What is compared.").note
        'What is compared.'
    """
    width = int(per_inch * figure.get_figwidth())
    figure.supxlabel(fill(note, width), x=0.01, ha="left", fontsize=8.5, color=INK)
    return Plate(name, title, table, figure, note)


def name_curves(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend for all axes of a figure, above them, where no curve is."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=9
    )


def describe_machine(machine: Mapping[str, str | int]) -> str:
    """What something was measured on, in words for a caption.

    Example:
        >>> describe_machine({"device": "AMD EPYC", "threads": 2, "torch": "2.13"})
        'AMD EPYC, 2 threads, torch 2.13'
    """
    count = "{} thread" if machine.get("threads") == 1 else "{} threads"
    forms = {"device": "{}", "threads": count, "torch": "torch {}"}
    return ", ".join(form.format(machine[key]) for key, form in forms.items() if key in machine)
