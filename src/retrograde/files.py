"""Results and pictures that are whole or as they were, however full the disk is.

They are written in a folder beside their places, forced to the disk, and then renamed over the old
ones, each in one stroke. Importing this loads neither torch nor matplotlib.
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
    """Make a folder, and see to it that files can be written there, before any work is done.

    Args:
        folder: made if it is not there.

    Raises:
        RetrogradeError: it cannot be made or written.

    Example:
        >>> import tempfile
        >>> check_folder(Path(tempfile.mkdtemp()) / "report")
    """
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
    """Replace a file by a new one, or leave it as it was.

    Args:
        path: the file; its folder must be there.
        write: writes the content to the path that it is given, which ends as ``path`` does.

    Raises:
        RetrogradeError: the disk is full, or the folder cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "greeting.txt"
        >>> write_file(path, lambda place: place.write_text("hello"))
        >>> path.read_text()
        'hello'
    """
    if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
        try:
            write(path)
        except OSError as error:
            raise _refusal(path, error) from error
        return
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    with aside(place) as folder:
        write(folder / place.name)


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8, or leave it as it was.

    Args:
        path: the file; its folder must be there.
        text: the whole of it.

    Raises:
        RetrogradeError: the disk is full, or the folder cannot be written.
    """
    write_file(path, lambda place: place.write_text(text, encoding="utf-8"))


@contextmanager
def aside(*paths: Path) -> Iterator[Path]:
    """A folder for files of one folder, which take their places together when all are whole.

    Args:
        paths: their places.

    Yields:
        The folder to write them to, by the same names.

    Raises:
        RetrogradeError: the disk is full, or the folder cannot be written.
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
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # torch's writer makes another error of a full disk
        if cause is None:
            raise
        raise _refusal(at, cause) from error


def _refusal(path: Path, error: OSError) -> RetrogradeError:
    return RetrogradeError(
        f"cannot write {path}: {error.strerror or error}; what was there before is kept: make room "
        "there, or name a place that can be written"
    )
