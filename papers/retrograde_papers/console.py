"""Common parts of all commands: error messages, tables, and some options.

An error is one message and exit code 2, never a traceback. This needs typer and rich, nothing
heavy.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from retrograde.errors import RetrogradeError

__all__ = ["INTERRUPTED", "Device", "Threads", "clean_errors", "new_table", "require"]

INTERRUPTED = 130  # the exit code of a shell for Ctrl-C

Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Threads = Annotated[
    int | None, typer.Option(help="Number of threads; torch's own choice by default.")
]


@contextmanager
def clean_errors() -> Iterator[None]:
    """Turn a RetrogradeError or an OSError into a message on the error stream and exit code 2."""
    try:
        yield
    except RetrogradeError as error:
        message = str(error)
    except OSError as error:
        place = error.filename or "the output"  # the error of a failed write names no file
        message = f"cannot write {place}: {error.strerror or error}"
    else:
        return
    Console(stderr=True, highlight=False).print(
        f"[bold red]error[/] {escape(message)}", soft_wrap=True
    )
    raise typer.Exit(2)


def require(module: str, brought_by: str | None = None) -> None:
    """Refuse to run without a package, and name the package or the extra to install."""
    if find_spec(module) is None:
        raise RetrogradeError(f"this needs {module}: pip install {brought_by or module}")


def new_table(
    title: str,
    columns: Collection[str],
    left: Collection[str] = (),
    unbroken: Collection[str] = (),
    **options: Any,
) -> Table:
    """Make a table without rows; columns are right-aligned, except those named in ``left``.

    Args:
        title: the title above the table.
        columns: the columns' headings.
        left: headings of columns that are left-aligned.
        unbroken: headings of columns that are cut on a narrow terminal rather than wrapped.
        options: options of :class:`rich.table.Table`.

    Returns:
        The table, to add rows to.

    Example:
        >>> [column.justify for column in new_table("Seconds", ("way", "all"), ("way",)).columns]
        ['left', 'right']
    """
    table = Table(title=title, title_justify="left", **options)
    for name in columns:
        justify: JustifyMethod = "left" if name in left else "right"
        table.add_column(name, justify=justify, no_wrap=name in unbroken)
    return table
