"""Calls that drop what autograd saves of them, and run again when it is read.

A dropped call stays an ordinary part of the caller's graph. What its operations save is a
:class:`Placeholder`, without a tensor. The first that is read runs the call again, which fills all
of them. That run ends at the last tensor that is still wanted, which is before the call's end.

Calls in a row, each given the result of the one before it, may drop their inputs too. Then a
:class:`RunningPlan` first runs the calls before, as a plan says.
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

from retrograde.errors import NotExactError, RetrogradeError
from retrograde.models.lean import recipes
from retrograde.models.lean.lean import lean as lean_pass
from retrograde.models.lean.tape import LeanTape
from retrograde.models.rows.arguments import (
    Arguments,
    RerunArguments,
    ResultBytes,
    packed,
    tensors_in,
)
from retrograde.models.rows.checks import Compared, Noted, Reruns
from retrograde.plan.calls import Part
from retrograde.replay.surroundings import Surroundings, Values, version
from retrograde.replay.switches import autocast_as_now, cast_context
from retrograde.replay.trees import Tensors
from retrograde.run.core import raise_again, unsaved
from retrograde.torch_private import after_backward, backward_pass

State = Sequence[Tensor | None]  # what a call made that the next one is given

#: The ways to keep a call, by their numbers in a plan. A dropped call runs again; when it does,
#: and it is lean, cheap values are let go.
KEPT, LEAN, DROPPED, DROPPED_LEAN = range(4)
_numbers = count()
_SECOND = (
    "layer {} runs twice in one autocast context, in which ordinary backpropagation casts a weight "
    "once, and adds its gradients in the type of the cast: expected a context for each pass; enter "
    "torch.autocast for each call of the model, or call it once for all inputs"
)
_BEYOND = (
    "create_graph=True: what the gradient's own graph saves is held as in ordinary "
    "backpropagation; the budget does not cover it"
)


@dataclass(frozen=True, eq=False)
class Recomputable:
    """What runs again as one call."""

    name: str  # of the layer, for messages
    forward: Callable[..., Any]
    surroundings: Surroundings  # as a trial found them
    reads: Sequence[Tensor]  # the parameters and buffers that it reads and does not change
    shares_casts: bool = False  # whether a weight's cast by autocast has several readers in a call
    reruns: Reruns = field(default_factory=Reruns)
    fill: float | None = None  # what few numbers are drawn where it does the most, if they decide
    is_apart: bool = True  # whether its result has memory that its arguments have not
    writes: bool = False  # whether it writes to its arguments
    made: ResultBytes = field(default_factory=ResultBytes)  # by its operations, in the trial

    @property
    def decides(self) -> bool:
        """Whether random numbers may decide what it does."""
        drawn = self.surroundings.sources
        return not all(source.is_torchs for source in drawn) or (self.made.varies and bool(drawn))

    @property
    def made_bytes(self) -> int | None:
        """What its operations made, if data or random numbers decide how much; else None."""
        return self.made.nbytes if self.made.varies or self.decides else None


class Placeholder:
    """What a node keeps in place of a tensor."""

    __slots__ = ("__weakref__", "call", "opened", "value")

    def __init__(self, call: "RecomputedCall") -> None:
        self.call = call
        self.value: Any = None
        self.opened: ref[Tensor] | None = None

    def open(self) -> Tensor:
        """Return the tensor, and let it go. If it is read once more, the call runs once more."""
        tensor = self.opened() if self.opened is not None else None
        if tensor is None:
            if self.value is None:
                self.call.refill()
            value, self.value = self.value, None
            tensor = recipes.unpack(value)
            self.opened = ref(tensor)
        return tensor


class _EndedError(BaseException):
    """The last wanted tensor is there, and the rest of a run is of no use."""


class RecomputedCall:
    """One call of a unit, which has a number in the ``row`` that has its input, if the call itself
    does not hold it. ``lean``: when it runs again, cheap values are let go."""

    def __init__(
        self, unit: Recomputable, arguments: Arguments, *, lean: bool,
        row: "RunningPlan | None" = None, number: int = 0,
    ) -> None:  # fmt: skip
        self.unit, self.lean, self.row, self.number = unit, lean, row, number
        self.born = next(_numbers)
        self.given = RerunArguments(arguments)
        self.saved: list[ref[Placeholder]] = []
        self.forms: list[tuple[torch.Size, torch.dtype]] = []
        self.noted = Noted(unit.reruns)
        self.versions = [version(t) for t in unit.reads]
        self.state: State = []  # the result of the call before it, while the row has it
        self.packed: int | None = None  # the bytes of bits that it holds in place of tensors
        self.before: RecomputedCall | None = None  # the call before it, which must live as long
        self.marks, self.then = unit.surroundings.marks(), unit.surroundings.capture()

    def run(self, forward: Callable[..., Any], arguments: Arguments) -> Any:
        """Run the call, or a part of it, for the first time, in the caller's graph."""
        ours = {id(leaf) for leaf in arguments.leaves if isinstance(leaf, Tensor)}
        hooks = saved_tensors_hooks(partial(self._drop, ours), recipes.unpack)  # type: ignore[arg-type]
        with hooks:
            result = forward(*arguments.args, **arguments.kwargs)
        self.noted.settle()
        if any(one.is_overwritten() for one in self.given.each):
            raise NotExactError(
                f"layer {self.unit.name} writes in place to what it is given, which is used again: "
                "expected it to leave that as it is; give it inplace=False"
            )
        return result

    def _drop(self, ours: set[int], t: Tensor) -> Any:
        if is_free(t, ours):
            return recipes.Versioned(t, t._version)
        saved = Placeholder(self)
        self.saved.append(ref(saved))
        self.forms.append((t.shape, t.dtype))
        self.noted.add(t)
        return saved

    def hide(self, made: Sequence[Tensor | None]) -> None:
        """Let go the tensors that the call before made, which the row can compute."""
        places = {id(t): place for place, t in enumerate(made) if t is not None}
        for one in self.given.each:
            if one.source is not None and id(one.source()) in places:
                one.hide(places[id(one.source())], self.noted.turn)

    def _arguments(self, state: State) -> tuple[Any, Any, set[int]]:
        """Return the arguments, without the graph that they came from, and their ids."""
        values = [one.find(state, self._differs) for one in self.given.each]
        args, kwargs, _ = self.given.enter(values)
        return args, kwargs, {*map(id, tensors_in(Arguments(args, kwargs).leaves))}

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Run the call as it ran first, in a block, and leave no trace."""
        if self.versions != [version(t) for t in self.unit.reads]:
            raise RetrogradeError(
                f"a parameter or buffer of layer {self.unit.name} has been modified by an inplace "
                "operation between the forward pass and the backward pass, which recomputes with "
                "it: expected it to stay as it was; call backward() before optimizer.step()"
            )
        with self.marks.as_then(), self.unit.surroundings.without_trace():
            self.unit.surroundings.restore(self.then)
            yield

    def advance(self, state: State) -> Tensors:
        """Run the call, keep nothing, and return the tensors of its result."""
        args, kwargs, _ = self._arguments(state)
        try:
            with unsaved(), self._again():
                return tensors_in(self.unit.forward(*args, **kwargs))
        except Exception as error:
            raise_again(error, f"layer {self.unit.name}")

    def refill(self) -> None:
        """Run the call again, and fill what it saved."""
        if torch.is_grad_enabled() and backward_pass() >= 0:
            warnings.warn(_BEYOND, stacklevel=2)
        _empty(backward_pass(), self.born)
        if self.row is not None and self.row.prepare(self):
            return
        state, self.state = self.state, []
        self.fill(state, lean=self.lean)

    def fill(self, state: State, *, lean: bool, whole: bool = False) -> Any:
        """Run the call and fill what it saved. With ``whole``, run to the end, and return the
        result. So it does if an end before would leave something undone."""
        task, reruns = backward_pass(), self.unit.reruns
        args, kwargs, ours = self._arguments(state)
        tape = LeanTape(True, task) if lean else None
        are_written = all(reruns.final.get(k, True) for k in reruns.last)  # when they are saved
        ends = not whole and reruns.ends_early is not False and are_written
        refill = _Refill(self, ours, tape, ends=ends)
        first = reruns.ends_early is None and refill.ends
        noted = Values(self.unit.surroundings.found) if first else None
        result = None
        try:
            hooks = saved_tensors_hooks(refill.pack, recipes.unpack)  # type: ignore[arg-type]
            with torch.enable_grad(), self._again(), tape or nullcontext(), hooks:
                result = self.unit.forward(*args, **kwargs)
            refill.compared.settle()
            if refill.compared.number != len(self.forms):
                raise self._differs()
        except _EndedError:
            pass
        except Exception as error:
            if not (refill.ended or refill.error):  # else TorchScript's, in place of ours
                raise_again(error, f"layer {self.unit.name}")
        if refill.error is not None:
            raise refill.error
        if noted is not None and refill.ended:
            reruns.ends_early = not noted.changed()
            noted.restore()
        del args, kwargs
        if tape is not None:
            tape.close()
        if task >= 0:
            if task not in _filled:
                after_backward(partial(_empty, task))
            _filled.setdefault(task, []).append(ref(self))
        return result

    def empty(self) -> None:
        """Let go what was computed again and is not read."""
        self.state = []
        for saved in filter(None, (one() for one in self.saved)):
            saved.value = None

    def _differs(self) -> RetrogradeError:
        return self.unit.surroundings.differs(f"layer {self.unit.name}")


class _Refill:
    """One rerun of a call, which fills what the call saved, and compares it. ``ends``: whether it
    may end at the last wanted tensor. ``error`` is what a comparison found."""

    def __init__(
        self, call: RecomputedCall, ours: set[int], tape: LeanTape | None, *, ends: bool
    ) -> None:
        self.call, self.ours, self.tape, self.ends = call, ours, tape, ends
        wanted = [number for number, saved in enumerate(call.saved) if saved() is not None]
        self.last = wanted[-1] if wanted else -1
        self.compared, self.ended = Compared(call.noted, call._differs), False
        self.error: Exception | None = None

    def pack(self, t: Tensor) -> Any:
        """Save a tensor, as a hook for saved tensors."""
        if is_free(t, self.ours):
            return recipes.Versioned(t, t._version)
        call, at = self.call, self.compared.number
        if at >= len(call.forms) or call.forms[at] != (t.shape, t.dtype):
            raise self._end(call._differs())
        saved, value = call.saved[at](), None
        if saved is not None:
            tape = self.tape
            value = tape.pack(t) if tape is not None else recipes.Versioned(t.detach(), t._version)
            saved.value = value
        try:
            is_right = self.compared.add(t)
        except RetrogradeError as error:
            raise self._end(error) from None
        if is_right and self.ends and at >= self.last:
            self.ended = True
            raise self._end(None)
        return value

    def _end(self, error: Exception | None) -> _EndedError:
        """Return what ends the run. An error of ours might be taken for an operator's own."""
        self.error = error
        return _EndedError()


