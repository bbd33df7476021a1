"""A trial call, of which no trace is left: what it draws and changes is found out (rules 2 and 3).

Random states are put back, and so are buffers, captured tensors and the places of Python values
that the cell refers to, whether the call returns or raises. A module of which the call changed one
buffer is taken to change all of its own: batch normalization's running mean stays as it is for an
input of zeros.

What the call changes in Python is of two kinds. Values without a history (a counter, an iterator, a
detached tensor) belong to the state, and travel with it. A tensor with a history is only *left*: to
be looked at, not to be read by the next step. A second call shows whether that reads it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from retrograde.errors import CellError
from retrograde.execute.captured import foreign_tensors
from retrograde.execute.chance import Source, Watch, is_alone, sources
from retrograde.execute.measure import MEASURING, unpacked
from retrograde.execute.places import (
    Paused,
    Place,
    Seen,
    Table,
    tensors_in,
)
from retrograde.execute.reach import Reach
from retrograde.execute.replay import Ambient, Left, Steady, put_back, version

__all__ = ["Trial", "try_out"]

T = TypeVar("T")


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


def try_out(
    call: Callable[[], T],
    found: Reach,
    device: torch.device,
    results: Callable[[T], Sequence[Tensor]],
) -> Trial[T]:
    """Run a call with autograd recording, and put back what it drew and changed.

    Args:
        call: one step of a cell.
        found: what the cell refers to.
        device: where it runs.
        results: the tensors in what the call returns.

    Returns:
        A :class:`Trial`.

    Raises:
        CellError: the call replaced a buffer by another tensor, or leaves behind what cannot be
            put back, or reads what it left before.
    """
    chance = _Chance(sources(device, found.generators))
    with MEASURING, unpacked(), _rewritten(found, device) as written, put_back(found.places):
        before = [place.note() for place in found.places]
        mark = torch._C._autograd._get_sequence_nr()
        try:
            with torch.enable_grad():
                value = call()
                first = last = _changes(found.places, before)
                if any(change.tensors() for change in first):
                    last = _again(lambda: results(call()), found.places, before, first, mark)
                drawn = chance.drawn(call)
        except BaseException:
            chance.put_back()
            raise
        chance.put_back(drawn)
        places, left = _parted(last)
        place_bytes = _bytes_of(first, last) if last is not first else 0
    changed, others = written.parted()
    steady = Steady(
        tuple(source for source in chance.sources if source not in drawn),
        others,
        _untouched(found.places, last),
    )
    parts = tuple(found.parts())
    return Trial(
        value, Ambient(device, drawn, changed, places, left, steady, parts, place_bytes), mark
    )


class _Chance:
    """Generators, and their states before a call."""

    def __init__(self, chance: tuple[Source, ...]) -> None:
        self.sources = chance
        self.before = {source: source.copy() for source in chance}

    def drawn(self, call: Callable[[], Any]) -> tuple[Source, ...]:
        """Those that a call drew from: it is called again where another thread may have."""
        moved = self._moved()
        if not moved or is_alone():
            return moved
        with Watch(moved) as watch:
            call()
        return tuple(source for source in moved if source in watch.drawn)

    def put_back(self, drawn: Iterable[Source] | None = None) -> None:
        """Restore those that were drawn from, so far as that is known."""
        for source in self._moved() if drawn is None else drawn:
            source.restore(self.before[source].capture())

    def _moved(self) -> tuple[Source, ...]:
        return tuple(s for s, then in self.before.items() if s.position() != then.position())


@dataclass(frozen=True)
class _Change:
    """Names of a place that hold other values now, and these values."""

    place: Place
    keys: tuple[Any, ...]
    now: Seen

    def tensors(self) -> list[Tensor]:
        return [t for key in self.keys for t in tensors_in(self.now.get(key))]

    def with_history(self) -> tuple[Any, ...]:
        """The names that hold tensors which were computed from others."""
        return tuple(
            key
            for key in self.keys
            if any(t.grad_fn is not None for t in tensors_in(self.now.get(key)))
        )


def _changes(places: Sequence[Place], before: Sequence[Seen]) -> list[_Change]:
    found = []
    for place, seen in zip(places, before, strict=True):
        keys = place.changed(seen)
        if keys:
            found.append(_Change(place, tuple(keys), place.note()))
    return found


def _again(
    call: Callable[[], Sequence[Tensor]],
    places: Sequence[Place],
    before: Sequence[Seen],
    first: list[_Change],
    mark: int,
) -> list[_Change]:
    """Call again, and refuse a call whose results go back to tensors that the first call left."""
    mark_again = torch._C._autograd._get_sequence_nr()
    _, older = foreign_tensors(call(), mark_again)
    if any(node._sequence_nr() >= mark for node, _ in older):
        for change in first:
            for key in change.with_history():
                raise Left(change.place, (key,)).refusal(key)
    return _changes(places, before)


def _parted(changes: list[_Change]) -> tuple[tuple[Place, ...], tuple[Left, ...]]:
    """What belongs to the state, and what is only left.

    Raises:
        CellError: a change can be neither kept nor undone.
    """
    places, left = [], []
    for change in changes:
        place, keys = change.place, change.with_history()
        for key in change.keys:
            if isinstance(change.now.get(key), Paused):
                raise CellError(_ADVANCES.format(place.called(key)))
            if isinstance(place, Table) and place.registered:
                raise CellError(_REPLACES.format(place.registered))
        if keys and place.growing:
            raise CellError(_COLLECTS.format(place.called(keys[0])))
        if keys:
            left.append(Left(place.of(keys), keys))
        rest = set(change.keys) - set(keys)
        if rest:
            places.append(place if place.growing else place.of(rest))
    return tuple(places), tuple(left)


def _untouched(places: Sequence[Place], changes: list[_Change]) -> tuple[Place, ...]:
    """The places, those names aside that a call changes."""
    changed = {id(change.place): change for change in changes}
    found = []
    for place in places:
        change = changed.get(id(place))
        if change is None:
            found.append(place)
        elif not place.growing:
            found.append(place.without(change.keys))
    return tuple(found)


def _bytes_of(first: list[_Change], last: list[_Change]) -> int:
    """The bytes of the tensors that belong to the state, those aside that a first call settles."""
    settled = {id(t) for change in first for t in change.tensors()}
    sizes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for change in last
        for t in change.tensors()
        if t.grad_fn is None and id(t) not in settled
    }
    return sum(sizes.values())


_ADVANCES = (
    "the cell advances the generator in {}, which cannot be set back for a rerun: expected a list, "
    "a tuple or an iterator over one; or give its values as inputs"
)
_REPLACES = (
    "the cell replaced a {} of its module: expected it to change it in place "
    "(self.count.copy_(...), not self.count = ...), so that a rerun can put it back"
)
_COLLECTS = (
    "the cell collects tensors with a gradient in {}: expected it to return them as outputs, for "
    "what a step leaves has no gradient within a budget; return them, or append t.detach()"
)


class _Rewritten:
    """The tensors that a cell may write to, and their values before a call."""

    def __init__(self, found: Reach, device: torch.device) -> None:
        self.device = device
        self.owners = [_Owner([*part.buffers(recurse=False)]) for part in found.parts()]
        self.owners += [_Captured(t) for t in found.tensors if not t.requires_grad]
        frozen = (p for part in found.parts() for p in part.parameters(recurse=False))
        self.frozen = [p for p in frozen if not p.requires_grad]

    def put_back(self) -> None:
        for owner in self.owners:
            owner.put_back(self.device)

    def parted(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What the call writes to, and what it does not."""
        changed = _each(t for owner in self.owners if owner.changed for t in owner.tensors)
        others = _each(t for owner in self.owners if not owner.changed for t in owner.tensors)
        kept = {id(t) for t in changed}
        return changed, tuple(t for t in (*others, *self.frozen) if id(t) not in kept)


