"""Write results and pictures completely or not at all, even when the disk is full.

Files are written in a folder beside their destination, flushed to the disk, and then renamed over
the old ones, each by one atomic operation. Importing this loads neither torch nor matplotlib.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from retrograde.errors import RetrogradeError

__all__ = ["aside", "check_folder", "write_file", "write_text"]

_ASIDE = ".partial-"
_PROBE_BYTES = 4096  # a full disk may take an empty file


def check_folder(folder: Path) -> None:
    """Make a folder, and write and remove a file there; RetrogradeError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(prefix=_ASIDE, dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
    except OSError as error:
        raise RetrogradeError(
            f"cannot write into the folder {folder}: {error.strerror or error}; make room there, "
            "or name a folder that can be written"
        ) from error


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by a new one, or leave it unchanged.

    Args:
        path: the file; its folder must exist.
        write: writes the content to a given path, whose extension is that of ``path``.

    Raises:
        RetrogradeError: the disk is full, or the folder cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "greeting.txt"
        >>> write_file(path, lambda place: place.write_text("hello"))
        >>> path.read_text()
        'hello'
    """
    with aside(path) as folder:
        write(folder / path.name)


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8, as :func:`write_file` does."""
    write_file(path, lambda place: place.write_text(text, encoding="utf-8"))


@contextmanager
def aside(*paths: Path) -> Iterator[Path]:
    """Yield a folder for new versions of files, which replace the old ones when all are complete.

    Args:
        paths: the files to replace, all in one folder.

    Yields:
        The folder to write them to, under the same names.

    Raises:
        RetrogradeError: the disk is full, or the folder cannot be written; it names the file.
    """
    at = paths[0]
    try:
        with TemporaryDirectory(prefix=_ASIDE, dir=at.parent) as name:
            folder = Path(name)
            try:
                yield folder
            except (OSError, RuntimeError):
                at = next((path for path in paths[::-1] if (folder / path.name).exists()), at)
                raise
            for at in paths:
                with (folder / at.name).open("rb+") as file:
                    os.fsync(file.fileno())
            for at in paths:
                os.replace(folder / at.name, at)
    except (OSError, RuntimeError) as error:
        cause = _disk_error(error)
        if cause is None:
            raise
        raise RetrogradeError(
            f"cannot write {at}: {cause.strerror or cause}; the old content is kept: make room "
            "there, or name a place that can be written"
        ) from error


def _disk_error(error: BaseException | None) -> OSError | None:
    """Return the disk's error behind another: torch's writer raises a RuntimeError instead."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
