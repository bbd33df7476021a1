"""Places: where a cell finds the Python values that it reads, and may write.

A step depends on more than its arguments. It reads a closure's variables, the globals and defaults
of functions, and the attributes of objects and modules. It reads the contents of lists, dicts, sets
and small arrays, and the position of an iterator. Each of these is a *place*. Its values can be
noted, compared later, and restored.

Values are noted by reference, since whatever can change inside a value is a place of its own. An
iterator cannot be reset, so a copy replaces it.

Known limit: a generator (a function with ``yield``) and ``itertools.cycle`` cannot be copied. A
cell that advances one is detected, and refused.
"""

import copy
import io
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from types import CellType, GeneratorType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = [
    "ARRAY_BYTES",
    "Array",
    "Attributes",
    "Bookmark",
    "Defaults",
    "Names",
    "Paused",
    "Place",
    "Row",
    "Seen",
    "Table",
    "Unreadable",
    "Variable",
    "has_bookmarks",
    "tensors_in",
    "within",
]

#: Larger arrays count as data, which no cell writes to.
ARRAY_BYTES = 65536

_LONG = 1000  # a longer container is expected to grow only at its end, and noted by its length

#: The values of a place, by their names there.
Seen = dict[Any, Any]


@dataclass(frozen=True)
class _Length:
    """The note of a long container: how many entries it has."""

    count: int


class Bookmark(ABC):
    """A value that changes by being read, and its position."""

    value: Any

    @abstractmethod
    def same(self, other: Any) -> bool:
        """Return whether another bookmark has the same value, or a copy, at the same position."""

    @abstractmethod
    def rewound(self) -> Any:
        """Return the value at the noted position: itself, reset, or a copy."""

    def original(self) -> Any:
        """Return the value itself, for its holder."""
        return self.value


class _Cursor(Bookmark):
    """An iterator; a copy of it stays at the noted position."""

    def __init__(self, value: Any) -> None:
        self.value, self.copied = value, _copied(value)

    def same(self, other: Any) -> bool:
        return isinstance(other, _Cursor) and _equal(
            _position(self.copied), _position(other.copied)
        )

    def rewound(self) -> Any:
        return _copied(self.copied)


class Paused(Bookmark):
    """A generator, or an iterator over a cycle, which cannot be reset."""

    def __init__(self, value: Any) -> None:
        self.value, self.frame = value, _position(value)

    def same(self, other: Any) -> bool:
        return (
            isinstance(other, Paused)
            and other.value is self.value
            and _equal(self.frame, other.frame)
        )

    def rewound(self) -> Any:
        return self.value


class _File(Bookmark):
    """A file that is read."""

    def __init__(self, value: Any) -> None:
        self.value, self.point = value, None
        try:
            if not value.closed and value.readable() and value.seekable():
                self.point = value.tell()
        except OSError:  # raised while its lines are iterated over
            pass

    def same(self, other: Any) -> bool:
        mine = isinstance(other, _File) and other.value is self.value
        return mine and other.point == self.point

    def rewound(self) -> Any:
        if self.point is not None and not self.value.closed:
            self.value.seek(self.point)
        return self.value

    original = rewound


_EMPTY: list[Any] = [[], (), "", b"", bytearray(), range(0), range(2**70)]
_UNORDERED_EMPTY: list[Any] = [{}, {}.values(), {}.items(), set()]
# Iterators that are copied as a tuple of the remaining items.
_UNORDERED = {type(iter(empty)) for empty in _UNORDERED_EMPTY}
_MARKS: dict[type, Callable[[Any], Bookmark]] = {
    **dict.fromkeys([type(iter(empty)) for empty in _EMPTY], _Cursor),
    **dict.fromkeys(_UNORDERED, _Cursor),
    **dict.fromkeys((enumerate, filter, map, reversed, zip, type(reversed([]))), _Cursor),
    **dict.fromkeys([k for k in vars(itertools).values() if isinstance(k, type)], _Cursor),
    **dict.fromkeys((io.BytesIO, io.StringIO, io.TextIOWrapper, io.BufferedReader), _File),
    GeneratorType: Paused,
}