@contextmanager
def _rewritten(found: Reach, device: torch.device) -> Iterator[_Rewritten]:
    """Put back, after a block, the values of the tensors that a cell may write to."""
    written = _Rewritten(found, device)
    try:
        yield written
    finally:
        written.put_back()


class _Owner:
    """Tensors of one owner, and their values before a call."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.versions = list(map(version, tensors))
        self.values = [t.detach().clone() for t in tensors]
        self.changed = False

    def put_back(self, device: torch.device) -> None:
        """Restore the values, if any is another."""
        # A kernel may write without counting, and a write may happen to change nothing.
        written = self.versions != list(map(version, self.tensors))
        pairs = zip(self.tensors, self.values, strict=True)
        self.changed = written or not all(torch.equal(t, value) for t, value in pairs)
        if self.changed:
            Ambient(device, buffers=tuple(self.tensors)).restore(tuple(self.values))


class _Captured(_Owner):
    """A tensor that a cell captured. It may be large, so only a few numbers are noted."""

    def __init__(self, t: Tensor) -> None:
        self.tensors, self.versions = [t], [version(t)]
        self.numbers = t.tolist() if t.numel() <= _FEW else None
        self.changed = False

    def put_back(self, device: torch.device) -> None:
        (t,) = self.tensors
        self.changed = [version(t)] != self.versions
        if not self.changed:
            return
        if self.numbers is None or t.requires_grad:
            raise CellError(
                f"the cell writes in place to a tensor of shape {tuple(t.shape)} that it captured: "
                "expected it to leave that as it is; register it as a buffer of a module, or make "
                "it part of the state"
            )
        value = torch.tensor(self.numbers, dtype=t.dtype, device=t.device)
        Ambient(device, buffers=(t,)).restore((value,))


_FEW = 16


def _each(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple({id(t): t for t in tensors}.values())
