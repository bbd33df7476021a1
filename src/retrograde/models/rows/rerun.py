"""Calls that drop what autograd saves of them, and run again when it is read.

A dropped call stays an ordinary part of the caller's graph. What its operations save is a
:class:`Placeholder`, without a tensor. The first that is read runs the call again, which fills all
of them. That run ends at the last tensor that is still wanted, which is before the call's end.

Calls in a row, each given the result of the one before it, may drop their inputs too. Then a
``RunningPlan`` first runs the calls before, as a plan says (``running_plan.py``).
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from retrograde.errors import NotExactError, RetrogradeError
from retrograde.models.lean import recipes
from retrograde.models.lean.tape import LeanTape
from retrograde.models.rows.arguments import (
    Arguments,
    RerunArguments,
    ResultBytes,
    tensors_in,
)
from retrograde.models.rows.checks import Compared, Noted, Reruns
from retrograde.replay.surroundings import Surroundings, Values, version
from retrograde.replay.trees import Tensors
from retrograde.run.core import raise_again, unsaved
from retrograde.torch_private import after_backward, backward_pass

if TYPE_CHECKING:
    from retrograde.models.rows.running_plan import RunningPlan

State = Sequence[Tensor | None]  # what a call made that the next one is given

#: The ways to keep a call, by their numbers in a plan. A dropped call runs again; when it does,
#: and it is lean, cheap values are let go.
KEPT, LEAN, DROPPED, DROPPED_LEAN = range(4)
_numbers = count()
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

    @cached_property
    def has_weights(self) -> bool:
        """Whether it reads parameters of which autocast may cache a cast."""
        return any(t.requires_grad and t.is_leaf for t in self.reads)

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
        ours = {*map(id, arguments.tensors)}
        hooks = saved_tensors_hooks(partial(self._drop, ours), recipes.unpack)  # type: ignore[arg-type]
        with hooks:
            result = forward(*arguments.args, **arguments.kwargs)
        self.noted.settle()
        if any(argument.is_overwritten() for argument in self.given.each):
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
        for argument in self.given.each:
            if argument.source is not None and id(argument.source()) in places:
                argument.hide(places[id(argument.source())], self.noted.turn)

    def _arguments(self, state: State) -> tuple[Any, Any, set[int]]:
        """Return the arguments, without the graph that they came from, and their ids."""
        values = [argument.find(state, self._differs) for argument in self.given.each]
        args, kwargs, _ = self.given.enter(values)
        return args, kwargs, {*map(id, Arguments(args, kwargs).tensors)}

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
        is_first = reruns.ends_early is None and refill.ends
        noted = Values(self.unit.surroundings.found) if is_first else None
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
        for saved in filter(None, (reference() for reference in self.saved)):
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
    calls = [call for reference in _filled.pop(task, ()) if (call := reference()) is not None]
    for call in (call for call in calls if call.born > born):
        call.empty()
    if born >= 0 and calls:
        _filled[task] = [ref(call) for call in calls if call.born <= born]


def is_free(t: Tensor, ours: set[int]) -> bool:
    """Return whether somebody holds a saved tensor in any case: a parameter."""
    return t.requires_grad and t.is_leaf and id(t) not in ours
