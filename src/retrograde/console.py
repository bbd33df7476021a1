"""How the command refuses: one message and exit code 2, never a traceback.

Shared by the command and its sub-commands. Needs typer and rich, and nothing heavy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import typer
from rich.console import Console
from rich.markup import escape

from retrograde.errors import RetrogradeError

__all__ = ["INTERRUPTED", "clean_errors", "require"]

INTERRUPTED = 130  # what a shell reports for Ctrl-C


@contextmanager
def clean_errors() -> Iterator[None]:
    """Turn what the user can put right into a message on the error stream.

    Yields:
        Nothing.

    Raises:
        Exit: with code 2, after a :class:`RetrogradeError` or an ``OSError``.

    Example:
        >>> with clean_errors():
        ...     pass
    """
    try:
        yield
    except RetrogradeError as error:
        message = str(error)
    except OSError as error:
        place = error.filename or "the output"  # a write that fails names no file
        message = f"cannot write {place}: {error.strerror or error}"
    else:
        return
    Console(stderr=True, highlight=False).print(
        f"[bold red]error[/] {escape(message)}", soft_wrap=True
    )
    raise typer.Exit(2)


def require(module: str, extra: str) -> None:
    """See to it that a package is there, before any work is done.

    Args:
        module: that is needed.
        extra: of retrograde, that brings it.

    Raises:
        RetrogradeError: it is missing; the message says how to install it.

    Example:
        >>> require("json", "none")
    """
    if find_spec(module) is None:
        raise RetrogradeError(f"this needs {module}: pip install 'retrograde[{extra}]'")
