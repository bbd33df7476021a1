"""A trial call, of which no trace is left: what it draws and changes is found out (rules 2 and 3).

Random states are put back, and so are the buffers of every module that the cell refers to, whether
the call returns or raises. A module of which the call changed one buffer is taken to change all of
its own: batch normalization's running mean stays as it is for an input of zeros.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from retrograde.errors import CellError
from retrograde.execute.chance import Source, sources
from retrograde.execute.reach import Reach
from retrograde.execute.replay import Ambient, Steady, version

__all__ = ["Trial", "try_out"]

T = TypeVar("T")
Buffers = dict[str, Tensor | None]


@dataclass(frozen=True)
class Trial(Generic[T]):
    """What a trial call returned and did.

    Attributes:
        value: what it returned.
        ambient: the surroundings that it depends on.
        mark: autograd's sequence number when it began.
    """

    value: T
    ambient: Ambient
    mark: int


def try_out(call: Callable[[], T], found: Reach, device: torch.device) -> Trial[T]:
    """Run a call with autograd recording, and put back what it drew and changed.

    Args:
        call: one step of a cell.
        found: what the cell refers to.
        device: where it runs.

    Returns:
        A :class:`Trial`.

    Raises:
        CellError: the call replaced a buffer by another tensor.
    """
    chance = _Chance(sources(device, found.generators))
    parts = found.parts()
    owners = [_Owner(part) for part in parts if part._buffers]
    holdings = [held for part in parts for held in (part._parameters, part._buffers) if held]
    mark = torch._C._autograd._get_sequence_nr()
    try:
        with torch.enable_grad():
            value = call()
    finally:
        drawn, still = chance.put_back()
        replaced = [owner.put_back(device) for owner in owners]
    if any(replaced):
        raise CellError(
            "the cell replaced a buffer of its module: expected it to change buffers in place "
            "(self.count.copy_(...), not self.count = ...), so that a rerun can put them back"
        )
    changed = _each(b for owner in owners if owner.changed for b in owner.tensors())
    others = _each(b for owner in owners if not owner.changed for b in owner.tensors())
    kept = {id(b) for b in changed}
    steady = Steady(still, tuple(b for b in others if id(b) not in kept))
    then = tuple((held, dict(held)) for held in holdings)
    return Trial(value, Ambient(device, drawn, changed, steady, then), mark)


class _Chance:
    """Generators, and their states before a call."""

    def __init__(self, chance: tuple[Source, ...]) -> None:
        self.sources = chance
        self.before = [source.copy() for source in chance]

    def put_back(self) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
        """Restore those that were drawn from; tell which they are, and which the others."""
        drawn, still = [], []
        for source, before in zip(self.sources, self.before, strict=True):
            if source.position() != before.position():
                source.restore(before.capture())
                drawn.append(source)
            else:
                still.append(source)
        return tuple(drawn), tuple(still)


class _Owner:
    """A module, and its own buffers before a call."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part
        self.buffers: Buffers = dict(part._buffers)
        self.values = [b.detach().clone() for b in self.tensors()]
        self.versions = [version(b) for b in self.tensors()]
        self.changed = False

    def tensors(self) -> list[Tensor]:
        return [b for b in self.buffers.values() if b is not None]

    def put_back(self, device: torch.device) -> bool:
        """Restore the buffers and their values; tell whether one was replaced."""
        now = self.part._buffers
        replaced = [*map(id, now.values())] != [*map(id, self.buffers.values())]
        if replaced:
            now.clear()
            now.update(self.buffers)
        # A kernel may write without counting, and a write may happen to change nothing.
        written = self.versions != [version(b) for b in self.tensors()]
        pairs = zip(self.tensors(), self.values, strict=True)
        self.changed = written or not all(torch.equal(b, value) for b, value in pairs)
        if self.changed:
            Ambient(device, buffers=tuple(self.tensors())).restore(tuple(self.values))
        return replaced


def _each(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple({id(t): t for t in tensors}.values())
