"""The surroundings of a step: what is replayed at a rerun, and what is refused.

A recomputation must repeat the first run and leave no trace. So four things are replayed. Random
states and buffers are stored with every state. The modules' ``training`` flags and autocast are
noted once a call. Any other change that a step makes is refused by its name. So is a change that
somebody else makes, before the backward pass, to what a step reads. A tensor that a step leaves in
an attribute may stay there, if no later step reads it.

Most cells draw nothing and change nothing; then nothing is stored.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from retrograde.errors import CellError, RetrogradeError
from retrograde.machine import MEASURING, unpacked
from retrograde.replay.generators import OwnDraws, Source, is_alone
from retrograde.replay.places import (
    ABSENT,
    Entries,
    Glance,
    Place,
    Slot,
    Unreadable,
    Watch,
    first_named,
    note,
    restore,
)
from retrograde.replay.referents import Referents

#: The states of generators, and copies of buffers. Those of Python and NumPy are no tensors.
Snapshot = tuple[Any, ...]


def version(t: Tensor) -> int:
    """Return a number that changes at each write to a tensor; 0 for an inference tensor."""
    return 0 if t.is_inference() else t._version


@dataclass(frozen=True)
class Marks:
    """The generators' positions, tensors' versions and places' values when a call began."""

    positions: list[Any]
    versions: list[int]
    glance: Glance


@dataclass(frozen=True)
class Steady:
    """The surroundings that the first step left unchanged, and so every other step must."""

    sources: tuple[Source, ...] = ()
    tensors: tuple[Tensor, ...] = ()  # buffers, captured tensors, parameters without a gradient
    places: tuple[Place, ...] = ()
    found: Referents = field(default_factory=Referents)  # the referents that they are from

    def marks(self) -> Marks:
        """Return their present values, to be compared later."""
        positions = [source.position() for source in self.sources]
        return Marks(positions, [version(t) for t in self.tensors], self._watch.now())

    @cached_property
    def _watch(self) -> Watch:
        return Watch(self.places)

    def changes(self, before: Marks, layer: str | None = None) -> tuple[Source, ...]:
        """Refuse changes since ``before``, since they were not stored for a rerun.

        Returns generators of torch's that moved, where another thread may have drawn. ``layer``
        names the layer that ran since, if it was not a cell. Of one, changed Python values are
        refused by a rerun alone, since to look at all places takes long.
        """
        changed = () if layer else self._watch.changes(before.glance)
        for name in self._read(changed, before):
            raise _unsteady(layer, f"changed {name}", "assign to it")
        pairs = zip(self.sources, before.positions, strict=True)
        moved = tuple(source for source, then in pairs if source.position() != then)
        if moved and is_alone():
            raise _unsteady(layer, "drew random numbers", "draw")
        if not all(source.is_torchs for source in moved):
            raise CellError(_THREADS.format(layer or "the cell"))
        return moved

    @contextmanager
    def as_then(self, then: Marks) -> Iterator[None]:
        """Undo changes of ``training``, parameters and buffers, and new attributes, in a block.

        Raises:
            RetrogradeError: something else that a step reads has changed since.
        """
        changed = self._watch.changes(then.glance)
        ours = {slot for slot in changed if slot.key == "training" or slot.place.registered}
        added = [s for s, was in changed.items() if was is ABSENT and isinstance(s.place, Entries)]
        new = {slot for slot in added if "_parameters" in slot.place.holder}  # of modules
        replayed = [(s, changed[s], now) for s in ours ^ new if (now := s.read()) is not ABSENT]
        others = changed.keys() - {slot for slot, *_ in replayed}
        for name in self._read(others, then):
            raise RetrogradeError(_CHANGED.format(name))
        for slot, before, _ in replayed:
            slot.write(before)
        try:
            yield
        finally:
            for slot, _, now in replayed:
                slot.write(now)

    def _read(self, changed: Collection[Slot], then: Marks) -> Iterator[str]:
        """Iterate over the names of what changed, or was written to, and the cell reads."""
        pairs = zip(self.tensors, then.versions, strict=True)
        written = [t for t, before in pairs if version(t) != before]
        if not (changed or written):
            return
        read = self.found.read()
        yield from (slot.called for slot in changed if read.reads(slot.place, slot.key))
        for t in written:
            if (name := first_named(read.places, t)) is not None:
                yield f"{name}, a tensor of shape {tuple(t.shape)}, in place"


