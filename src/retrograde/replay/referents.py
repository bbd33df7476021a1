"""The referents of a cell: modules, captured tensors, generators, and places of Python values.

A cell is a module, a function, a closure, a method, a ``functools.partial`` or any other callable.
The search looks at a function's closure, its defaults and the globals that it names. It looks at
the object of a method, at the attributes of objects and modules, and into lists, tuples and dicts,
a few levels deep. It follows all code except the standard library, torch, NumPy and their kind.

What a cell refers to is more than what it reads: a method refers to all of its model. A change by
somebody else is refused only if the code names what changed (:meth:`Referents.reads`).
"""

import copyreg
import functools
import inspect
import io
import sys
from abc import ABC
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn

from retrograde.replay.generators import is_generator
from retrograde.replay.places import ARRAY_BYTES, Attributes, Contents, Entries, Place, Unreadable

_DEPTH = 3
_VARIABLE = "the variable {0!r}"
_ITEMS = 1000  # entries of a list that are searched; a longer one may be a data set
_USUAL = frozenset(vars(nn.Module()))
#: The attributes of a module that are tables of their own, or torch's.
MODULE_TABLES = _USUAL - {"training"}
_TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "numba", "triton", "retrograde"}
_ATOMS = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_BUILT_IN = type(len)
#: Code with one of these names may read any attribute.
_DYNAMIC = {
    "__dict__", "__getattribute__", "attrgetter", "buffers", "children", "eval", "exec", "getattr",
    "get_buffer", "get_parameter", "get_submodule", "modules", "named_buffers", "named_children",
    "named_modules", "named_parameters", "parameters", "setattr", "state_dict", "vars",
}  # fmt: skip
#: Methods that code calls without their names.
_IMPLICIT = {
    f"__{name}__"
    for name in (
        "add", "bool", "call", "contains", "enter", "eq", "exit", "getattr", "getitem", "iter",
        "len", "matmul", "mul", "next", "radd", "rmul", "rsub", "setitem", "sub", "truediv",
    )
}  # fmt: skip
_OPEN = {object, nn.Module, ABC, Generic, SimpleNamespace}  # have no code that reads attributes


@dataclass(frozen=True)
class Referents:
    """The objects that a cell refers to.

    ``modules`` has no submodules. ``tensors`` are captured, or held by modules without
    registration. ``moving`` are the names of iterators and files, which change by being read.
    ``callers`` are methods that are being run, and run the cell: the object's id, and a name.
    """

    made_of: Sequence[Any] = ()
    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    codes: list[CodeType] = field(default_factory=list)
    moving: list[str] = field(default_factory=list)
    callers: set[tuple[int, str]] = field(default_factory=set)

    def parts(self) -> list[nn.Module]:
        """Return every module, submodules included, each once."""
        parts = (part for module in self.modules for part in module.modules())
        return list({id(part): part for part in parts}.values())

    def read(self) -> "Referents":
        """Return those that the cell's code names, as far as it shows. This walk is for errors."""
        names = frozenset[str]().union(*map(_names, self.codes))
        if names & _DYNAMIC:
            return self
        walk = _Walk(self.made_of, names, self.callers)
        walk.run()
        return walk.found

    def reads(self, place: Place, key: Any) -> bool:
        """Return whether the cell reads the value of a name, as far as its code shows."""
        alike = (p for p in self.places if p.holder is place.holder)
        return any(p.names is None or key in p.names for p in alike)


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
    walk = _Walk(parts)
    walk.run()
    return walk.found


