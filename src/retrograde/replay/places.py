"""Places: where a cell finds the Python values that it reads, and may write.

A step depends on more than its arguments. It reads a closure's variables, globals, the defaults of
functions, and the attributes of objects and modules. It reads the contents of lists, dicts, sets
and small arrays. Each of these is a *place*. Its values can be noted and compared later, so that a
change is refused by its name. Values are noted by reference, since whatever can change inside a
value is a place of its own.
"""

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import is_
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

#: Larger arrays count as data, which no cell writes to.
ARRAY_BYTES = 65536

#: The values of a place, by their names there.
Seen = dict[Any, Any]

#: Stands for the value of a name that has none.
ABSENT: Any = object()

_LONG = 1000  # a longer container is expected to grow only at its end, and noted by its length
_LENGTH = object()  # the name of that length in a note
_PLAIN = (int, float, complex, str, bytes, frozenset, range)


class Place(ABC):
    """A holder of values; a place refers to the holder, so that its id is not used again.

    ``form`` makes a value's name in a message from the place's name and the value's. ``registered``
    is torch's word for the values, if the place is a table of a module.
    """

    def __init__(
        self,
        holder: Any,
        name: str,
        names: Collection[Any] | None = None,
        *,
        form: str = "{}.{}",
        registered: str | None = None,
    ) -> None:
        self.holder, self.name, self.names = holder, name, names
        self.form, self.registered = form, registered
        self.but: frozenset[Any] = frozenset()

    @abstractmethod
    def read(self) -> Seen:
        """Return all values now, in a new dict."""

    @abstractmethod
    def write(self, values: Seen, gone: Collection[Any] = ()) -> None:
        """Set some values, and remove others."""

    def called(self, key: Any) -> str:
        """Return the name of a value in a message."""
        return self.form.format(self.name, key)

    def note(self) -> Seen:
        """Note the values, to compare and restore them later."""
        seen = self.read()
        for key in self.but:
            seen.pop(key, None)
        return seen

    def changed(self, seen: Seen) -> set[Any]:
        """Return the names whose values differ from the noted ones."""
        now = self.note()
        if len(now) == len(seen) and all(map(is_, now.values(), seen.values())):
            return set() if now.keys() == seen.keys() else {*now, *seen}
        both = now.keys() & seen.keys()
        return (now.keys() ^ seen.keys()) | {k for k in both if not _equal(now[k], seen[k])}

    def restore(self, seen: Seen) -> None:
        """Set the noted values; a container that is too long to be noted stays."""
        if _LENGTH not in seen:
            self.write(seen, self.note().keys() - seen.keys())

    def without(self, keys: Collection[Any]) -> "Place":
        """Return the same place without some names."""
        other = copy.copy(self)
        other.but = self.but | frozenset(keys)
        return other


class Entries(Place):
    """Names of a dict that are an object's attributes."""

    def read(self) -> Seen:
        if self.names is None:
            return dict(self.holder)
        return {name: self.holder[name] for name in self.names if name in self.holder}

    def write(self, values: Seen, gone: Collection[Any] = ()) -> None:
        for key in gone:
            self.holder.pop(key, None)
        self.holder.update(values)


class Attributes(Place):
    """Some attributes, read and written one by one: of a class, a function, slots, or a closure's
    cell."""

    names: Collection[str]

    def read(self) -> Seen:
        if isinstance(self.holder, type):  # inherited values belong to the base class
            own = vars(self.holder)
            return {name: own[name] for name in self.names if name in own}
        with suppress(ValueError):  # a cell that is not bound yet
            return {n: getattr(self.holder, n) for n in self.names if hasattr(self.holder, n)}
        return {}

    def write(self, values: Seen, gone: Collection[Any] = ()) -> None:
        now = self.read()
        for name in now.keys() & gone:
            delattr(self.holder, name)
        for name, value in values.items():
            if name not in now or now[name] is not value:
                setattr(self.holder, name, value)


class Contents(Place):
    """What a dict, a list, a deque, a set or a small array holds."""

    def read(self) -> Seen:
        held = self.holder
        if isinstance(held, dict):
            return dict(dict.items(held))  # a subclass may make what it returns
        if isinstance(held, np.ndarray):
            return {None: held.copy()}
        return {None: frozenset(held)} if isinstance(held, set) else dict(enumerate(held))

    def note(self) -> Seen:
        if not isinstance(self.holder, np.ndarray) and len(self.holder) > _LONG:
            return {_LENGTH: len(self.holder)}
        return super().note()

    def write(self, values: Seen, gone: Collection[Any] = ()) -> None:
        held: Any = self.holder
        whole = {key: value for key, value in {**self.read(), **values}.items() if key not in gone}
        if isinstance(held, np.ndarray):
            held[...] = whole[None]
            return
        held.clear()
        if isinstance(held, dict):
            held.update(whole)
        elif isinstance(held, set):
            held.update(whole[None])
        else:
            held.extend(whole.values())

    def called(self, key: Any) -> str:
        indexed = isinstance(self.holder, dict) and key is not _LENGTH
        return f"{self.name}[{key!r}]" if indexed else self.name


class Unreadable(Tensor):
    """Replaces a value that must not be read; any use of it raises the error that is made."""

    @staticmethod
    def of(error: Callable[[], Exception]) -> "Unreadable":
        made = Tensor._make_subclass(Unreadable, torch.empty(0, device="cpu"))
        made.__dict__["_error"] = error
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        raise next(value for value in given if type(value) is cls).__dict__["_error"]()

    def _refused(self, *_: Any) -> Any:
        raise self.__dict__["_error"]()

    __hash__ = __call__ = __getattr__ = _refused


