"""The surroundings of a call: what it depends on besides its arguments, and how that is replayed.

A recomputation must repeat the first run and leave no trace (rules 2, 3, 4). A trial finds the
generators, buffers and plain attributes that a call changes (:func:`try_out`), and these are
replayed. So are the modes and weights of modules, and the switches of torch
(:mod:`retrograde.replay.switches`). Most calls change nothing; then nothing is stored. If a call
changes one buffer of a module, all buffers of modules of its class count as changed. The result of
a rerun says whether it was the same (:mod:`retrograde.replay.fingerprints`). Only if it was not,
the likeliest cause is looked for.

Known limits: a trial does not put back a closure's variables, globals, and what cannot be found
from the cell. Large captured tensors stay as a refused call left them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from retrograde.errors import CellError, RetrogradeError
from retrograde.machine import MEASURING, unpacked
from retrograde.replay.fingerprints import fingerprints
from retrograde.replay.generators import Source, sources
from retrograde.replay.referents import PLAIN, Referents, find_referents
from retrograde.replay.switches import Switch, Switches, autocast_as_now
from retrograde.replay.trees import distinct
from retrograde.torch_private import next_node

T = TypeVar("T")

ABSENT: Any = object()  #: Stands for the value of a name that has none.
#: The states of generators, copies of buffers, and noted values. Only tensors take torch's memory.
Snapshot = tuple[Any, ...]


def version(t: Tensor) -> int:
    """Return a number that changes at each write to a tensor; 0 for an inference tensor."""
    return 0 if t.is_inference() else t._version


@dataclass(frozen=True, eq=False)
class Slot:
    """A name in a dict, such as one of attributes. ``called`` is its name in a message. The value
    is :data:`ABSENT` if there is none."""

    holder: dict[Any, Any]
    key: Any
    called: str

    def read(self) -> Any:
        return dict.get(self.holder, self.key, ABSENT)

    def write(self, value: Any) -> None:
        if value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value

    def put_back(self, then: dict[Any, Any]) -> None:
        """Write the value of an earlier copy of the dict, whose keys then come in their order."""
        self.write(then.get(self.key, ABSENT))
        keys, order = [*dict.keys(self.holder)], [*then]
        for key in dict.fromkeys(order + keys) if keys[: len(order)] != order else ():
            if key in self.holder:
                self.holder[key] = self.holder.pop(key)


def _refuse(name: str, _: Tensor) -> Tensor:
    raise RetrogradeError(
        f"the loss depends on {name}, where a step left a tensor: expected it to depend on outputs "
        "of the steps, since tensors that they leave have no gradient within a budget; let the "
        "cell return it as an output, or use memory=None"
    )


def _without_graph(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)


@dataclass(frozen=True)
class Surroundings:
    """The surroundings that matter to one call, as a trial found them."""

    device: torch.device  # where it runs
    sources: tuple[Source, ...] = ()  # the generators that it draws from
    buffers: tuple[Tensor, ...] = ()  # the tensors that it writes to
    moving: tuple[Slot, ...] = ()  # the attributes that it changes, noted before each call
    changing: tuple[Slot, ...] = ()  # all attributes that it changes, which a rerun puts back
    # Where it leaves tensors that have a history, and their bytes.
    left: Mapping[Slot, int] = field(default_factory=dict)
    left_bytes: int = 0  # the bytes of other tensors that it leaves
    growing: tuple[list[Any], ...] = ()  # lists that it adds to, which a rerun shortens again
    found: Referents = field(default_factory=Referents)  # the objects that it refers to

    @property
    def moves(self) -> bool:
        """Whether its steps draw or write anything that has to be restored before a rerun."""
        return bool(self.sources or self.buffers)

    @cached_property
    def modes(self) -> list[Switch]:
        """What decides how modules run: whether they train, their parameters and buffers."""
        modes: list[Switch] = []
        for m in self.found.parts():
            modes.append((partial(getattr, m, "training"), partial(setattr, m, "training")))
            tables = [t for t in (m._parameters, m._buffers) if isinstance(t, dict)]  # not scripted
            for slot in (Slot(table, name, name) for table in tables for name in table):
                modes.append((partial(dict.get, slot.holder, slot.key, ABSENT), slot.write))
        return modes

    def marks(self) -> Switches:
        """Note what surrounds a call that begins now, besides what :meth:`capture` copies."""
        return Switches(self.device, self.modes)

    def capture(self) -> Snapshot:
        """Copy the present surroundings; the copy is empty for a call that depends on none."""
        random = (source.capture() for source in self.sources)
        copies = (buffer.detach().clone() for buffer in self.buffers)
        return (*random, *copies, *(_without_graph(slot.read()) for slot in self.moving))

    def restore(self, snapshot: Snapshot) -> None:
        """Restore captured surroundings."""
        rest = iter(snapshot)
        for source in self.sources:
            source.restore(next(rest))
        copy_back(self.buffers, rest)
        for slot, value in zip(self.moving, rest, strict=True):
            slot.write(value)

    def cut(self) -> None:
        """Cut off the tensors that the forward pass left, which may not be differentiated."""

        def apart(t: Tensor) -> Tensor:
            t = t.detach()
            if t.is_floating_point() or t.is_complex():
                t = t.requires_grad_()[...]
                t.register_hook(partial(_refuse, slot.called))  # type: ignore[no-untyped-call]
            return t

        with torch.enable_grad():
            for slot in self.left:
                slot.write(pytree.tree_map_only(Tensor, apart, slot.read()))

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Restore the surroundings after the block."""
        before, lengths = self.capture(), [*map(len, self.growing)]
        holders = [dict(dict.items(slot.holder)) for slot in self.changing]
        try:
            yield
        finally:
            self.restore(before)
            for slot, then in zip(self.changing, holders, strict=True):
                slot.put_back(then)
            for each, length in zip(self.growing, lengths, strict=True):
                del each[length:]

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Run steps in the block to measure them, without a trace and without hooks."""
        with (
            MEASURING,
            unpacked(),
            muted_modules(self.found.parts()),
            self.without_trace(),
            autocast_as_now(self.device),
            ExitStack() as stack,
        ):
            stack.callback(Values(self.found).restore)
            yield

    def differs(self, what: str) -> RetrogradeError:
        """Return the error for a rerun that computed something else, with the likeliest cause."""
        return RetrogradeError(
            f"{what} computed something else when it ran again for the backward pass, "
            f"{self.cause()}: expected the same bits; change nothing that it reads before "
            "backward(), make it part of the inputs, of a buffer or of the state (of a cell's "
            "module by stateful=), or use memory=None"
        )

    def cause(self) -> str:
        """Return the likeliest cause of a difference, as a part of a sentence."""
        if changed := self.found.changed():
            return f"perhaps since {', '.join(changed[:3])} changed"
        if kept := [slot.called for slot in self.changing if slot not in self.moving]:
            return f"perhaps since it keeps a state of its own in {', '.join(kept[:3])}"
        return "it depends on something besides its arguments"


class Values:
    """What the dicts and lists hold, at one moment, that a call refers to."""

    def __init__(self, found: Referents) -> None:
        self.found, self.lengths = found, [*map(len, found.lists)]
        self.values = [dict(dict.items(holder)) for holder, _ in found.holders]

    def changed(self) -> list[tuple[Slot, Any, Any]]:
        """Return what has changed since, and each value then and now."""
        slots = []
        for (holder, form), then in zip(self.found.holders, self.values, strict=True):
            for key in dict.fromkeys((*then, *dict.keys(holder))):
                before, now = then.get(key, ABSENT), dict.get(holder, key, ABSENT)
                plain = type(before) is type(now) and type(now) in PLAIN
                if before is not now and not (plain and before == now):
                    slots.append((Slot(holder, key, form.format(key)), before, now))
        return slots

    def restore(self) -> list[list[Any]]:
        """Put back what has changed, shorten the lists that have grown, and return these."""
        for slot, then, _ in self.changed():
            slot.write(then)
        grown = []
        for each, length in zip(self.found.lists, self.lengths, strict=True):
            if len(each) > length:
                grown.append(each)
                del each[length:]
        return grown


def copy_back(tensors: Sequence[Tensor], copies: Iterable[Tensor]) -> None:
    """Write copies into tensors, whose versions stay: an earlier graph may hold them."""
    with torch.no_grad() if tensors else nullcontext():
        for t, copy in zip(tensors, copies, strict=False):
            with _unsafe_preserve_version_counter(t):
                t.copy_(copy)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors that a value is, holds, or has as attributes."""
    leaves = pytree.tree_leaves(value)
    leaves += [v for leaf in leaves if hasattr(leaf, "__dict__") for v in vars(leaf).values()]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def try_out(
    call: Callable[[], T], made_of: Sequence[Any], device: torch.device
) -> tuple[T, Surroundings, int]:
    """Run a call with autograd recording, and put back what it drew and changed.

    ``made_of`` are the objects in which to search for what the call depends on. Returns the result,
    the surroundings that the call depends on, and autograd's sequence number when it began. Casts
    of an earlier call would look like tensors from outside, so autocast caches none. Raises
    CellError if the call writes to a captured tensor.
    """
    referents = find_referents(made_of)
    with MEASURING, unpacked(), torch.enable_grad():
        noted = _Noted(referents, device)
        value, mark = noted.run(call)
        if noted.drawn and threading.active_count() > 1:  # another thread may have moved them
            del value  # BUDGET: the graph of one call at a time
            moved, noted = noted.drawn, _Noted(referents, device)
            with _Seeded() as seeded:  # type: ignore[no-untyped-call]
                value, mark = noted.run(call)
            noted.drawn = {
                source: end
                for source, end in noted.drawn.items()
                if moved.get(source) == end and (seeded.seen or not source.is_torchs)
            }
    for owner in noted.owners:
        if owner.written and (owner.mode is None or owner.skipped):
            raise CellError(_WRITES.format(tuple(owner.tensors[0].shape)))
    return value, noted.surroundings(), mark