_filled: dict[int, list[ref[RecomputedCall]]] = {}  # by backward pass: calls that ran again


def _empty(task: int, born: int = -1) -> None:
    """Let go what a backward pass did not read of calls that began after one: they went back."""
    calls = [call for one in _filled.pop(task, ()) if (call := one()) is not None]
    for call in (call for call in calls if call.born > born):
        call.empty()
    if born >= 0 and calls:
        _filled[task] = [ref(call) for call in calls if call.born <= born]


def is_free(t: Tensor, ours: set[int]) -> bool:
    """Return whether somebody holds a saved tensor in any case: a parameter."""
    return t.requires_grad and t.is_leaf and id(t) not in ours


class Waiting:
    """Lives as long as the graph of a result, or of the last of several, until that goes back."""

    over = False

    @classmethod
    def of(cls, result: object, known: "Waiting | None" = None) -> "ref[Waiting]":
        waiting = known or cls()
        node = next((t.grad_fn for t in tensors_in(result) if t.grad_fn is not None), None)
        if node is not None:
            waiting.over = False
            node.register_prehook(lambda _: setattr(waiting, "over", True))
        return ref(waiting)

    @staticmethod
    def is_on(one: "Callable[[], Waiting | None]") -> bool:
        """Return whether the result may still go back."""
        return (waiting := one()) is not None and not waiting.over