def _unsteady(layer: str | None, did: str, remedy: str) -> CellError:
    """Return the error for a later run that does what the first one did not."""
    if layer is not None:
        return CellError(
            f"{layer} {did}, which it did not do when tried: expected the same at every call, so "
            f"that it can be run again; {remedy} every time (and discard what is not used), or "
            "use memory=None"
        )
    return CellError(
        f"the cell {did} at a later step, but not at step 0: expected it to do so at every step or "
        f"at none; {remedy} at step 0 too, and discard what is not used, or make it part of the "
        "state"
    )


_CHANGED = (
    "somebody changed {} between the forward pass and the backward pass, which reads it again: "
    "expected it to stay as it was; call backward() first, or put it into the inputs or the state"
)
_THREADS = (
    "{} ran while numbers were drawn from a generator of Python's or NumPy's, by it or by another "
    "thread: expected no such draw, for a rerun could not tell; let the thread draw from a "
    "random.Random or a numpy.random.Generator of its own"
)


class Trail:
    """The generators' positions at each state, to detect draws of other threads.

    If another thread draws from a generator that the cell draws from too, a rerun cannot draw the
    same numbers.
    """

    def __init__(self, ambient: "Ambient") -> None:
        self.ambient = ambient
        self.found: dict[int, list[Any]] = {}

    def arrive(self, at: int) -> None:
        """Compare with the last time that this state was reached.

        Raises:
            CellError: another thread drew.
        """
        if self.ambient.draws and (self.found or not is_alone()):
            now = [source.position() for source in self.ambient.sources]
            if self.found.setdefault(at, now) != now:
                raise CellError(
                    "another thread drew random numbers from a generator that the cell draws from "
                    "too, so a rerun cannot draw the same: expected a generator that nobody else "
                    "uses; give the cell a torch.Generator of its own, or draw before and pass the "
                    "numbers as inputs"
                )


@dataclass(frozen=True)
class Left(Slot):
    """A name under which a step leaves tensors.

    A later step must not read them, since a rerun would read other tensors. So before a rerun, or a
    recording, an object that raises on use replaces them. ``before`` is what was there before the
    call. ``graph`` says whether the tensors have a history, and if not, ``nbytes`` is their size.
    """

    before: Any
    graph: bool
    nbytes: int = 0

    @cached_property
    def _barred(self) -> Unreadable:
        return Unreadable.of(self.refusal)

    def bar(self) -> None:
        """Make reading from there an error."""
        self.write(self._barred)

    def cut(self) -> None:
        """Keep the tensors that a forward pass left from being differentiated."""
        value = self.read()
        if self.graph and value is not ABSENT:
            self.write(pytree.tree_map_only(Tensor, partial(_cut, self.called), value))

    def refusal(self) -> CellError:
        """Return the error for a later step that reads it."""
        return CellError(
            f"the cell keeps a state of its own in {self.called}, which a step writes "
            "and a later one reads: expected the state to hold all that steps hand on; "
            "make it part of the state, or name its module in stateful="
        )


def _cut(name: str, t: Tensor) -> Tensor:
    real = t.is_floating_point() or t.is_complex()
    return cast(Tensor, _Cut.apply(t.detach().requires_grad_(), name)) if real else t  # type: ignore[no-untyped-call]


