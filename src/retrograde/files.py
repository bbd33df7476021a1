"""Write results and pictures completely or not at all, even when the disk is full.

Files are written in a folder beside their destination, flushed to the disk, and then renamed over
the old ones, each by one atomic operation. Importing this loads neither torch nor matplotlib.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from retrograde.errors import RetrogradeError

__all__ = [
    "aside",
    "check_folder",
    "disk_error",
    "replacing",
    "settle",
    "try_folder",
    "write_file",
    "write_text",
]

_ASIDE = ".partial-"
_PROBE_BYTES = 4096  # a full disk may take an empty file


def try_folder(folder: Path) -> None:
    """Make a folder, and write and remove a file there; an OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(prefix=_ASIDE, dir=folder) as probe:
        probe.write(bytes(_PROBE_BYTES))
        probe.flush()


def check_folder(folder: Path) -> None:
    """:func:`try_folder` before any work is done; RetrogradeError if that fails."""
    try:
        try_folder(folder)
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
    """Replace a file by a text in UTF-8, as :func:`write_file` does."""
    write_file(path, lambda place: place.write_text(text, encoding="utf-8"))


@contextmanager
def aside(*paths: Path) -> Iterator[Path]:
    """As :func:`replacing`, with a RetrogradeError that says what to do about a full disk."""
    try:
        with replacing(*paths) as folder:
            yield folder
    except OSError as error:
        raise _refusal(error.filename, error) from error


@contextmanager
def replacing(*paths: Path) -> Iterator[Path]:
    """Yield a folder for new versions of files, which replace the old ones when all are complete.

    Args:
        paths: the files to replace, all in one folder.

    Yields:
        The folder to write them to, under the same names.

    Raises:
        OSError: the disk is full, or the folder cannot be written; it names the file.
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
            settle(at.parent)
    except (OSError, RuntimeError) as error:
        named = disk_error(error, at)
        if named is None:
            raise
        raise named from error


def disk_error(error: BaseException, path: Path) -> OSError | None:
    """Return the disk's error behind another, with ``path`` as its file; None if there is none.

    The error of a failed write names no file, and torch's writer raises a RuntimeError instead.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause and OSError(cause.errno, cause.strerror or str(cause), str(path))


def settle(folder: Path) -> None:
    """Flush renamings in a folder to the disk, where the system allows to open a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _refusal(path: Path | str, error: OSError) -> RetrogradeError:
    return RetrogradeError(
        f"cannot write {path}: {error.strerror or error}; the old content is kept: make room "
        "there, or name a place that can be written"
    )
