"""The protocol of a core: a recurrence that can be cut into ranges of steps.

A core advances steps and keeps only states; it records a range; it backpropagates a recorded range;
and it provides totals for the parameters' gradients. It does so by ordinary autograd
(:mod:`retrograde.run.autograd_core`), or by its own derivative.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from retrograde.errors import CellError, RetrogradeError
from retrograde.replay.surroundings import Snapshot, Surroundings
from retrograde.replay.trees import Tensors
from retrograde.run.layout import Inputs, Layout
from retrograde.run.prints import Prints
from retrograde.run.settled import Settled
from retrograde.run.states import is_real
from retrograde.schedule import Action

Gradient = Tensor | None
#: Takes the outputs of a call: ``emit(start, stop, outputs)``; of a cell's step also its state.
Emit = Callable[..., object]


def discard(start: int, stop: int, outputs: Tensors, *_: Tensors) -> None:
    """The :data:`Emit` of a repeated forward pass, whose outputs the caller has already. The
    backward pass uses no ``Emit`` at all."""


@contextmanager
def unsaved() -> Iterator[None]:
    """Run layers in a block with a graph that saves nothing. So the kernels run that run with a
    graph. Without gradients, torch takes other ones for attention in ``eval()`` mode, or attention
    whose bias wants a gradient."""
    with torch.enable_grad(), saved_tensors_hooks(lambda _: None, _unpack):  # type: ignore[arg-type]
        yield


def _unpack(_: None) -> Tensor:
    raise CellError(
        "a tensor with a gradient was read that another run had left behind: expected a layer or a "
        "step to read its arguments, parameters and buffers only; hand tensors on as results"
    )


@contextmanager
def hooked(what: str) -> Iterator[None]:
    """Refuse code, by its name, in which no hooks may save tensors, as within torch.func.grad."""
    code = disable_saved_tensors_hooks.__wrapped__.__code__  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if not any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__)):
            raise
        raise CellError(
            f"{what} cannot be run with hooks for saved tensors ({error}): expected no such code; "
            "leave it out of what has a budget, or is lean"
        ) from error


def raise_again(error: Exception, what: str) -> NoReturn:
    """Raise an error of a rerun: as one of ours, since the first run did not raise it."""
    if isinstance(error, RetrogradeError | torch.OutOfMemoryError):
        raise error
    raise RetrogradeError(
        f"{what} raises {error!r} when it runs again, and did not when it ran first: expected the "
        "same both times; let it depend on its arguments, its state, parameters and buffers only, "
        "or use memory=None"
    ) from error


class Core(ABC):
    """A recurrence on flat lists of tensors, as the executor runs it.

    A ``fused`` core takes a range of steps in a call, time first, rather than one step. If it
    ``output_is_total``, an output is a tensor to sum over calls, rather than a part for each step.
    If it ``advances_many``, one call may run several advances, and save states between.
    """

    fused = True
    output_is_total = False
    advances_many = False
    stepwise = False  # states require a gradient, and have a history, as in the plain loop
    settled = Settled()  # of a cell, what its steps have shown
    surroundings: Surroundings  # the surroundings that a step depends on

    @property
    @abstractmethod
    def parameters(self) -> Tensors:
        """Every tensor, besides inputs and state, that receives a gradient."""

    @property
    def records_ranges(self) -> bool:
        """Whether a tape can have several steps of a range."""
        return self.fused

    @abstractmethod
    def totals(self) -> list[Gradient]:
        """Return the parameters' totals; None for one that the first share starts."""

    def room(self, inputs: Inputs) -> Tensors:
        """Return the tensors for the outputs of all steps, if the core writes them itself. The
        backward pass reads them again. The list is empty if the core emits its outputs."""
        return []

    def cuts(self, actions: Iterable[Action], length: int) -> Sequence[int]:
        """Return the steps at which a recording is divided into tapes, ascending."""
        return () if self.records_ranges else range(length)

    @abstractmethod
    def advance(
        self, inputs: Inputs, start: int, stops: Sequence[int], state: Tensors, emit: Emit | None
    ) -> list[Tensors]:
        """Run steps from ``start`` to the last of some stops, and keep the state at each stop."""

    @abstractmethod
    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> "Tape":
        """Run a range of steps and keep what its backward pass needs; ``state`` may be emptied."""

    @abstractmethod
    def backpropagate(self, tape: Any, gradients: "Gradients") -> None:
        """Backpropagate the steps of a tape, collect their gradients, and consume the tape."""

    def prints(self, length: int) -> Prints | None:
        """Return where to note what the steps of a pass compute, if they run a caller's code."""
        return None

    def complete(self) -> None:  # noqa: B027
        """Note that every step was recorded and backpropagated."""


@dataclass
class Tape:
    """The internal states of a recorded range, steps ``start`` … ``stop − 1``."""

    start: int
    stop: int
    inputs: Tensors  # the leaves of the call
    wanted: Sequence[bool]  # for each leaf, whether it receives a gradient
    passes: Sequence[bool]  # for each part of the state after, whether a gradient flows through it
    state_after: Tensors
    ambient_after: Snapshot


@dataclass
class Gradients:
    """The gradients that a backward pass starts from and collects; outputs and inputs have time
    first.

    ``outside`` is autocast where the backward pass was called. A recomputation replays the forward
    pass's autocast (rule 4), but ordinary autograd differentiates under the caller's. Inputs that
    are ``wanted`` get memory as soon as there is a gradient.
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
    asked: Sequence[bool] = ()  # which parameters get one from autograd; all, if this is empty

    def of_outputs(self, index: int | slice) -> Sequence[Gradient]:
        """Return the gradients of one call's outputs."""
        return self.layout.parts(self.outputs, index)

    def take_inputs(self, index: int | slice, shares: list[Gradient]) -> None:
        """Keep the input gradients of one call; later calls come first."""
        for k, (x, share) in enumerate(zip(self.wanted, shares, strict=False)):
            if x is not None and share is not None and self.inputs[k] is None:
                self.inputs[k] = torch.zeros_like(x)
        self.layout.take(self.inputs, index, shares)


def window(core: Core, start: int, stop: int) -> int | slice:
    """Return the index of a call's part, or of several steps', in a tensor over all steps."""
    return slice(start, stop) if core.fused or stop - start > 1 else start


def as_leaf(t: Tensor) -> Tensor:
    """Return a state tensor detached from its history, as a new leaf."""
    return t.detach().requires_grad_(is_real(t))
