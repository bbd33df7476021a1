"""Checkpoints: written completely or not at all, and checked in full before use.

Reading makes two checks. The archive's checksums find damage, since torch reads changed bytes as
changed weights. Then the tensors' shapes must be those that the run's options and vocabulary imply,
so a mismatch is named before anything is computed.
"""

import io
import zipfile
from pathlib import Path
from types import UnionType
from typing import Any

import torch
from torch import Tensor

from retrograde.training.folder import write_whole
from retrograde.training.options import TrainingError, TrainingOptions, is_of_kind, kind_name
from retrograde.training.task import CharacterModel

__all__ = ["check_snapshot", "load_checkpoint", "save_checkpoint"]

_KIND = "retrograde training checkpoint"
_VERSION = 1
_NEW_RUN = "start a new run without --resume"
_NAMED = 6  # entries of a foreign file that an error lists
_WHOLE = "the snapshot"


class _AtLeast(dict[str, Any]):
    """Names that must be present; others may be."""


_PARTS = _AtLeast(
    options=dict,
    text={"source": str, "sha256": str},
    vocabulary=str,
    model=dict,
    optimizer=_AtLeast(param_groups=list),
    losses=list,
    seconds=list,
)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain values, completely or not at all; an OSError names ``path``."""
    content = {"kind": _KIND, "version": _VERSION, **state}
    write_whole(path, lambda file: torch.save(content, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read the file of :func:`save_checkpoint`, and run no code from it. Raises TrainingError if it
    is missing or not a complete checkpoint of this version."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise TrainingError(
            f"there is no checkpoint {path}: one is written after the first iteration; "
            f"{_NEW_RUN}, or name the --report folder of the run to resume"
        ) from None
    except OSError as error:
        raise TrainingError(
            f"cannot read the checkpoint {path}: {error.strerror or error}; make it readable, "
            f"or {_NEW_RUN}"
        ) from error
    state = _read(content, path)
    if not isinstance(state, dict) or state.get("kind") != _KIND:
        raise TrainingError(
            f"{path} is not a checkpoint of `retrograde train`: it holds {_held(state)}; expected "
            f"the checkpoint.pt of a run; name the --report folder of a run, or {_NEW_RUN}"
        )
    if state.get("version") != _VERSION:
        raise TrainingError(
            f"the checkpoint {path} is of version {state.get('version')}, expected {_VERSION}: "
            f"use the version of retrograde that wrote it, or {_NEW_RUN}"
        )
    return state


def check_snapshot(snapshot: Any) -> TrainingOptions:
    """Return the options of a run's snapshot, after a check that the rest of it matches them.
    Raises TrainingError, which names the first mismatch, or UnitError if the memory cannot be
    read."""
    _compare(snapshot, _PARTS, _WHOLE, "")
    options = TrainingOptions.from_dict(snapshot["options"])
    characters, done = len(snapshot["vocabulary"]), len(snapshot["losses"])
    reason = f", for --hidden {options.hidden}, --batch {options.batch} and {characters} characters"
    _compare(snapshot, _expected(options, characters, done), _WHOLE, reason)
    return options


def _read(content: bytes, path: Path) -> Any:
    """Load a file, if every byte is as it was written."""
    cause = None
    try:
        if zipfile.ZipFile(io.BytesIO(content)).testzip() is None:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise any error
        cause = error
    raise TrainingError(
        f"the checkpoint {path} is damaged: it holds {len(content):,} bytes, expected those that a "
        f"run saved, whole and unchanged; {_NEW_RUN}, or replace it by a complete copy"
    ) from cause


def _held(state: object) -> str:
    """Describe the content of a file that is not a checkpoint."""
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    names = [str(name) for name in state]
    return ", ".join(names[:_NAMED]) + (" and more" if len(names) > _NAMED else "")


def _expected(options: TrainingOptions, characters: int, done: int) -> _AtLeast:
    """Return the expected snapshot: tensors of the right shapes without content, and types."""
    with torch.device("meta"):
        model = CharacterModel(characters, options.hidden, None)
        state = torch.empty(1, options.batch, options.hidden, device="meta")
        step = torch.empty((), device="meta")
    moments = {
        index: {"step": step, "exp_avg": parameter, "exp_avg_sq": parameter}
        for index, parameter in enumerate(model.parameters())
    }
    group = _AtLeast(lr=float, params=[int] * len(moments))
    return _AtLeast(
        model=dict(model.state_dict()),
        optimizer={"state": moments if done else {}, "param_groups": [group]},
        random=torch.get_rng_state(),
        state=(state, state) if done else None,
        losses=[float] * done,
        seconds=[float] * done,
    )


def _compare(found: Any, expected: Any, place: str, reason: str) -> None:
    """Refuse a part that is not as expected; the error names the first one."""
    if not _fits(found, expected):
        raise TrainingError(
            f"{place} has {_describe(found)}: expected {_describe(expected)}{reason}; "
            f"use a complete checkpoint of this version, or {_NEW_RUN}"
        )
    if isinstance(expected, dict):
        for name, value in expected.items():
            inner = name if place == _WHOLE else f"{place}.{name}"
            _compare(found[name], value, inner, reason)
    elif isinstance(expected, list | tuple):
        for index, value in enumerate(expected):
            _compare(found[index], value, f"{place}[{index}]", reason)


def _fits(found: Any, expected: Any) -> bool:
    """Return whether a part is as expected, apart from its own parts."""
    match expected:
        case _AtLeast():
            return isinstance(found, dict) and expected.keys() <= found.keys()
        case dict():
            return isinstance(found, dict) and expected.keys() == found.keys()
        case list() | tuple():
            return isinstance(found, type(expected)) and len(found) == len(expected)
        case Tensor():
            same = isinstance(found, Tensor) and found.shape == expected.shape
            return same and found.dtype == expected.dtype
        case None:
            return found is None
    return is_of_kind(found, expected)


def _describe(value: Any) -> str:
    """Describe a part of a snapshot in a few words."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return ", ".join(map(str, value)) or "no entries"
    if isinstance(value, list | tuple):
        return {0: "no entries", 1: "1 entry"}.get(len(value), f"{len(value)} entries")
    if isinstance(value, type | UnionType):
        return kind_name(value)
    return f"{value!r:.40}"