class Place(ABC):
    """A holder of values; a place refers to the holder, so that its id is not used again."""

    growing = False

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name = holder, name
        self.but: frozenset[Any] = frozenset()
        self.only: frozenset[Any] | None = None
        #: The names that the cell's code uses, where other code may use the others.
        self.named: frozenset[Any] | None = None

    @abstractmethod
    def read(self) -> Seen:
        """Return all values now, in a new dict."""

    @abstractmethod
    def write(self, values: Seen, gone: Collection[Any]) -> None:
        """Set some values, and remove others."""

    @abstractmethod
    def called(self, key: Any) -> str:
        """Return the name of a value in a message."""

    def note(self) -> Seen:
        """Note the values, to compare and restore them later."""
        if self.growing and len(self.holder) > _LONG:
            return {_Length: _Length(len(self.holder))}
        return self.take()

    def take(self) -> Seen:
        """Note the values, however many they are."""
        seen = self.read()
        if self.only is not None:
            seen = {key: seen[key] for key in self.only if key in seen}
        for key in self.but:
            seen.pop(key, None)
        for key, value in seen.items():
            if type(value) in _MARKS:
                seen[key] = _mark(value)
        return seen

    def changed(self, seen: Seen) -> set[Any]:
        """Return the names whose values differ from the noted ones."""
        if _Length in seen:
            return {_Length} if len(self.holder) != seen[_Length].count else set()
        now = self.take()
        if len(now) == len(seen) and all(map(is_, now.values(), seen.values())):
            return set() if now.keys() == seen.keys() else {*now, *seen}
        both = now.keys() & seen.keys()
        return (now.keys() ^ seen.keys()) | {k for k in both if not _equal(now[k], seen[k])}

    def of(self, keys: Collection[Any]) -> "Place":
        """Return the same place with some names only."""
        other = copy.copy(self)
        other.only = frozenset(keys)
        return other

    def without(self, keys: Collection[Any]) -> "Place":
        """Return the same place without some names."""
        other = copy.copy(self)
        other.but = self.but | frozenset(keys)
        return other

    def concerns(self, key: Any) -> bool:
        """Return whether the cell reads the value of a name, as far as its code shows."""
        return self.named is None or key in self.named

    def put(self, seen: Seen) -> None:
        """Set the noted values; iterators are replaced by copies."""
        self._hold(seen, lambda mark: mark.rewound())

    def give_back(self, seen: Seen) -> None:
        """Set the noted values, the iterators themselves included."""
        self._hold(seen, lambda mark: mark.original())

    def _hold(self, seen: Seen, value_of: Callable[[Bookmark], Any]) -> None:
        if _Length in seen:
            self.shorten(seen[_Length].count)
            return
        known = self.read().keys()
        gone = (known if self.only is None else known & self.only) - seen.keys() - self.but
        values = {k: value_of(v) if isinstance(v, Bookmark) else v for k, v in seen.items()}
        self.write(values, gone)

    def shorten(self, count: int) -> None:
        """Keep only the first entries."""
        raise NotImplementedError


class Table(Place):
    """A dict, or the attributes of an object, which are called by their owner's name.

    ``registered`` is torch's word for the values, if it is a table of a module.
    """

    growing = True

    def __init__(
        self,
        holder: dict[Any, Any],
        name: str,
        *,
        attributes: bool = False,
        registered: str | None = None,
    ) -> None:
        super().__init__(holder, name)
        self.attributes = attributes
        self.registered = registered
        self.growing = not attributes

    def read(self) -> Seen:
        return dict(self.holder)

    def write(self, values: Seen, gone: Collection[Any]) -> None:
        for key in gone:
            del self.holder[key]
        self.holder.update(values)

    def called(self, key: Any) -> str:
        return f"{self.name}.{key}" if self.attributes else f"{self.name}[{key!r}]"

    def shorten(self, count: int) -> None:
        for key in list(self.holder)[count:]:
            del self.holder[key]


