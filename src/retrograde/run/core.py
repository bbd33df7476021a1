"""What the executor runs: a core, that is, a recurrence that can be cut into ranges of steps.

A core offers four things: it advances steps and keeps only states, records a range, backpropagates
what was recorded, and says where parameters' gradients are collected. How it does so is its own:
by ordinary autograd (:mod:`retrograde.run.autograd_core`), or by its own derivative
(:class:`RangeCore`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from retrograde.discover.surroundings import Ambient, Snapshot
from retrograde.errors import RetrogradeError
from retrograde.run.inputs import Inputs
from retrograde.run.layout import Layout
from retrograde.run.states import Packed
from retrograde.schedule import Action

__all__ = [
    "NO_SECOND_ORDER",
    "Core",
    "Emit",
    "Gate",
    "Gradients",
    "RangeCore",
    "Tape",
    "as_leaf",
    "discard",
    "window",
]

Tensors = list[Tensor]
Gradient = Tensor | None
#: Takes the outputs of a call: ``emit(start, stop, outputs)``.
Emit = Callable[[int, int, Tensors], None]
#: Lets tensors into a graph of all steps, see :mod:`retrograde.run.second_order`.
Gate = Callable[[Tensors], Tensors]

NO_SECOND_ORDER = (
    "the gradient of this budgeted recurrence cannot itself be differentiated: expected "
    "create_graph=False; for second derivatives use backward=None, memory=None and "
    "schedule=None (ordinary BPTT)"
)


def discard(start: int, stop: int, outputs: Tensors) -> None:
    """The :data:`Emit` of a forward pass that is repeated, whose outputs the caller has already. In
    the backward pass there is none at all."""


class Core(Protocol):
    """A recurrence on flat lists of tensors, as the executor runs it."""

    @property
    def fused(self) -> bool:
        """Whether a call has a range of steps, time first, and else one."""
        ...

    @property
    def sums(self) -> bool:
        """Whether an output is one tensor a call, to be summed over calls, not one part a step."""
        ...

    @property
    def strides(self) -> bool:
        """Whether advances that only a store parts may be one call."""
        ...

    @property
    def joins(self) -> bool:
        """Whether a tape can be of several steps of a range."""
        ...

    @property
    def parameters(self) -> Tensors:
        """Every tensor, besides inputs and state, that is to receive a gradient."""
        ...

    @property
    def ambient(self) -> Ambient:
        """The surroundings that a step depends on."""
        ...

    def totals(self) -> list[Tensor | None]:
        """Where the parameters' gradients are collected; None for what the first share begins."""
        ...

    def room(self, inputs: Inputs) -> Tensors:
        """Where the outputs of all steps go, if the core writes them itself, and reads them again
        in the backward pass; none if it emits them."""
        ...

    def cuts(self, actions: Iterable[Action], length: int) -> Sequence[int]:
        """Where a recording is divided into tapes, ascending."""
        ...

    def stored(self, state: Tensors) -> Sequence[Tensor | Packed]:
        """What is stored of a state."""
        ...

    def advance(
        self, inputs: Inputs, start: int, stops: Sequence[int], state: Tensors, emit: Emit | None
    ) -> list[Tensors]:
        """Run steps from ``start`` to the last of some stops, and keep the state at each of them
        and nothing else."""
        ...

    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> "Tape":
        """Run a range of steps and keep what its backward pass needs; ``state`` may be emptied."""
        ...

    def backpropagate(self, tape: Any, gradients: "Gradients") -> None:
        """Backpropagate the steps of a tape, collect their gradients, and use the tape up."""
        ...

    def complete(self) -> None:
        """Take note that every step was recorded and backpropagated."""
        ...

    def ordinary(
        self, layout: Layout, inputs: Tensors, state: Tensors, gate: Gate
    ) -> tuple[Tensors, Tensors, Tensors]:
        """All steps as autograd records them: outputs, state after, and the graph's parameters.

        Raises:
            RetrogradeError: second derivatives are not to be had.
        """
        ...


@dataclass
class Tape:
    """What a recorded range holds: the internal states of steps ``start`` … ``stop − 1``."""

    start: int
    stop: int
    inputs: Tensors  # the leaves of the call
    wanted: Sequence[bool]  # of each leaf, whether it receives a gradient
    passes: Sequence[bool]  # of each part of the state after, whether a gradient goes through it
    state_after: Tensors
    ambient_after: Snapshot


@dataclass
class Gradients:
    """What a backward pass starts from and collects; outputs and inputs have time first.

    ``outside`` is autocast where the backward pass was asked for: a recomputation replays the
    forward pass's (rule 4), but ordinary autograd differentiates under the caller's. Inputs that
    are ``wanted`` are given room as soon as there is a gradient.
    """

    outputs: Sequence[Gradient]  # of one call's outputs, if the core sums
    states: list[Gradient]  # of the state reached so far
    inputs: list[Gradient]
    parameters: list[Gradient]
    length: int
    layout: Layout
    outside: AbstractContextManager[Any] = field(default_factory=nullcontext)
    wanted: Sequence[Tensor | None] = ()
    read: Inputs | None = None

    def of_outputs(self, index: int | slice) -> Sequence[Gradient]:
        """The gradients of one call's outputs."""
        return self.layout.parts(self.outputs, index)

    def take_inputs(self, index: int | slice, shares: list[Gradient]) -> None:
        """Keep the input gradients of one call, the latest call's first."""
        for k, x in enumerate(self.wanted):
            used = any(share is not None for share in shares[k :: len(self.wanted)])
            if x is not None and used and self.inputs[k] is None:
                self.inputs[k] = torch.zeros_like(x)
        self.layout.take(self.inputs, index, shares)


class RangeCore(ABC):
    """A :class:`Core` that knows its own derivative, and says itself what its tape is."""

    fused = True
    sums = False
    strides = True
    parameters: Tensors
    ambient: Ambient

    @property
    def joins(self) -> bool:
        return self.fused

    def cuts(self, actions: Iterable[Action], length: int) -> Sequence[int]:
        return () if self.fused else range(length)

    def stored(self, state: Tensors) -> Sequence[Tensor | Packed]:
        return state

    def room(self, inputs: Inputs) -> Tensors:
        return []

    @abstractmethod
    def totals(self) -> list[Gradient]: ...

    @abstractmethod
    def advance(
        self, inputs: Inputs, start: int, stops: Sequence[int], state: Tensors, emit: Emit | None
    ) -> list[Tensors]: ...

    @abstractmethod
    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> Tape: ...

    @abstractmethod
    def backpropagate(self, tape: Any, gradients: Gradients) -> None: ...

    def complete(self) -> None:
        return None

    def ordinary(
        self, layout: Layout, inputs: Tensors, state: Tensors, gate: Gate
    ) -> tuple[Tensors, Tensors, Tensors]:
        raise RetrogradeError(NO_SECOND_ORDER)


def window(core: Core, start: int, stop: int) -> int | slice:
    """The index of a call's part in a tensor over all steps."""
    return slice(start, stop) if core.fused else start


def as_leaf(t: Tensor) -> Tensor:
    """A state tensor cut off from its past, gradients being followed from here on."""
    return t.detach().requires_grad_(t.is_floating_point() or t.is_complex())
