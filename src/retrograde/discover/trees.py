"""Pytrees of tensors as flat lists and back; a ``None`` is part of the structure, not a leaf."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from retrograde.errors import CellError

__all__ = ["Structure", "flatten"]


@dataclass(frozen=True)
class Structure:
    """What a flat list of tensors once was."""

    spec: pytree.TreeSpec  # a None is a leaf in it
    absent: tuple[bool, ...]  # which leaves are None

    def unflatten(self, tensors: Sequence[Tensor | None]) -> Any:
        """The tree again, with these tensors as its leaves."""
        if self is _LEAF:
            return tensors[0]
        if self is _PAIR:
            return tuple(tensors)
        rest = iter(tensors)
        leaves = [None if absent else next(rest) for absent in self.absent]
        return pytree.tree_unflatten(leaves, self.spec)

    def __str__(self) -> str:
        leaves = [None if absent else "*" for absent in self.absent]
        return str(pytree.tree_unflatten(leaves, self.spec)).replace("'*'", "*")


def flatten(tree: Any, name: str) -> tuple[list[Tensor], Structure]:
    """The tensors of a tree, in order, and its structure.

    Raises:
        CellError: a leaf is neither a tensor nor ``None``.

    Example:
        >>> import torch
        >>> leaves, structure = flatten({"h": torch.zeros(2), "c": None}, "state")
        >>> len(leaves), str(structure)
        (1, "{'h': *, 'c': None}")
    """
    if isinstance(tree, Tensor):
        return [tree], _LEAF
    if type(tree) is tuple and len(tree) == 2 and all(isinstance(t, Tensor) for t in tree):
        return list(tree), _PAIR
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise CellError(
                f"the {name} holds a {type(leaf).__name__}: expected a pytree of tensors; "
                "turn numbers into tensors"
            )
    return [t for t in leaves if t is not None], Structure(spec, tuple(t is None for t in leaves))


# What most cells have for input, output and state: known by sight, since every step asks.
_LEAF = Structure(pytree.tree_flatten(0)[1], (False,))
_PAIR = Structure(pytree.tree_flatten((0, 0))[1], (False, False))
