"""The command ``figures``: the plots and schedules of both papers, with their numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from retrograde.errors import RetrogradeError
from retrograde_papers.console import clean_errors, require
from retrograde_papers.files import check_folder, write_text

if TYPE_CHECKING:
    from gruslys2016.timed import Seconds

__all__ = ["draw"]


def draw(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Figure names, such as figure_2a; all figures by default."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where to write them.")] = Path("figures"),
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the seconds of figure_2b on this machine, which takes minutes; without "
            "it, those that come with the library are drawn.",
        ),
    ] = False,
) -> None:
    """The plots and schedules of Gruslys et al. (2016) and its bounds, those of Wang (2020), what
    deep networks take within a budget, and what many ranks would: SVG, PNG, and numbers as CSV.

    Needs no torch, save for --measure.
    """
    with clean_errors():
        require("matplotlib", "'.[cli]'")
        if measure:
            require("torch")
        _draw_figures(names, folder, measure)


def _draw_figures(names: list[str] | None, folder: Path, measure: bool) -> None:
    from gruslys2016.timed import figure_2b
    from retrograde_papers.every import PLATES
    from retrograde_papers.plates import write_plate

    wanted = names or list(PLATES)
    for name in wanted:
        if name not in PLATES:
            known = ", ".join(PLATES)
            raise RetrogradeError(f"unknown figure {name!r}: use one of {known}")
    if measure and "figure_2b" not in wanted:
        raise RetrogradeError("--measure is for figure_2b alone: name it too, or leave it out")
    console = Console(highlight=False)
    check_folder(folder)
    for name in wanted:
        anew = measure and name == "figure_2b"
        seconds = _measure_seconds(folder, console) if anew else None
        with console.status(f"drawing {name}"):
            plate = PLATES[name]() if seconds is None else figure_2b(seconds)
            write_plate(plate, folder)
        console.print(f"[bold]{name:<26}[/]{plate.title}", soft_wrap=True)
    console.print(f"written to {folder}: .svg, .png and .csv of each", soft_wrap=True)


def _measure_seconds(folder: Path, console: Console) -> "Seconds":
    """Measure figure 2(b), and keep the seconds beside the picture."""
    from gruslys2016.measured import expected_seconds, measure_seconds

    minutes = max(1, round(expected_seconds() / 60))
    console.print(f"measuring figure_2b: about {minutes} min")
    with console.status("measuring"):
        seconds = measure_seconds()
    write_text(folder / "figure_2b.json", seconds.to_json())
    return seconds
