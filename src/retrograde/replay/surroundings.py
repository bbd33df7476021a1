"""The surroundings of a call: what it depends on besides its arguments, and how that is replayed.

A recomputation must repeat the first run and leave no trace (rules 2, 3, 4). Replayed are
generators, buffers that the call writes to, and attributes that it changes. So are the modes and
weights of modules, and the switches of torch (:mod:`retrograde.replay.switches`). The result of a
rerun says whether it was the same (:mod:`retrograde.replay.fingerprints`). Only if it was not, the
likeliest cause is looked for.

Most calls draw nothing and change nothing; then nothing is stored.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from retrograde.errors import RetrogradeError
from retrograde.machine import MEASURING, unpacked
from retrograde.replay.generators import Source
from retrograde.replay.referents import Referents
from retrograde.replay.switches import Switch, Switches, autocast_as_now

ABSENT: Any = object()  #: Stands for the value of a name that has none.
#: The states of generators, copies of buffers, and noted values. Only tensors take torch's memory.
Snapshot = tuple[Any, ...]


def version(t: Tensor) -> int:
    """Return a number that changes at each write to a tensor; 0 for an inference tensor."""
    return 0 if t.is_inference() else t._version


@dataclass(frozen=True, eq=False)
class Slot:
    """A name in a dict, or of an attribute. ``called`` is its name in a message. The value is
    :data:`ABSENT` if there is none. Slots of the same place are equal."""

    holder: Any
    key: Any
    called: str
    rest: Any = None  # its value between calls, unless that holds tensors

    def __hash__(self) -> int:
        return hash((id(self.holder), self.key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and hash(self) == hash(other) and self.key == other.key

    def read(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.key, ABSENT)
        return getattr(self.holder, self.key, ABSENT)

    def write(self, value: Any) -> None:
        if not isinstance(self.holder, dict):
            setattr(self.holder, self.key, value)
        elif value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


class _Cut(torch.autograd.Function):
    """A tensor that a step left, without the graph behind it, and with an error in its place."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, name: str) -> Tensor:
        ctx.name = name
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise RetrogradeError(
            f"the loss depends on {ctx.name}, where a step left a tensor: expected it to depend on "
            "outputs of the steps, since tensors that they leave have no gradient within a budget; "
            "let the cell return it as an output, or use memory=None"
        )