class _Cut(torch.autograd.Function):
    """A tensor that a step left, without the graph behind it."""

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
class Ambient:
    """The surroundings that matter to one cell.

    Its steps draw from ``sources``, write to ``buffers``, and leave tensors in ``left``. The rest
    is ``steady``.
    """

    device: torch.device
    sources: tuple[Source, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    left: tuple[Left, ...] = ()
    steady: Steady = Steady()

    @property
    def draws(self) -> bool:
        """Whether its steps draw random numbers."""
        return bool(self.sources)

    @property
    def moves(self) -> bool:
        """Whether its steps change anything that has to be restored before a rerun."""
        return bool(self.sources or self.buffers)

    def capture(self) -> Snapshot:
        """Copy the present surroundings; the copy is empty for a cell that depends on none."""
        random = (source.capture() for source in self.sources)
        return (*random, *(buffer.detach().clone() for buffer in self.buffers))

    def restore(self, snapshot: Snapshot) -> None:
        """Restore captured surroundings, and bar the tensors that other steps left."""
        for source, state in zip(self.sources, snapshot, strict=False):
            source.restore(state)
        with torch.no_grad():
            for buffer, value in zip(self.buffers, snapshot[len(self.sources) :], strict=False):
                # A graph recorded earlier may hold this buffer; its version must not change.
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)
        self.bar()

    def bar(self) -> None:
        """Keep the following steps from reading tensors that other steps left."""
        for left in self.left:
            left.bar()

    def cut(self) -> None:
        """Keep everybody from differentiating the tensors that the forward pass left."""
        with torch.enable_grad():
            for left in self.left:
                left.cut()

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Restore the surroundings after the block."""
        before, values = self.capture(), [left.read() for left in self.left]
        self.bar()
        try:
            yield
        finally:
            self.restore(before)
            for left, value in zip(self.left, values, strict=True):
                left.write(value)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Run steps in the block to measure them, without a trace and without hooks."""
        with (
            MEASURING,
            unpacked(),
            muted_modules(self.steady.found.parts()),
            put_back(self.steady.places),
            self.without_trace(),
            autocast_as_now(self.device),
        ):
            yield

    @contextmanager
    def rerun(
        self, then: Marks, moved: Sequence[Source] = (), layer: str | None = None
    ) -> Iterator[None]:
        """Run steps again as they ran when some marks were taken, and leave no trace.

        ``layer`` names the layer that runs, if it is not a cell.

        Raises:
            RetrogradeError: something that a step reads has changed since, or a step draws from one
                of the generators that ``moved`` while the steps first ran.
        """
        with ExitStack() as stack:
            stack.enter_context(self.steady.as_then(then))
            stack.enter_context(self.without_trace())
            draws = stack.enter_context(OwnDraws(moved)) if moved else None
            yield
        if draws is not None and draws.drawn:
            raise _unsteady(layer, "drew random numbers", "draw")


@contextmanager
def put_back(places: Sequence[Place]) -> Iterator[None]:
    """Restore the values of places when a block ends."""
    before = note(places)
    try:
        yield
    finally:
        restore(before)


def autocast_as_now(device: torch.device) -> torch.autocast:
    """Return a context that sets autocast as it is at this moment, to be entered later (rule 4).

    Its weight cache is off: a cached cast would join the graphs of different steps.
    """
    return torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    )


@contextmanager
def muted_modules(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Silence the backward hooks of modules; the graph is the same as with them."""
    tables = (t for m in modules for t in (m._backward_hooks, m._backward_pre_hooks) if t)
    held = [(table, dict(table)) for table in tables]
    for table, hooks in held:
        table.update(dict.fromkeys(hooks, _no_hook))
    try:
        yield
    finally:
        for table, hooks in held:
            table.update(hooks)


def _no_hook(*_: Any) -> None:
    return None


@contextmanager
def muted_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Silence the hooks of tensors, which expect the whole gradient, not the share of one step.

    ``retain_grad`` is a hook too. It cannot be removed, so ``.grad`` is restored afterwards.
    """
    hooks = [(t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks]
    retained = [(t, t.grad) for t in tensors if t.retains_grad]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, entries in hooks:
            table.update(entries)
        for t, grad in retained:
            t.grad = grad
