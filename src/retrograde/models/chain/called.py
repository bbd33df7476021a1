"""A chain whose layers are called by the model itself, one after the other.

The first sweep follows the schedule call by call. A recorded layer stays an ordinary layer of the
caller's graph. A layer that is recomputed becomes a node. The node returns a real tensor, because
the model may read it. So autograd computes the gradients of states, and differentiates whatever
else the model does with a state.

The nodes perform the rest of the schedule as long as their gradients arrive in its order. If the
model uses only a part of the chain, or backpropagates twice, a gradient may arrive out of order.
Then its layer is recomputed from the nearest stored state.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from retrograde.errors import RetrogradeError
from retrograde.models.chain.chain_core import NO_INPUTS, ChainCore
from retrograde.models.chain.links import Link
from retrograde.models.chain.split_schedule import loads_of, split_schedule
from retrograde.replay.surroundings import autocast_as_now, version
from retrograde.run.core import unrecorded
from retrograde.run.executor import Run
from retrograde.run.states import unpack
from retrograde.run.transforms import NO_FORWARD_MODE, refuse_batches, uncompiled
from retrograde.schedule import Advance, Record, Schedule, Store

__all__ = ["CalledRun"]

Tensors = list[Tensor]
Gradient = Tensor | None


class CalledRun:
    """One pass of a model through a chain, each of whose states is one tensor."""

    def __init__(self, links: Sequence[Link], schedule: Schedule, device: torch.device) -> None:
        self.split = split_schedule(schedule, links)
        self.device = device
        self.core = ChainCore(links, device)
        self.recorded: set[int] = set()
        self.stored: set[int] = set()
        for action in self.split.sweep:
            match action:
                case Store(at):
                    self.stored.add(at)
                case Record(start, stop):
                    self.recorded.update(range(start, stop))
                case Advance():
                    pass
        self.order = [k for k in reversed(range(len(links))) if k not in self.recorded]
        self.run = self._fresh_run()
        self.first: Tensors = []  # the state before all links, until the last link has run
        self.handed: list[tuple[int, weakref.ref[Tensor], int]] = []  # states and their versions
        self.ridden: Tensors = []  # the arguments of a link whose riders have not run yet
        self.walk: Iterator[None] | None = None
        self.done = 0  # how many of ``order`` the walk has backpropagated
        self.gradients = self.core.gradients()

    def step(
        self, k: int, again: Link, now: Link, x: Tensor, used: Tensors, *, ridden: bool
    ) -> Tensor:
        """Run link k in the caller's graph.

        Args:
            again: the link for recomputation, which holds nothing of the caller's graph.
            now: the link for the present run, without its riders.
            x: the state before it.
            used: the caller's tensors that a gradient is wanted for, in the order of ``again.own``.
            ridden: whether :meth:`ride` follows.
        """
        self.core.bind(k, again)
        (first,) = self.first or [x.detach()]
        self.first = [] if k + 1 == len(self.core.links) else [first]
        if k in self.stored:
            self.run.keep(k, [x])
            (held,), _ = self.run.stored[k]
            assert isinstance(held, Tensor)
            self.handed.append((k, weakref.ref(held), version(x)))
        if k in self.recorded:
            repeated = k < self.split.repeated
            with self.core.surroundings(k) if repeated else nullcontext():
                return now.run([x])[0]
        with unrecorded(), self.core.surroundings(k):
            y = now.run([x.detach()])[0].detach()
        if ridden:
            self.ridden = [first, x, *used]
            begun: Tensor = _Begin.apply(y, x, *used)  # type: ignore[no-untyped-call]
            return begun
        result: Tensor = _Step.apply(self, k, None, y, first, x, *used)  # type: ignore[no-untyped-call]
        return result

    def ride(self, k: int, rider: Callable[[Tensor], Tensor], y: Tensor, *, last: bool) -> Tensor:
        """Run a rider of link k, a layer that writes to the link's output in place."""
        if k in self.recorded:
            return rider(y)
        if not last:
            return _write(rider, y)
        given, self.ridden = self.ridden, []
        result: Tensor = _Step.apply(self, k, rider, y, *given)  # type: ignore[no-untyped-call]
        return result

    def back(
        self, k: int, gradient: Tensor, needed: Sequence[bool], first: Tensor
    ) -> tuple[Gradient, list[Gradient]]:
        """Backpropagate link k. Return the gradients of the state before it, and of its parameters.

        ``first`` is the state before all links.
        """
        self._check_unchanged()
        if self.order[0] == k and self.walk is not None:  # a second pass
            self.walk, self.done = None, 0
            self.run.forward(NO_INPUTS, [first], None)
        if self.order[0] == k:
            self.walk = self.run.retreat(NO_INPUTS, self.gradients)
        in_turn = self.walk is not None and self.order[self.done : self.done + 1] == [k]
        ours, self.core.needed[k] = self.gradients, needed
        ours.states, ours.outside = [gradient], autocast_as_now(self.device)
        del gradient
        try:
            if in_turn:
                next(self.walk)  # type: ignore[arg-type]
                self.done += 1
                if self.done == len(self.order):
                    self.run.clear()
            else:
                self._alone(k, first)
        except BaseException:
            self.run, self.walk, self.done = self._fresh_run(), None, 0
            raise
        (state,), ours.states = ours.states, []
        parameters, ours.parameters = ours.parameters, []
        return state, parameters

    def _alone(self, k: int, first: Tensor) -> None:
        """Backpropagate a link whose gradient arrived out of the schedule's order."""
        held = self.run.stored
        at = max((at for at in held if at <= k), default=0)
        state = unpack(held[at][0]) if at in held else [first]
        if at < k:
            (state,) = self.core.advance(NO_INPUTS, at, [k], state, None)
        self.core.backpropagate(self.core.record(NO_INPUTS, k, k + 1, state, None), self.gradients)

    def _fresh_run(self) -> Run:
        actions, length = self.split.actions, len(self.core.links)
        return Run(
            self.core,
            actions,
            length,
            done=self.split.begin,
            loads=loads_of(actions),
            cuts=range(length),
        )

    def _check_unchanged(self) -> None:
        """Refuse a stored state that was written to, because it is used again."""
        for k, reference, then in self.handed:
            t = reference()
            if t is not None and version(t) != then:
                name = self.core.links[k].name
                raise RetrogradeError(
                    f"the input of layer {name} was written to in place between the forward pass "
                    "and the backward pass: expected it to stay as it was, because it is used "
                    "again; clone() it first"
                )


