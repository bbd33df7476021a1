"""The referents of a cell: modules, captured tensors, generators, and places of Python values.

A cell is a module, a function, a closure, a method, a ``functools.partial`` or any other callable.
The search looks at a function's closure, its defaults and the globals that it names. It looks at
the object of a method, at the attributes of objects and modules, and into lists, tuples and dicts,
a few levels deep. It follows all code except the standard library, torch, NumPy and their kind.
"""

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from retrograde.discover.generators import is_generator
from retrograde.discover.places import (
    ARRAY_BYTES,
    Array,
    Attributes,
    Defaults,
    Names,
    Place,
    Row,
    Table,
    Variable,
)

__all__ = ["MODULE_TABLES", "Referents", "find_referents"]

T = TypeVar("T")

_DEPTH = 3
_ITEMS = 1000  # entries of a list that are searched; a longer one may be a data set
_USUAL = frozenset(vars(nn.Module()))
#: The attributes of a module that are tables of their own, or torch's.
MODULE_TABLES = _USUAL - {"training"}
_TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "numba", "triton", "retrograde"}
_ATOMS = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_BUILT_IN = type(len)
_DYNAMIC = {"getattr", "vars", "__dict__", "__getattribute__"}


@dataclass(frozen=True)
class Referents:
    """The objects that a cell refers to.

    ``modules`` has no submodules. ``tensors`` are captured, or held by modules without
    registration.
    """

    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    codes: list[CodeType] = field(default_factory=list)

    def parts(self) -> list[nn.Module]:
        """Return every module, submodules included, each once."""
        parts = (part for module in self.modules for part in module.modules())
        return list({id(part): part for part in parts}.values())


def find_referents(parts: Sequence[Any]) -> Referents:
    """Find all that the functions and objects that a cell is made from refer to.

    Example:
        >>> import torch
        >>> def make(linear, scale):
        ...     return lambda x, h: linear(x) * scale + h
        >>> linear, scale = nn.Linear(2, 2), torch.ones(2)
        >>> found = find_referents([make(linear, scale)])
        >>> found.modules == [linear], found.tensors[0] is scale
        (True, True)
    """
    walk = _Walk()
    for part in parts:
        walk.add(part, "the cell", _DEPTH)
    walk.run()
    names = frozenset[str]().union(*map(_names, walk.found.codes))
    if not names & _DYNAMIC:
        for place in walk.objects:
            place.named = names
    return walk.found


