"""Dropout's zeros and ones on a CPU, drawn as torch draws them, several times as fast.

torch draws a mask number by number, so a dropout takes longer than the product before it. Here
vectors draw it (:func:`retrograde.kernels.cpu_masks.fill_as_torch`). The masks have the same bits,
and leave the generator where torch would. That is tried once in a process. Where torch draws
otherwise, as on Intel's processors, torch's own dropout runs.
"""

from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from retrograde.replay.fingerprints import in_order

_FEWEST = 4096  # numbers of a mask that is drawn here


class Draws(TorchFunctionMode):
    """Large masks of dropout within a block are drawn here. ``drawn``: how many numbers were."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling() or func not in DRAWING:
            return func(*args, **(kwargs or {}))
        return self.call(func, *args, **(kwargs or {}))

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call one of the functions that draw masks."""
        first = args[0] if args else None
        if type(first) is not Tensor or not first.is_cpu or is_functorch_wrapped_tensor(first):
            return func(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack():  # somebody watches what is drawn
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            if not kwargs.get("training", True) or args[10:11] == (0,):
                return func(*args, **kwargs)
            with self:
                return _attention(*args, **kwargs)
        if func is functional.dropout and _is_ours(*args, **kwargs):
            return self._dropout(*args, **kwargs)
        attends = func is functional.scaled_dot_product_attention
        is_off = attends and not _dropout_of(*args, **kwargs)
        if func is functional.dropout or is_off or not _draws_as_torch():
            return func(*args, **kwargs)
        with _Bernoulli(self.bernoulli):
            return func(*args, **kwargs)

    def bernoulli(self, target: Tensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
        """Do as ``target.bernoulli_(p)`` does."""
        from retrograde.kernels.cpu_masks import fill_as_torch

        ours = _is_large(target) and generator is None and 0 <= p <= 1
        flat = in_order(target) if ours else None
        if flat is not None:
            self.drawn += len(flat)
            if fill_as_torch(flat, p, torch.default_generator):
                return target
        return _BERNOULLI(target, p, generator=generator)  # type: ignore[no-any-return]

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Call the operations that torch's dropout calls on a CPU."""
        noise = self.bernoulli(torch.empty_like(input), 1 - p).div_(1 - p)
        return input.mul_(noise) if inplace else input * noise


class _Bernoulli(TorchDispatchMode):
    """Draws masks by another function. Each operation takes some microseconds."""

    def __init__(self, draw: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draw = draw

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, and from wrapping each call."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self.draw if func is _BERNOULLI else func)(*args, **(kwargs or {}))


@cache
def _draws_as_torch() -> bool:
    """Return whether masks and generators are the same as torch's own on this machine."""
    from retrograde.kernels.cpu_masks import fill_as_torch

    generator = torch.Generator("cpu").manual_seed(1)
    for p, rows in ((0.1, 9001), (0.5, 2048), (1 / 3, 4097)):
        torch.randint(9, (1,), generator=generator, device="cpu")  # one word, and masks take two
        before, ours = generator.get_state(), torch.empty(3, rows, device="cpu").t()
        theirs = torch.empty(3, rows, device="cpu").t().bernoulli_(p, generator=generator)
        after = generator.get_state()
        generator.set_state(before)
        if not fill_as_torch(ours.t().view(-1), p, generator) or not torch.equal(ours, theirs):
            return False
        if not torch.equal(generator.get_state(), after):
            return False
    return True


def _is_ours(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Return whether a dropout has the bits of the operations that are called here."""
    if not (training and 0 < p < 1 and _is_large(input) and _draws_as_torch()):
        return False
    if input.dtype not in _SAME:
        mask = torch.arange(99, dtype=input.dtype, device="cpu") % 2
        with _Bernoulli(lambda target, *_, **__: target.copy_(mask)):
            expected = functional.dropout(mask + 3, p)
        _SAME[input.dtype] = torch.equal(expected, (mask + 3) * mask.div_(1 - p))
    return _SAME[input.dtype]


def _dropout_of(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any,
    **__: Any,
) -> float:  # fmt: skip
    return dropout_p


def _is_large(t: Tensor) -> bool:
    return t.is_cpu and t.is_floating_point() and t.numel() >= _FEWEST


_SAME: dict[torch.dtype, bool] = {}
_BERNOULLI = torch.ops.aten.bernoulli_.float
#: The functions that draw masks, or may.
DRAWING = {
    functional.dropout, functional.multi_head_attention_forward,
    functional.scaled_dot_product_attention, torch.dropout, torch.dropout_, Tensor.bernoulli_,
}  # fmt: skip
#: The same code, which does not look for modes first. So these see the functions that it calls.
_attention = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda _: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)
