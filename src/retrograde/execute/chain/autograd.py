"""A chain in the caller's graph: one ``autograd.Function`` for each link.

A recurrence is one node (:mod:`retrograde.execute.autograd`), for all its steps share their
parameters. The links of a chain have their own, so each is a node of its own: the gradients of its
parameters are handed over when they are known, as ordinary autograd does, an output's gradient is
let go of when the link behind it is done, and what nobody asks for is not computed. What is between
two nodes is a token of the state's shape, which holds nothing.

The forward pass performs the schedule up to its first ``Backward``; then each node performs it up
to the ``Backward`` of its own link.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from retrograde.errors import RetrogradeError
from retrograde.execute.chain.core import ChainCore, check_steady
from retrograde.execute.chain.links import Links
from retrograde.execute.executor import Run
from retrograde.execute.inputs import Held
from retrograde.execute.layout import Straight
from retrograde.execute.ranges import Gradients
from retrograde.execute.replay import autocast_as_now, autocast_of_caller, version
from retrograde.execute.transforms import NO_FORWARD_MODE, uncompiled
from retrograde.schedule import Action, Free, Load, Record, Schedule, Store

__all__ = ["run_chain"]

Tensors = list[Tensor]
Gradient = Tensor | None


def run_chain(links: Links, schedule: Schedule, state: Tensors) -> Tensors:
    """Run a chain so that its gradient is computed by ``schedule``.

    Args:
        links: as examined for an input like this.
        schedule: of as many steps as the links of ``links.chain``.
        state: the flat input.

    Returns:
        The flat output.
    """
    device = state[0].device
    with autocast_as_now(device), torch.no_grad():
        for link in links.prefix:
            state = link.run(state)
    call = _Call(links, schedule, state, device)
    call.forward()
    for k, link in enumerate(links.chain):
        results = _Node.apply(call, k, len(state), *state, *link.own)  # type: ignore[no-untyped-call]
        state = list(results)
    return state


class _Call:
    """One forward pass, and the backward passes through it.

    Attributes:
        outputs: of the chain, until its last node takes them.
    """

    def __init__(
        self, links: Links, schedule: Schedule, state: Tensors, device: torch.device
    ) -> None:
        self.core = ChainCore(links.chain, device)
        self.steady = links.steady
        actions = tuple(schedule)
        self.run = Run(self.core, actions, schedule.length, loads=_loads(actions))
        self.device = device
        self.state = [t.detach() for t in state]
        self.versions = [version(t) for t in self.state]
        self.autocast = autocast_as_now(device)
        self.replayed = torch.is_autocast_enabled(device.type)
        self.outputs: Tensors = []
        self.walk: Iterator[None] | None = None
        self.gradients = self._no_gradients()
        self.reached = 0

    def forward(self) -> None:
        """Perform all that precedes the first ``Backward``."""
        still = self.steady.marks()
        with self.autocast:
            self.outputs = self.run.forward(_NO_INPUTS, self.state, None)
        first, last = self.core.links[0].name, self.core.links[-1].name
        check_steady(f"one of the layers {first} … {last}", self.steady, still)
        self._check_input("during the forward pass")
        self.walk = None

    def tokens(self, k: int) -> Tensors:
        """What stands for the state after a link; after the last one, the state itself."""
        if k == len(self.core.links) - 1:
            outputs, self.outputs = self.outputs, []
            return outputs
        return [_token(*like) for like in self.core.links[k].like]

    def back(
        self, k: int, gradients: Sequence[Gradient], needed: Sequence[bool]
    ) -> tuple[list[Gradient], list[Gradient]]:
        """Go back through link k: the gradients of the state before it, and of its parameters.

        Between links a gradient is held here, and by nobody else; what the nodes are given and
        hand on are tokens.
        """
        self._check_input("between the forward pass and the backward pass")
        if k == len(self.core.links) - 1:
            self._begin()
        elif self.walk is None or self.reached != k + 1:
            raise RetrogradeError(
                "two backward passes through one chain overlap: expected one to end, or to be "
                "given up, before the next begins"
            )
        assert self.walk is not None
        ours, self.core.needed[k] = self.gradients, list(needed)
        if k == len(self.core.links) - 1:
            ours.states = list(gradients)
        try:
            with self.autocast:
                next(self.walk)
                if k == 0:
                    self.run.clear()
        except BaseException:
            self.run.clear()
            self.reached = -1
            raise
        self.reached = k
        parameters, ours.parameters = ours.parameters, []
        if k == 0:
            states, ours.states = ours.states, []
            return states, parameters
        return [None if g is None else _token(g.shape, g.dtype, g.device) for g in ours.states], (
            parameters
        )

    def _begin(self) -> None:
        """Begin a backward pass; for another one than the first, run forward again."""
        if self.walk is not None:
            with self.autocast:
                self.run.forward(_NO_INPUTS, self.state, None)
        self.gradients = self._no_gradients()
        self.walk = self.run.retreat(_NO_INPUTS, self.gradients)

    def _no_gradients(self) -> Gradients:
        length = len(self.core.links)
        outside = autocast_of_caller(self.device, replayed=self.replayed)
        return Gradients([], [], [], [], length, Straight(length, False), outside)

    def _check_input(self, when: str) -> None:
        if self.versions != [version(t) for t in self.state]:
            raise RetrogradeError(
                f"the input of the chain was written to in place {when}: expected it to stay as it "
                "was, for it is used again; clone() it first"
            )


_NO_INPUTS = Held([])


def _loads(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """The outputs of recorded layers that are loaded, not having been stored: by the number of the
    recording, for a layer is recorded again and again."""
    recorded: dict[int, int] = {}
    stored: set[int] = set()
    found: set[tuple[int, int]] = set()
    for index, action in enumerate(actions):
        match action:
            case Record(start, stop):
                recorded.update(dict.fromkeys(range(start + 1, stop + 1), index))
            case Store(at):
                stored.add(at)
            case Free(at):
                stored.discard(at)
            case Load(at) if at not in stored:
                found.add((recorded[at], at))
    return frozenset(found)


def _token(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one zero, whatever its shape."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, k: int, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.k, ctx.count = call, k, count
        results = call.tokens(k)
        passes = call.core.links[k].passes
        ctx.mark_non_differentiable(*(t for t, p in zip(results, passes, strict=True) if not p))
        return tuple(results)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: Gradient) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RetrogradeError(
                "the gradient of a chain within a budget cannot itself be differentiated: expected "
                "create_graph=False; for second derivatives use memory=None"
            )
        needed = ctx.needs_input_grad[3 + ctx.count :]
        states, parameters = ctx.call.back(ctx.k, gradients, needed)
        return None, None, None, *states, *parameters

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RetrogradeError(NO_FORWARD_MODE)
