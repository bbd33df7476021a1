"""The links of a deep chain: its layers, grouped where they cannot run separately.

A layer that writes to its input (an in-place ReLU), or only reshapes it (``Flatten``), shares
memory with the layer before it. Both become one link, so no later layer writes to a state that is
kept. One trial call finds what a link depends on besides its input. The trial leaves no trace.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.errors import CellError
from retrograde.replay.captured import foreign_tensors
from retrograde.replay.surroundings import Ambient, Steady, version
from retrograde.replay.trees import Structure, flatten
from retrograde.run.states import Like, like_of

__all__ = ["WRITES", "Laid", "Link", "Links", "check_leaves", "enter", "run_layers"]

Tensors = list[Tensor]
Laid = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


@dataclass(frozen=True, eq=False)
class Link:
    """One layer, or a few that share memory; ``given`` and ``returned`` are structures.

    Attributes:
        wanted: which tensors of its input need a gradient.
        passes: which tensors of its output pass a gradient on.
        own: its parameters that need a gradient, each once.
        leaves: the nodes of ``own`` in a graph.
        reads: parameters, buffers and captured tensors, without the buffers that it changes.
        output_bytes: the bytes of its output that do not share the memory of its input.
        hands_on: numbers of the earlier links whose output it returns unchanged.
        laid: how each tensor of its input lies in memory: shape, strides, dtype, device, and the
            bytes of the whole storage.
        make: everything besides ``laid`` that determines its bytes and seconds, if it consists of
            torch's own modules; else None.
    """

    name: str
    layers: tuple[nn.Module, ...]
    given: Structure
    returned: Structure
    like: tuple[Like, ...]
    wanted: tuple[bool, ...]
    passes: tuple[bool, ...]
    ambient: Ambient
    own: Tensors
    leaves: list[Any]
    reads: Tensors
    output_bytes: int
    hands_on: tuple[int, ...]
    laid: tuple[Laid, ...]
    make: Hashable

    def run(self, state: Tensors) -> Tensors:
        """Return the next state.

        Raises CellError if that state differs in form from the trial's, or passes a gradient on
        that the trial's did not. Raises it too if the link writes to its input.
        """
        versions = [version(t) for t in state]
        outputs, returned = run_layers(self.layers, self.given, state, self.name)
        if versions != [version(t) for t in state]:
            raise CellError(WRITES.format(self.name, "its input"))
        found = tuple(map(like_of, outputs))
        if returned != self.returned or found != self.like:
            raise CellError(
                f"layer {self.name} returned another structure, shape or dtype than for an input "
                "like this before: expected the same every time; use memory=None"
            )
        wanting = zip(outputs, self.passes, strict=True)
        if torch.is_grad_enabled() and any(t.requires_grad > passes for t, passes in wanting):
            raise CellError(
                f"layer {self.name} passes a gradient on, which it did not do when tried: expected "
                "the same at every call; use memory=None"
            )
        return outputs


@dataclass(frozen=True, eq=False)
class Links:
    """All links of a chain.

    No gradient goes through the links of ``prefix``, and these run once, as ordinary layers.
    ``chain`` has the others. Generators in ``steady`` move while none of them runs, if at all.
    """

    prefix: tuple[Link, ...]
    chain: tuple[Link, ...]
    steady: Steady

    @property
    def returned(self) -> Structure:
        """The structure of the last link's output."""
        return (*self.prefix, *self.chain)[-1].returned

    def enter(self, state: Tensors) -> Tensors:
        """Run the prefix, and return the state after it."""
        for link in self.prefix:
            state = link.run(state)
        return state


class _Enter(torch.autograd.Function):
    """A state in the form that a preceding layer would have returned.

    Autograd would hold a leaf as long as the graph, even one that no layer refers to.
    """

    @staticmethod
    def forward(ctx: object, anchor: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in state)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        raise AssertionError("gradients are taken before they get here")


def enter(state: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensor]:
    """Return a state from which to record a link, and the leaf that it comes from in the graph.

    The state's tensors require a gradient where one is ``wanted``.
    """
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    x = [t.detach() for t in state]
    if any(wanted):
        some = _Enter.apply(anchor, *(t for t, want in zip(x, wanted, strict=True) if want))  # type: ignore[no-untyped-call]
        rest = iter(some)
        x = [next(rest) if want else t for t, want in zip(x, wanted, strict=True)]
    return x, anchor


#: The message about a layer that writes to a state that is used again: the layer, and whose state.
WRITES = (
    "layer {} writes in place to {}, which is used again: expected it to leave that as it is; give "
    "it inplace=False, or let it return a new tensor"
)


def check_leaves(
    name: str, outputs: Tensors, mark: int, known: Tensors, nodes: Collection[Any] = ()
) -> None:
    """Raise CellError if a link uses an unknown tensor whose gradient would be lost (rule 5).

    ``known`` are the tensors that it may use. ``mark`` is autograd's sequence number at the start
    of recording. ``nodes``, those of known leaves, only save time.
    """
    leaves, older = foreign_tensors(outputs, mark, expected=nodes)
    if older or (leaves and not {id(t) for t in leaves} <= {id(t) for t in known}):
        raise CellError(
            f"layer {name} uses a tensor that wants a gradient and is none of its parameters: "
            "expected parameters only; register it as one, hand it on from layer to layer as part "
            "of a tuple, or use memory=None"
        )


def run_layers(
    layers: Sequence[nn.Module], given: Structure, state: Tensors, name: str
) -> tuple[Tensors, Structure]:
    """Run layers in turn on a flat state. Return the flat output, and its structure."""
    value = given.unflatten(state)
    del state
    for layer in layers:
        value = layer(value)
    return flatten(value, f"output of layer {name}")
