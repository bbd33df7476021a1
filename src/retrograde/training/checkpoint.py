"""Checkpoints: written whole, and checked in full before any of their content is used.

Two checks when one is read. The archive's checksums find damage, since torch reads changed bytes as
changed weights. Then the tensors' shapes must be those that the run's options and vocabulary imply,
so a misfit is named before anything is computed.
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
_ANEW = "start anew without --resume"
_NAMED = 6  # entries of a foreign file that an error lists
_WHOLE = "the snapshot"


class _AtLeast(dict[str, Any]):
    """Names that must be there, beside which there may be others."""


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
    """Write a state of tensors and plain values, whole or not at all; an OSError names ``path``."""
    content = {"kind": _KIND, "version": _VERSION, **state}
    write_whole(path, lambda file: torch.save(content, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, and run no code from the file. Raises TrainingError
    if it is missing or not a whole checkpoint of this version."""
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


def check_snapshot(snapshot: Any) -> TrainingOptions:
    """The options of a run's snapshot, once the rest of it is known to fit them. Raises
    TrainingError, which names the first misfit, or UnitError if the memory cannot be read."""
    _compare(snapshot, _PARTS, _WHOLE, "")
    options = TrainingOptions.from_dict(snapshot["options"])
    characters, done = len(snapshot["vocabulary"]), len(snapshot["losses"])
    reason = f", for --hidden {options.hidden}, --batch {options.batch} and {characters} characters"
    _compare(snapshot, _expected(options, characters, done), _WHOLE, reason)
    return options


def _read(content: bytes, path: Path) -> Any:
    """What a file holds, if every byte is as it was written."""
    cause = None
    try:
        if zipfile.ZipFile(io.BytesIO(content)).testzip() is None:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes its reader raise anything
        cause = error
    raise TrainingError(
        f"the checkpoint {path} is damaged: it holds {len(content):,} bytes, expected those that a "
        f"run saved, whole and unchanged; {_ANEW}, or put a whole copy in its place"
    ) from cause


def _held(state: object) -> str:
    """What a file holds in place of a checkpoint, in a few words."""
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    names = [str(name) for name in state]
    return ", ".join(names[:_NAMED]) + (" and more" if len(names) > _NAMED else "")


def _expected(options: TrainingOptions, characters: int, done: int) -> _AtLeast:
    """Tensors without content of the right shapes, and kinds of what is no tensor."""
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
    """Refuse what is not as expected, the first of it by name."""
    if not _fits(found, expected):
        raise TrainingError(
            f"{place} has {_describe(found)}: expected {_describe(expected)}{reason}; "
            f"take a whole checkpoint of this version, or {_ANEW}"
        )
    if isinstance(expected, dict):
        for name, value in expected.items():
            inner = name if place == _WHOLE else f"{place}.{name}"
            _compare(found[name], value, inner, reason)
    elif isinstance(expected, list | tuple):
        for index, value in enumerate(expected):
            _compare(found[index], value, f"{place}[{index}]", reason)


def _fits(found: Any, expected: Any) -> bool:
    """Whether a part is as expected, what it consists of left aside."""
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
    """What a part of a snapshot is, or should be, in a few words."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return ", ".join(map(str, value)) or "no entries"
    if isinstance(value, list | tuple):
        return {0: "no entries", 1: "1 entry"}.get(len(value), f"{len(value)} entries")
    if isinstance(value, type | UnionType):
        return kind_name(value)
    return f"{value!r:.40}"
