"""The arguments of a call that runs again: the same objects, without the graph that they came from.

A rerun finds what the call found. One tensor that was given twice is one tensor again. A tensor
without a gradient, or a parameter, is the very object. Another one is replaced by a stand-in, which
has its class, its attributes, and a node or none, as the tensor had.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from retrograde.models.lean.recipes import overwritten
from retrograde.models.rows.arguments import Arguments, unflatten
from retrograde.replay.fingerprints import Fingerprint, fingerprint, verify
from retrograde.replay.surroundings import version


@dataclass
class RerunArgument:
    """An argument. Where the row has the tensor, there is no value, but its ``place`` in the result
    of the call before, and its fingerprint."""

    value: Any
    source: "ref[Tensor] | None" = None
    wants: bool = False
    has_node: bool = False
    version: int = 0
    place: int = 0
    print: Fingerprint = None
    turn: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, leaf: object) -> "RerunArgument":
        if not isinstance(leaf, Tensor):
            return cls(leaf)
        is_itself = not leaf.requires_grad or isinstance(leaf, nn.Parameter)
        value, has_node = leaf if is_itself else leaf.detach(), leaf.grad_fn is not None
        attributes = {**vars(leaf)}
        return cls(value, ref(leaf), not is_itself, has_node, version(leaf), attributes=attributes)

    def is_hidden(self) -> bool:
        return self.source is not None and self.value is None

    def hide(self, place: int, turn: int) -> None:
        """Let go the tensor, which is in this place of the result of the call before."""
        self.print, self.turn = fingerprint(self.value, turn), turn
        self.value, self.place = None, place

    def is_overwritten(self) -> bool:
        has_tensor = self.source is not None and self.value is not None
        return has_tensor and version(self.value) != self.version

    def find(self, state: Sequence[Tensor | None], differs: Callable[[], Exception]) -> Any:
        """Return the value, perhaps from the state that the row has computed again. ``differs``
        makes the error for a tensor there that is not the one that the call was given."""
        if self.is_overwritten():
            raise overwritten(self.value.shape, version(self.value), self.version)
        if not self.is_hidden():
            return self.value
        found = state[self.place]
        assert found is not None
        verify(self.print, found, differs, self.turn)
        return found


class RerunArguments:
    """The arguments of one call: ``each`` of them, and which are one tensor."""

    def __init__(self, given: Arguments) -> None:
        leaves, self.spec = given.leaves, given.spec
        self.each = [RerunArgument.of(leaf) for leaf in leaves]
        first: dict[int, int] = {}
        ids = [id(leaf) if isinstance(leaf, Tensor) else -n for n, leaf in enumerate(leaves, 1)]
        self.same = [first.setdefault(at, n) for n, at in enumerate(ids)]

    def enter(self, values: Sequence[Any]) -> tuple[Any, Any, list[Tensor]]:
        """Return the arguments and keyword arguments with some values, for another run, and those
        tensors that want a gradient."""
        leaves = [*values]
        wanted = [n for n, one in enumerate(self.each) if one.wants and self.same[n] == n]
        with torch.enable_grad():
            inner = [n for n in wanted if self.each[n].has_node]
            for n, t in zip(inner, with_nodes([values[n] for n in inner]), strict=True):
                leaves[n] = t
            for n in wanted:
                if not self.each[n].has_node:
                    leaves[n] = values[n].detach().requires_grad_()
        for n, one in enumerate(self.each):
            if one.attributes and leaves[n] is not one.value:
                vars(leaves[n]).update(one.attributes)
        leaves = [leaves[n] for n in self.same]
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs, [leaves[n] for n in wanted]


def with_nodes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors that require a gradient, as a layer before would have returned them."""
    if not tensors:
        return ()
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    return tuple(_Enter.apply(anchor, *(t.detach() for t in tensors)))  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """Tensors in the form that a preceding layer would have returned.

    Autograd would hold a leaf as long as the graph, even one that no layer refers to.
    """

    @staticmethod
    def forward(ctx: object, anchor: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in state)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        raise AssertionError("gradients are taken before they get here")
