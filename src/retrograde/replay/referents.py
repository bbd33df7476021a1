"""What a call refers to: modules, captured tensors, generators, and plain values.

A call is of a module, a function, a closure, a method, a ``functools.partial`` or any other object.
The search looks at a function's closure, its defaults and the globals that it names. It looks at
the object of a method, at the attributes of objects and modules, and into lists, tuples and dicts,
a few levels deep. It follows all code except the standard library, torch, NumPy and their kind.
"""

import copyreg
import functools
import gc
import inspect
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.replay.generators import is_generator

_DEPTH = 3
_ITEMS = 1000  # entries of a list that are searched; a longer one may be a data set
_FEW = 16  # entries of a list whose plain values are noted
_USUAL = frozenset(vars(nn.Module()))
#: The attributes of a module that are tables of their own, or torch's.
MODULE_TABLES = _USUAL - {"training"}
#: Those of parameters, buffers and submodules, and torch's words for what they hold.
TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "numba", "triton", "retrograde"}
_ATOMS = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_BUILT_IN = type(len)
#: Methods that code calls without their names.
_IMPLICIT = {"forward", "__call__", "__getattr__", "__getitem__", "__next__", "__enter__"}
_CONTAINERS = list, tuple, deque, set, frozenset
_CALLS = MethodType, functools.partial


@dataclass(frozen=True)
class Referents:
    """The objects that a call refers to.

    ``modules`` has no submodules. ``tensors`` are captured, or held by modules without
    registration. ``values`` are numbers, texts and the like, by name. ``holders`` are dicts with a
    form of their values' names: attributes of objects, tables of modules, and others.
    """

    made_of: Sequence[Any] = ()
    modules: list[nn.Module] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    codes: list[CodeType] = field(default_factory=list)
    values: list[tuple[str, Any]] = field(default_factory=list)
    holders: list[tuple[dict[Any, Any], str]] = field(default_factory=list)
    lists: list[list[Any]] = field(default_factory=list)

    def parts(self) -> list[nn.Module]:
        """Return every module, submodules included, each once."""
        parts = (part for module in self.modules for part in nn.Module.modules(module))
        return list({id(part): part for part in parts}.values())

    def changed(self) -> list[str]:
        """Return the names of plain values that are others now."""
        now = dict(find_referents(self.made_of).values)
        return [name for name, value in dict(self.values).items() if now.get(name, value) != value]


