"""Files that are whole or as they were, whenever the process dies and however full the disk is.

A file is written beside its place, forced to the disk and then renamed over the old one, which
POSIX and Windows do in one stroke: whenever the process dies, what stands there is a whole file.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING

from retrograde import figures
from retrograde.interrupts import interrupts_put_off

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_figure", "write_whole"]


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file by a new one, or leave it as it was.

    Args:
        path: the file; its folder must be there.
        write: writes the content into the open file that it is given.

    Raises:
        OSError: the disk is full, or the folder cannot be written; it names ``path``.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "greeting"
        >>> write_whole(path, lambda file: file.write(b"hello"))
        >>> path.read_bytes()
        b'hello'
    """
    partial = path.with_name(path.name + ".partial")
    with _naming(path), interrupts_put_off():  # torch's writer would call Ctrl-C a failure
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _settle(path.parent)


def write_figure(figure: "Figure", folder: Path, name: str) -> None:
    """Write a figure as ``name.svg`` and ``name.png``, each whole or as it was.

    Args:
        figure: to write.
        folder: that is there.
        name: of the files, without an ending.

    Raises:
        OSError: the disk is full, or the folder cannot be written; it names the file.
    """
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    with _naming(svg, png), TemporaryDirectory(prefix=".partial-", dir=folder) as aside:
        try:
            drawn = figures.save(figure, aside, name)
        except OSError as error:
            begun = png if (Path(aside) / png.name).exists() else svg
            raise OSError(error.errno, error.strerror or str(error), str(begun)) from error
        for path, place in zip(drawn, (svg, png), strict=True):
            _write_bytes(place, path.read_bytes())


def _write_bytes(path: Path, content: bytes) -> None:
    write_whole(path, lambda file: file.write(content))


@contextlib.contextmanager
def _naming(*paths: Path) -> Iterator[None]:
    """Have an error of the disk name the file that was asked for: the first, or the one it names.

    A write that fails names no file, and torch's writer even makes another error of it, which
    keeps the disk's as its context.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        name = Path(str(cause.filename)).name
        path = next((path for path in paths if path.name == name), paths[0])
        raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from error


def _settle(folder: Path) -> None:
    """Force the renaming itself to the disk, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