class _Seeded(TorchDispatchMode):
    """Notes whether its own thread calls an operation that may draw."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Noted:
    """What a call may draw from, write to and change, as it is before the call."""

    def __init__(self, found: Referents, device: torch.device) -> None:
        self.found, self.device = found, device
        self.sources = [(source, *source.note()) for source in sources(device, found.generators)]
        self.owners = [_Owner([t]) for t in found.tensors if not t.requires_grad]
        for m in found.parts():
            self.owners.append(_Owner([*m.buffers(recurse=False)], (type(m), m.training)))
        self.values = Values(found)

    def run(self, call: Callable[[], T]) -> tuple[T, int]:
        """Return a call's result and autograd's sequence number before it; put everything back."""
        try:
            with autocast_as_now(self.device):
                mark, value = next_node(), call()
            return value, mark
        finally:
            self.drawn = {}
            for source, then, set_back in self.sources:
                if (end := source.position()) != then:
                    self.drawn[source] = end
                    set_back()
            for owner in self.owners:
                owner.put_back()
            self.changed, self.growing = self.values.changed(), self.values.restore()

    def surroundings(self) -> Surroundings:
        """Return the surroundings that a call drew from, wrote to and changed."""
        by_slot = [(slot, tensors_in(now)) for slot, _, now in self.changed]
        left = {s: sum(t.nbytes for t in own) for s, own in by_slot if any(t.grad_fn for t in own)}
        apart = (t for slot, own in by_slot if slot not in left for t in own)
        nbytes = {t.untyped_storage().data_ptr(): t.nbytes for t in apart}
        modes = {o.mode for o in self.owners if o.written}  # chance may decide which modules run
        return Surroundings(
            self.device,
            sources=tuple(self.drawn),
            buffers=tuple(distinct(t for o in self.owners if o.mode in modes for t in o.tensors)),
            moving=tuple(s for s, *each in self.changed if {*map(type, each)} <= _PLAIN),
            changing=tuple(slot for slot, *_ in self.changed),
            left=left,
            left_bytes=sum(nbytes.values()),
            growing=tuple(self.growing),
            found=self.found,
        )


class _Owner:
    """Tensors of one owner before a call: the buffers of a module of some class and ``mode``, or a
    captured tensor, whose mode is None. Of that a few numbers are noted at most. A large buffer is
    skipped if an earlier call in this mode did not write to it."""

    def __init__(self, tensors: list[Tensor], mode: tuple[type, bool] | None = None) -> None:
        self.tensors, self.mode, self.written = tensors, mode, False
        self.versions = [*map(version, tensors)]
        noted = [t for t in tensors if t.layout is torch.strided]  # sparse ones count versions
        self.large = [t for t in noted if t.nbytes > _LARGE and t.dim() > 1]
        self.skipped = {id(t) for t in self.large if _UNWRITTEN.get(t) == (mode, version(t))}
        if mode is None:  # batch normalization writes to vectors, and counts no version
            noted = [t[:_FEW] if t.dim() == 1 else t for t in noted]
            noted = [t for t in noted if t.numel() <= _FEW]
        self.noted = [t for t in noted if id(t) not in self.skipped]
        self.copies = [t.detach().clone() for t in self.noted]
        self.prints = fingerprints(self.noted)

    def put_back(self) -> None:
        """Restore the values, if any differs."""
        # A kernel may write without counting a version, and a write may leave the same value.
        then, now = (self.versions, self.prints), [*map(version, self.tensors)]
        self.written = then != (now, fingerprints(self.noted))
        if self.written:
            copy_back(self.noted, self.copies)
        elif self.mode is not None:
            _UNWRITTEN.update((t, (self.mode, version(t))) for t in self.large)


_PLAIN = PLAIN | {type(ABSENT)}
_FEW, _LARGE = 16, 65536  # numbers, bytes
# Large buffers, and in which mode no call wrote to them.
_UNWRITTEN: Any = WeakTensorKeyDictionary()
_WRITES = (
    "the cell writes in place to a tensor of shape {} that it captured: expected it to stay "
    "unchanged; register it as a buffer of a module, or make it part of the state"
)


@contextmanager
def _muted(tables: Iterable[dict[Any, Any] | None]) -> Iterator[None]:
    """Replace hooks by one that does nothing, with which the graph is the same."""
    saved = [(table, dict(table)) for table in tables if table]
    for table, hooks in saved:
        table.update(dict.fromkeys(hooks, lambda *_: None))
    try:
        yield
    finally:
        for table, hooks in saved:
            table.update(hooks)


def muted_modules(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Silence the backward hooks of modules."""
    return _muted(t for m in modules for t in (m._backward_hooks, m._backward_pre_hooks))


@contextmanager
def muted_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Silence the hooks of tensors, which expect the whole gradient, not the share of one step.
    ``retain_grad`` is a hook that cannot be removed, so ``.grad`` is restored afterwards."""
    retained = [(t, t.grad) for t in tensors if t.retains_grad]
    try:
        with _muted(t._backward_hooks for t in tensors):
            yield
    finally:
        for t, grad in retained:
            t.grad = grad