def find_referents(parts: Sequence[Any]) -> Referents:
    """Find all that the functions and objects that a call is made of refer to.

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
    """A breadth-first walk over the referents of a call."""

    def __init__(self, made_of: Sequence[Any]) -> None:
        self.found = Referents(made_of)
        self.seen: dict[int, Any] = {}  # by id; values are held, so that no id is used again
        self.pending: deque[tuple[Any, str, int]] = deque()
        self.open: dict[type, int] = {}  # whose methods may be called, and the depth
        for part in made_of:
            self.add(part, "the cell", _DEPTH)

    def add(self, value: Any, name: str, depth: int) -> None:
        """Look at a value later, once; note a plain one."""
        kind = type(value)
        if kind in _ATOMS:
            self.found.values.append((name, value))
        elif depth >= 0 and id(value) not in self.seen:
            ours = kind.__module__.startswith("retrograde.") and not isinstance(value, nn.Module)
            if depth == _DEPTH or not ours:  # the memory of our own modules is not part of a cell
                self.seen[id(value)] = value
                self.pending.append((value, name, depth))

    def run(self) -> None:
        codes, known, names, done = self.found.codes, -1, {*_IMPLICIT}, set[tuple[type, str]]()
        while self.pending or len(codes) > known:
            while self.pending:
                self.look(*self.pending.popleft())
            names.update(*map(_names, codes[max(known, 0) :]))
            known = len(codes)
            for kind, depth in [*self.open.items()]:
                for name in sorted(names & _members(kind)):
                    if (kind, name) not in done:
                        done.add((kind, name))
                        self.member(kind, name, depth)

    def look(self, value: Any, name: str, depth: int) -> None:
        """Classify a value, and add the values inside it."""
        found = self.found
        if isinstance(value, Tensor):
            found.tensors.append(value)
        elif isinstance(value, nn.Module):
            found.modules.append(value)
            for part in nn.Module.modules(value):
                if part is value or id(part) not in self.seen:
                    self.seen[id(part)] = part
                    self.module(part, depth)
        elif is_generator(value):
            found.generators.append(value)
        elif inspect.isfunction(value):
            self.function(value, depth)
        elif isinstance(value, _CALLS):
            self.each(gc.get_referents(value), name, depth + 1)
        elif isinstance(value, dict):
            found.holders.append((value, name + "[{!r}]"))
            self.named(dict(dict.items(value)), name, depth)  # a subclass may make what it returns
        elif isinstance(value, _CONTAINERS):
            found.lists.extend([value] if isinstance(value, list) else [])
            self.each(gc.get_referents(value), name, depth)
        elif not isinstance(value, type | ModuleType | CodeType | _BUILT_IN):
            kind = type(value)
            slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
            held = {n: getattr(value, n) for n in slots if hasattr(value, n)}
            if isinstance(own := getattr(value, "__dict__", None), dict):
                found.holders.append((own, kind.__name__ + ".{}"))
                held |= own
            self.named(held, kind.__name__, depth, "{}.{}")
            self.open.setdefault(kind, depth)

    def each(self, values: Sequence[Any], name: str, depth: int) -> None:
        for value in values[:_ITEMS]:
            if type(value) not in _ATOMS or len(values) <= _FEW:
                self.add(value, name, depth - 1)

    def named(self, values: dict[Any, Any], name: str, depth: int, form: str = "{}[{!r}]") -> None:
        """Add what a dict holds, or an object's attributes."""
        for key, value in [*values.items()][:_ITEMS]:
            self.add(value, form.format(name, key), depth - 1)

    def module(self, part: nn.Module, depth: int) -> None:
        """Add one module without its submodules."""
        own, form = vars(part), type(part).__name__ + ".{}"
        tables = [own, *map(own.get, TABLES)]  # of a scripted module they are wrappers
        self.found.holders.extend((each, form) for each in tables if isinstance(each, dict))
        if not isinstance(part, torch.jit.ScriptModule):  # it keeps its attributes elsewhere
            self.open.setdefault(type(part), depth)
        for table in _HOOKS:
            self.each([*(own.get(table) or {}).values()], f"a hook of {part}", depth)
        others = {key: value for key, value in own.items() if key not in MODULE_TABLES}
        self.named(others, type(part).__name__, depth, "{}.{}")

    def member(self, kind: type, name: str, depth: int) -> None:
        """Add the method, property or class attribute of an object that some code names."""
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if _is_library(owner.__module__):
            return
        found = vars(owner)[name]
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if inspect.isfunction(found) or _is_data(found):
            self.add(found, f"{owner.__name__}.{name}", depth)

    def function(self, value: FunctionType, depth: int) -> None:
        self.found.codes.append(value.__code__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self.each(gc.get_referents(cell), f"the variable {name!r}", depth)
        if _is_library(value.__module__):
            return
        defaults: dict[Any, Any] = dict(enumerate(value.__defaults__ or ()))
        defaults |= value.__kwdefaults__ or {}
        self.named(defaults, f"the defaults of {value.__qualname__}", depth)
        self.named(value.__dict__, value.__qualname__, depth, "{}.{}")
        self.scope(value.__globals__, _names(value.__code__), value.__module__, depth)

    def scope(self, scope: dict[str, Any], names: frozenset[str], name: str, depth: int) -> None:
        """Add the globals in code; of modules and classes among them, the values it may read."""
        for key in sorted(names & scope.keys()):
            value = scope[key]
            if not isinstance(value, ModuleType | type | _BUILT_IN):
                self.add(value, f"{key!r} of the module {name}", depth - 1)
            elif id(value) not in self.seen:
                self.seen[id(value)] = value
                if isinstance(value, ModuleType) and not _is_library(value.__name__):
                    self.scope(vars(value), names, value.__name__, depth)
                elif isinstance(value, type) and not _is_library(value.__module__):
                    own = {n: v for n, v in vars(value).items() if n in names and _is_data(v)}
                    self.named(own, value.__name__, depth, "{}.{}")


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """Return all names in code that are not its own variables, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.lru_cache(maxsize=256)
def _members(kind: type) -> frozenset[str]:
    """Return the names in a class and its bases, without those of libraries."""
    return frozenset(n for b in kind.__mro__ if not _is_library(b.__module__) for n in vars(b))


def _is_data(value: Any) -> bool:
    return not hasattr(type(value), "__get__")


def _is_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES
