"""The arguments of a call, and the tensors in these and in results."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from retrograde.sizes.cache import signature

_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), nn.Module)
_PLAIN += (torch.dtype, torch.device, torch.Size)


class Arguments:
    """The arguments of a call, with copies of the caller's lists and dicts.

    ``slot`` is the position or name of the state among them.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, slot: int | str = 0
    ) -> None:
        self.slot = slot
        self.spec: pytree.TreeSpec | None = None  # of positional tensors alone, the usual case
        self.leaves: list[Any] = [*args]
        if kwargs or not all(isinstance(leaf, Tensor) for leaf in args):
            self.leaves, self.spec = pytree.tree_flatten((args, kwargs or {}))
        self.args, self.kwargs = unflatten(self.leaves, self.spec)

    @property
    def state(self) -> Any:
        """The state, or None if there is no such argument."""
        held: Any = dict(enumerate(self.args)) if isinstance(self.slot, int) else self.kwargs
        return held.get(self.slot)

    def kind(self) -> Hashable:
        """Return their key: the structure, the tensors' signatures, and the other values."""
        known = (signature(v) if isinstance(v, Tensor) else (type(v), v) for v in self.leaves)
        return str(self.spec), tuple(known)

    def refusal(self) -> str | None:
        """Return the reason why a layer cannot be recomputed with these arguments, or None."""
        for leaf in self.leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                return (
                    f"is given a {type(leaf).__name__}, which it may change: expected tensors and "
                    "numbers; of a language model, call it with use_cache=False"
                )
        return None


def tied(weights: Iterable[Iterable[Tensor]]) -> frozenset[Tensor]:
    """Return the weights that several calls have, given those of each."""
    users = Counter(p for own in weights for p in own)
    return frozenset(p for p, count in users.items() if count > 1)


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec | None) -> tuple[Any, Any]:
    """Return the arguments and keyword arguments that have some leaves."""
    if spec is None:
        return tuple(leaves), {}
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in a pytree."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class ResultBytes(TorchDispatchMode):
    """Sums up the bytes of what torch's operations return in a block. It notes whether some sizes
    depend on data, as those of ``nonzero`` do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self.varies = 0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler at the first operation, for a second

    def __enter__(self) -> Any:
        self.nbytes = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.varies |= not _BY_DATA.isdisjoint(func.tags)
        if not any(one.alias_info for one in func._schema.returns):
            self.nbytes += sum(t.nbytes for t in tensors_in(result) if t.layout is torch.strided)
        return result


_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def made_by(result: object, given: object) -> list[Tensor | None]:
    """Return the tensors of a result; None for one that lies in memory of what was given."""
    theirs = {t.untyped_storage().data_ptr() for t in tensors_in(given)}
    return [t if t.untyped_storage().data_ptr() not in theirs else None for t in tensors_in(result)]