class Row(Place):
    """The contents of a list, a deque or a set."""

    growing = True

    def read(self) -> Seen:
        if isinstance(self.holder, set):
            return {None: frozenset(self.holder)}
        return dict(enumerate(self.holder))

    def write(self, values: Seen, gone: Collection[Any]) -> None:
        rows = list(self.holder)
        if isinstance(self.holder, set):
            rows = list(values[None])
        else:
            rows = [values.get(i, old) for i, old in enumerate(rows) if i not in gone]
            rows += [value for i, value in values.items() if i >= len(self.holder)]
        self.holder.clear()
        (self.holder.update if isinstance(self.holder, set) else self.holder.extend)(rows)

    def called(self, key: Any) -> str:
        return self.name

    def shorten(self, count: int) -> None:
        if isinstance(self.holder, set):
            return
        while len(self.holder) > count:
            self.holder.pop()


class Variable(Place):
    """A variable of a function around the cell."""

    holder: CellType

    def read(self) -> Seen:
        try:
            return {self.name: self.holder.cell_contents}
        except ValueError:  # not bound yet
            return {}

    def write(self, values: Seen, gone: Collection[Any]) -> None:
        if gone:
            del self.holder.cell_contents
        for value in values.values():
            self.holder.cell_contents = value

    def called(self, key: Any) -> str:
        return f"the variable {self.name!r}"


class Names(Table):
    """Some names of a dict: the globals that a function reads."""

    def __init__(self, holder: dict[str, Any], name: str, names: Collection[str]) -> None:
        super().__init__(holder, name)
        self.names, self.growing = names, False

    def read(self) -> Seen:
        return {name: self.holder[name] for name in self.names if name in self.holder}

    def called(self, key: Any) -> str:
        return f"{key!r} of {self.name}"


class Attributes(Place):
    """Some attributes, read and written one by one: of a class, or an object with slots."""

    def __init__(self, holder: Any, name: str, names: Collection[str]) -> None:
        super().__init__(holder, name)
        self.names = names

    def read(self) -> Seen:
        if isinstance(self.holder, type):  # inherited values belong to the base class
            own = vars(self.holder)
            return {name: own[name] for name in self.names if name in own}
        return {n: getattr(self.holder, n) for n in self.names if hasattr(self.holder, n)}

    def write(self, values: Seen, gone: Collection[Any]) -> None:
        now = self.read()
        for name in gone:
            delattr(self.holder, name)
        for name, value in values.items():
            if name not in now or now[name] is not value:
                setattr(self.holder, name, value)

    def called(self, key: Any) -> str:
        return f"{self.name}.{key}"


class Defaults(Place):
    """The defaults of a function's arguments."""

    holder: Any

    def read(self) -> Seen:
        named = self.holder.__kwdefaults__ or {}
        return {None: self.holder.__defaults__, **named}

    def write(self, values: Seen, gone: Collection[Any]) -> None:
        named = {key: value for key, value in values.items() if key is not None}
        self.holder.__defaults__, self.holder.__kwdefaults__ = values[None], named or None

    def called(self, key: Any) -> str:
        return f"a default of {self.name}"


class Array(Place):
    """The numbers of a small array."""

    holder: np.ndarray[Any, Any]

    def read(self) -> Seen:
        return {None: self.holder.copy()}

    def write(self, values: Seen, gone: Collection[Any]) -> None:
        self.holder[...] = values[None]

    def called(self, key: Any) -> str:
        return self.name


class Unreadable:
    """Replaces a tensor that must not be read; any use of it raises an error."""

    def __init__(self, error: Exception) -> None:
        self.__dict__["_error"] = error

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__["_error"]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        raise next(value for value in given if isinstance(value, cls)).__dict__["_error"]


