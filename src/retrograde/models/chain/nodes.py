"""A chain in the caller's graph.

Links that run once stay ordinary layers of the caller's graph; only recomputed links become nodes.
So each node returns the gradients of its parameters as soon as they are known, as in ordinary
autograd. Gradients that nobody asks for are not computed.

The first sweep follows the schedule up to its first ``Backward``. Later each node performs the
schedule up to the ``Backward`` of its own link. Two nodes are connected by a token: a tensor of the
state's shape, without its memory. The gradient itself is passed on by this module, and released
when the link that needed it is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from retrograde.errors import RetrogradeError
from retrograde.models.chain.chain_core import NO_INPUTS, ChainCore
from retrograde.models.chain.links import Link, Links
from retrograde.models.chain.split_schedule import loads_of, split_schedule
from retrograde.replay.surroundings import autocast_as_now, autocast_of_caller, version
from retrograde.run.core import Gradients
from retrograde.run.executor import Run
from retrograde.run.transforms import NO_FORWARD_MODE, refuse_batches, uncompiled
from retrograde.schedule import Advance, Record, Schedule, Store

__all__ = ["run_chain"]

Tensors = list[Tensor]
Gradient = Tensor | None


def run_chain(links: Links, schedule: Schedule, state: Tensors) -> Tensors:
    """Run a chain on a flat input so that ``schedule`` computes its gradient, one step per link."""
    device = state[0].device
    with autocast_as_now(device):
        state = links.enter(state)
    call = _Call(links.chain, schedule, state, device)
    first, last = links.chain[0].name, links.chain[-1].name
    still = links.steady.marks()
    with call.autocast:
        state = call.forward(state)
    moved = links.steady.changes(still, f"one of the layers {first} … {last}")
    call.core.watched.update(moved)
    call.check_input("during the forward pass")
    return state


class _Call:
    """One forward pass, and the backward passes through it."""

    def __init__(
        self, links: Sequence[Link], schedule: Schedule, state: Tensors, device: torch.device
    ) -> None:
        self.split = split = split_schedule(schedule, links)
        self.core = ChainCore(links, device)
        self.run = Run(
            self.core,
            split.actions,
            len(links),
            done=split.begin,
            loads=loads_of(split.actions),
            cuts=split.cuts,
        )
        self.device = device
        self.state = [t.detach() for t in state]
        self.versions = [version(t) for t in self.state]
        self.autocast = autocast_as_now(device)
        self.replayed = torch.is_autocast_enabled(device.type)
        self.outputs: Tensors = []
        self.walk: Iterator[None] | None = None
        self.gradients = self._no_gradients()
        self.reached = 0

    def forward(self, state: Tensors) -> Tensors:
        """Run the first sweep in the caller's graph."""
        links = self.core.links
        for action in self.split.sweep:
            match action:
                case Store(at):
                    self.run.keep(at, state)
                case Record(start, stop):
                    for k in range(start, stop):
                        again = k < self.split.repeated
                        with self.core.surroundings(k) if again else nullcontext():
                            state = links[k].run(state)
                case Advance(start, stop):
                    inside = [t.detach() for t in state]
                    (self.outputs,) = self.core.advance(NO_INPUTS, start, [stop], inside, None)
                    for a, b in self.split.nodes(start, stop):
                        own = self.core.own(a, b)
                        state = list(_Node.apply(self, a, b, len(state), *state, *own))  # type: ignore[no-untyped-call]
                    state = list(_Handover.apply(self, stop, *state))  # type: ignore[no-untyped-call]
        return state

    def begin(self, stop: int, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Take over the gradient of state ``stop``, and return tokens of it.

        A backward pass begins at the last range. A second one first repeats the part of the first
        sweep that it needs.
        """
        after = self.split.after(stop)
        if after is not None:
            self._check_turn(after)
        else:
            if self.walk is not None:
                with self.autocast:
                    self.run.forward(NO_INPUTS, self.state, None)
            self.gradients = self._no_gradients()
            self.walk = self.run.retreat(NO_INPUTS, self.gradients)
        self.gradients.states = list(gradients)
        self.reached = stop
        return _tokens(gradients)

    def back(
        self, start: int, stop: int, needed: Sequence[bool]
    ) -> tuple[list[Gradient], list[Gradient]]:
        """Backpropagate a node. Return the gradients of the state before it and its parameters."""
        self.check_input("between the forward pass and the backward pass")
        self._check_turn(stop)
        ours, self.core.needed[start] = self.gradients, needed
        try:
            with self.autocast:
                next(self.walk)  # type: ignore[arg-type]
                if start == self.split.starts[0]:
                    self.run.clear()
        except BaseException:
            self.run.clear()
            self.reached = -1
            raise
        self.reached = start
        parameters, ours.parameters = ours.parameters, []
        if start in self.split.starts:
            states, ours.states = ours.states, []
            return states, parameters
        return _tokens(ours.states), parameters

    def check_input(self, when: str) -> None:
        """Refuse an input that was written to, because it is used again."""
        if self.versions != [version(t) for t in self.state]:
            raise RetrogradeError(
                f"the input of the chain was written to in place {when}: expected it to stay as it "
                "was, because it is used again; clone() it first"
            )

    def _check_turn(self, reached: int) -> None:
        if self.walk is None or self.reached != reached:
            raise RetrogradeError(
                "two backward passes through one chain overlap: expected one to end, or to be "
                "given up, before the next begins"
            )

    def _no_gradients(self) -> Gradients:
        outside = autocast_of_caller(self.device, replayed=self.replayed)
        return self.core.gradients(outside=outside)


def _tokens(gradients: Sequence[Gradient]) -> list[Gradient]:
    return [None if g is None else _token(g.shape, g.dtype, g.device) for g in gradients]


def _token(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of any shape that takes the memory of one zero."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _returned(ctx: Any, results: Tensors, link: Link) -> tuple[Tensor, ...]:
    """Return a link's output from a function, and mark the parts that pass no gradient on."""
    ctx.set_materialize_grads(False)
    passes = zip(results, link.passes, strict=True)
    ctx.mark_non_differentiable(*(t for t, differentiable in passes if not differentiable))
    return tuple(results)


class _Node(torch.autograd.Function):
    """Links that are recomputed.

    The forward pass returns tokens, and the backward pass follows the schedule.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, start: int, stop: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.start, ctx.stop, ctx.count = call, start, stop, count
        link = call.core.links[stop - 1]
        return _returned(ctx, [_token(*like) for like in link.like], link)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Gradient) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[4 + ctx.count :]
        states, parameters = ctx.call.back(ctx.start, ctx.stop, needed)
        return None, None, None, None, *states, *parameters

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RetrogradeError(NO_FORWARD_MODE)


class _Handover(torch.autograd.Function):
    """The boundary between nodes and ordinary layers: it takes tokens and returns tensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, stop: int, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.stop = call, stop
        results, call.outputs = call.outputs, []
        return _returned(ctx, results, call.core.links[stop - 1])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Gradient) -> tuple[Any, ...]:
        refuse_batches(gradients)
        if torch.is_grad_enabled():
            raise RetrogradeError(
                "the gradient of a chain within a budget cannot itself be differentiated: expected "
                "create_graph=False; for second derivatives use memory=None"
            )
        return None, None, *ctx.call.begin(ctx.stop, gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RetrogradeError(NO_FORWARD_MODE)
