"""What was found for recent calls: a memory of bounded size.

To measure a cell and to fit a schedule takes as long as many steps do, so a fit is kept. But cells
are often made anew at every call (a closure in ``forward``, a bound method), and sequences are of
ever new lengths: so a cell is known by what it is made of (:func:`identity`), nothing that it is
made of is kept alive, and only the most recent fits are kept.

Two cells that are taken for one share a fit, not a gradient: a budget may then be missed, but what
is computed stays right, for the cell itself is examined at every call.
"""

import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from numbers import Number
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Recent", "Same", "identity", "signature"]

T = TypeVar("T")

_MOST = 48
_DEPTH = 4
_ITEMS = 100
_PLAIN = (Number, str, bytes, type(None), type, torch.dtype, torch.device)


@dataclass(frozen=True)
class _Known(Generic[T]):
    result: T
    of: list[weakref.ref[object]]

    def alive(self) -> bool:
        return all(reference() is not None for reference in self.of)


class Recent(Generic[T]):
    """The most recent results of something that takes long, by what they were found for.

    Args:
        most: how many are kept.

    Example:
        >>> squares = Recent(most=2)
        >>> [squares.get(n, lambda n=n: n * n) for n in (2, 3, 4)], len(squares)
        ([4, 9, 16], 2)
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, _Known[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable, find: Callable[[], T], of: Iterable[object] = ()) -> T:
        """The result for a key, found now if it is not known.

        Args:
            key: what it is known by.
            find: called where it is not known.
            of: objects that the key has the ids of, for that is quicker than :class:`Same`; when
                one of them is gone, so is the result.

        Returns:
            The result.
        """
        known = self._found.get(key)
        if known is None or not known.alive():
            known = _Known(find(), [weakref.ref(value) for value in of])
            for old in [old for old, each in self._found.items() if _is_dead(old, each)]:
                del self._found[old]
            self._found[key] = known
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        return known.result


class Same:
    """A key that is equal for the same object only, and that does not keep it alive."""

    def __init__(self, value: Any) -> None:
        self.reference = weakref.ref(value)
        self._id = id(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        value = self.reference()
        return isinstance(other, Same) and value is not None and other.reference() is value


def _is_dead(key: Any, known: _Known[Any] | None = None) -> bool:
    if known is not None and not known.alive():
        return True
    if isinstance(key, Same):
        return key.reference() is None
    return isinstance(key, tuple) and any(map(_is_dead, key))


def signature(t: Tensor) -> tuple[Any, ...]:
    """All that the bytes of a step depend on in one of its tensors."""
    kind = t.device.type
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, autocast


def identity(value: Any, depth: int = _DEPTH) -> Hashable:
    """What a cell is made of, as a key: equal for two closures of the same code over the same.

    Args:
        value: a cell, or what one is made of.
        depth: how many levels of functions and containers are looked into.

    Returns:
        A key that keeps no module and no tensor alive.

    Example:
        >>> def make(n):
        ...     return lambda x, h: (x * n, h)
        >>> identity(make(2)) == identity(make(2)), identity(make(2)) == identity(make(3))
        (True, False)
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return signature(value)
    if isinstance(value, nn.Module):
        return Same(value), tuple(part.training for part in value.modules())
    parts = _parts(value)
    if parts is None:
        try:
            return Same(value)
        except TypeError:  # it cannot be referred to weakly
            return type(value), id(value)
    kind, inner = parts
    if depth == 0 or len(inner) > _ITEMS:
        return kind, len(inner)
    return kind, *(identity(item, depth - 1) for item in inner)


def _parts(value: Any) -> tuple[Hashable, list[Any]] | None:
    """A function or a container: what distinguishes it, and what it holds."""
    if isinstance(value, functools.partial):
        return "partial", [value.func, *value.args, *value.keywords.items()]
    if inspect.ismethod(value):
        return "method", [value.__self__, value.__func__]
    if inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        inner = [*names.nonlocals.values(), *names.globals.values()]
        return value.__code__, [*inner, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, dict):
        return "dict", list(value.items())
    if isinstance(value, list | tuple):
        return type(value), list(value)
    return None
