"""Dropout's zeros and ones on a CPU, drawn as torch draws them, several times as fast.

torch draws each number of a mask by itself, from a Mersenne Twister of 32-bit words: two words are
a number below one of 53 bits, which is compared with the probability. So a dropout takes longer
than the product before it. Here blocks of 624 words are computed by vectors. The masks have the
same bits, and leave the generator where torch would. That is tried once in a process. Where torch
draws otherwise, as on Intel's processors, torch's own dropout runs.

Reference: Matsumoto and Nishimura, "Mersenne Twister", 1998.
"""

from functools import cache
from math import ceil
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_LENGTH = 624  # words of the generator's state
_ONE, _FAR, _FIRST, _LAST = (np.uint64(n) for n in (1, 397, 227, 623))  # without a sign: faster
_CHUNK = 8192  # numbers at a time, so that NumPy takes little memory
_FEWEST = 4096  # numbers of a mask that is drawn here
_Words = NDArray[np.uint32]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _mixed(one: np.uint32, next: np.uint32, far: np.uint32) -> np.uint32:
    """Return the word that takes the place of ``one``."""
    both = np.uint32((one & np.uint32(0x80000000)) | (next & np.uint32(0x7FFFFFFF)))
    odd = np.uint32(-np.int32(both & np.uint32(1)))
    return np.uint32(far ^ np.uint32(both >> np.uint32(1)) ^ (odd & np.uint32(0x9908B0DF)))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _draw(state: _Words, at: int, below: np.uint64, words: _Words, out: NDArray[np.uint8]) -> int:
    """Draw zeros and ones, from word ``at`` of the state on. Return the place of the next word."""
    done, count = 0, 2 * len(out)
    while done < count:
        if at == _LENGTH:  # the next block
            for k in range(_FIRST):
                state[k] = _mixed(state[k], state[k + _ONE], state[k + _FAR])
            for k in range(_FIRST, _LAST):
                state[k] = _mixed(state[k], state[k + _ONE], state[k - _FIRST])
            state[_LAST] = _mixed(state[_LAST], state[0], state[_LAST - _FIRST])
            at = 0
        some = min(count - done, _LENGTH - at)
        begin, place = np.uint64(at), np.uint64(done)
        for k in range(np.uint64(some)):
            y = state[begin + k]
            y = np.uint32(y ^ np.uint32(y >> np.uint32(11)))
            y = np.uint32(y ^ (np.uint32(y << np.uint32(7)) & np.uint32(0x9D2C5680)))
            y = np.uint32(y ^ (np.uint32(y << np.uint32(15)) & np.uint32(0xEFC60000)))
            words[place + k] = np.uint32(y ^ np.uint32(y >> np.uint32(18)))
        at, done = at + some, done + some
    for k in range(np.uint64(len(out))):
        high = np.uint64(words[k + k] & np.uint32(0x1FFFFF)) << np.uint64(32)
        out[k] = (high | np.uint64(words[k + k + _ONE])) < below
    return at


