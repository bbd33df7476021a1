"""Checkpoints that are whole or not there at all.

A file is written beside its place, forced to the disk and then renamed over the old one, which
POSIX and Windows do in one stroke: whenever the process dies, what stands there is a whole file.
"""

import contextlib
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from retrograde.training.options import TrainingError

__all__ = ["load_checkpoint", "save_checkpoint", "write_whole"]

_KIND = "retrograde training checkpoint"
_VERSION = 1


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file by a new one, or leave it as it was.

    Args:
        path: the file; its folder must be there.
        write: writes the content into the open file that it is given.

    Raises:
        OSError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "greeting"
        >>> write_whole(path, lambda file: file.write(b"hello"))
        >>> path.read_bytes()
        b'hello'
    """
    partial = path.with_name(path.name + ".partial")
    with _uninterrupted():
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


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off until the end: torch's writer would report it as a failure of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _settle(folder: Path) -> None:
    """Force the renaming itself to the disk, where the system lets a folder be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a run's state whole.

    Args:
        path: the file to replace.
        state: tensors, numbers, strings and plain containers of them.

    Raises:
        OSError: the folder cannot be written.
    """
    content = {"kind": _KIND, "version": _VERSION, **state}
    write_whole(path, lambda file: torch.save(content, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, and run no code from the file.

    Args:
        path: the file.

    Returns:
        The run's state.

    Raises:
        TrainingError: there is no such file, or it is not a whole checkpoint of this version.

    Example:
        >>> load_checkpoint(Path("missing.pt"))
        Traceback (most recent call last):
        retrograde.training.options.TrainingError: there is no checkpoint missing.pt: ...
    """
    anew = "start anew without --resume"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise TrainingError(
            f"there is no checkpoint {path}: one is written after the first iteration; {anew}, or "
            "name the --report folder of the run to go on with"
        ) from None
    except OSError as error:
        raise TrainingError(
            f"cannot read the checkpoint {path}: {error.strerror or error}; make it readable, "
            f"or {anew}"
        ) from error
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, UnpicklingError) as error:
        raise TrainingError(f"the checkpoint {path} is damaged: {anew}") from error
    if not isinstance(state, dict) or state.get("kind") != _KIND:
        raise TrainingError(f"{path} is not a checkpoint of `retrograde train`: {anew}")
    if state.get("version") != _VERSION:
        raise TrainingError(
            f"the checkpoint {path} is of version {state.get('version')}, expected {_VERSION}: "
            f"take the retrograde that wrote it, or {anew}"
        )
    return state