@dataclass(frozen=True)
class Surroundings:
    """The surroundings that matter to one call, as a trial found them.

    Attributes:
        device: where it runs.
        sources: the generators that it draws from.
        buffers: the tensors that it writes to.
        moving: the attributes that it changes, and depends on.
        changing: all attributes that it changes, which a rerun puts back.
        left: where it leaves tensors that have a history.
        left_bytes: the bytes of other tensors that it leaves.
        growing: lists that it adds to, which a rerun shortens again.
        found: the objects that it refers to.
    """

    device: torch.device
    sources: tuple[Source, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    moving: tuple[Slot, ...] = ()
    changing: tuple[Slot, ...] = ()
    left: tuple[Slot, ...] = ()
    left_bytes: int = 0
    growing: tuple[list[Any], ...] = ()
    found: Referents = field(default_factory=Referents)

    @property
    def draws(self) -> bool:
        """Whether its steps draw random numbers."""
        return bool(self.sources)

    @property
    def moves(self) -> bool:
        """Whether its steps change anything that has to be restored before a rerun."""
        return bool(self.sources or self.buffers or self.moving)

    @cached_property
    def modes(self) -> list[Switch]:
        """What decides how modules run: whether they train, their parameters and buffers."""
        parts = self.found.parts()
        tables: Any = (table for m in parts for table in (m._parameters, m._buffers))
        of_modules = [table for table in tables if isinstance(table, dict)]  # no scripted one's
        slots = [Slot(m, "training", "training") for m in parts]
        slots += [Slot(table, name, name) for table in of_modules for name in table]
        return [(slot.read, slot.write) for slot in slots]

    def marks(self) -> Switches:
        """Note what surrounds a call that begins now, besides what :meth:`capture` copies."""
        return Switches(self.device, self.modes)

    def capture(self) -> Snapshot:
        """Copy the present surroundings; the copy is empty for a call that depends on none."""
        random = (source.capture() for source in self.sources)
        copies = (buffer.detach().clone() for buffer in self.buffers)
        return (*random, *copies, *(slot.read() for slot in self.moving))

    def restore(self, snapshot: Snapshot) -> None:
        """Restore captured surroundings."""
        rest = iter(snapshot)
        for source in self.sources:
            source.restore(next(rest))
        with torch.no_grad():
            for buffer in self.buffers:
                # A graph recorded earlier may hold this buffer; its version must not change.
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(next(rest))
        for slot, value in zip(self.moving, rest, strict=True):
            slot.write(value)

    def release(self) -> None:
        """Release the tensors that a call left."""
        for slot in self.changing:
            slot.write(slot.rest)

    def cut(self) -> None:
        """Keep everybody from differentiating the tensors that the forward pass left."""

        def apart(t: Tensor) -> Any:
            real = t.is_floating_point() or t.is_complex()
            return _Cut.apply(t.detach().requires_grad_(), slot.called) if real else t  # type: ignore[no-untyped-call]

        with torch.enable_grad():
            for slot in self.left:
                if (value := slot.read()) is not ABSENT:
                    slot.write(pytree.tree_map_only(Tensor, apart, value))

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Restore the surroundings after the block."""
        before, values = self.capture(), [slot.read() for slot in self.changing]
        lengths = [*map(len, self.growing)]
        try:
            yield
        finally:
            self.restore(before)
            for slot, value in zip(self.changing, values, strict=True):
                slot.write(value)
            for each, length in zip(self.growing, lengths, strict=True):
                del each[length:]

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Run steps in the block to measure them, without a trace and without hooks."""
        with (
            MEASURING,
            unpacked(),
            muted_modules(self.found.parts()),
            put_back(self.found),
            self.without_trace(),
            autocast_as_now(self.device),
        ):
            yield

    @contextmanager
    def rerun(self, then: Switches) -> Iterator[None]:
        """Run steps again as they ran when some marks were taken, and leave no trace."""
        with then.as_then(), self.without_trace():
            yield

    def differs(self, what: str) -> RetrogradeError:
        """Return the error for a rerun that computed something else, with the likeliest cause."""
        cause, changed = "it depends on something besides its arguments", self.found.changed()
        if changed:
            cause = f"perhaps since {', '.join(changed[:3])} changed"
        return RetrogradeError(
            f"{what} computed something else when it ran again for the backward pass, {cause}: "
            "expected the same bits; change nothing that it reads before backward(), make it part "
            "of the inputs, of the state or of a buffer, or use memory=None"
        )


@contextmanager
def put_back(found: Referents) -> Iterator[None]:
    """Restore after a block what the dicts and lists hold that a call refers to."""
    noted = Values(found)
    try:
        yield
    finally:
        noted.restore()


class Values:
    """What the dicts and lists hold, at one moment, that a call refers to."""

    def __init__(self, found: Referents) -> None:
        self.found, self.lengths = found, [*map(len, found.lists)]
        self.values = [dict(dict.items(holder)) for holder, _ in found.holders]

    def changed(self) -> dict[Slot, Any]:
        """Return what has changed since, and each value then."""
        slots = {}
        for (holder, form), then in zip(self.found.holders, self.values, strict=True):
            for key in dict.fromkeys((*then, *dict.keys(holder))):
                before, now = then.get(key, ABSENT), dict.get(holder, key, ABSENT)
                if before is not now and not _equal(before, now):
                    rest = None if tensors_in(before) else before
                    slots[Slot(holder, key, form.format(key), rest)] = before
        return slots

    def shorten(self) -> list[list[Any]]:
        """Shorten the lists that have grown since, and return them."""
        pairs = zip(self.found.lists, self.lengths, strict=True)
        grown = [(each, length) for each, length in pairs if len(each) > length]
        for each, length in grown:
            del each[length:]
        return [each for each, _ in grown]

    def restore(self) -> None:
        for slot, value in self.changed().items():
            slot.write(value)
        self.shorten()


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal, and numbers or texts."""
    return type(a) is type(b) and isinstance(a, int | float | complex | str | bytes) and a == b


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors that a value is, holds, or has as attributes."""
    leaves = pytree.tree_leaves(value)
    inside = [v for leaf in leaves if hasattr(leaf, "__dict__") for v in vars(leaf).values()]
    return [leaf for leaf in (*leaves, *inside) if isinstance(leaf, Tensor)]


@contextmanager
def _muted(tables: Iterable[dict[Any, Any] | None]) -> Iterator[None]:
    """Replace hooks by one that does nothing, with which the graph is the same."""
    held = [(table, dict(table)) for table in tables if table]
    for table, hooks in held:
        table.update(dict.fromkeys(hooks, lambda *_: None))
    try:
        yield
    finally:
        for table, hooks in held:
            table.update(hooks)


def muted_modules(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Silence the backward hooks of modules."""
    return _muted(t for m in modules for t in (m._backward_hooks, m._backward_pre_hooks))


@contextmanager
def muted_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Silence the hooks of tensors, which expect the whole gradient, not the share of one step.

    ``retain_grad`` is a hook too. It cannot be removed, so ``.grad`` is restored afterwards.
    """
    retained = [(t, t.grad) for t in tensors if t.retains_grad]
    try:
        with _muted(t._backward_hooks for t in tensors):
            yield
    finally:
        for t, grad in retained:
            t.grad = grad
