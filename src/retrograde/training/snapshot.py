"""What a snapshot of a run must hold, looked at before any of it is taken up.

A run's options and vocabulary decide the shape of every tensor beside them, so whatever does not
fit is found, and can be named, without computing anything.
"""

from types import UnionType
from typing import Any

import torch
from torch import Tensor

from retrograde.training.model import CharacterModel
from retrograde.training.options import TrainingError, TrainingOptions, is_of_kind, kind_name

__all__ = ["check_snapshot"]

_WHOLE = "the snapshot"
_REMEDY = "take a whole checkpoint of this version, or start anew without --resume"


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


def check_snapshot(snapshot: Any) -> TrainingOptions:
    """See to it that a snapshot is whole, and its tensors as its options and vocabulary want them.

    Args:
        snapshot: what should be one.

    Returns:
        Its options.

    Raises:
        TrainingError: it is not; what differs first is named, as it is and as it should be.
        UnitError: its memory cannot be read.

    Example:
        >>> check_snapshot({"losses": []})
        Traceback (most recent call last):
        retrograde.training.options.TrainingError: the snapshot has losses: expected ...
    """
    _compare(snapshot, _PARTS, _WHOLE, "")
    options = TrainingOptions.from_dict(snapshot["options"])
    characters, done = len(snapshot["vocabulary"]), len(snapshot["losses"])
    reason = f", for --hidden {options.hidden}, --batch {options.batch} and {characters} characters"
    _compare(snapshot, _expected(options, characters, done), _WHOLE, reason)
    return options


def _expected(options: TrainingOptions, characters: int, done: int) -> _AtLeast:
    """Tensors without content of the right shapes, and kinds of what is no tensor."""
    with torch.device("meta"):
        model = CharacterModel(characters, options.hidden, None)
        state = torch.empty(1, options.batch, options.hidden)
        step = torch.empty(())
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
            f"{place} has {_describe(found)}: expected {_describe(expected)}{reason}; {_REMEDY}"
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