def packed(zeros_and_ones: Tensor) -> Tensor:
    """Return a tensor of zeros and other numbers on a CPU as bits, in a tensor of bytes."""
    flat = _whole_numbers(zeros_and_ones.detach().contiguous())
    bits = torch.empty(-(-len(flat) // 8), dtype=torch.uint8, device="cpu")
    for at in range(0, len(flat), _CHUNK):
        some = np.packbits(flat[at : at + _CHUNK] != 0)
        bits.numpy()[at // 8 :][: len(some)] = some
    return bits


def unpack_into(bits: Tensor, target: Tensor) -> Tensor:
    """Write the bits as zeros and ones into a contiguous tensor, and return it."""
    flat, one, known = _whole_numbers(target), _whole_numbers(target.new_ones(1)), bits.numpy()
    for at in range(0, len(flat), _CHUNK):
        some = flat[at : at + _CHUNK]
        np.multiply(np.unpackbits(known[at // 8 :], count=len(some)), one, out=some)
    return target


def _whole_numbers(t: Tensor) -> Any:
    """Return a contiguous tensor's numbers as whole numbers of NumPy's that have their bits."""
    kind = (torch.uint8, torch.int16, torch.int32, torch.int64)[t.itemsize.bit_length() - 1]
    return t.view(-1).view(kind).numpy()


def _fill(target: Tensor, p: float, generator: torch.Generator) -> bool:
    """Do as ``target.bernoulli_(p)`` does on a CPU. Return whether nobody else drew meanwhile."""
    before = generator.get_state()
    after = before.clone()
    data = after.numpy()
    left, at, held = data[8:12].view(np.int32), data[16:24].view(np.int64), data[24 : 24 + 8 * 624]
    state = held.view(np.uint64).astype(np.uint32)
    place = int(at[0]) if left[0] > 1 else _LENGTH
    flat, one = _whole_numbers(target), _whole_numbers(target.new_ones(1))
    below, mask = np.uint64(ceil(p * 2.0**53)), np.empty(_CHUNK, np.uint8)
    words = np.empty(2 * _CHUNK, np.uint32)
    for start in range(0, len(flat), _CHUNK):
        some = flat[start : start + _CHUNK]
        place = _draw(state, place, below, words, mask[: len(some)])
        np.multiply(mask[: len(some)], one, out=some)
    held.view(np.uint64)[:] = state
    left[0], at[0] = _LENGTH + 1 - place, place
    if not torch.equal(generator.get_state(), before):
        return False
    generator.set_state(after)
    return True


class Draws(TorchFunctionMode):
    """Large masks of dropout within a block are drawn here. ``drawn``: how many numbers were."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in DRAWING or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self.call(func, *args, **(kwargs or {}))

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call one of the functions that draw masks."""
        first = args[0] if args else None
        if type(first) is not Tensor or not first.is_cpu or is_functorch_wrapped_tensor(first):
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            with self:
                return _attention(*args, **kwargs)
        if func is functional.dropout and _is_ours(*args, **kwargs):
            return self._dropout(*args, **kwargs)
        attends = func is functional.scaled_dot_product_attention
        if func is functional.dropout or (attends and not _dropout_of(*args, **kwargs)):
            return func(*args, **kwargs)
        with _Bernoulli(self.bernoulli):
            return func(*args, **kwargs)

    def bernoulli(self, target: Tensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
        """Do as ``target.bernoulli_(p)`` does."""
        ours = _is_large(target) and generator is None and 0 <= p <= 1
        flat = _in_order(target) if ours else None
        if flat is not None:
            self.drawn += len(flat)
            if _fill(flat, p, torch.default_generator):
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


def drawing() -> Draws | None:
    """Return a context in which large masks are drawn here; None if torch draws otherwise."""
    return Draws() if _draws_as_torch() else None


@cache
def _draws_as_torch() -> bool:
    """Return whether masks and generators are the same as torch's own on this machine."""
    generator = torch.Generator().manual_seed(1)
    for p, rows in ((0.1, 9001), (0.5, 2048), (1 / 3, 4097)):
        torch.randint(9, (1,), generator=generator, device="cpu")  # one word, and masks take two
        before, ours = generator.get_state(), torch.empty(3, rows, device="cpu").t()
        theirs = torch.empty(3, rows, device="cpu").t().bernoulli_(p, generator=generator)
        after = generator.get_state()
        generator.set_state(before)
        if not _fill(ours.t().view(-1), p, generator) or not torch.equal(ours, theirs):
            return False
        if not torch.equal(generator.get_state(), after):
            return False
    return True


def _is_ours(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Return whether a dropout has the bits of the operations that are called here."""
    if not (_is_large(input) and training and 0 < p < 1):
        return False
    if (p, input.dtype) not in _SAME:
        mask = torch.arange(99, dtype=input.dtype, device="cpu") % 2
        with _Bernoulli(lambda target, *_, **__: target.copy_(mask)):
            expected = functional.dropout(mask + 3, p)
        _SAME[p, input.dtype] = torch.equal(expected, (mask + 3) * mask.div_(1 - p))
    return _SAME[p, input.dtype]


def _dropout_of(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any,
    **__: Any,
) -> float:  # fmt: skip
    return dropout_p


def _in_order(t: Tensor) -> Tensor | None:
    """Return a tensor's numbers in the order of memory, or None if it has gaps."""
    step = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride != step:
            return None
        step *= size
    return t.as_strided((t.numel(),), (1,))


def _is_large(t: Tensor) -> bool:
    return t.is_cpu and t.is_floating_point() and t.numel() >= _FEWEST


_SAME: dict[tuple[float, torch.dtype], bool] = {}
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
