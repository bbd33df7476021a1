"""A trial call that leaves no trace, and finds out what it draws and changes (rules 2 and 3).

Random states, buffers, captured tensors and the Python values that the cell refers to are restored,
whether the call returns or raises. If the call changes one buffer of a module, all buffers of that
module count as changed: batch normalization's running mean is unchanged by an input of zeros.

The call can change two kinds of Python values. Values without a history (a counter, an iterator, a
detached tensor) belong to the state, and are stored with it. A tensor with a history is only
*left*: the caller may look at it, but the next step must not read it. A second call checks this.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retrograde.discover.captured import distinct, foreign_tensors
from retrograde.discover.generators import Source, Watch, draws_python, is_alone, sources
from retrograde.discover.places import Paused, Place, Seen, Table, tensors_in, within
from retrograde.discover.referents import Referents
from retrograde.discover.surroundings import Ambient, Left, Steady, put_back, version
from retrograde.discover.trial_watch import watched
from retrograde.errors import CellError
from retrograde.measure.allocations import MEASURING, unpacked

__all__ = ["DryRun", "assigned_tensors", "try_out"]

T = TypeVar("T")


@dataclass(frozen=True)
class DryRun(Generic[T]):
    """The result of a trial call, and the surroundings that it depends on."""

    value: T
    ambient: Ambient
    mark: int  # autograd's sequence number when it began
    found: Referents  # the referents, without objects that only earlier calls left there
    written: tuple[bool, ...]  # whether it writes to the tensors of each owner
    decides: bool  # whether it draws numbers of Python's, which may decide what it computes

    def repeatable(self) -> bool:
        """Return whether the call changes nothing but random states and tensors."""
        return not (self.ambient.places or self.ambient.left or self.found.generators)

    def on(self, found: Referents) -> Ambient:
        """Return the surroundings of the same call on equal modules, without a trial."""
        owners = _Rewritten(found, self.ambient.device)
        for owner, changed in zip(owners.owners, self.written, strict=True):
            owner.changed = changed
        buffers, others = owners.parted()
        steady = Steady(self.ambient.steady.sources, others, tuple(found.places))
        parts = tuple(found.parts())
        return replace(self.ambient, buffers=buffers, steady=steady, modules=parts)


def try_out(
    call: Callable[[], T],
    found: Referents,
    device: torch.device,
    results: Callable[[T], Sequence[Tensor]],
    *,
    reruns: bool = True,
) -> DryRun[T]:
    """Run a call with autograd recording, and restore what it drew and changed.

    ``reruns`` says whether the call will be run again for the backward pass.

    Raises:
        CellError: the call replaced a buffer by another tensor, changed a value that cannot be
            restored, reads a tensor that it left before, takes a gradient, or has a site of Pyro's.
    """
    generators = _GeneratorStates(sources(device, found.generators))
    with (
        MEASURING,
        unpacked(),
        _rewritten(found, device) as written,
        put_back(found.places),
        watched(reruns=reruns) as watch,
    ):
        before = [place.note() for place in found.places]
        try:
            with torch.enable_grad():
                mark, value = _marked(call)
                first = last = _changes(found.places, before)
                if any(change.tensors() for change in first):
                    del value  # so that only one call's graph is held
                    earlier, stand_ins = mark, _stand_ins(first)
                    mark, value = _marked(call)
                    _check_unread(results(value), earlier, mark, first, stand_ins)
                    last = _changes(found.places, before)
                drawn = generators.moved()
                if drawn and not is_alone():
                    del value
                    with Watch(drawn) as ours:
                        mark, value = _marked(call)
                    drawn = tuple(source for source in drawn if source in ours.drawn)
        except BaseException:
            generators.put_back(generators.moved())
            raise
        generators.put_back(drawn)
        places, left = _parted(last)
        place_bytes = _bytes_of(first, last) if last is not first else 0
    changed, others = written.parted()
    found = _without_stale(found, last)
    unmoved = tuple(source for source in generators.sources if source not in drawn)
    steady = Steady(unmoved, others, _untouched(found.places, last))
    parts = tuple(found.parts())
    ambient = Ambient(device, drawn, changed, places, left, steady, parts, place_bytes)
    decides = watch.decides or any(map(draws_python, drawn))
    changing = tuple(owner.changed for owner in written.owners)
    return DryRun(value, ambient, mark, found, changing, decides)


def assigned_tensors(
    call: Callable[[], object], found: Referents, places: Sequence[Place], device: torch.device
) -> list[tuple[Place, Any, Any, Any]]:
    """Find where a call assigns other values that hold tensors, and restore everything. The results
    are a place, a name there, and the values before and after."""
    generators = _GeneratorStates(sources(device, found.generators))
    with MEASURING, unpacked(), _rewritten(found, device), put_back(found.places):
        before = [place.note() for place in places]
        try:
            with torch.enable_grad():
                call()
            return [
                (change.place, key, change.then.get(key), change.now[key])
                for change in _changes(places, before)
                for key in change.keys
                if tensors_in(change.now.get(key))
            ]
        finally:
            generators.put_back(generators.moved())


def _marked(call: Callable[[], T]) -> tuple[int, T]:
    """Return autograd's sequence number, and the result of a call. Autocast's weight cache is off:
    casts of an earlier call would look like tensors from outside."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        return torch._C._autograd._get_sequence_nr(), call()
    finally:
        torch.set_autocast_cache_enabled(cached)


