"""One style for every picture: colours for colour-blind readers and for print, thin frames.

The colours are those of Okabe and Ito, *Color Universal Design*, 2008.
"""

from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
GREY = "#B8BEC6"
INK = "#2B2F36"

_SAVED: Any = {"svg.hashsalt": "retrograde"}  # so that equal pictures are equal files


def new_axes(width: float, height: float) -> Axes:
    """Return axes on a new figure, in inches, whose labels stay inside its edges."""
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def figure_of(axes: Axes) -> Figure:
    """Return the whole figure that axes belong to, however deep they are nested in it."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


def tidy(
    axes: Axes, *, title: str, x: str, y: str, grid: Literal["x", "y", "both"] | None = None
) -> None:
    """Set title, labels (with units) and grid lines, and remove most of the frame.

    Example:
        >>> tidy(new_axes(4, 3), title="Loss", x="iteration", y="bits per character")
    """
    if grid is not None:
        axes.grid(axis=grid, color=INK, alpha=0.12, linewidth=0.8)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK, length=3, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=INK, linewidth=0.8)


def save(figure: Figure, folder: str | Path, name: str) -> tuple[Path, Path]:
    """Write a figure as ``name.svg`` and ``name.png``, the same bytes for the same picture.

    ``folder`` is made if missing. Returns the two paths, SVG first. Raises OSError if it cannot be
    written.

    Example:
        >>> import tempfile
        >>> [path.name for path in save(Figure(), tempfile.mkdtemp(), "empty")]
        ['empty.svg', 'empty.png']
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    with rc_context(_SAVED):
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=160)
    return svg, png