# An error that is a TypeError would become a NotImplemented in these methods of a tensor.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    for _side in ("", "r", "i"):
        setattr(Unreadable, f"__{_side}{_name}__", Unreadable._refused)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "hash"):
    setattr(Unreadable, f"__{_name}__", Unreadable._refused)


@dataclass(frozen=True)
class Slot:
    """One name of a place. Its value is :data:`ABSENT` if there is none."""

    place: Place
    key: Any

    def read(self) -> Any:
        held = self.place.holder if isinstance(self.place, Entries) else self.place.read()
        return held.get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        if value is ABSENT:
            self.place.write({}, (self.key,))
        else:
            self.place.write({self.key: value})

    @property
    def called(self) -> str:
        """The name of the value in a message."""
        return self.place.called(self.key)


#: The values of places at one moment.
Notes = dict[Place, Seen]


def note(places: Iterable[Place]) -> Notes:
    """Note the values of places, to compare and restore them later."""
    return {place: place.note() for place in places}


def changes(notes: Notes) -> dict[Slot, Any]:
    """Return what has changed since the values were noted, in order, and each value then."""
    return {
        Slot(place, key): seen.get(key, ABSENT)
        for place, seen in notes.items()
        for key in sorted(place.changed(seen), key=str)
    }


def restore(notes: Notes) -> None:
    """Set the values that were noted."""
    for place, seen in notes.items():
        if place.changed(seen):
            place.restore(seen)


#: What a :class:`Watch` saw: names and values of some places, how many each has, values of single
#: names, and what the other places noted.
Glance = tuple[tuple[Any, ...], tuple[Any, ...], list[int], list[Any], list[Seen]]


class Watch:
    """Places whose values are noted together, and compared by identity first.

    A call and its rerun look at a hundred places each, and hardly ever has one changed. So values
    are compared place by place only where one differs.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places, kinds = places, (dict, OrderedDict, list)
        self._named = [p for p in places if _by_name(p) is not None]
        rest = [p for p in places if _by_name(p) is None]
        self._whole = [p for p in rest if type(p.holder) in kinds and not p.but]
        self._whole = [p for p in self._whole if len(p.holder) < _LONG]
        self._whole.sort(key=lambda place: isinstance(place.holder, list))  # after the dicts
        self._rest = [place for place in rest if place not in self._whole]
        self._held = [place.holder for place in self._whole]
        self._dicts = [held for held in self._held if isinstance(held, dict)]
        self._gets = [(_by_name(p), name) for p in self._named for name in p.names or ()]

    def now(self) -> Glance:
        """Return the present values."""
        keys = tuple(chain.from_iterable(self._held))  # of lists, their values
        values = tuple(chain.from_iterable(map(dict.values, self._dicts)))
        named = [get(name, ABSENT) for get, name in self._gets]  # type: ignore[misc]
        return keys, values, [*map(len, self._held)], named, [p.note() for p in self._rest]

    def changes(self, then: Glance) -> dict[Slot, Any]:
        """Return what has changed since, in order, and each value then."""
        now, (keys, values, lengths, named, rest) = self.now(), then
        pairs = (now[0], keys), (now[1], values), (now[3], named)
        notes: Notes = dict(zip(self._rest, rest, strict=True))
        if now[2] != lengths or not all(all(map(is_, new, old)) for new, old in pairs):
            heads, found, single = iter(keys), iter(values), iter(named)
            for place, count in zip(self._whole, lengths, strict=True):
                names = [*islice(heads, count)]
                is_dict = isinstance(place.holder, dict)
                notes[place] = dict(zip(names, found) if is_dict else enumerate(names))  # noqa: B905
            for place in self._named:
                seen = {name: next(single) for name in place.names or ()}
                notes[place] = {k: v for k, v in seen.items() if v is not ABSENT}
        return changes({place: notes[place] for place in self.places if place in notes})


def _by_name(place: Place) -> Callable[[Any, Any], Any] | None:
    """Return what gets single names of a place, or None if it is not read by these."""
    if place.names is None or place.but:
        return None
    if isinstance(place.holder, FunctionType | CellType):
        return partial(_attribute, place.holder)
    table = vars(place.holder) if isinstance(place.holder, type) else place.holder
    return table.get if isinstance(table, dict | MappingProxyType) else None


def _attribute(holder: Any, name: str, default: Any) -> Any:
    try:
        return getattr(holder, name, default)
    except ValueError:  # a cell that is not bound yet
        return default


class HandsOn:
    """A cell of ours whose state is the values of its ``slots``."""

    slots: Sequence[Slot]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors that a value is, holds, or has as attributes."""
    leaves = pytree.tree_leaves(value)
    inside = [v for leaf in leaves if hasattr(leaf, "__dict__") for v in vars(leaf).values()]
    return [leaf for leaf in (*leaves, *inside) if isinstance(leaf, Tensor)]


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values are one object, or equal and of a plain kind."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return isinstance(a, _PLAIN) and bool(a == b)


def first_named(places: Iterable[Place], value: Any) -> str | None:
    """Return the name of the first place that holds a value."""
    return next((p.called(k) for p in places for k, v in p.read().items() if v is value), None)
