"""A trial of one step, which finds out what it draws, writes and leaves, and refuses the rest.

Random states, buffers and Python values are put back, whether the call returns or raises. If the
call changes one buffer of a module, all of its buffers count as changed. (Batch normalization's
running mean is unchanged by an input of zeros.)

A change of a Python value is one of three things. What a second call does not change again is a
cache. It stays, if the second call computes what the first one did. What holds tensors, and a
second call does not read, is only *left*, to be looked at. All else is a state of the cell's own,
and is refused by its name.

Known limits: some things stay as a refused call left them. These are large captured tensors that it
wrote to, entries of lists longer than a thousand, and what cannot be found from the cell.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from retrograde.errors import CellError
from retrograde.machine import MEASURING, unpacked
from retrograde.replay.captured import distinct, foreign_tensors
from retrograde.replay.generators import OwnDraws, Source, is_alone, sources
from retrograde.replay.places import (
    ABSENT,
    Contents,
    HandsOn,
    Place,
    Slot,
    changes,
    first_named,
    note,
    restore,
    tensors_in,
)
from retrograde.replay.referents import Referents, find_referents
from retrograde.replay.surroundings import (
    Ambient,
    Left,
    Steady,
    autocast_as_now,
    muted_hooks,
    muted_modules,
    put_back,
    version,
)
from retrograde.replay.trial_watch import watched

T = TypeVar("T")


@dataclass(frozen=True)
class DryRun(Generic[T]):
    """The result of a trial call, and the surroundings that it depends on."""

    value: T
    ambient: Ambient
    mark: int  # autograd's sequence number when it began
    found: Referents  # the referents, without objects that only earlier calls left there
    decides: bool  # whether it draws numbers of Python's, which may decide what it computes


def try_out(
    call: Callable[[], T],
    made_of: Sequence[Any],
    device: torch.device,
    results: Callable[[T], Sequence[Tensor]],
    *,
    reruns: bool = True,
    settled: bool = False,
) -> DryRun[T]:
    """Run a call with autograd recording, and put back what it drew and changed, but for caches.

    ``made_of`` are the objects in which to search for what the call depends on. ``reruns`` says
    whether the call will be run again for the backward pass. ``settled`` says that an earlier trial
    made the caches.

    Raises:
        CellError: the call changed a value that is not replayed, reads a tensor that it left
            before, refers to an iterator, takes a gradient, or has a site of Pyro's.
    """
    found = find_referents(made_of)
    for name in found.read().moving if found.moving else ():
        raise CellError(_MOVES.format(name))
    with MEASURING, unpacked(), watched(reruns=reruns) as watch, torch.enable_grad():
        trial = _Trial(call, found, device, results)
        try:
            mark, value = trial.run()
            if trial.cached and settled:
                raise _refusal(trial.cached[0])
            if trial.cached:
                del value
                trial.rewind()
                return try_out(call, made_of, device, results, reruns=reruns, settled=True)
        except BaseException:
            trial.rewind()
            restore(trial.before)
            raise
    ambient = trial.ambient(made_of)
    decides = watch.decides or not all(s.is_torchs for s in ambient.sources)
    return DryRun(value, ambient, mark, trial.found, decides)


class _Trial(Generic[T]):
    """Calls of one step, each from the same random states and buffers."""

    def __init__(
        self,
        call: Callable[[], T],
        found: Referents,
        device: torch.device,
        results: Callable[[T], Sequence[Tensor]],
    ) -> None:
        self.call, self.found, self.device, self.results = call, found, device, results
        self.sources = {source: source.copy() for source in sources(device, found.generators)}
        self.drawn: tuple[Source, ...] = ()
        self.written = _Rewritten(found)
        self.before = note(found.places)
        self.left: list[Left] = []
        self.cached: list[Slot] = []

    def run(self) -> tuple[int, T]:
        """Call until it is known what every change is.

        Return autograd's sequence number before the last call, and its result.
        """
        mark, value = self.once()
        first = changes(self.before)
        if first:
            graphs = [slot for slot in first if _is_left(slot, graph=True)]
            shown = self.evidence(mark, value) if len(first) > len(graphs) else ([], [])
            del value  # so that only one call's graph is held
            self.leave(graphs)
            noted = note(self.found.places)
            mark, value = self.once()
            again = [slot for slot in changes(noted) if slot not in graphs]
            if changing := [slot for slot in again if not _is_left(slot)]:
                raise _refusal(changing[0])
            self.cached = [slot for slot in first if slot not in (*graphs, *again)]
            if self.cached and not _alike(shown, self.evidence(mark, value)):
                raise _refusal(self.cached[0])
            if again and not self.cached:
                del value
                self.leave(again)
                noted = note(self.found.places)
                mark, value = self.once()
                for slot in changes(noted):
                    if slot not in (*graphs, *again):
                        raise _refusal(slot)
        if self.drawn and not is_alone():
            del value
            drawn, self.drawn = self.drawn, ()  # a generator of another thread's is not rewound
            ours = OwnDraws(drawn)
            mark, value = self.once(ours)
            self.drawn = tuple(s for s in drawn if s in ours.drawn or not s.is_torchs)
        return mark, value

    def once(self, watch: OwnDraws | None = None) -> tuple[int, T]:
        """Call from the states at the beginning. Return autograd's sequence number, and the result.

        Autocast's weight cache is off: casts of an earlier call would look like tensors from
        outside.
        """
        self.rewind()
        try:
            with autocast_as_now(self.device), watch or nullcontext():
                found = torch._C._autograd._get_sequence_nr(), self.call()
        finally:
            pairs = self.sources.items()
            moved = (s for s, then in pairs if s.position() != then.position())
            self.drawn = tuple(dict.fromkeys((*self.drawn, *moved)))
        self.written.put_back(self.found.places)
        return found

    def rewind(self) -> None:
        """Put back random states, buffers, and what was where tensors are left."""
        for source in self.drawn:
            source.restore(self.sources[source].capture())
        self.written.put_back()

    def leave(self, slots: Sequence[Slot]) -> None:
        """Make it an error to read what the last call left."""
        counted = set[int]()
        for slot in slots:
            before = self.before[slot.place].get(slot.key, ABSENT)
            graph = _is_left(slot, graph=True)
            tensors = [] if graph else tensors_in(slot.read())
            sizes = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors}
            nbytes = sum(size for at, size in sizes.items() if at not in counted)
            counted |= sizes.keys()
            self.left.append(Left(slot.place, slot.key, before, graph, nbytes))
        for left in self.left:
            left.bar()

    def evidence(self, mark: int, value: T) -> tuple[list[Any], list[Tensor | None]]:
        """Return where generators are after a call, its results, and its gradients for some
        gradients of the results."""
        results = self.results(value)
        roots = [t for t in results if t.requires_grad]
        leaves = [t for t in foreign_tensors(roots, mark)[0] if t.numel()]  # no anchor of a chain
        seeds = [torch.arange(t.numel(), device=t.device).cos().to(t.dtype) for t in roots]
        given = [seed.view(t.shape) for seed, t in zip(seeds, roots, strict=True)]
        drawn = [source.position() for source in self.sources]
        with MEASURING, muted_hooks(leaves), muted_modules(self.found.parts()):
            grads = torch.autograd.grad(roots, leaves, given, allow_unused=True) if leaves else ()
        return drawn, [*(t.detach().clone() for t in results), *grads]

    def ambient(self, made_of: Sequence[Any]) -> Ambient:
        """Return the surroundings, and put back what was where tensors are left."""
        self.rewind()
        changed, others = self.written.parted()
        held: dict[int, set[Any]] = {}
        for left in self.left:
            left.bar()
        ours = (slot for part in made_of if isinstance(part, HandsOn) for slot in part.slots)
        for slot in (*self.left, *ours):
            held.setdefault(id(slot.place.holder), set()).add(slot.key)
        if self.left:  # what only earlier calls left is not found now
            now = find_referents(made_of)
            stale = {id(t) for t in self.found.tensors} - {id(t) for t in now.tensors}
            others, self.found = tuple(t for t in others if id(t) not in stale), now
        for left in self.left:
            left.write(left.before)
        places = (place.without(held.get(id(place.holder), ())) for place in self.found.places)
        still = tuple(source for source in self.sources if source not in self.drawn)
        steady = Steady(still, others, tuple(places), self.found)
        return Ambient(self.device, self.drawn, changed, tuple(self.left), steady)


def _refusal(slot: Slot) -> CellError:
    """Return the error for a change that is not replayed."""
    if slot.place.registered:
        return CellError(_REPLACES.format(slot.place.registered, slot.called))
    return CellError(_CHANGES.format(slot.called))


def _is_left(slot: Slot, *, graph: bool = False) -> bool:
    """Return whether a change may stay as what a step leaves: an attribute with tensors."""
    if isinstance(slot.place, Contents) or slot.place.registered:
        return False
    tensors = tensors_in(slot.read())
    return any(t.grad_fn is not None for t in tensors) if graph else bool(tensors)


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two calls drew and computed the same, but for rounding."""
    (drawn, found), (again, results) = one, other
    return drawn == again and len(found) == len(results) and all(map(_near, found, results))


def _near(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    x, y = x.to_dense(), y.to_dense()
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-3, equal_nan=True)


def assigned_values(
    call: Callable[[], object], found: Referents, places: Sequence[Place], device: torch.device
) -> list[tuple[Slot, Any, Any]]:
    """Find where a call assigns other tensors, or counts, and restore everything. The results are
    slots, with their values before and after."""
    trial = _Trial(call, found, device, lambda _: ())
    before = note(places)
    with put_back(found.places):
        try:
            with MEASURING, unpacked(), torch.enable_grad():
                trial.once()
        finally:
            trial.rewind()
        found_changed = [(slot, then, slot.read()) for slot, then in changes(before).items()]
        return [one for one in found_changed if tensors_in(one[2]) or _counts(*one[1:])]


def _counts(then: Any, now: Any) -> bool:
    return type(then) is type(now) and type(now) in (int, float)


_CHANGES = (
    "the cell changed {} besides its state, where a rerun would find it changed: expected a step "
    "to hand on all that it changes; put it into the state, name its module in stateful=, "
    "or return it as an output"
)
_MOVES = (
    "the cell reads {}, an iterator, a generator or a file, which cannot be set back for a rerun: "
    "expected values by their number; give a list and a count in the state, or give its values as "
    "inputs"
)
_REPLACES = (
    "the cell replaced a {} of its module, {}: expected it to change it in place "
    "(self.count.copy_(...), not self.count = ...), so that a rerun can put it back"
)


class _Rewritten:
    """The tensors that a cell may write to, and their values before a call."""

    def __init__(self, found: Referents) -> None:
        self.owners = [_Owner([*part.buffers(recurse=False)]) for part in found.parts()]
        self.owners += [_Owner([t], captured=True) for t in found.tensors if not t.requires_grad]
        frozen = (p for part in found.parts() for p in part.parameters(recurse=False))
        self.frozen = [p for p in frozen if not p.requires_grad]

    def put_back(self, places: Sequence[Place] = ()) -> None:
        """Restore the values. With ``places``, raise for a captured tensor that was written to."""
        for owner in self.owners:
            owner.put_back()
        for owner in self.owners:
            if places and owner.captured and owner.changed:
                (t,) = owner.tensors
                name = first_named(places, t) or "a place that cannot be found"
                raise CellError(
                    f"the cell writes in place to {name}, a tensor of shape "
                    f"{tuple(t.shape)} that it captured: expected it to stay unchanged; register "
                    "it as a buffer of a module, or make it part of the state"
                )

    def parted(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the tensors that the call writes to, and the others."""
        changed = distinct(t for owner in self.owners if owner.changed for t in owner.tensors)
        others = distinct(t for owner in self.owners if not owner.changed for t in owner.tensors)
        kept = {id(t) for t in changed}
        return tuple(changed), tuple(t for t in (*others, *self.frozen) if id(t) not in kept)


class _Owner:
    """Tensors of one owner, and their values before a call. Of a large captured tensor at most the
    first few are noted, which are compared but not put back."""

    def __init__(self, tensors: list[Tensor], *, captured: bool = False) -> None:
        self.tensors, self.captured, self.changed = tensors, captured, False
        self.versions = list(map(version, tensors))
        self.whole = not captured or tensors[0].numel() <= _FEW
        self.noted = [t for t in tensors if t.layout is torch.strided]  # sparse ones count versions
        if not self.whole:  # batch normalization writes to vectors, and counts no version
            self.noted = [t[:_FEW] for t in self.noted if t.dim() == 1]
        self.values = [t.detach().clone() for t in self.noted]

    def put_back(self) -> None:
        """Restore the values, if any differs."""
        # A kernel may write without counting a version, and a write may leave the same value.
        written = self.versions != list(map(version, self.tensors))
        if written or not all(map(_same, self.noted, self.values)):
            self.changed = True
            if self.whole:
                device = torch.device("cpu")
                Ambient(device, buffers=tuple(self.noted)).restore(tuple(self.values))


def _same(t: Tensor, then: Tensor) -> bool:
    comparable = t.shape == then.shape and not t.is_quantized
    return torch.equal(t, then) or (comparable and torch.allclose(t, then, 0, 0, equal_nan=True))


_FEW = 16
