"""The papers' commands: ``python -m retrograde_papers figures`` and ``… bench``."""

import typer

from retrograde_papers.bench import bench
from retrograde_papers.draw import draw

__all__ = ["app"]

app = typer.Typer(
    name="python -m retrograde_papers",
    help="The experiments and figures of Gruslys et al. (2016) and of Wang (2020).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("figures")(draw)
app.add_typer(bench, name="bench")

if __name__ == "__main__":
    app()
