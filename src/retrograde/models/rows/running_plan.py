"""The calls of one pass through a row of layers, kept as its plan says.

Calls in a group drop their inputs too. When one of them goes back, the calls before it run again
first (:class:`RunningPlan`).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from retrograde.errors import NotExactError
from retrograde.models.lean.lean import lean as lean_pass
from retrograde.models.rows.arguments import Arguments, packed, tensors_in
from retrograde.models.rows.rerun import (
    DROPPED,
    DROPPED_LEAN,
    KEPT,
    LEAN,
    Recomputable,
    RecomputedCall,
    State,
)
from retrograde.plan.calls import Part
from retrograde.replay.switches import autocast_as_now, cast_context
from retrograde.replay.trees import Tensors
from retrograde.torch_private import after_backward, backward_pass

_SECOND = (
    "layer {} runs twice in one autocast context, in which ordinary backpropagation casts a weight "
    "once, and adds its gradients in the type of the cast: expected a context for each pass; enter "
    "torch.autocast for each call of the model, or call it once for all inputs"
)


class Waiting:
    """Lives as long as the graph of a result, or of the last of several, until that goes back."""

    over = False

    @classmethod
    def of(cls, result: object, earlier: "Waiting | None" = None) -> "ref[Waiting]":
        waiting = earlier or cls()
        node = next((t.grad_fn for t in tensors_in(result) if t.grad_fn is not None), None)
        if node is not None:
            waiting.over = False
            node.register_prehook(lambda _: setattr(waiting, "over", True))
        return ref(waiting)

    @staticmethod
    def is_on(reference: "Callable[[], Waiting | None]") -> bool:
        """Return whether the result may still go back."""
        return (waiting := reference()) is not None and not waiting.over


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
        if way == KEPT and not apart:
            return forward(*arguments.args, **arguments.kwargs), None
        casts = autocast_as_now(device) if apart else nullcontext()
        once, call = apart and unit.has_weights and torch.is_autocast_cache_enabled(), None
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
            call.packed = sum(argument.pack(made) for argument in call.given.each)
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
        if any(each.value is not None for each in filter(None, (saved() for saved in call.saved))):
            return True
        is_hidden = any(argument.is_hidden() for argument in call.given.each)
        if not call.state and is_hidden:  # what it saved was there, and was read
            self.opened = None
            return self.prepare(call)
        return False

    def _begin(self) -> None:
        """Begin a backward pass. An earlier one may have raised, and left calls half filled."""
        self.opened, self.task = [*self.parts], backward_pass()
        for call in filter(None, (reference() for reference in self.calls.values())):
            call.empty()

    def _open(self, part: Part, number: int) -> None:
        """Run the calls of a group, up to the part that has a call's number."""
        assert self.opened is not None
        at = self.opened.index(part)
        state, self._call(part.start).state = self._call(part.start).state, []
        done = [inner for inner in part.parts if inner.start <= number]
        self.opened[at : at + 1] = done
        for inner in done:
            call = self._call(inner.start)
            if not inner.parts and inner.way in (KEPT, LEAN):
                ends = inner is done[-1]
                result = call.fill(state, lean=inner.way == LEAN, whole=not ends)
                state = [] if ends else self._handed(inner.stop, tensors_in(result))
                del result
                continue
            call.state, call.lean = state, inner.way == DROPPED_LEAN
            if inner is done[-1]:
                return
            call.state = [*map(packed, state)]
            for k in range(inner.start, inner.stop):
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
