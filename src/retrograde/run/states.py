"""Hidden states between steps: without extra memory, and with the same bits.

A cell may hand on a view: the last tensor of a stack, a chunk of a wider one. Kept as it is, it
would hold all of that memory. But a kernel rounds by strides and alignment, so a contiguous copy
would not give the bits of ordinary autograd (rule 1). A state between two ranges is therefore
copied without the surrounding memory, with its strides and alignment.

Two parts of the state may be the same tensor, and stay the same. Autograd adds all gradients of one
tensor in one order; with two tensors the order would differ.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from retrograde.errors import CellError

T = TypeVar("T")
S = TypeVar("S")
Like = tuple[torch.Size, torch.dtype, torch.device]

#: Allocations begin at a multiple of so many bytes.
_ALIGNMENT = 64


def each_once(function: Callable[[T], S], values: Iterable[T]) -> list[S]:
    """Apply a function to every value; the same object gives the same result."""
    values = list(values)
    if len(values) == 1:
        return [function(values[0])]
    by_id: dict[int, S] = {}
    return [
        by_id[id(v)] if id(v) in by_id else by_id.setdefault(id(v), function(v)) for v in values
    ]


def shaped(sample: Any, module: Any) -> Any:
    """Return an input, or one of the given shape for a module, with any numbers."""
    if not (isinstance(sample, tuple | torch.Size) and all(type(n) is int for n in sample)):
        return sample
    like = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
    return torch.empty(sample, device="cpu") if like is None else like.new_empty(sample)


def bytes_of_gradients(tensors: Iterable[Tensor]) -> int:
    """Return what the gradients of some tensors take, of those that require one."""
    return sum(t.nbytes for t in tensors if t.requires_grad)


def renewed(t: Tensor) -> Tensor:
    """Return a state as the plain loop hands it on, but without the graph behind it. It requires a
    gradient, has a history and has attributes where the plain loop's has. What has no history is
    returned as it is."""
    return entry(t)[1]


def renewed_apart(t: Tensor, *, linked: bool = False) -> Tensor:
    """Return a renewed state in its own memory, to be kept. If it was computed without a graph,
    ``linked`` says that the plain loop's requires a gradient."""
    new = apart(t.detach())
    if t.requires_grad or (linked and is_real(t)):
        with torch.enable_grad():
            new = new.requires_grad_()[...]
    return with_attributes(new, t)


def with_attributes(new: Tensor, old: Tensor) -> Tensor:
    """Give a tensor the attributes of the one that it stands for."""
    attributes = vars(old)
    if any(isinstance(v, Tensor) and v.grad_fn is not None for v in attributes.values()):
        raise CellError(
            f"the cell's state has the attributes {', '.join(attributes)}, of which one is a "
            "tensor with a history: expected all tensors that a step hands on as parts of the state"
        )
    vars(new).update(attributes)
    return new


def entry(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return a leaf to differentiate a range by, and the state that the range begins with."""
    if t.grad_fn is None:
        return t, t
    leaf = t.detach().requires_grad_()
    return leaf, with_attributes(leaf[...], t)


def apart(t: Tensor) -> Tensor:
    """Return a copy in its own memory, with strides and alignment; itself if that saves nothing."""
    if t.layout is not torch.strided:
        return t
    pairs = zip(t.shape, t.stride(), strict=True)
    span = 1 + sum((n - 1) * s for n, s in pairs) if t.numel() else 0
    if t.untyped_storage().nbytes() <= max(span * t.itemsize + _ALIGNMENT, t.nbytes):
        return t
    shift = t.data_ptr() % _ALIGNMENT // t.itemsize  # from an aligned address to the first number
    room = t.new_empty(shift + span)
    room[shift:].copy_(t.as_strided((span,), (1,)))
    return room.as_strided(t.shape, t.stride(), shift)


def is_real(t: Tensor) -> bool:
    """Return whether a tensor can require a gradient."""
    return t.is_floating_point() or t.is_complex()


def like_of(t: Tensor) -> Like:
    """Return the shape, dtype and device that a tensor must have to be like this one."""
    return t.shape, t.dtype, t.device


def device_of(*tensors: Tensor) -> torch.device:
    """Return the device of some tensors, of which those of single numbers may be on the CPU."""
    devices = [t.device for t in tensors]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