def _write(rider: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Let a rider write to a tensor, unseen by autograd."""
    with torch.no_grad():
        rider(y.detach())
    return y


class _Begin(torch.autograd.Function):
    """The output of a recomputed link, before its riders write to it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Gradient) -> tuple[None, ...]:
        if gradient is not None:
            raise RetrogradeError(
                "what a layer returned was used before an activation wrote to it in place: "
                "expected the activation to follow at once; give it inplace=False"
            )
        return (None,) * len(ctx.needs_input_grad)


class _Step(torch.autograd.Function):
    """A recomputed link; its last rider, if it has one, writes to the link's output."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CalledRun,
        k: int,
        rider: Callable[[Tensor], Tensor] | None,
        y: Tensor,
        first: Tensor,
        x: Tensor,
        *own: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.k = call, k
        ctx.save_for_backward(first)  # autograd releases it after the backward pass
        if rider is None:
            return y.detach()
        rider(y)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: Gradient) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[6:]
        if gradient is None:
            return (None,) * (6 + len(needed))
        refuse_batches([gradient])
        if torch.is_grad_enabled():
            raise RetrogradeError(
                "the gradient of layers within a budget cannot itself be differentiated: expected "
                "create_graph=False; for second derivatives leave rg.budget out"
            )
        state, parameters = ctx.call.back(ctx.k, gradient, needed, *ctx.saved_tensors)
        return None, None, None, None, None, state, *parameters

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RetrogradeError(NO_FORWARD_MODE)
