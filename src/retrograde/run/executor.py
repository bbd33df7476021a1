"""The executor: one ``match`` over the actions of a schedule. It plans nothing.

A :class:`Run` performs the actions up to the first ``Backward`` in the forward pass, and the rest
when the gradient arrives. The core (:mod:`retrograde.run.core`) defines a step, a tape and how it
is differentiated.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from retrograde.replay.surroundings import Snapshot
from retrograde.replay.trees import Tensors
from retrograde.run.core import Core, Emit, Gradients, Tape, raise_again
from retrograde.run.layout import Inputs
from retrograde.run.prints import Prints
from retrograde.run.settled import LargerSteps
from retrograde.run.states import each_once, renewed
from retrograde.schedule import Action, Advance, Backward, Free, Load, Record, Schedule, Store


@dataclass
class _Later:
    """A range that was run, but not recorded."""

    start: int
    stop: int
    state: Tensors
    surroundings: Snapshot
    state_after: Tensors = field(default_factory=list)
    ambient_after: Snapshot = ()


@dataclass
class Run:
    """The state of one execution: the stored states, the tapes, the current state. The caller's
    tensors are passed to its methods and never kept."""

    core: Core
    actions: Schedule | tuple[Action, ...]
    length: int
    done: int = 0
    position: int = 0
    state: Tensors = field(default_factory=list)
    stored: dict[int, tuple[Tensors, Snapshot]] = field(default_factory=dict)
    tapes: "list[Tape | _Later]" = field(default_factory=list)
    cuts: Sequence[int] | None = None  # where recordings are divided, ascending
    states: int = 0  # the number of the state's tensors after all steps
    prints: Prints | None = None

    def forward(self, inputs: Inputs, state: Tensors, emit: Emit | None) -> Tensors:
        """Perform all actions before the first ``Backward``; return the state after all steps."""
        return self.follow(self._next_forward(), inputs, state, emit)

    def follow(
        self, actions: Iterable[Action], inputs: Inputs, state: Tensors, emit: Emit | None
    ) -> Tensors:
        """Perform actions before any ``Backward``, as they come; return the state after them."""
        self.clear()
        self.done, self.position = 0, 0
        self.state = [*state] if self.core.stepwise else each_once(Tensor.detach, state)
        if self.prints is not None and emit is not None:
            emit = partial(_noted, emit, self.prints)
        for action in actions:
            self._perform(action, inputs, emit)
        after, self.state = self.state, []
        self.states = len(after)
        return after

    def backward(self, inputs: Inputs, gradients: Gradients) -> None:
        """Perform the rest, from the first ``Backward`` on. Reruns leave no trace; what the steps'
        own backward passes draw and change stays, as in the plain loop."""
        while self.done < len(self.actions):
            if isinstance(action := self.actions[self.done], Backward):
                self.done, self.state = self.done + 1, []
                self._consume(inputs, action.start, gradients)
                continue
            with self.without_trace():
                for action in self._next_forward():
                    self._perform(action, inputs, None)
        self.state = []

    def _next_forward(self) -> Iterator[Action]:
        """Iterate over the actions that come next, up to a ``Backward``."""
        while self.done < len(self.actions):
            action = self.actions[self.done]
            if isinstance(action, Backward):
                break
            self.done += 1
            yield action

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Run steps again in a block, and restore what they draw and change, if they do."""
        surroundings = self.core.surroundings
        changes = surroundings.moves or surroundings.changing or surroundings.growing
        try:
            with surroundings.without_trace() if changes else nullcontext():
                yield
        except RuntimeError as error:  # others may be those of a caller that reads inputs
            raise_again(error, f"a step of the cell after step {self.position}")

    def clear(self) -> None:
        self.stored, self.tapes, self.state = {}, [], []

    def _perform(self, action: Any, inputs: Inputs, emit: Emit | None) -> None:
        match action:
            case Advance(start, stop):
                self._advance(inputs, start, stop, emit)
            case Store(at):
                with torch.enable_grad():
                    state = each_once(renewed, self.state) if at == 0 else self.state
                self.stored[at] = state, self._ambient(at)
            case Record(start, stop):
                self._record(inputs, start, stop, emit)
            case Load(at):
                self.state, surroundings = self._kept(at)
                self.core.surroundings.restore(surroundings)
                self.position = at
            case Free(at):
                del self.stored[at]

    def _record(self, inputs: Inputs, start: int, stop: int, emit: Emit | None) -> None:
        """Record a range; or put it off if its steps are larger than those that were measured."""
        settled = self.core.settled
        if not settled.planned:
            self._record_all(inputs, start, stop, emit)
            return
        later = _Later(start, stop, self.state, self._ambient(start))
        if settled.at_once(stop - start) < stop - start:
            self._put_off(inputs, later, emit)
            return
        count, done = len(self.tapes), stop
        try:
            with settled.within(stop - start):
                self._record_all(inputs, start, stop, emit)
        except LargerSteps as larger:
            (done,) = larger.args
        if done < stop:
            del self.tapes[count:]
            self._put_off(inputs, later, emit and (lambda a, *rest: a < done or emit(a, *rest)))

    def _record_all(self, inputs: Inputs, start: int, stop: int, emit: Emit | None) -> None:
        for a, b in self._tapes(start, stop):
            state, self.state = [*self.state], []
            look = self.prints is not None and self.prints.covers(a, b)
            taker = self.prints if emit is None and look else emit
            tape = self.core.record(inputs, a, b, state, taker)
            self.tapes.append(tape)
            self.state, self.position = tape.state_after, b

    def _put_off(self, inputs: Inputs, later: "_Later", emit: Emit | None) -> None:
        """Run a range without recording it; it is recorded in pieces when it is backpropagated."""
        self.core.surroundings.restore(later.surroundings)
        with torch.no_grad():
            (after,) = self.core.advance(inputs, later.start, [later.stop], later.state, emit)
        later.state_after, later.ambient_after = after, self.core.surroundings.capture()
        self.tapes.append(later)
        self.state, self.position = after, later.stop

    def _consume(self, inputs: Inputs, start: int, gradients: Gradients) -> None:
        """Backpropagate the recorded ranges from some step on."""
        while self.tapes and self.tapes[-1].start >= start:
            tape = self.tapes.pop()
            if not isinstance(tape, _Later):
                self.core.backpropagate(tape, gradients)
                continue
            stop = tape.stop
            while stop > tape.start:
                a = max(tape.start, stop - self.core.settled.at_once(tape.stop - tape.start))
                with self.without_trace():
                    self.core.surroundings.restore(tape.surroundings)
                    self.state = tape.state
                    if a > tape.start:
                        with torch.no_grad():
                            states = self.core.advance(inputs, tape.start, [a], tape.state, None)
                        self.state = states[0]
                    self._record_all(inputs, a, stop, None)
                self.state, stop = [], a
                self._consume(inputs, a, gradients)

    def _advance(self, inputs: Inputs, start: int, stop: int, emit: Emit | None) -> None:
        """Perform an ``Advance``, and with it those that follow directly after a ``Store``. The
        core must allow them in one call."""
        stops = [stop]
        while self.core.advances_many and isinstance(self.actions[self.done], Store):
            after = self.actions[self.done + 1]
            if not isinstance(after, Advance):
                break
            stops.append(after.stop)
            self.done += 2
        state, self.state = self.state, []
        with torch.no_grad():
            states = self.core.advance(inputs, start, stops, state, emit)
        *between, (self.position, self.state) = zip(stops, states, strict=True)
        del states  # BUDGET: the current state is released when the next step has run
        for at, state in between:
            self.stored[at] = state, self.core.surroundings.capture()

    def _tapes(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges that a recording is divided into. They are loaded or consumed one by
        one, or their surroundings are restored between them."""
        if self.cuts is None:
            self.cuts = self.core.cuts(self.actions, self.length)
        inside = self.cuts[bisect_right(self.cuts, start) : bisect_left(self.cuts, stop)]
        if (most := self.core.settled.most_steps) < stop - start and self.core.stepwise:
            inside = sorted({*inside, *range(start + most, stop, most)})
        return list(pairwise([start, *inside, stop]))

    def _ambient(self, at: int) -> Snapshot:
        """Return the surroundings at the current state, which may be kept already."""
        if at in self.stored or (self.tapes and self.tapes[-1].stop == at):
            return self._kept(at)[1]
        return self.core.surroundings.capture()

    def _kept(self, at: int) -> tuple[Tensors, Snapshot]:
        if at in self.stored:
            return self.stored[at]
        tape = next(tape for tape in reversed(self.tapes) if tape.stop == at)
        return tape.state_after, tape.ambient_after


def _noted(
    emit: Emit, prints: Prints, start: int, stop: int, outputs: Tensors, state: Tensors
) -> None:
    emit(start, stop, outputs, state)
    prints(start, stop, outputs, state)