class _Walk:
    """A breadth-first walk over the referents of a cell. With ``names`` it follows only the
    attributes that have one of them, where all code that reads them is known."""

    def __init__(
        self,
        made_of: Sequence[Any],
        names: frozenset[str] | None = None,
        callers: Iterable[tuple[int, str]] = (),
    ) -> None:
        self.found = Referents(made_of, callers={*callers})
        self.names = names
        self.seen: dict[int, Any] = {}  # by id; values are held, so that no id is used again
        self.pending: deque[tuple[Any, str, int]] = deque()
        self.open: dict[type, tuple[Any, int, set[str]]] = {}  # whose methods may be called
        # By id, since what torch compiles has no hash.
        self.running = {id(frame.f_code) for frame in frames()} if names is None else set[int]()
        for part in made_of:
            self.add(part, "the cell", _DEPTH)

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
        codes, known, names = self.found.codes, -1, {*_IMPLICIT}
        while self.pending or len(codes) > known:
            while self.pending:
                self.look(*self.pending.popleft())
            names.update(*map(_names, codes[max(known, 0) :]))
            known = len(codes)
            for kind, (value, depth, done) in [*self.open.items()]:
                for name in (names & _members(kind)) - done:
                    self.code(value, name, depth)

    def look(self, value: Any, name: str, depth: int) -> None:
        """Classify a value, and add the values inside it."""
        found = self.found
        if isinstance(value, Tensor):
            if type(value) is not Unreadable:
                found.tensors.append(value)
        elif isinstance(value, nn.Module):
            found.modules.append(value)
            for part in self.parts(value):
                self.seen[id(part)] = part
                self.module(part, depth)
        elif is_generator(value):
            found.generators.append(value)
        elif inspect.isfunction(value):
            self.function(value, depth)
        elif inspect.ismethod(value):
            self.add(value.__self__, name, depth)
            self.code(value.__self__, value.__name__, depth)
            self.add(value.__func__, name, depth)
        elif isinstance(value, functools.partial):
            self.add(value.func, name, depth)
            self.held(Contents(value.keywords, f"the arguments of {name}"), depth)
            self.each(value.args, name, depth)
        elif isinstance(value, dict | list | deque | set):
            self.held(Contents(value, name), depth)
        elif isinstance(value, tuple):
            self.each(value, name, depth)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= ARRAY_BYTES and value.flags.writeable and value.dtype != object:
                found.places.append(Contents(value, name))
        elif hasattr(type(value), "__next__"):
            written = isinstance(value, io.IOBase) and (value.closed or not value.readable())
            found.moving.extend([] if written else [name])
        elif not isinstance(value, type | ModuleType | CodeType | _BUILT_IN):
            self.object(value, depth)

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

    def follows(self, kind: type) -> frozenset[str] | None:
        """Return the names of the attributes to follow in an object of a class; None for all."""
        return self.names if _is_open(kind) else None

    def object(self, value: Any, depth: int) -> None:
        kind = type(value)
        if hasattr(value, "__dict__"):
            self.held(Entries(vars(value), kind.__name__, self.follows(kind)), depth)
        if slots := copyreg._slotnames(kind):  # type: ignore[attr-defined]
            self.held(Attributes(value, kind.__name__, slots), depth)
        self.open.setdefault(kind, (value, depth, set()))

    def parts(self, module: nn.Module) -> Iterator[nn.Module]:
        yield module
        names = self.follows(type(module))
        for name, child in module._modules.items():
            wanted = child is not None and (names is None or name in names)
            if wanted and id(child) not in self.seen:
                yield from self.parts(child)  # type: ignore[arg-type]

    def module(self, part: nn.Module, depth: int) -> None:
        """Add one module without its submodules."""
        kind, own, names = type(part).__name__, vars(part), self.follows(type(part))
        places = self.found.places
        places.append(Entries(own, kind, names))
        if isinstance(part, torch.jit.ScriptModule):  # it keeps its attributes elsewhere
            made = getattr(part, "_concrete_type", None)
            more = made.get_attributes() if made is not None else ()
            places.append(Attributes(part, kind, ["training", *more]))
        else:
            tables = _TABLES.items()
            places.extend(Entries(own[t], kind, names, registered=what) for t, what in tables)
            self.code(part, "forward", depth)
            self.open.setdefault(type(part), (part, depth, {"forward"}))
        for table in _HOOKS:
            if own.get(table):
                self.held(Contents(own[table], f"{kind}.{table}"), depth)
        for key, value in own.items():
            if key not in _USUAL and type(value) not in _ATOMS and (names is None or key in names):
                self.add(value, f"{kind}.{key}", depth - 1)

    def code(self, value: Any, name: str, depth: int) -> None:
        """Add the method, property or class attribute of an object that some code names. A method
        that is being run is the cell's caller, and no part of the cell."""
        kind = type(value)
        self.open.setdefault(kind, (value, depth, set()))[2].add(name)
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is None or _is_library(owner.__module__):
            return
        found = vars(owner)[name]
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if inspect.isfunction(found):
            if id(found.__code__) in self.running and _runs(found.__code__, value):
                self.found.callers.add((id(value), name))
            if (id(value), name) not in self.found.callers:
                self.add(found, kind.__name__, depth)
        elif _is_data(found):
            self.held(Attributes(owner, owner.__name__, [name]), depth)

    def function(self, value: FunctionType, depth: int) -> None:
        self.found.codes.append(value.__code__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if id(cell) not in self.seen:
                self.seen[id(cell)] = cell
                self.held(Attributes(cell, name, ["cell_contents"], form=_VARIABLE), depth)
        if _is_library(value.__module__):
            return
        if value.__defaults__ or value.__kwdefaults__:
            place = Attributes(value, value.__qualname__, ["__defaults__", "__kwdefaults__"])
            self.held(place, depth)
        if value.__dict__:
            self.held(Entries(value.__dict__, value.__qualname__), depth)
        names = _names(value.__code__)
        self.named(value.__globals__, names, f"the module {value.__module__}", depth)

    def named(self, scope: dict[str, Any], names: frozenset[str], name: str, depth: int) -> None:
        """Add the globals in code; of modules and classes among them, the values it may read."""
        read = [name for name in names if name in scope]
        data = [n for n in read if not isinstance(scope[n], ModuleType | _BUILT_IN)]
        if data:
            self.held(Entries(scope, name, data, form="{1!r} of {0}"), depth)
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


def frames() -> Iterator[FrameType]:
    """Iterate over what is being run, from the caller outward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _runs(code: CodeType, value: Any) -> bool:
    """Return whether code is being run as a method of an object."""
    first = code.co_varnames[:1]
    return any(f.f_code is code and f.f_locals.get(*first) is value for f in frames() if first)


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """Return all names in code that are not its own variables, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.lru_cache(maxsize=256)
def _members(kind: type) -> frozenset[str]:
    """Return the names in a class and its bases, without those of libraries."""
    return frozenset(n for b in kind.__mro__ if not _is_library(b.__module__) for n in vars(b))


@functools.lru_cache(maxsize=256)
def _is_open(kind: type) -> bool:
    """Return whether all code of a class can be followed."""
    return all(base in _OPEN or not _is_library(base.__module__) for base in kind.__mro__)


def _is_data(value: Any) -> bool:
    return not callable(value) and not hasattr(type(value), "__get__")


def _is_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES
