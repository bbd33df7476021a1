"""The surroundings of a step: stored with a state, and restored before a rerun.

A step may draw random numbers, change buffers of its module (running statistics), count in Python,
and run under autocast. A value that it reads may have changed before the rerun: a mask that was
assigned again, a module that was put in evaluation mode. A recomputation must repeat the first run
and leave no trace (rules 2 to 4). So its surroundings are those of the first run.
What steps change is stored with every hidden state. What they only read is noted once a call, and
restored if it differs. At the end everything is as ordinary training leaves it.

Most cells draw nothing and change nothing; then nothing is stored.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from retrograde.discover.generators import PythonValue, Source, Watch, is_alone
from retrograde.discover.places import Place, Seen, Unreadable, has_bookmarks
from retrograde.errors import CellError, RetrogradeError
from retrograde.measure.allocations import MEASURING, unpacked

__all__ = [
    "Ambient",
    "Left",
    "Marks",
    "Snapshot",
    "Steady",
    "Trail",
    "autocast_as_now",
    "autocast_of_caller",
    "muted_hooks",
    "put_back",
    "version",
]

#: The states of generators, copies of buffers, and notes of places.
Snapshot = tuple[Any, ...]


def version(t: Tensor) -> int:
    """Return a number that changes at each write to a tensor; 0 for an inference tensor."""
    return 0 if t.is_inference() else t._version


@dataclass(frozen=True)
class Marks:
    """The generators' positions, tensors' versions and places' values when a call began."""

    positions: list[Any]
    versions: list[int]
    seen: list[Seen]


@dataclass(frozen=True)
class Steady:
    """The surroundings that the first step left unchanged, and so every other step must."""

    sources: tuple[Source, ...] = ()
    tensors: tuple[Tensor, ...] = ()  # buffers, captured tensors, parameters without a gradient
    places: tuple[Place, ...] = ()

    def marks(self) -> Marks:
        """Return their present values, to be compared later."""
        return Marks(
            [source.position() for source in self.sources],
            [version(t) for t in self.tensors],
            [place.note() for place in self.places],
        )

    def changes(self, before: Marks, layer: str | None = None) -> tuple[Source, ...]:
        """Refuse changes since ``before``, since they were not stored for a rerun (rule 6).

        Returns the generators that moved, since another thread may have drawn from them. ``layer``
        names the layer that ran since, if it was not a cell.
        """
        for place, seen in zip(self.places, before.seen, strict=True):
            for key in filter(place.concerns, place.changed(seen)):
                raise _unsteady(layer, f"changed {place.called(key)}", "assign to it")
        if [version(t) for t in self.tensors] != before.versions:
            raise _unsteady(layer, "changed a buffer of its module", "write to it")
        pairs = zip(self.sources, before.positions, strict=True)
        moved = tuple(source for source, then in pairs if source.position() != then)
        if moved and is_alone():
            raise _unsteady(layer, "drew random numbers", "draw")
        return moved

    def written(self, before: Marks) -> list[Tensor]:
        """Return the tensors that were written to since."""
        pairs = zip(self.tensors, before.versions, strict=True)
        return [t for t, then in pairs if version(t) != then]


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


_WRITTEN = (
    "a tensor of shape {} that the cell reads was modified in place between the forward pass and "
    "the backward pass, which recomputes with it: expected it to stay as it was; bind a new tensor "
    "(self.mask = mask, not self.mask.copy_(mask)), or call backward() first"
)


class Trail:
    """The generators' positions at each state, to detect draws of other threads.

    If another thread draws from a generator that the cell draws from too, a rerun cannot draw the
    same numbers.
    """

    def __init__(self, ambient: "Ambient") -> None:
        self.ambient = ambient
        self.found: dict[int, list[Any]] = {}
        self.begin()

    def begin(self) -> None:
        """Check whether there are other threads, and whether the cell draws."""
        self.watching = self.ambient.draws and not is_alone()

    def arrive(self, at: int) -> None:
        """Compare with the last time that this state was reached.

        Raises:
            CellError: another thread drew.
        """
        if self.watching:
            now = self.ambient.positions()
            if self.found.setdefault(at, now) != now:
                raise CellError(
                    "another thread drew random numbers from a generator that the cell draws from "
                    "too, so a rerun cannot draw the same: expected a generator that nobody else "
                    "uses; give the cell a torch.Generator of its own, or draw before and pass the "
                    "numbers as inputs"
                )


