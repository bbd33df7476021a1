"""Fingerprints of tensors, which tell whether a rerun computes the bits of the first run (rule 11).

A fingerprint is a weighted sum of a tensor's bits, read as 64-bit integers. Each of 8,209 columns
has a weight of its own, and each of 1,021 on a GPU, so that permuted rows differ. Of a tensor of
some size an eighth may be looked at, each time another one.

Known limits: two tensors may have one fingerprint by chance, of one in 2⁶⁴ or so. Words that change
places within a column, or in a large tensor with gaps in memory, are not told apart. Nested, sparse
and quantized tensors, and those of subclasses without memory, have no fingerprint.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
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

_SMALL = 256 * 1024  # bytes, at most, of a tensor with gaps that is copied to be looked at
_WHOLE = 32 * 1024  # bytes, at most, of a tensor that is looked at as a whole at every turn
_PARTS = 8
# Two prime numbers. 64 KiB, an eighth of 512, are less than a row of the first.
_COLUMNS, _COLUMNS_ON_A_GPU, _WEIGHT = 8209, 1021, 5_308_871_862
_CPU_WEIGHTS = np.arange(_COLUMNS) * _WEIGHT + 1
_NUMPYS = {torch.float32, torch.float64, torch.int64}  # which need no other view
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: What :func:`fingerprint` returns: a number, on a GPU in a tensor; None if there is none.
Fingerprint = Any


def fingerprint(t: Tensor, turn: int = 0) -> Fingerprint:
    """Return a tensor's fingerprint. It holds no memory of torch's, but for a number on a GPU.

    At turn 0 all of its bits are looked at, and at later turns an eighth, if there are many.
    """
    if torch.compiler.is_compiling():
        return None
    is_plain = type(t) is Tensor and not (function_modes() or dispatch_modes())
    if is_plain and t.dtype in _NUMPYS and t.is_cpu:
        try:
            numbers = (t.detach() if t.requires_grad else t).numpy()
            if numbers.flags.c_contiguous:  # the usual case
                return _weighted(_part(numbers.reshape(-1), turn))
        except (RuntimeError, TypeError):  # it has no plain memory
            pass
    lacks_memory = t.is_meta or t.is_quantized or t.is_nested or t.layout is not torch.strided
    if lacks_memory or t._is_zerotensor() or is_wrapped(t):
        return None
    if is_plain:
        return _fingerprint(t.detach(), turn)
    own_memory = suppress(NotImplementedError)  # which a subclass may lack
    with without_functions(), without_dispatch(), below_autograd(), own_memory:
        return _fingerprint(t.detach(), turn)
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
    if t.dtype not in _NUMPYS:
        t = t.view(_INTEGERS[t.itemsize])
    # A copy takes longer, but two tensors with the same numbers in other places then are alike.
    copies = not turn and t.is_cpu and t.nbytes <= _SMALL and not t.is_contiguous()
    flat = None if copies else _in_order(t)
    if flat is None and not (t.is_cpu and t.nbytes <= _SMALL):
        total = t.view(_INTEGERS[t.itemsize]).sum(dtype=torch.int64)
        return int(total) if t.is_cpu else total
    if t.is_cpu:
        numbers = np.ascontiguousarray(t.numpy()).reshape(-1) if flat is None else flat.numpy()
        return _weighted(_part(numbers, turn))
    words = _part(flat, turn)
    if words.nbytes % 8 == 0 == words.storage_offset() * words.itemsize % 8:
        words = words.view(torch.int64)
    else:
        words = words.view(_INTEGERS[words.itemsize])
    whole = len(words) // _COLUMNS_ON_A_GPU * _COLUMNS_ON_A_GPU
    columns = words[:whole].view(-1, _COLUMNS_ON_A_GPU).sum(0, dtype=torch.int64)
    return columns.mul_(_weights(t.device)).sum().add_(words[whole:].sum(dtype=torch.int64))


def _weighted(numbers: NDArray[Any]) -> int:
    """Return the sum of the words of flat numbers, each by the weight of its column."""
    rest = b""
    if numbers.nbytes % 8:  # the last bytes make no word
        data = numbers.view(np.uint8)
        numbers, rest = data[: -(len(data) % 8)], data[-(len(data) % 8) :].tobytes()
    words, total = numbers.view(np.int64), 0
    if whole := len(words) // _COLUMNS * _COLUMNS:
        total = int(words[:whole].reshape(-1, _COLUMNS).sum(0).dot(_CPU_WEIGHTS))
        words = words[whole:]
    total += int(words.dot(_CPU_WEIGHTS[: len(words)]))
    return hash((total, rest)) if rest else total


@cache
def _weights(device: torch.device) -> Tensor:
    """Return an odd number for each column on a GPU."""
    return torch.arange(_COLUMNS_ON_A_GPU, device=device) * _WEIGHT + 1


def _in_order(t: Tensor) -> Tensor | None:
    """Return a tensor's numbers in the order of memory, or None if it has gaps."""
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
    compared = _waiting.pop(task)
    differs = torch.stack([then != now for then, now, _ in compared]).tolist()
    for (*_, error), changed in zip(compared, differs, strict=True):
        if changed:
            raise error()


def fingerprints(tensors: Iterable[Tensor]) -> tuple[Fingerprint, ...]:
    """Return the fingerprints of some tensors, to be compared at once on a CPU."""
    prints = map(fingerprint, tensors)
    return tuple(int(computed) if isinstance(computed, Tensor) else computed for computed in prints)
