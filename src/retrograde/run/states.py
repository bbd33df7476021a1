"""Hidden states between steps: without extra memory, and with the same bits.

A cell may hand on a view: the last tensor of a stack, a chunk of a wider one. Kept as it is, it
would hold all of that memory. But a kernel rounds by strides and alignment, so a contiguous copy
would not give the bits of ordinary autograd (rule 1). A state between two ranges is therefore
copied without the surrounding memory, with its strides and alignment. A stored state is packed, and
laid out again when it is loaded.

Two parts of the state may be the same tensor, and stay the same. Autograd adds all gradients of one
tensor in one order; with two tensors the order would differ.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "Like", "Packed", "apart", "device_of", "each_once", "laid_bytes", "like_of", "pack",
    "stored_memory", "unpack",
]  # fmt: skip

T = TypeVar("T")
S = TypeVar("S")
Tensors = list[Tensor]
Like = tuple[torch.Size, torch.dtype, torch.device]

#: Allocations begin at a multiple of so many bytes.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Packed:
    """A tensor with gaps between its numbers, stored without them."""

    values: Tensor
    stride: tuple[int, ...]
    shift: int  # numbers of the allocation before the tensor

    def laid(self) -> Tensor:
        """Return the tensor in its first layout."""
        room = self.values.new_empty(self.shift + _span(self.values.shape, self.stride))
        return room.as_strided(self.values.shape, self.stride, self.shift).copy_(self.values)


def each_once(function: Callable[[T], S], values: Iterable[T]) -> list[S]:
    """Apply a function to every value; the same object gives the same result."""
    found: dict[int, S] = {}
    values = list(values)
    return [
        found[id(v)] if id(v) in found else found.setdefault(id(v), function(v)) for v in values
    ]


def apart(t: Tensor) -> Tensor:
    """Return a copy in its own memory, with strides and alignment; itself if that saves nothing."""
    if t.layout is not torch.strided:
        return t
    span, shift = _span(t.shape, t.stride()), _shift(t)
    if t.untyped_storage().nbytes() <= max(span * t.itemsize + _ALIGNMENT, t.nbytes):
        return t
    room = t.new_empty(shift + span)
    room[shift:].copy_(t.as_strided((span,), (1,)))
    return room.as_strided(t.shape, t.stride(), shift)


def pack(state: Sequence[Tensor]) -> list[Tensor | Packed]:
    """Return the stored form of a state, whose tensors are results of :func:`apart`."""
    return each_once(_packed, state)


def unpack(stored: Sequence[Tensor | Packed]) -> Tensors:
    """Return a stored state in its first layout."""
    return each_once(lambda t: t.laid() if isinstance(t, Packed) else t, stored)


def stored_memory(stored: Sequence[Tensor | Packed]) -> list[torch.UntypedStorage]:
    """Return the storages of a stored state, each once."""
    found = ((t.values if isinstance(t, Packed) else t).untyped_storage() for t in stored)
    return list({s.data_ptr(): s for s in found}.values())


def laid_bytes(state: Sequence[Tensor]) -> int:
    """Return the bytes of a state besides its stored form, where the two do not share memory."""
    each = {id(t): t for t in state if _has_gaps(t)}.values()
    return sum(t.untyped_storage().nbytes() for t in each)


def _packed(t: Tensor) -> Tensor | Packed:
    if not _has_gaps(t):
        return t
    return Packed(t.clone(memory_format=torch.contiguous_format), t.stride(), _shift(t))


def _has_gaps(t: Tensor) -> bool:
    """Return whether there are gaps between a tensor's numbers, which do not overlap."""
    if t.layout is not torch.strided or t.numel() == 0:
        return False
    pairs = zip(t.shape, t.stride(), strict=True)
    return _span(t.shape, t.stride()) > t.numel() and all(s > 0 for n, s in pairs if n > 1)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the distance from the first number of a tensor to its last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _shift(t: Tensor) -> int:
    """Return how many numbers lie between an aligned address and the first number of a tensor."""
    return t.data_ptr() % _ALIGNMENT // t.itemsize


def like_of(t: Tensor) -> Like:
    """Return the shape, dtype and device that a tensor must have to be like this one."""
    return t.shape, t.dtype, t.device


def device_of(*tensors: Tensor) -> torch.device:
    """Return the device of some tensors, of which those of single numbers may be on the CPU."""
    devices = [t.device for t in tensors]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