def _refused(self: Unreadable, *_: Any) -> Any:
    raise self.__dict__["_error"]


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod"):
    setattr(Unreadable, f"__{_name}__", _refused)
    setattr(Unreadable, f"__r{_name}__", _refused)
for _name in ("neg", "getitem", "len", "iter", "bool", "float", "int", "abs", "call"):
    setattr(Unreadable, f"__{_name}__", _refused)


def has_bookmarks(seen: Seen) -> bool:
    """Return whether any of some values changes by being read."""
    return any(isinstance(value, Bookmark) for value in seen.values())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors that a value is, holds, or has as attributes."""
    leaves = pytree.tree_leaves(value)
    inside = [v for leaf in leaves if hasattr(leaf, "__dict__") for v in vars(leaf).values()]
    return [leaf for leaf in (*leaves, *inside) if isinstance(leaf, Tensor)]


def within(value: Any, depth: int = 3) -> Iterator[Any]:
    """Iterate over a value, its containers and attributes, and their contents."""
    yield value
    if depth == 0 or isinstance(value, Tensor):
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = list(value.values())[:_LONG]
    elif isinstance(value, list | tuple | deque | set | frozenset):
        inner = itertools.islice(value, _LONG)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        inner = (vars(value),)
    for item in inner:
        yield from within(item, depth - 1)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values are one object, or equal and of an immutable kind."""
    if a is b:
        return True
    if isinstance(a, Bookmark):
        return bool(a.same(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return isinstance(a, int | float | complex | str | bytes | frozenset | range) and bool(a == b)


def _mark(value: Any) -> Bookmark:
    kind = _MARKS[type(value)]
    return Paused(value) if kind is _Cursor and _has_cycle(value) else kind(value)


def _has_cycle(iterator: Any) -> bool:
    """Return whether an iterator is, or reads, a cycle, whose copies share a list with it."""
    if isinstance(iterator, itertools.cycle):
        return True
    if _MARKS.get(type(iterator)) is not _Cursor or type(iterator) in _UNORDERED:
        return False
    _, given, *state = iterator.__reduce__()
    inner = state[0] if state and isinstance(state[0], tuple) else ()
    return any(map(_has_cycle, (*given, *inner)))


def _copied(iterator: Any) -> Any:
    """Return a copy of an iterator, which does not move; iterators that it reads are copied too."""
    if type(iterator) not in _MARKS or isinstance(iterator, io.IOBase):
        return iterator
    if isinstance(iterator, GeneratorType):
        return iterator
    make, given, *state = iterator.__reduce__()
    if type(iterator) in _UNORDERED:
        return iter(tuple(given[0]))
    found = make(*map(_copied, given))
    if state and state[0] is not None:
        inner = state[0]
        found.__setstate__(tuple(map(_copied, inner)) if isinstance(inner, tuple) else inner)
    return found


def _position(iterator: Any) -> Any:
    """Return the position of an iterator, as a value that compares."""
    if type(iterator) not in _MARKS or isinstance(iterator, io.IOBase):
        return iterator
    if isinstance(iterator, GeneratorType):
        return _frame(iterator)
    make, given, *state = iterator.__reduce__()
    inner: Any = state[0] if state else None
    if isinstance(iterator, itertools.cycle):  # its list grows
        inner = (len(inner[0]), inner[1])
    inner = tuple(map(_position, inner)) if isinstance(inner, tuple) else inner
    return make, tuple(map(_position, given)), inner


def _frame(generator: Any) -> Any:
    """Return the position of a generator; its present values are held, and so their ids."""
    frame = generator.gi_frame
    if frame is None:
        return None
    inner = generator.gi_yieldfrom
    further = _frame(inner) if isinstance(inner, GeneratorType) else inner
    values = tuple(_position(value) for value in frame.f_locals.values())
    return frame.f_lasti, values, further
