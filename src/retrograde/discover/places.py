"""Places: where a cell finds the Python values that it reads, and may write.

A step is a function of more than its arguments: of a closure's variables, of the globals and
defaults of functions, of the attributes of objects and modules, of what lists, dicts, sets and
small arrays hold, and of how far an iterator has come. Each of these is a *place*. What it holds
can be noted, compared later, and put back.

Values are noted by reference, for what can change inside a value is a place of its own. An
iterator cannot be set back, so a copy of it takes its place.

Known limit: a generator (a function with ``yield``) cannot be copied. That a cell advanced one is
noticed, and refused.
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

#: Larger arrays are taken for data, which no cell writes to.
ARRAY_BYTES = 65536

_LONG = 1000  # a longer container is taken to grow at its end, and noted by its length

#: What a place holds, by the names that it has there.
Seen = dict[Any, Any]


@dataclass(frozen=True)
class _Length:
    """So many of the first entries."""

    count: int


class Bookmark(ABC):
    """A value that moves on by itself, and where it was."""

    value: Any

    @abstractmethod
    def same(self, other: Any) -> bool:
        """Whether another bookmark is of the same value, or of a copy, at the same point."""

    @abstractmethod
    def again(self) -> Any:
        """The value as it was: itself, set back, or a copy."""

    def back(self) -> Any:
        """The value itself, for its holder."""
        return self.value


class _Cursor(Bookmark):
    """An iterator; a copy of it stays where it was."""

    def __init__(self, value: Any) -> None:
        self.value, self.copied = value, _copied(value)

    def same(self, other: Any) -> bool:
        return isinstance(other, _Cursor) and _equal(
            _position(self.copied), _position(other.copied)
        )

    def again(self) -> Any:
        return _copied(self.copied)


class Paused(Bookmark):
    """A generator, which cannot be set back."""

    def __init__(self, value: Any) -> None:
        self.value, self.frame = value, _frame(value)

    def same(self, other: Any) -> bool:
        return (
            isinstance(other, Paused)
            and other.value is self.value
            and _equal(self.frame, other.frame)
        )

    def again(self) -> Any:
        return self.value


class _File(Bookmark):
    """A file that is read."""

    def __init__(self, value: Any) -> None:
        self.value, self.point = value, None
        try:
            if not value.closed and value.readable() and value.seekable():
                self.point = value.tell()
        except OSError:  # told so while its lines are iterated over
            pass

    def same(self, other: Any) -> bool:
        mine = isinstance(other, _File) and other.value is self.value
        return mine and other.point == self.point

    def again(self) -> Any:
        if self.point is not None and not self.value.closed:
            self.value.seek(self.point)
        return self.value

    back = again


_EMPTY: list[Any] = [[], (), "", b"", bytearray(), range(0), range(2**70)]
_UNORDERED_EMPTY: list[Any] = [{}, {}.values(), {}.items(), set()]
# Iterators that are copied as a tuple of what is left.
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
    """Somewhere that values are held; it refers to the holder, whose id so stays its own."""

    growing = False

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name = holder, name
        self.but: frozenset[Any] = frozenset()
        self.only: frozenset[Any] | None = None
        #: The names that the cell's code uses, where others are somebody else's affair.
        self.named: frozenset[Any] | None = None

    @abstractmethod
    def read(self) -> Seen:
        """All values now, in a new dict."""

    @abstractmethod
    def write(self, values: Seen, gone: Collection[Any]) -> None:
        """Hold some values, and drop others."""

    @abstractmethod
    def called(self, key: Any) -> str:
        """What a value is called in a message."""

    def note(self) -> Seen:
        """What it holds, to be compared with, and put back, later."""
        if self.growing and len(self.holder) > _LONG:
            return {_Length: _Length(len(self.holder))}
        return self.take()

    def take(self) -> Seen:
        """What it holds, however much that is."""
        seen = self.read()
        if self.only is not None:
            seen = {key: seen[key] for key in self.only if key in seen}
        for key in self.but:
            seen.pop(key, None)
        for key, value in seen.items():
            if type(value) in _MARKS:
                seen[key] = _MARKS[type(value)](value)
        return seen

    def changed(self, seen: Seen) -> set[Any]:
        """The names whose values are others than when they were noted."""
        if _Length in seen:
            return {_Length} if len(self.holder) != seen[_Length].count else set()
        now = self.take()
        if len(now) == len(seen) and all(map(is_, now.values(), seen.values())):
            return set() if now.keys() == seen.keys() else {*now, *seen}
        both = now.keys() & seen.keys()
        return (now.keys() ^ seen.keys()) | {k for k in both if not _equal(now[k], seen[k])}

    def of(self, keys: Collection[Any]) -> "Place":
        """The same place, some names only."""
        other = copy.copy(self)
        other.only = frozenset(keys)
        return other

    def without(self, keys: Collection[Any]) -> "Place":
        """The same place, some names aside."""
        other = copy.copy(self)
        other.but = self.but | frozenset(keys)
        return other

    def concerns(self, key: Any) -> bool:
        """Whether the cell reads what is held under a name, as far as its code tells."""
        return self.named is None or key in self.named

    def put(self, seen: Seen) -> None:
        """Hold what was noted; of iterators, copies."""
        self._hold(seen, lambda mark: mark.again())

    def give_back(self, seen: Seen) -> None:
        """Hold what was noted, the iterators themselves included."""
        self._hold(seen, lambda mark: mark.back())

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
    """A dict, or the attributes of an object; these are called by their owner's name.

    ``registered`` says what the values are to torch, if it is a table of a module.
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
    """What a list, a deque or a set holds."""

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
        if isinstance(self.holder, type):  # what it inherits is another class's
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
    """Stands where a tensor was that is not to be read; to use it raises an error."""

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
    """Whether any of some values moves on by itself."""
    return any(isinstance(value, Bookmark) for value in seen.values())


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors that a value is, holds, or has as its attributes."""
    leaves = pytree.tree_leaves(value)
    inside = [v for leaf in leaves if hasattr(leaf, "__dict__") for v in vars(leaf).values()]
    return [leaf for leaf in (*leaves, *inside) if isinstance(leaf, Tensor)]


def within(value: Any, depth: int = 3) -> Iterator[Any]:
    """A value, the containers and attributes that it has, and all that these hold."""
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
    """Whether two values are one, or of the kinds that are known by their value alone."""
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


def _copied(iterator: Any) -> Any:
    """A copy of an iterator that leaves it where it is, with copies of those that it reads."""
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
    """Where an iterator stands, as a value that compares."""
    if type(iterator) not in _MARKS or isinstance(iterator, io.IOBase):
        return iterator
    if isinstance(iterator, GeneratorType):
        return _frame(iterator)
    make, given, *state = iterator.__reduce__()
    inner = state[0] if state else None
    inner = tuple(map(_position, inner)) if isinstance(inner, tuple) else inner
    return make, tuple(map(_position, given)), inner


def _frame(generator: Any) -> Any:
    """Where a generator stands: the values that it has then are held, and so are their ids."""
    frame = generator.gi_frame
    if frame is None:
        return None
    inner = generator.gi_yieldfrom
    further = _frame(inner) if isinstance(inner, GeneratorType) else inner
    values = tuple(_position(value) for value in frame.f_locals.values())
    return frame.f_lasti, values, further
