"""What a program holds besides some of its calls."""

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_MOST = 256  # calls whose beginning is looked at: of thousands, each look would take longer


class Elsewhere(TorchFunctionMode):
    """Notes what is saved for a backward pass, and what is there whenever one of the calls begins.
    The latter is used later. While such a call goes back, the gradient of that waits as long."""

    def __init__(self) -> None:
        super().__init__()
        self._saved, self._made, self._theirs = (list[ref[Tensor]]() for _ in range(3))
        self._moments: list[dict[int, tuple[int, bool]]] = []  # bytes by address, and if it waits
        self._is_aside = False  # one of the calls runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made += [] if self._is_aside else _tensors(result)
        return result

    def pack(self, t: Tensor) -> Tensor:
        """Save a tensor, as a hook for saved tensors."""
        self.hold(t := t.detach())  # as an output of its own node it would keep that node alive
        return t

    def hold(self, tensors: Any) -> None:
        """Note tensors that are held until the backward pass."""
        self._saved += _tensors(tensors)

    def begin(self, given: Any) -> None:
        """Note what is there when a call begins, but for what that is given, and others made."""
        self._is_aside = True
        if len(self._moments) == _MOST:
            return
        self._made = [one for one in self._made if one() is not None]
        made, theirs = _memory(self._made), _memory([*_tensors(given), *self._theirs])
        waits = _memory(one for one in self._made if (t := one()) is not None and t.requires_grad)
        self._moments.append({at: (made[at], at in waits) for at in made.keys() - theirs.keys()})

    def end(self, result: Any) -> None:
        """Note the end of a call."""
        self._theirs += _tensors(result)
        self._is_aside = False

    def held_bytes(self, apart: Any) -> int:
        """Return the most bytes that were held, but for memory of the tensors ``apart``."""
        known, saved = _memory(_tensors(apart)), _memory(self._saved)
        either, later = {**known, **saved}, [0]
        for now in self._moments:
            counts = (n for at, (n, waits) in now.items() if at not in (known if waits else either))
            later.append(sum(counts))
        return sum(saved[at] for at in saved.keys() - known.keys()) + max(later)


def _tensors(value: Any) -> list[ref[Tensor]]:
    return [ref(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(references: Any) -> dict[int, int]:
    """Return the bytes of tensors' memory by its address, without that of sparse ones."""
    alive = (t for one in references if (t := one()) is not None and t.layout is torch.strided)
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