@dataclass(frozen=True)
class Left:
    """A place where a step leaves a tensor with a history.

    A later step must not read it, since a rerun would read another tensor. So before a rerun, or a
    recording, an object that raises on use replaces it.
    """

    place: Place
    keys: tuple[Any, ...]

    def bar(self) -> None:
        """Make reading from there an error."""
        self.place.write({k: Unreadable(self.refusal(k)) for k in self.keys}, ())

    def cut(self) -> None:
        """Keep the tensors that a forward pass left from being differentiated."""
        now = self.place.read()
        names = {key: self.place.called(key) for key in self.keys if key in now}
        cut = {k: pytree.tree_map_only(Tensor, partial(_cut, n), now[k]) for k, n in names.items()}
        self.place.write(cut, ())

    def refusal(self, key: Any) -> CellError:
        """Return the error for a later step that reads it."""
        return CellError(
            f"the cell keeps a state of its own in {self.place.called(key)}, which a step writes "
            "and a later one reads: expected the state to hold all that steps hand on; "
            "make it part of the state"
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

    Its steps draw from ``sources``, write to ``buffers`` (small captured tensors among them),
    change ``places``, and leave tensors with a history in ``left``. Hooks of ``modules`` are not
    called while it is measured; ``place_bytes`` is the size of the places' tensors after a step.
    """

    device: torch.device
    sources: tuple[Source, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    places: tuple[Place, ...] = ()
    left: tuple[Left, ...] = ()
    steady: Steady = Steady()
    modules: tuple[nn.Module, ...] = ()
    place_bytes: int = 0

    @property
    def draws(self) -> bool:
        """Whether its steps draw random numbers."""
        return bool(self.sources)

    @property
    def moves(self) -> bool:
        """Whether its steps change anything that has to be restored before a rerun."""
        return bool(self.sources or self.buffers or self.places)

    def names_changed(self) -> Iterator[tuple[int, Any]]:
        """Iterate over the ids of places' holders, and the names there that its steps change."""
        for place in (*self.places, *(left.place for left in self.left)):
            for name in (None,) if place.only is None else place.only:
                yield id(place.holder), name

    def positions(self) -> list[Any]:
        """Return the positions of the generators that its steps draw from."""
        return [source.position() for source in self.sources]

    def capture(self) -> Snapshot:
        """Copy the present surroundings; the copy is empty for a cell that depends on none."""
        random = (source.capture() for source in self.sources)
        noted = [PythonValue([place.note() for place in self.places])] if self.places else []
        return (*random, *(buffer.detach().clone() for buffer in self.buffers), *noted)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore captured surroundings (rules 2 and 3)."""
        self._restore_tensors(snapshot)
        if self.places:
            for place, seen in zip(self.places, snapshot[-1].value, strict=True):
                place.put(seen)
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

    def _restore_tensors(self, snapshot: Snapshot) -> None:
        for source, state in zip(self.sources, snapshot, strict=False):
            source.restore(state)
        with torch.no_grad():
            for buffer, value in zip(self.buffers, snapshot[len(self.sources) :], strict=False):
                # A graph recorded earlier may hold this buffer; its version must not change.
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Restore the surroundings after the block (rule 3)."""
        with put_back([*self.places, *(left.place for left in self.left)]):
            before = self.capture()
            self.bar()
            try:
                yield
            finally:
                self._restore_tensors(before)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Run steps in the block to measure them, without a trace and without hooks."""
        with (
            MEASURING,
            unpacked(),
            muted_modules(self.modules),
            put_back(self.steady.places),
            self.without_trace(),
            autocast_as_now(self.device),
        ):
            yield

    @contextmanager
    def rerun(
        self, then: Marks, watched: Sequence[Source] = (), layer: str | None = None
    ) -> Iterator[None]:
        """Run steps again as they ran when some marks were taken, and leave no trace.

        ``layer`` names the layer that runs, if it is not a cell.

        Raises:
            RetrogradeError: a step reads a tensor that was written to since, or draws from one of
                the ``watched`` generators, which moved while the steps first ran.
        """
        steady = self.steady
        pairs = zip(steady.places, then.seen, strict=True)
        others = [(place, seen) for place, seen in pairs if place.changed(seen)]
        written = steady.written(then)
        with ExitStack() as stack:
            for place, seen in others:
                stack.enter_context(_as_then(place, seen))
            stack.enter_context(self.without_trace())
            if watched or written:
                stack.enter_context(Watch(watched, written, partial(_refuse, layer)))
            yield


@contextmanager
def _as_then(place: Place, then: Seen) -> Iterator[None]:
    """Set a place, in a block, to its values at another time.

    Values that somebody else writes there meanwhile, such as a callback of the caller's, stay.
    """
    keys = place.changed(then)
    place = place if place.growing else place.of(keys)
    now = place.take()
    place.put(then if place.growing else {key: then[key] for key in keys if key in then})
    mine = place.note()
    try:
        yield
    finally:
        theirs = place.changed(mine)
        if not theirs:
            place.give_back(now)
        elif not place.growing:
            rest = place.without(theirs)
            rest.give_back({key: value for key, value in now.items() if key not in theirs})


def _refuse(layer: str | None, seen: Any) -> None:
    if isinstance(seen, Tensor):
        raise RetrogradeError(_WRITTEN.format(tuple(seen.shape)))
    raise _unsteady(layer, "drew random numbers", "draw")


@contextmanager
def put_back(places: Sequence[Place]) -> Iterator[None]:
    """Restore the values of places when a block ends; within the block, iterators are copies."""
    before = [(place, place.take()) for place in places]
    moving = [has_bookmarks(seen) for _, seen in before]
    for (place, seen), moves in zip(before, moving, strict=True):
        if moves:
            place.put(seen)
    try:
        yield
    finally:
        for (place, seen), moves in zip(before, moving, strict=True):
            if moves or place.changed(seen):
                place.give_back(seen)


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


def autocast_of_caller(device: torch.device, *, replayed: bool) -> AbstractContextManager[Any]:
    """Return the caller's autocast for use within a replay; nothing where neither uses any."""
    on = replayed or torch.is_autocast_enabled(device.type)
    return autocast_as_now(device) if on else nullcontext()


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