@dataclass(eq=False)
class RunningPlan:
    """Calls in a row within one pass of a model."""

    parts: tuple[Part, ...]  # the plan
    tied: frozenset[Tensor] = frozenset()  # the weights that several calls have
    late: Callable[[], tuple[Part, ...]] | None = None  # makes it later, of calls in one group
    calls: "dict[int, ref[RecomputedCall]]" = field(default_factory=dict)
    opened: list[Part] | None = None
    task: int = -1  # the backward pass in which it was opened
    context: Any = None  # of autocast
    waiting: Callable[[], Waiting | None] = lambda: None  # for the gradients of its calls' results

    def run(
        self, number: int, unit: Recomputable, forward: Callable[..., Any], arguments: Arguments,
        made: Sequence[Tensor | None], before: RecomputedCall | None,
    ) -> tuple[Any, RecomputedCall | None]:  # fmt: skip
        """Run the next call as the plan says. Return its result, and the call if it is dropped.

        ``made`` are the tensors that the call ``before`` made, each in its place in that result.
        The input is let go unless a part begins with the call.

        Autocast's cache would hold the casts of all weights until autocast ends. That of a tied
        weight stays: ordinary autograd adds its gradients in the type of the cast.
        """
        part = self._part(self.parts, number) if self.late is None else None
        grouped = part is None or bool(part.parts)
        way = DROPPED if part is None or grouped else part.way
        device = unit.surroundings.device
        apart = torch.is_autocast_enabled(device.type) and self.tied.isdisjoint(unit.reads)
        apart = apart and not unit.shares_casts
        casts = autocast_as_now(device) if apart else nullcontext()
        once, call = apart and torch.is_autocast_cache_enabled(), None
        if once:
            self._refuse_second(unit)
        if way in (DROPPED, DROPPED_LEAN):
            row = self if grouped else None
            call = RecomputedCall(unit, arguments, lean=way == DROPPED_LEAN, row=row, number=number)
        with casts, lean_pass() if way == LEAN else nullcontext():
            if call is None:
                result = forward(*arguments.args, **arguments.kwargs)
            else:
                result = call.run(forward, arguments)
        if once:
            self.waiting = Waiting.of(result, self.waiting())
            unit.reruns.latest = self.context, self.waiting
        if call is not None and grouped:
            call.before = before
            self.calls[number] = ref(call)
        if call is not None and grouped and number != (0 if part is None else part.start):
            call.hide(made)
        elif call is not None:
            call.packed = sum(one.pack(made) for one in call.given.each)
        return result, call

    def _refuse_second(self, unit: Recomputable) -> None:
        """Refuse a second pass in one autocast context, whose casts of weights would be shared."""
        self.context = self.context or cast_context(unit.surroundings.device)
        before, waiting = unit.reruns.latest
        if before is self.context and Waiting.is_on(waiting):
            raise NotExactError(_SECOND.format(unit.name))

    def prepare(self, call: RecomputedCall) -> bool:
        """Compute the input of a call, or what it saved; return whether it did the latter."""
        if self.late is not None:
            self.parts, self.late = self.late(), None
        if self.opened is None or self.task != backward_pass():
            self._begin()
            if self.task >= 0:
                after_backward(partial(setattr, self, "opened", None))
        assert self.opened is not None
        while (part := self._part(self.opened, call.number)).parts:
            self._open(part, call.number)
        if any(one.value is not None for one in filter(None, (saved() for saved in call.saved))):
            return True
        is_hidden = any(one.is_hidden() for one in call.given.each)
        if not call.state and is_hidden:  # what it saved was there, and was read
            self.opened = None
            return self.prepare(call)
        return False

    def _begin(self) -> None:
        """Begin a backward pass. An earlier one may have raised, and left calls half filled."""
        self.opened, self.task = [*self.parts], backward_pass()
        for call in filter(None, (one() for one in self.calls.values())):
            call.empty()

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
            call.state = [*map(packed, state)]
            for k in range(one.start, one.stop):
                state = self._handed(k + 1, self._call(k).advance(state))

    def _handed(self, number: int, made: Tensors) -> State:
        """Return what was made that a call is given, each in its place."""
        places = {one.place for one in self._call(number).given.each if one.is_hidden()}
        return [t.detach() if place in places else None for place, t in enumerate(made)]

    def _call(self, number: int) -> RecomputedCall:
        call = self.calls[number]()
        assert call is not None
        return call

    @staticmethod
    def _part(parts: Sequence[Part], number: int) -> Part:
        return next(part for part in parts if part.start <= number < part.stop)
