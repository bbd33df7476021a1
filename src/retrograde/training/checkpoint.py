"""Checkpoints, whole when they are written and looked through when they are read.

A file that was damaged or is of another kind is told by what it holds: its sums of bytes are
compared, since torch reads changed bytes as changed weights.
"""

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from retrograde.training.atomic_files import write_whole
from retrograde.training.options import TrainingError

__all__ = ["load_checkpoint", "save_checkpoint"]

_KIND = "retrograde training checkpoint"
_VERSION = 1
_ANEW = "start anew without --resume"
_NAMED = 6  # of the entries of a file that is something else


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a run's state whole.

    Args:
        path: the file to replace.
        state: tensors, numbers, strings and plain containers of them.

    Raises:
        OSError: the disk is full, or the folder cannot be written; it names ``path``.
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
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise TrainingError(
            f"there is no checkpoint {path}: one is written after the first iteration; {_ANEW}, or "
            "name the --report folder of the run to go on with"
        ) from None
    except OSError as error:
        raise TrainingError(
            f"cannot read the checkpoint {path}: {error.strerror or error}; make it readable, "
            f"or {_ANEW}"
        ) from error
    state = _read(content, path)
    if not isinstance(state, dict) or state.get("kind") != _KIND:
        raise TrainingError(
            f"{path} is not a checkpoint of `retrograde train`: it holds {_held(state)}; expected "
            f"what a run saves as checkpoint.pt; name the --report folder of a run, or {_ANEW}"
        )
    if state.get("version") != _VERSION:
        raise TrainingError(
            f"the checkpoint {path} is of version {state.get('version')}, expected {_VERSION}: "
            f"take the retrograde that wrote it, or {_ANEW}"
        )
    return state


def _read(content: bytes, path: Path) -> Any:
    """What a file holds, if every byte is as it was written."""
    try:
        changed = zipfile.ZipFile(io.BytesIO(content)).testzip()
        if changed is None:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes its reader raise anything
        raise _damaged(content, path) from error
    raise _damaged(content, path)


def _damaged(content: bytes, path: Path) -> TrainingError:
    return TrainingError(
        f"the checkpoint {path} is damaged: it holds {len(content):,} bytes, expected those that a "
        f"run saved, whole and unchanged; {_ANEW}, or put a whole copy in its place"
    )


def _held(state: object) -> str:
    """What was found in place of a checkpoint, in a few words."""
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    names = [str(name) for name in state]
    return ", ".join(names[:_NAMED]) + (" and more" if len(names) > _NAMED else "")
