"""One run at a time in a report folder.

The lock is the operating system's, on a file in the folder: it goes with the process that holds
it, however that ends, so a file that a killed process left is no obstacle.
"""

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from errno import EACCES, EAGAIN, EDEADLK, ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP
from pathlib import Path

from retrograde.training.options import TrainingError

__all__ = ["hold"]

_NAME = ".lock"
_TAKEN = (EACCES, EAGAIN, EDEADLK)
_NO_LOCKS = (ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP)  # of a file system that keeps none

if sys.platform == "win32":
    import msvcrt

    _FAR = 1 << 30  # a byte beyond what is written: one that is locked cannot be read

    def _lock(handle: int) -> None:
        os.lseek(handle, _FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[bool]:
    """Keep other runs out of a folder for as long as this one is at work in it.

    Args:
        folder: that is there.

    Yields:
        True; False where the file system keeps no locks, so that others cannot be kept out.

    Raises:
        TrainingError: another run is at work there; the message names its process.
        OSError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> with hold(Path(tempfile.mkdtemp())) as alone:
        ...     print(alone)
        True
    """
    path = folder / _NAME
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
    """The open file, and whether it could be locked."""
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
                    f"another run is at work in the report folder {path.parent}: process {holder} "
                    f"holds {path}; wait for it to end or stop it, or name another folder with "
                    "--report"
                ) from error
            raise
        if _stands(handle, path):
            return handle, True
        os.close(handle)  # its last holder has just removed it: take the one that stands there now


def _holder(handle: int) -> str:
    """The process that a lock's file names, or that it is not known yet."""
    os.lseek(handle, 0, os.SEEK_SET)
    return os.read(handle, 200).decode(errors="replace").strip() or "of unknown number"


def _stands(handle: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
