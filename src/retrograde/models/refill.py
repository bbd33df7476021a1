"""Calls that drop what autograd saves of them, and run again when it is read.

A dropped call stays an ordinary part of the caller's graph. What its operations save is a
:class:`Saved`, without a tensor. The first that is read runs the call again, which fills all of
them. That run ends at the last tensor that is still wanted, which is before the call's end.

Calls in a row, each given the result of the one before it, may drop their inputs too. Then a
:class:`Row` first runs the calls before, as a plan says.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from retrograde.errors import CellError, RetrogradeError
from retrograde.models import recipes
from retrograde.models.draws import Draws
from retrograde.models.given import Given, tensors_in, unflatten
from retrograde.models.lean import lean as lean_pass
from retrograde.models.tape import LeanTape
from retrograde.plan.calls import Part
from retrograde.replay.generators import Source, is_alone
from retrograde.replay.surroundings import Ambient, Trail, autocast_as_now, version
from retrograde.replay.trees import Tensors
from retrograde.run.core import unsaved

State = Sequence[Tensor | None]  # what a call made that the next one is given

#: The ways to keep a call, by their numbers in a plan. A dropped call runs again; when it does,
#: and it is lean, cheap values are let go.
KEPT, LEAN, DROPPED, DROPPED_LEAN = range(4)
_numbers = count()
_MANY = 2**16  # numbers of masks that take longer to draw than to look at each function
_BEYOND = (
    "create_graph=True: what the gradient's own graph saves is held as in ordinary "
    "backpropagation; the budget does not cover it"
)


@dataclass(frozen=True, eq=False)
class Unit:
    """What runs again as one call.

    Attributes:
        name: of the layer, for messages.
        forward: runs it.
        ambient: the surroundings that it depends on, as a trial found them.
        reads: the parameters and buffers that it reads and does not change.
        drawn: the numbers of large masks that a call draws on a CPU.
    """

    name: str
    forward: Callable[..., Any]
    ambient: Ambient
    reads: Sequence[Tensor]
    drawn: int = 0

    @property
    def draws_fast(self) -> bool:
        """Whether it gains if its masks are drawn fast."""
        return self.drawn >= _MANY

    def drawing(self) -> Any:
        """Return the context of its calls, in which masks are drawn fast."""
        return Draws() if self.draws_fast else nullcontext()


class Saved:
    """What a node keeps in place of a tensor."""

    __slots__ = ("__weakref__", "call", "opened", "value")

    def __init__(self, call: "Dropped") -> None:
        self.call = call
        self.value: Any = None
        self.opened: ref[Tensor] | None = None

    def open(self) -> Tensor:
        """Return the tensor, and let it go. If it is read once more, the call runs once more."""
        found = self.opened() if self.opened is not None else None
        if found is None:
            if self.value is None:
                self.call.refill()
            value, self.value = self.value, None
            found = recipes.unpack(value)
            self.opened = ref(found)
        return found


class _EndedError(BaseException):
    """The last wanted tensor is there, and the rest of a run is of no use."""


class Dropped:
    """One call of a unit. ``lean``: when it runs again, cheap values are let go.

    Args:
        row: the row that has its input, or None if the call holds it.
        number: its number in the row.
    """

    def __init__(
        self, unit: Unit, given: Given, *, lean: bool, row: "Row | None" = None, number: int = 0
    ) -> None:
        self.unit, self.lean, self.row, self.number = unit, lean, row, number
        self.born = next(_numbers)
        self.autocast = autocast_as_now(unit.ambient.device)
        self.given, self.spec = [_Argument.of(leaf) for leaf in given.leaves], given.spec
        self.saved: list[ref[Saved]] = []
        self.forms: list[tuple[torch.Size, torch.dtype]] = []
        self.versions = [version(t) for t in unit.reads]
        self.state: State = []  # the result of the call before it, while the row has it
        self.before: Dropped | None = None  # the call before it, which must live as long
        ambient = unit.ambient
        self.marks, self.then = ambient.steady.marks(), ambient.capture()
        self.moved: tuple[Source, ...] = ()
        # By the number of tensors that were saved; a call begins with all threads that may draw.
        self.trail = Trail(ambient) if ambient.draws and not is_alone() else None

    def run(self, forward: Callable[..., Any], given: Given) -> Any:
        """Run the call, or a part of it, for the first time, in the caller's graph."""
        ours = {id(leaf) for leaf in given.leaves if isinstance(leaf, Tensor)}
        hooks = saved_tensors_hooks(partial(self._drop, ours), recipes.unpack)  # type: ignore[arg-type]
        with hooks, self.unit.drawing():
            result = forward(*given.args, **given.kwargs)
        self._arrive(len(self.saved))
        self.moved += self.unit.ambient.steady.changes(self.marks, f"layer {self.unit.name}")
        if any(one.is_overwritten() for one in self.given):
            raise CellError(
                f"layer {self.unit.name} writes in place to what it is given, which is used again: "
                "expected it to leave that as it is; give it inplace=False"
            )
        return result

    def _drop(self, ours: set[int], t: Tensor) -> Any:
        if _is_free(t, ours):
            return recipes.Versioned(t, t._version)
        self._arrive(len(self.saved))
        saved = Saved(self)
        self.saved.append(ref(saved))
        self.forms.append((t.shape, t.dtype))
        return saved

    def _arrive(self, number: int) -> None:
        """Note the generators, or compare them, when so many tensors were saved."""
        if self.trail is not None:
            self.trail.arrive(number)

    def hide(self, made: Sequence[Tensor | None]) -> None:
        """Let go the tensors that the call before made, which the row can compute."""
        places = {id(t): place for place, t in enumerate(made) if t is not None}
        for one in self.given:
            if one.source is not None and id(one.source()) in places:
                one.value, one.place = None, places[id(one.source())]

    def is_hidden(self) -> bool:
        """Return whether the row has the input."""
        return any(one.is_hidden() for one in self.given)

    def _arguments(self, state: State) -> tuple[Any, Any, set[int]]:
        """Return the arguments, without the graph that they came from, and their ids."""
        leaves = [one.again(state) for one in self.given]
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs, {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Run the call as it ran first, in a block, and leave no trace."""
        if self.versions != [version(t) for t in self.unit.reads]:
            raise RetrogradeError(
                f"a parameter or buffer of layer {self.unit.name} has been modified by an inplace "
                "operation between the forward pass and the backward pass, which recomputes with "
                "it: expected it to stay as it was; call backward() before optimizer.step()"
            )
        ambient = self.unit.ambient
        with ambient.rerun(self.marks, self.moved, f"layer {self.unit.name}"), self.autocast:
            ambient.restore(self.then)
            with self.unit.drawing():
                yield

    def advance(self, state: State) -> Tensors:
        """Run the call, keep nothing, and return the tensors of its result."""
        args, kwargs, _ = self._arguments(state)
        with unsaved(), self._again():
            result = tensors_in(self.unit.forward(*args, **kwargs))
            self._arrive(len(self.saved))
            return result

    def refill(self) -> None:
        """Run the call again, and fill what it saved."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0:
            warnings.warn(_BEYOND, stacklevel=2)
        _empty(torch._C._current_graph_task_id(), self.born)
        if self.row is not None and self.row.prepare(self):
            return
        state, self.state = self.state, []
        self.fill(state, lean=self.lean)

    def fill(self, state: State, *, lean: bool, whole: bool = False) -> Any:
        """Run the call and fill what it saved. With ``whole``, run to the end, and return the
        result."""
        task = torch._C._current_graph_task_id()
        args, kwargs, ours = self._arguments(state)
        alive = [number for number, saved in enumerate(self.saved) if saved() is not None]
        last = -1 if whole else alive[-1]
        tape = LeanTape(True, task) if lean else None
        number, result, ended = 0, None, False

        def pack(t: Tensor) -> Any:
            nonlocal number, ended
            if _is_free(t, ours):
                return recipes.Versioned(t, t._version)
            try:
                self._arrive(number)
            except CellError as error:  # a TypeError, which operators take for one of their own
                raise _EndedError from error
            at, number = number, number + 1
            if at >= len(self.forms) or self.forms[at] != (t.shape, t.dtype):
                raise self._differs()
            saved, value = self.saved[at](), None
            if saved is not None:
                value = (
                    tape.pack(t) if tape is not None else recipes.Versioned(t.detach(), t._version)
                )
                saved.value = value
            if at == last:
                ended = True
                raise _EndedError
            return value

        try:
            hooks = saved_tensors_hooks(pack, recipes.unpack)  # type: ignore[arg-type]
            with torch.enable_grad(), self._again(), tape or nullcontext(), hooks:
                result = self.unit.forward(*args, **kwargs)
                self._arrive(number)
            if number != len(self.forms):
                raise self._differs()
        except _EndedError as end:
            if end.__cause__ is not None:
                raise end.__cause__ from None
        except RuntimeError as error:  # TorchScript's, in place of ours
            if not ended or "TorchScript" not in str(error):
                raise
        del args, kwargs
        if tape is not None:
            tape.close()
        if task >= 0:
            if task not in _filled:
                torch.autograd.Variable._execution_engine.queue_callback(partial(_empty, task))
            _filled.setdefault(task, []).append(ref(self))
        return result

    def _differs(self) -> RetrogradeError:
        return RetrogradeError(
            f"layer {self.unit.name} saved other tensors when it ran again: expected it to do the "
            "same for the same arguments; use memory=None"
        )


_filled: dict[int, list[ref[Dropped]]] = {}  # by backward pass: calls that ran again


def _empty(task: int, born: int = -1) -> None:
    """Let go what a backward pass did not read of calls that began after one: they went back."""
    calls = [call for one in _filled.pop(task, ()) if (call := one()) is not None]
    for call in (call for call in calls if call.born > born):
        call.state = []
        for saved in filter(None, (one() for one in call.saved)):
            saved.value = None
    if born >= 0 and calls:
        _filled[task] = [ref(call) for call in calls if call.born <= born]


def _is_free(t: Tensor, ours: set[int]) -> bool:
    """Return whether somebody holds a saved tensor in any case: a parameter."""
    return t.requires_grad and t.is_leaf and id(t) not in ours


@dataclass
class _Argument:
    """An argument. Where the row has the tensor, there is no value, but its ``place`` in the result
    of the call before."""

    value: Any
    source: "ref[Tensor] | None" = None
    wanted: bool = False
    version: int = 0
    place: int = 0

    @classmethod
    def of(cls, leaf: Any) -> "_Argument":
        if not isinstance(leaf, Tensor):
            return cls(leaf)
        return cls(leaf.detach(), ref(leaf), leaf.requires_grad, version(leaf))

    def is_hidden(self) -> bool:
        return self.source is not None and self.value is None

    def is_overwritten(self) -> bool:
        has_tensor = self.source is not None and self.value is not None
        return has_tensor and version(self.value) != self.version

    def again(self, state: State) -> Any:
        if self.source is None:
            return self.value
        if self.is_overwritten():
            raise recipes.overwritten(self.value.shape, version(self.value), self.version)
        leaf = self.value if self.value is not None else state[self.place]
        assert leaf is not None
        return leaf.detach().requires_grad_(self.wanted)


@dataclass(eq=False)
class Row:
    """Calls in a row within one pass of a model.

    Attributes:
        parts: the plan.
        tied: the weights that several calls have.
        late: makes the plan when the pass goes back, of a row whose calls are all one group.
    """

    parts: tuple[Part, ...]
    tied: frozenset[Tensor] = frozenset()
    late: Callable[[], tuple[Part, ...]] | None = None
    calls: "dict[int, ref[Dropped]]" = field(default_factory=dict)
    opened: list[Part] | None = None

    def run(
        self, number: int, unit: Unit, forward: Callable[..., Any], given: Given,
        made: Sequence[Tensor | None], before: Dropped | None,
    ) -> tuple[Any, Dropped | None]:  # fmt: skip
        """Run the next call as the plan says. Return its result, and the call if it is dropped.

        ``made`` are the tensors that the call ``before`` made, each in its place in that result.
        The input is let go unless a part begins with the call.

        Autocast's cache would hold the casts of all weights until autocast ends. That of a tied
        weight stays: ordinary autograd adds its gradients in the type of the cast.
        """
        grouped = self.late is not None or bool(self._part(self.parts, number).parts)
        way = DROPPED if grouped else self._part(self.parts, number).way
        device = unit.ambient.device
        apart = torch.is_autocast_enabled(device.type) and self.tied.isdisjoint(unit.reads)
        casts = autocast_as_now(device) if apart else nullcontext()
        if way in (KEPT, LEAN):
            with casts, lean_pass() if way == LEAN else unit.drawing():
                return forward(*given.args, **given.kwargs), None
        call = Dropped(
            unit, given, lean=way == DROPPED_LEAN, row=self if grouped else None, number=number,
        )  # fmt: skip
        with casts:
            result = call.run(forward, given)
        if grouped:
            call.before = before
            self.calls[number] = ref(call)
            if number != (0 if self.late else self._part(self.parts, number).start):
                call.hide(made)
        return result, call

    def prepare(self, call: Dropped) -> bool:
        """Compute the input of a call, or what it saved; return whether it did the latter."""
        if self.late is not None:
            self.parts, self.late = self.late(), None
        if self.opened is None:
            self.opened = [*self.parts]
            if torch._C._current_graph_task_id() >= 0:
                close = partial(setattr, self, "opened", None)
                torch.autograd.Variable._execution_engine.queue_callback(close)
        while (part := self._part(self.opened, call.number)).parts:
            self._open(part, call.number)
        if any(one.value is not None for one in filter(None, (saved() for saved in call.saved))):
            return True
        if not call.state and call.is_hidden():  # what it saved was there, and was read
            self.opened = None
            return self.prepare(call)
        return False

    def _open(self, part: Part, number: int) -> None:
        """Run the calls of a group, up to the part that has a call's number."""
        assert self.opened is not None
        at = self.opened.index(part)
        state, self._call(part.start).state = self._call(part.start).state, []
        done = [one for one in part.parts if one.start <= number]
        self.opened[at : at + 1] = done
        for one in done:
            call = self._call(one.start)
            if not one.parts and one.way in (KEPT, LEAN):
                ends = one is done[-1]
                result = call.fill(state, lean=one.way == LEAN, whole=not ends)
                state = [] if ends else self._handed(one.stop, tensors_in(result))
                del result
                continue
            call.state, call.lean = state, one.way == DROPPED_LEAN
            if one is done[-1]:
                return
            for k in range(one.start, one.stop):
                state = self._handed(k + 1, self._call(k).advance(state))

    def _handed(self, number: int, made: Tensors) -> State:
        """Return what was made that a call is given, each in its place."""
        places = {one.place for one in self._call(number).given if one.is_hidden()}
        return [t.detach() if place in places else None for place, t in enumerate(made)]

    def _call(self, number: int) -> Dropped:
        call = self.calls[number]()
        assert call is not None
        return call

    @staticmethod
    def _part(parts: Sequence[Part], number: int) -> Part:
        return next(part for part in parts if part.start <= number < part.stop)
