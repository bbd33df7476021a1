"""Fingerprints of tensors, which tell whether a rerun computes the bits of the first run (rule 11).

A fingerprint is a weighted sum of a tensor's bits, read as 64-bit integers. In a small tensor each
word has a weight of its own. In a larger one each of 1,021 columns has, so that permuted rows
differ. Of a tensor of some size an eighth may be looked at, each time another one.

Known limits: two tensors may have one fingerprint by chance, of one in 2⁶⁴ or so. Words that change
places within a column, or in a tensor with gaps in memory, are not told apart. Nested, sparse and
quantized tensors, and those of subclasses without memory, have no fingerprint.
"""

import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrograde.torch_private import (
    after_backward,
    backward_pass,
    below_autograd,
    dispatch_modes,
    function_modes,
    is_wrapped,
    without_dispatch,
    without_functions,
)

_SMALL = 256 * 1024  # bytes, at most, of a tensor whose words all have weights
_WHOLE = 32 * 1024  # bytes, at most, of a tensor that is looked at as a whole at every turn
_PARTS = 8
_WORDS = 1021  # of a column, a prime number
_NUMPYS = {torch.float32, torch.float64, torch.float16, torch.int64, torch.bool}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: What :func:`fingerprint` returns: a number, on a GPU in a tensor; None if there is none.
Fingerprint = Any


def fingerprint(t: Tensor, turn: int = 0) -> Fingerprint:
    """Return a tensor's fingerprint. It holds no memory of torch's, but for a number on a GPU.

    At turn 0 all of its bits are looked at, and at later turns an eighth, if there are many.

    Example:
        >>> t = torch.randn(100, 100)
        >>> fingerprint(t) == fingerprint(t.clone()), fingerprint(t) == fingerprint(t.flip(0))
        (True, False)
    """
    if torch.compiler.is_compiling() or t.is_meta or t.is_quantized or t.is_nested:
        return None
    if t.layout is not torch.strided or t._is_zerotensor():
        return None
    if is_wrapped(t):
        return None
    if type(t) is Tensor and not (function_modes() or dispatch_modes()):
        return _fingerprint(t.detach(), turn)
    with (
        without_functions(),
        without_dispatch(),
        below_autograd(),
    ):
        try:
            return _fingerprint(t.detach(), turn)
        except NotImplementedError:  # a subclass without memory of its own
            return None


def _part(numbers: Any, turn: int) -> Any:
    """Return the part of flat numbers that is looked at in a turn. At most the last 63 numbers are
    in no part."""
    if not turn or numbers.nbytes <= _WHOLE:
        return numbers
    count = len(numbers) // (8 * _PARTS) * 8  # so that parts are whole words
    return numbers[turn % _PARTS * count :][:count]


def _fingerprint(t: Tensor, turn: int) -> Fingerprint:
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    if t.is_neg():
        t = t.resolve_neg()
    # Of a contiguous tensor, an eighth has words with weights.
    most = _PARTS * _SMALL if turn and t.is_contiguous() else _SMALL
    if t.is_cpu and t.nbytes <= most:  # by few operations, since most tensors are small
        if turn and (in_order := _in_order(t)) is not None:  # where a copy would take longer
            t = in_order
        numbers = (t if t.dtype in _NUMPYS else t.view(_INTEGERS[t.itemsize])).numpy()
        return _weighted(_part(np.ascontiguousarray(numbers).reshape(-1), turn))
    words = _part(whole, turn) if (whole := _in_order(t)) is not None else None
    if words is None:  # with gaps
        total = t.view(_INTEGERS[t.itemsize]).sum(dtype=torch.int64)
        return int(total) if t.is_cpu else total
    aligned = words.nbytes % 8 == 0 == words.storage_offset() * words.itemsize % 8
    if t.is_cpu and not aligned and words.nbytes % 8 == 0:  # of which NumPy makes words
        words = torch.from_numpy(
            words.view(_INTEGERS[words.itemsize]).numpy().view(np.int64).copy()
        )
        aligned = True
    words = words.view(torch.int64 if aligned else _INTEGERS[words.itemsize])
    rows = len(words) // _WORDS
    columns, rest = words[: rows * _WORDS].view(rows, _WORDS), words[rows * _WORDS :]
    if not t.is_cpu:
        weighted = columns.sum(0, dtype=torch.int64).mul_(_weights(t.device)).sum()
        return weighted.add_(rest.sum(dtype=torch.int64))
    if not hasattr(_room, "sums"):  # kept, so that a fingerprint takes no more memory
        _room.sums = torch.empty(_WORDS, dtype=torch.int64, device="cpu")
    torch.sum(columns, 0, dtype=torch.int64, out=_room.sums)
    weighted = _room.sums.mul_(_weights(t.device)).numpy().sum()
    return hash((int(weighted), int(rest.numpy().sum(dtype=np.int64))))


_room = threading.local()


def _weighted(numbers: NDArray[Any]) -> int:
    """Return the sum of the words of flat numbers, each by a weight of its own."""
    if numbers.nbytes % 8:
        return hash(numbers.tobytes())
    return int(np.dot(numbers.view(np.int64), _word_weights()[: numbers.nbytes // 8]))


@cache
def _word_weights() -> NDArray[np.int64]:
    """Return an odd number for each word of a small tensor."""
    return np.arange(_SMALL // 8) * 5_308_871_862 + 1


@cache
def _weights(device: torch.device) -> Tensor:
    """Return an odd number for each column."""
    return torch.arange(_WORDS, device=device) * 5_308_871_862 + 1


def _in_order(t: Tensor) -> Tensor | None:
    """Return a tensor's numbers in the order of memory, or None if it has gaps."""
    if t.is_contiguous():
        return t.view(-1)
    step = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride != step:
            return None
        step *= size
    return t.as_strided((t.numel(),), (1,))


def verify(then: Fingerprint, t: Tensor, error: Callable[[], Exception], turn: int = 0) -> None:
    """Raise an error unless a tensor has the fingerprint that another had before, in that turn.

    Numbers on a GPU are compared when the running backward pass ends, so that nobody waits for one.
    """
    now, task = None if then is None else fingerprint(t, turn), backward_pass()
    if isinstance(now, Tensor) and task >= 0:
        if task not in _waiting:
            after_backward(partial(_compare, task))
        _waiting.setdefault(task, []).append((then, now, error))
    elif now is not None and bool(now != then):
        raise error()


_waiting: dict[int, list[tuple[Tensor, Tensor, Callable[[], Exception]]]] = {}


def _compare(task: int) -> None:
    found = _waiting.pop(task)
    differs = torch.stack([then != now for then, now, _ in found]).tolist()
    for (*_, error), one in zip(found, differs, strict=True):
        if one:
            raise error()


def fingerprints(tensors: Iterable[Tensor]) -> tuple[Fingerprint, ...]:
    """Return the fingerprints of some tensors, to be compared at once on a CPU."""
    found = map(fingerprint, tensors)
    return tuple(int(one) if isinstance(one, Tensor) else one for one in found)