class _Walk:
    """A breadth-first walk over the referents of a cell."""

    def __init__(self) -> None:
        self.found = Referents()
        self.seen: dict[int, Any] = {}  # by id; values are held, so that no id is used again
        self.pending: deque[tuple[Any, str, int]] = deque()
        self.objects: list[Place] = []

    def add(self, value: Any, name: str, depth: int) -> None:
        """Look at a value later, once."""
        kind = type(value)
        if kind in _ATOMS or depth < 0 or id(value) in self.seen:
            return
        ours = kind.__module__.startswith("retrograde.") and not isinstance(value, nn.Module)
        if depth == _DEPTH or not ours:  # the memory of our own modules is not part of a cell
            self.seen[id(value)] = value
            self.pending.append((value, name, depth))

    def run(self) -> None:
        while self.pending:
            self.look(*self.pending.popleft())

    def look(self, value: Any, name: str, depth: int) -> None:
        """Classify a value, and add the values inside it."""
        found = self.found
        if isinstance(value, Tensor):
            found.tensors.append(value)
        elif isinstance(value, nn.Module):
            found.modules.append(value)
            for part in value.modules():
                self.seen[id(part)] = part
                self.module(part, depth)
        elif is_generator(value):
            found.generators.append(value)
        elif inspect.isfunction(value):
            self.function(value, depth)
        elif inspect.ismethod(value):
            self.add(value.__self__, name, depth)
            self.add(value.__func__, name, depth)
        elif isinstance(value, functools.partial):
            self.add(value.func, name, depth)
            self.held(Table(value.keywords, f"the arguments of {name}"), depth)
            self.each(value.args, name, depth)
        elif isinstance(value, dict):
            self.held(Table(value, name), depth)
        elif isinstance(value, list | deque | set):
            self.held(Row(value, name), depth)
        elif isinstance(value, tuple):
            self.each(value, name, depth)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= ARRAY_BYTES and value.flags.writeable and value.dtype != object:
                found.places.append(Array(value, name))
        elif not isinstance(value, type | ModuleType | CodeType | _BUILT_IN):
            self.object(value, name, depth)

    def each(self, values: Iterable[Any], name: str, depth: int) -> None:
        for value in list(values)[:_ITEMS]:
            self.add(value, name, depth - 1)

    def held(self, place: Place, depth: int) -> None:
        """Add a place, and its values."""
        self.found.places.append(place)
        if depth:
            values = list(place.read().items())[:_ITEMS]
            for key, value in values:
                if type(value) not in _ATOMS:
                    self.add(value, place.called(key), depth - 1)

    def object(self, value: Any, name: str, depth: int) -> None:
        kind = type(value)
        if hasattr(value, "__dict__"):
            self.objects.append(Table(vars(value), kind.__name__, attributes=True))
            self.held(self.objects[-1], depth)
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        if slots:
            self.held(Attributes(value, kind.__name__, slots), depth)
        if callable(value):
            self.code(kind, "__call__", depth)

    def module(self, part: nn.Module, depth: int) -> None:
        """Add one module without its submodules."""
        kind = type(part).__name__
        own = vars(part)
        places = self.found.places
        places.append(Table(own, kind, attributes=True))
        scripted = isinstance(part, torch.jit.ScriptModule)
        if scripted:  # a scripted module keeps its attributes elsewhere
            made = getattr(part, "_concrete_type", None)
            names = made.get_attributes() if made is not None else ()
            places.append(Attributes(part, kind, ["training", *names]))
        for table, what in () if scripted else _TABLES.items():
            places.append(Table(own[table], kind, attributes=True, registered=what))
        for table in _HOOKS:
            if own.get(table):
                self.held(Table(own[table], f"{kind}.{table}"), depth)
        for key, value in own.items():
            if key not in _USUAL and type(value) not in _ATOMS:
                self.add(value, f"{kind}.{key}", depth - 1)
        if not scripted:
            self.code(type(part), "forward", depth)

    def code(self, kind: type, entry: str, depth: int) -> None:
        """Add the methods that one method of a class reaches, and the class attributes in them."""
        if not inspect.isfunction(first := getattr(kind, entry, None)):
            return
        methods, named = _methods(kind, entry, first)
        for owner, names in named:
            self.held(Attributes(owner, owner.__name__, names), depth)
        for method in methods:
            self.add(method, kind.__name__, depth)

    def function(self, value: FunctionType, depth: int) -> None:
        self.found.codes.append(value.__code__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if id(cell) not in self.seen:
                self.seen[id(cell)] = cell
                self.held(Variable(cell, name), depth)
        if _is_library(value.__module__):
            return
        if value.__defaults__ or value.__kwdefaults__:
            self.held(Defaults(value, value.__qualname__), depth)
        if value.__dict__:
            self.held(Table(value.__dict__, value.__qualname__, attributes=True), depth)
        names = _names(value.__code__)
        self.named(value.__globals__, names, f"the module {value.__module__}", depth)

    def named(self, scope: dict[str, Any], names: frozenset[str], name: str, depth: int) -> None:
        """Add the globals in code; of modules and classes among them, the values it may read."""
        read = [name for name in names if name in scope]
        data = [n for n in read if not isinstance(scope[n], ModuleType | _BUILT_IN)]
        if data:
            self.held(Names(scope, name, data), depth)
        for value in map(scope.__getitem__, read):
            if id(value) in self.seen or not isinstance(value, ModuleType | type):
                continue
            self.seen[id(value)] = value
            if isinstance(value, ModuleType) and not _is_library(value.__name__):
                self.named(vars(value), names, f"the module {value.__name__}", depth)
            elif isinstance(value, type) and not _is_library(value.__module__):
                own = [n for n in names if n in vars(value) and _is_data(vars(value)[n])]
                if own:
                    self.held(Attributes(value, value.__name__, own), depth)


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """Return all names in code that are not its own variables, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.lru_cache(maxsize=256)
def _methods(
    kind: type, entry: str, _: Callable[..., Any]
) -> tuple[list[FunctionType], list[tuple[type, list[str]]]]:
    """Return the functions that a method reaches in its class, and the class attributes they name.

    The method itself is part of the key, so that a replaced method is searched again.
    """
    found: list[FunctionType] = []
    named: dict[type, list[str]] = {}
    seen = {entry}
    pending = [entry]
    while pending:
        name = pending.pop()
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is None or _is_library(owner.__module__):
            continue
        value = vars(owner)[name]
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(value):
            found.append(value)
            pending += _names(inspect.unwrap(value).__code__) - seen
            seen |= _names(inspect.unwrap(value).__code__)
        elif _is_data(value):
            named.setdefault(owner, []).append(name)
    return found, list(named.items())


def _is_data(value: Any) -> bool:
    return not callable(value) and not hasattr(type(value), "__get__")


def _slots(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return (name for name in names if name not in ("__dict__", "__weakref__"))


def _is_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES
