"""A trial of a call, which finds out what it draws, writes and leaves, and what it depends on.

Generators, buffers and Python values are put back, whether the call returns or raises. If the call
changes one buffer of a module, all of its buffers count as changed. (Batch normalization's running
mean is unchanged by an input of zeros.)

A call that changes attributes runs once more, on what it left. If its results and gradients are the
same bits, the attributes do not matter, and reruns put them back. What the second call did not
change again is a cache, and stays. If the bits differ, the call depends on the attributes: numbers
and texts are then replayed as buffers are. Attributes that hold tensors are a state of the cell's
own, and are refused by name.

Known limits: some things stay as a call left them. These are large captured tensors that a refused
call wrote to, lists, a closure's variables, globals, and what cannot be found from the cell.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from retrograde.errors import CellError
from retrograde.machine import MEASURING, unpacked
from retrograde.replay.captured import distinct, foreign_tensors
from retrograde.replay.fingerprints import fingerprints
from retrograde.replay.generators import Source, sources
from retrograde.replay.referents import TABLES, Referents, find_referents
from retrograde.replay.surroundings import (
    Slot,
    Surroundings,
    Values,
    muted_hooks,
    muted_modules,
    tensors_in,
    version,
)
from retrograde.replay.switches import autocast_as_now
from retrograde.torch_private import next_node

T = TypeVar("T")


def try_out(
    call: Callable[[], T],
    made_of: Sequence[Any],
    device: torch.device,
    results: Callable[[T], Sequence[Tensor]],
) -> tuple[T, Surroundings, int]:
    """Run a call with autograd recording, and put back what it drew and changed, but for caches.

    ``made_of`` are the objects in which to search for what the call depends on. Returns the result,
    the surroundings that the call depends on, and autograd's sequence number when it began.

    Raises:
        CellError: the call keeps a state of its own, or writes to a captured tensor.
    """
    found = find_referents(made_of)
    with MEASURING, unpacked(), torch.enable_grad():
        trial = _Trial(call, found, device, results)
        try:
            mark, value = trial.run()
        except BaseException:
            trial.rewind()
            trial.before.restore()
            raise
        return value, trial.surroundings(), mark


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
        self.drawn: dict[Source, Any] = {}  # and where each was after the call
        self.written = _Rewritten(found)
        self.before = Values(found)
        # What every call changes, and its value before the last.
        self.changing: dict[Slot, Any] = {}
        self.matter = False  # whether the call depends on what it changes
        self.left: list[Slot] = []
        self.left_bytes = 0
        self.growing: dict[int, list[Any]] = {}  # by id

    def run(self) -> tuple[int, T]:
        """Call until it is known what every change is.

        Return autograd's sequence number before the last call, and its result.
        """
        mark, value = self.once()
        if self.drawn and threading.active_count() > 1:  # another thread may have moved a generator
            del value  # BUDGET: the graph of one call at a time
            self.rewind()
            moved, self.drawn = self.drawn, {}
            mark, value = self.once(_Seeded())
            self.drawn = {s: at for s, at in self.drawn.items() if moved.get(s) == at}
        first = self.before.changed()
        if not first:
            return mark, value
        shown = self.evidence(mark, value)
        del value  # BUDGET: the graph of one call at a time
        noted = Values(self.found)
        mark, value = self.once()
        self.changing = noted.changed()
        if self.drawn:  # what is made of drawn numbers is not to be made by a trial
            self.changing = first | self.changing
        self.note_left()
        try:
            if self.evidence(mark, value) == shown:
                return mark, value
        except RuntimeError:  # its graph goes on into that of the call before, which is freed
            pass
        self.changing, self.matter = first, True
        for slot, then in first.items():
            if (what := _registered(self.found, slot)) is not None:
                raise CellError(_REPLACES.format(what, slot.called))
            if tensors_in((then, slot.read())):
                raise CellError(_KEEPS.format(slot.called))
        return mark, value

    def once(self, own: "_Seeded | None" = None) -> tuple[int, T]:
        """Call from the states at the beginning. Return autograd's sequence number, and the result.

        Autocast's weight cache is off: casts of an earlier call would look like tensors from
        outside. ``own`` says whether this thread moves torch's generators.
        """
        self.rewind()
        try:
            with autocast_as_now(self.device), own or nullcontext():
                found = next_node(), self.call()
        finally:
            for source, then in self.sources.items():
                ours = own is None or own.seen or not isinstance(source.generator, torch.Generator)
                if ours and (now := source.position()) != then.position():
                    self.drawn[source] = now
        self.written.put_back(refuse=True)
        return found

    def rewind(self) -> None:
        """Put back random states and buffers."""
        for source in self.drawn:
            source.restore(self.sources[source].capture())
        self.written.put_back()
        self.growing |= {id(each): each for each in self.before.shorten()}

    def note_left(self) -> None:
        """Note where the last call left tensors, and their bytes."""
        counted: dict[int, int] = {}
        for slot in self.changing:
            tensors = [] if _registered(self.found, slot) else tensors_in(slot.read())
            if any(t.grad_fn is not None for t in tensors):
                self.left.append(slot)
            else:
                counted.update({t.untyped_storage().data_ptr(): t.nbytes for t in tensors})
        self.left_bytes = sum(counted.values())

    def evidence(self, mark: int, value: T) -> Sequence[Any]:
        """Return fingerprints of a call's results, and of its gradients for some gradients of the
        results. The gradients tell what the results do not show, such as a scale of zeros."""
        results = self.results(value)
        roots = [t for t in results if t.requires_grad]
        leaves = [t for t in foreign_tensors(roots, mark)[0] if t.numel()]  # no anchor of a chain
        given = [*map(seed_of, roots)]
        with MEASURING, muted_hooks(leaves), muted_modules(self.found.parts()):
            grads = torch.autograd.grad(roots, leaves, given, allow_unused=True) if leaves else ()
        kept = [None if g is None else g.to_dense() for g in grads]
        names = [t.requires_grad for t in results], [g is None for g in kept], len(leaves)
        return *names, fingerprints(results), fingerprints(g for g in kept if g is not None)

    def surroundings(self) -> Surroundings:
        """Return the surroundings, after putting back what every call changes."""
        self.rewind()
        before = {s: v for s, v in self.before.changed().items() if s in self.changing}
        for slot, value in before.items():
            slot.write(value)
        slots = (*before,)
        return Surroundings(
            self.device,
            sources=(*self.drawn,),
            buffers=self.written.changed(),
            moving=slots if self.matter else (),
            changing=slots,
            left=(*self.left,),
            left_bytes=self.left_bytes,
            growing=(*self.growing.values(),),
            found=self.found,
        )


def _registered(found: Referents, slot: Slot) -> str | None:
    """Return torch's word for what a slot holds, if it is in a table of a module."""
    tables = ((getattr(m, t), what) for m in found.parts() for t, what in TABLES.items())
    return next((what for table, what in tables if table is slot.holder), None)


def assigned_values(
    call: Callable[[], object], found: Referents, own: Referents, device: torch.device
) -> list[tuple[Slot, Any, Any]]:
    """Find where a call assigns other tensors, or counts, in what ``own`` refers to, and restore
    everything. The results are slots, with their values before and after."""
    trial, before = _Trial(call, found, device, lambda _: ()), Values(own)
    try:
        with MEASURING, unpacked(), torch.enable_grad():
            trial.once()
        slots = [(slot, then, slot.read()) for slot, then in before.changed().items()]
    finally:
        trial.rewind()
        trial.before.restore()
    return [
        (slot, then, now)
        for slot, then, now in slots
        if tensors_in(now) or (type(then) is type(now) and type(now) in (int, float))
    ]


def seed_of(t: Tensor) -> Tensor:
    """Return some gradient of a result, whose numbers differ."""
    numbers = torch.arange(t.numel(), dtype=torch.float32, device=t.device)
    return numbers.mul_(0.7).cos_().to(t.dtype).view(t.shape)


class _Seeded(TorchDispatchMode):
    """Notes whether its own thread calls an operation that may draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Rewritten:
    """The tensors that a call may write to, and their values before it."""

    def __init__(self, found: Referents) -> None:
        self.owners = [_Owner([*m.buffers(recurse=False)], m.training) for m in found.parts()]
        self.owners += [_Owner([t]) for t in found.tensors if not t.requires_grad]

    def put_back(self, *, refuse: bool = False) -> None:
        """Restore the values; or refuse a call that wrote to a tensor that it captured."""
        for owner in self.owners:
            owner.put_back()
            if refuse and owner.changed and (owner.mode is None or owner.skipped):
                raise CellError(_WRITES.format(tuple(owner.tensors[0].shape)))

    def changed(self) -> tuple[Tensor, ...]:
        """Return the tensors that the call writes to."""
        written = (t for owner in self.owners if owner.changed for t in owner.tensors)
        return tuple(distinct(written))


class _Owner:
    """Tensors of one owner, and their values before a call: a module's buffers in some ``mode``, or
    a captured tensor, whose mode is None.

    Of a captured tensor a few numbers are noted at most. A large buffer is skipped if an earlier
    call in this mode did not write to it.
    """

    def __init__(self, tensors: list[Tensor], mode: bool | None = None) -> None:
        self.tensors, self.mode, self.changed = tensors, mode, False
        self.versions = [*map(version, tensors)]
        noted = [t for t in tensors if t.layout is torch.strided]  # sparse ones count versions
        self.large = [t for t in noted if t.nbytes > _LARGE and t.dim() > 1]
        self.skipped = {id(t) for t in self.large if _UNWRITTEN.get(t) == (mode, version(t))}
        if mode is None:  # batch normalization writes to vectors, and counts no version
            noted = [t[:_FEW] if t.dim() == 1 else t for t in noted]
            noted = [t for t in noted if t.numel() <= _FEW]
        self.noted = [t for t in noted if id(t) not in self.skipped]
        self.kept = Surroundings(torch.device("cpu"), buffers=tuple(self.noted))
        self.values = self.kept.capture()
        self.prints = fingerprints(self.noted)

    def put_back(self) -> None:
        """Restore the values, if any differs."""
        # A kernel may write without counting a version, and a write may leave the same value.
        written = self.versions != [*map(version, self.tensors)]
        if written or self.prints != fingerprints(self.noted):
            self.changed = True
            self.kept.restore(self.values)
        elif self.mode is not None:
            _UNWRITTEN.update((t, (self.mode, version(t))) for t in self.large)


_FEW = 16
_LARGE = 65536  # bytes
# Large buffers, and in which mode no call wrote to them.
_UNWRITTEN: Any = WeakTensorKeyDictionary()
_KEEPS = (
    "the cell keeps a state of its own in {}, which a step writes and a later one reads: expected "
    "the state to hold all that steps hand on; make it part of the state, or name its module in "
    "stateful="
)
_REPLACES = (
    "the cell replaced a {} of its module, {}: expected it to change it in place "
    "(self.count.copy_(...), not self.count = ...), so that a rerun can put it back; or name that "
    "module in stateful="
)
_WRITES = (
    "the cell writes in place to a tensor of shape {} that it captured: expected it to stay "
    "unchanged; register it as a buffer of a module, or make it part of the state"
)