class _GeneratorStates:
    """Generators, and their states before a call."""

    def __init__(self, generators: tuple[Source, ...]) -> None:
        self.sources = generators
        self.before = {source: source.copy() for source in generators}

    def moved(self) -> tuple[Source, ...]:
        """Return the generators that moved since, whoever drew from them."""
        return tuple(s for s, then in self.before.items() if s.position() != then.position())

    def put_back(self, moved: Iterable[Source]) -> None:
        for source in moved:
            source.restore(self.before[source].capture())


@dataclass(frozen=True)
class _Change:
    """Names of a place that hold other values now, and the values."""

    place: Place
    keys: tuple[Any, ...]
    then: Seen
    now: Seen
    history: list[Any] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        return [t for key in self.keys for t in tensors_in(self.now.get(key))]

    def with_history(self) -> tuple[Any, ...]:
        """Return the names that hold tensors computed from others."""
        return tuple(
            key
            for key in self.keys
            if key in self.history
            or any(t.grad_fn is not None for t in tensors_in(self.now.get(key)))
        )


def _changes(places: Sequence[Place], before: Sequence[Seen]) -> list[_Change]:
    found = []
    for place, seen in zip(places, before, strict=True):
        keys = place.changed(seen)
        if keys:
            found.append(_Change(place, tuple(keys), seen, place.note()))
    return found


def _stand_ins(changes: list[_Change]) -> list[Tensor]:
    """Replace tensors that a call left by leaves without memory, which frees their graph."""
    found: list[Tensor] = []

    def stand_in(t: Tensor) -> Tensor:
        if t.grad_fn is None:
            return t
        found.append(t.new_zeros(()).expand(t.shape).requires_grad_())
        return found[-1]

    for change in changes:
        keys = () if change.place.growing else change.with_history()
        left = {key: change.now.pop(key) for key in keys}
        change.place.write(pytree.tree_map_only(Tensor, stand_in, left), ())
        change.now.update(dict.fromkeys(keys))
        change.history.extend(keys)
    return found


def _check_unread(
    results: Sequence[Tensor],
    earlier: int,
    mark: int,
    changes: list[_Change],
    stand_ins: list[Tensor],
) -> None:
    """Refuse a second call whose results depend on tensors that the first call left."""
    leaves, older = foreign_tensors(results, mark)
    read = {id(t) for t in leaves} & {id(t) for t in stand_ins}
    if read or any(node._sequence_nr() >= earlier for node, _ in older):
        for change in changes:
            for key in change.with_history():
                raise Left(change.place, (key,)).refusal(key)


def _without_stale(found: Referents, changes: list[_Change]) -> Referents:
    """Return the referents without objects that only an earlier call left in a place."""
    stale = {
        id(v) for change in changes for key in change.keys for v in within(change.then.get(key))
    }
    return replace(
        found,
        tensors=[t for t in found.tensors if id(t) not in stale],
        places=[place for place in found.places if id(place.holder) not in stale],
    )


def _parted(changes: list[_Change]) -> tuple[tuple[Place, ...], tuple[Left, ...]]:
    """Divide the changes into places that belong to the state, and tensors that are only left.

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
    """Return the places without the names that a call changes."""
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
    """Return the bytes of tensors in the state that the first call does not settle."""
    settled = {id(t) for change in first for t in change.tensors()}
    sizes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for change in last
        for t in change.tensors()
        if t.grad_fn is None and id(t) not in settled
    }
    return sum(sizes.values())


_ADVANCES = (
    "the cell advances {}, a generator or itertools.cycle, which cannot be reset for a rerun: "
    "expected a list, a tuple or an iterator over one; or give its values as inputs"
)
_REPLACES = (
    "the cell replaced a {} of its module: expected it to change it in place "
    "(self.count.copy_(...), not self.count = ...), so that a rerun can put it back"
)
_COLLECTS = (
    "the cell collects tensors with a gradient in {}: expected it to return them as outputs, since "
    "tensors that a step leaves have no gradient within a budget; return them, or append t.detach()"
)


class _Rewritten:
    """The tensors that a cell may write to, and their values before a call."""

    def __init__(self, found: Referents, device: torch.device) -> None:
        self.device = device
        self.owners = [_Owner([*part.buffers(recurse=False)]) for part in found.parts()]
        self.owners += [_Captured(t) for t in found.tensors if not t.requires_grad]
        frozen = (p for part in found.parts() for p in part.parameters(recurse=False))
        self.frozen = [p for p in frozen if not p.requires_grad]

    def put_back(self) -> None:
        for owner in self.owners:
            owner.put_back(self.device)

    def parted(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the tensors that the call writes to, and the others."""
        changed = distinct(t for owner in self.owners if owner.changed for t in owner.tensors)
        others = distinct(t for owner in self.owners if not owner.changed for t in owner.tensors)
        kept = {id(t) for t in changed}
        return tuple(changed), tuple(t for t in (*others, *self.frozen) if id(t) not in kept)


@contextmanager
def _rewritten(found: Referents, device: torch.device) -> Iterator[_Rewritten]:
    """Restore, after a block, the values of the tensors that a cell may write to."""
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
        """Restore the values, if any differs."""
        # A kernel may write without counting a version, and a write may leave the same value.
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
                "expected it to stay unchanged; register it as a buffer of a module, or make "
                "it part of the state"
            )
        value = torch.tensor(self.numbers, dtype=t.dtype, device=t.device)
        Ambient(device, buffers=(t,)).restore((value,))


_FEW = 16
