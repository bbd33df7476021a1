"""The report folder of a run: one run at a time uses it, and its files are complete or unchanged.

The lock is the operating system's, on a file in the folder. It ends with the process that holds it,
so a file that a killed process left does no harm.
"""

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from errno import EACCES, EAGAIN, EDEADLK, ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP
from pathlib import Path
from typing import IO, TYPE_CHECKING

from retrograde import figures
from retrograde.files import disk_error, replacing, settle
from retrograde.interrupts import interrupts_put_off
from retrograde.training.options import TrainingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["hold", "write_figure", "write_whole"]

_LOCK = ".lock"
_TAKEN = (EACCES, EAGAIN, EDEADLK)
_NO_LOCKS = (ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP)  # errors of a file system without locks

if sys.platform == "win32":
    import msvcrt

    _FAR = 1 << 30  # a byte beyond the content, since a locked byte cannot be read

    def _lock(handle: int) -> None:
        os.lseek(handle, _FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file, completely or not at all, by what ``write`` writes to the open file. The
    content goes to ``path.partial`` first; the next write replaces one that a killed process left.
    Raises OSError, naming ``path``, if the disk is full or the folder cannot be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        with interrupts_put_off():  # torch's writer would report Ctrl-C as a failure
            try:
                with partial.open("wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            settle(path.parent)
    except (OSError, RuntimeError) as error:
        named = disk_error(error, path)
        if named is None:
            raise
        raise named from error


def write_figure(figure: "Figure", folder: Path, name: str) -> None:
    """Write ``name.svg`` and ``name.png``, completely or not at all; an OSError names the file."""
    with replacing(folder / f"{name}.svg", folder / f"{name}.png") as aside:
        figures.save(figure, aside, name)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Keep other runs out of a folder while the context lasts. Yields False where the file system
    has no locks. Raises TrainingError, naming the process, if another run uses it, or OSError if
    the folder cannot be written."""
    path = folder / _LOCK
    handle, locked = _take(path)
    try:
        with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()} on {platform.node()}".encode())
        yield locked
    finally:
        with contextlib.suppress(OSError):  # Windows removes no file that is open
            path.unlink()
        os.close(handle)


def _take(path: Path) -> tuple[int, bool]:
    """Return the open file, and whether it is locked."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return handle, False
            holder = _holder(handle)
            os.close(handle)
            if error.errno in _TAKEN:
                raise TrainingError(
                    f"another run uses the report folder {path.parent}: process {holder} "
                    f"holds {path}; wait for it to end or stop it, or name another folder with "
                    "--report"
                ) from error
            raise
        if _stands(handle, path):
            return handle, True
        os.close(handle)  # its last holder has just removed it: open the file that is there now


def _holder(handle: int) -> str:
    """Return the process that a lock's file names, or a phrase if it names none yet."""
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, 200).decode(errors="replace").strip() or "of unknown number"


def _stands(handle: int, path: Path) -> bool:
    """Return whether an open file is still the one with that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
