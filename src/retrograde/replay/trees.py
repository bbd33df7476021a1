"""Pytrees of tensors as flat lists and back; a ``None`` is part of the structure, not a leaf.

Where numbers are allowed, as in a state, they become tensors of one number, so that each is stored
with its state.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retrograde.errors import CellError

Tensors = list[Tensor]


def distinct(tensors: Iterable[Tensor]) -> Tensors:
    """Return tensors in order, each once."""
    return list({id(t): t for t in tensors}.values())


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Structure:
    """The structure of a tree that was flattened. ``kinds`` says what each leaf of ``spec`` is: a
    tensor, or by its type a number or a None."""

    spec: pytree.TreeSpec
    kinds: tuple[type, ...]

    def unflatten(self, tensors: Sequence[Tensor | None]) -> Any:
        """Return the tree with these tensors as its leaves."""
        if self is LEAF:
            return tensors[0]
        if self is _PAIR:
            return tuple(tensors)
        rest = iter(tensors)
        return pytree.tree_unflatten((_leaf(kind, rest) for kind in self.kinds), self.spec)

    def __str__(self) -> str:
        names = {Tensor: "*", type(None): None}
        leaves = [names.get(kind, kind.__name__) for kind in self.kinds]
        return str(pytree.tree_unflatten(leaves, self.spec)).replace("'*'", "*")


def _leaf(kind: type, rest: Iterator[Any]) -> Any:
    if kind is type(None):
        return None
    tensor = next(rest)
    return tensor if kind is Tensor or tensor is None else tensor.detach().item()


def flatten(tree: Any, name: str, *, numbers: bool = False) -> tuple[list[Tensor], Structure]:
    """Return the tensors of a tree, in order, and its structure; ``numbers`` become tensors too.

    Raises:
        CellError: a leaf is neither a tensor nor ``None``, nor a number where they are allowed.

    Example:
        >>> import torch
        >>> leaves, structure = flatten({"h": torch.zeros(2), "c": None}, "state")
        >>> len(leaves), str(structure)
        (1, "{'h': *, 'c': None}")
    """
    if isinstance(tree, Tensor):
        return [tree], LEAF
    if type(tree) is tuple and len(tree) == 2 and all(isinstance(t, Tensor) for t in tree):
        return list(tree), _PAIR
    leaves, spec = pytree.tree_flatten(tree)
    tensors: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif numbers and type(leaf) in _NUMBERS:
            tensors.append(torch.tensor(leaf, dtype=_NUMBERS[type(leaf)], device="cpu"))
        elif leaf is not None:
            actual = type(leaf).__name__
            remedy = _REMEDIES.get(actual, "turn numbers into tensors")
            if dataclasses.is_dataclass(leaf):
                remedy = f"make it one by torch.export.register_dataclass({actual})"
            raise CellError(f"got a {actual} in the {name}: expected a pytree of tensors; {remedy}")
    kinds = (Tensor if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    return tensors, Structure(spec, tuple(kinds))


_REMEDIES = {
    "ndarray": "give torch.from_numpy(array)",
    "range": "for the numbers of the steps give torch.arange(T)",
}


def flatten_inputs(tree: Any) -> tuple[list[Tensor], Structure]:
    """:func:`flatten` for the inputs of all steps, with time first. Raises CellError also for a
    list of tensors of one shape, which looks like one tensor for each step."""
    shapes = {getattr(t, "shape", None) for t in tree} if type(tree) is list else set()
    if len(shapes) == 1 < len(tree) and None not in shapes:
        raise CellError(
            f"the inputs are a list of {len(tree)} tensors of shape {tuple(tree[0].shape)}: "
            "expected tensors with time first; of one tensor for each step make "
            "torch.stack(inputs), and of several tensors for every step a tuple"
        )
    return flatten(tree, "inputs")


def flatten_state(tree: Any, name: str = "state") -> tuple[list[Tensor], Structure]:
    """:func:`flatten` for a state, which may hold numbers."""
    return flatten(tree, name, numbers=True)


# The structures of most inputs, outputs and states: prebuilt, since every step needs them.
LEAF = Structure(pytree.tree_flatten(0)[1], (Tensor,))
_PAIR = Structure(pytree.tree_flatten((0, 0))[1], (Tensor, Tensor))
