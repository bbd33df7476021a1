"""The links of a deep chain: its layers, as far as each can be run apart from the others.

A layer that writes to its input (an in-place ReLU), or that only reshapes it (``Flatten``), shares
memory with the layer before it. Both become one link, so a state that is kept is never written to.
What a link depends on besides its input is learnt from one trial call, of which no trace is left.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.cores.cell import Like, like_of
from retrograde.discover.captured import foreign_tensors
from retrograde.discover.surroundings import Ambient, Steady, version
from retrograde.discover.trees import Structure, flatten
from retrograde.errors import CellError

__all__ = ["WRITES", "Laid", "Link", "Links", "check_leaves", "enter", "run_layers"]

Tensors = list[Tensor]
Laid = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


@dataclass(frozen=True, eq=False)
class Link:
    """One layer, or a few that share memory; ``given`` and ``returned`` are structures.

    Attributes:
        wanted: which tensors of its input a gradient is wanted for.
        passes: which tensors of its output pass a gradient on.
        own: its parameters that a gradient is wanted for, each once.
        leaves: the nodes of ``own`` in a graph.
        reads: parameters, buffers and captured tensors, without the buffers it changes.
        output_bytes: what its output takes beyond the memory of its input.
        hands_on: numbers of the earlier links whose output it hands on unchanged.
        laid: how each tensor of its input lies in memory: shape, strides, dtype, device, and the
            bytes around it.
        make: all that its bytes and seconds depend on besides ``laid``, if it is made of torch's
            own modules; else None.
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
        """The next state; refused if it differs in form from the trial's, or if its input was
        written to."""
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
        return outputs


@dataclass(frozen=True, eq=False)
class Links:
    """All links of a chain: ``prefix``, through which no gradient goes and which runs once, and
    ``chain``. No link of ``chain`` draws from the generators in ``steady``."""

    prefix: tuple[Link, ...]
    chain: tuple[Link, ...]
    steady: Steady

    @property
    def returned(self) -> Structure:
        """The structure of the last one's output."""
        return (*self.prefix, *self.chain)[-1].returned


class _Enter(torch.autograd.Function):
    """A state as the layer before would have returned it: autograd would hold a leaf, even one
    that no layer refers to, as long as the graph."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in state)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        raise AssertionError("gradients are taken before they get here")


def enter(state: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensor]:
    """A state to record a link from, with gradients where they are ``wanted``, and the leaf that it
    comes from in the graph."""
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    x = [t.detach() for t in state]
    if any(wanted):
        some = _Enter.apply(anchor, *(t for t, want in zip(x, wanted, strict=True) if want))  # type: ignore[no-untyped-call]
        rest = iter(some)
        x = [next(rest) if want else t for t, want in zip(x, wanted, strict=True)]
    return x, anchor


#: What is raised where a layer changes a state that is used again: the layer, and whose state.
WRITES = (
    "layer {} writes in place to {}, which is used again: expected it to leave that as it is; give "
    "it inplace=False, or let it return a new tensor"
)


def check_leaves(
    name: str, outputs: Tensors, mark: int, known: Tensors, nodes: Collection[Any] = ()
) -> None:
    """Raise CellError if a link uses a tensor other than ``known`` whose gradient would be lost
    (rule 5). ``mark`` is autograd's sequence number when recording began. ``nodes``, those of known
    leaves, only save time."""
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
    """Run layers in turn on a flat state: the flat output, and its structure."""
    value = given.unflatten(state)
    del state
    for layer in layers:
        value = layer(value)
    return flatten(value, f"output of layer {name}")
