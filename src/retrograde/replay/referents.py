"""What a call refers to: modules, captured tensors, generators, and plain values.

A call is of a module, a function, a closure, a method, a ``functools.partial`` or any other object.
The search looks at a function's closure, its defaults and the globals that it names. It looks at
the attributes of objects and modules, and into lists, tuples and dicts, a few levels deep. It
follows all code except the standard library, torch, NumPy and their kind.
"""

import copyreg
import functools
import gc
import inspect
import sys
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.replay.generators import KINDS

_DEPTH = 3
_ITEMS = 1000  # entries of a list that are searched; a longer one may be a data set
_FEW = 16  # entries of a list whose plain values are noted
#: The attributes of a module that are tables of their own, or torch's.
MODULE_TABLES = frozenset(vars(nn.Module())) - {"training"}
_TABLES = "_parameters", "_buffers", "_modules"
_HOOKS = "_forward_pre_hooks", "_forward_hooks"
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "numba", "triton", "retrograde"}
#: The types of plain values.
PLAIN = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
#: Methods that code calls without their names.
_IMPLICIT = {"forward", "__call__", "__getattr__", "__getitem__", "__next__", "__enter__"}


@dataclass(frozen=True)
class Referents:
    """The objects that a call refers to.

    ``modules`` has no submodules. ``tensors`` are captured, or held by modules without
    registration. ``values`` are plain, each with a name. ``holders`` are dicts with a form of their
    values' names: attributes of objects, tables of modules, and others.
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
        modules = (part for module in self.modules for part in nn.Module.modules(module))
        return list({id(part): part for part in modules}.values())

    def changed(self) -> list[str]:
        """Return the names of plain values that are others now; entries of lists have none."""
        pairs = zip(self.values, find_referents(self.made_of).values, strict=False)
        return [
            name for (name, then), (same, now) in pairs if name and name == same and then != now
        ]


def find_referents(made_of: Sequence[Any]) -> Referents:
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
    return _Walk(made_of).run()


class _Walk:
    """A breadth-first walk over the referents of a call."""

    def __init__(self, made_of: Sequence[Any]) -> None:
        self.found = Referents(made_of)
        self.seen: dict[int, Any] = {}  # by id; values are held, so that no id is used again
        self.pending: deque[tuple[Any, int]] = deque()
        self.open: dict[type, int] = {}  # whose methods may be called, and the depth
        self.each(made_of, _DEPTH + 1)

    def named(self, values: Mapping[Any, Any], form: str, depth: int) -> None:
        """Note plain values by their names, and look at others later, each once."""
        for key, value in [*values.items()][:_ITEMS]:
            kind = type(value)
            if kind in PLAIN:
                self.found.values.append((form.format(key), value))
            elif depth > 0 and id(value) not in self.seen:
                ours = kind.__module__.startswith("retrograde.") and not issubclass(kind, nn.Module)
                if depth > _DEPTH or not ours:  # our own modules' memory is not part of a cell
                    self.seen[id(value)] = value
                    self.pending.append((value, depth - 1))

    def each(self, values: Sequence[Any], depth: int) -> None:
        """Look at what a list holds; note plain values if they are few."""
        if len(values) > _FEW:
            values = [value for value in values[:_ITEMS] if type(value) not in PLAIN]
        self.named(dict(enumerate(values)), "", depth)

    def run(self) -> Referents:
        names, done = {*_IMPLICIT}, set[tuple[type, str]]()
        while self.pending:
            while self.pending:
                self.look(*self.pending.popleft())
            names.update(*map(_names, self.found.codes))
            for kind, depth in [*self.open.items()]:
                for name in sorted(names & _members(kind).keys()):
                    if (kind, name) not in done:
                        done.add((kind, name))
                        owner = _members(kind)[name]
                        self.scope(vars(owner), owner.__name__, {name}, depth)
        return self.found

    def look(self, value: Any, depth: int) -> None:
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
        elif isinstance(value, KINDS):
            found.generators.append(value)
        elif inspect.isfunction(value):
            self.function(value, depth)
        elif isinstance(value, MethodType | functools.partial):
            self.each(gc.get_referents(value), depth + 1)
        elif isinstance(value, dict):
            found.holders.append((value, "the entry {!r}"))
            self.named(dict(dict.items(value)), "the entry {!r}", depth)  # as it holds them
        elif isinstance(value, list | tuple | deque | set | frozenset):
            found.lists.extend([value] if isinstance(value, list) else [])
            self.each(gc.get_referents(value), depth)
        elif not isinstance(value, type | ModuleType | CodeType | type(len)):
            self.attributes(value, depth)

    def attributes(self, value: Any, depth: int) -> None:
        """Add the attributes of an object: those in its slots and in its dict."""
        slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
        attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        namespace, form = getattr(value, "__dict__", None), type(value).__name__ + ".{}"
        if isinstance(namespace, dict):
            self.found.holders.append((namespace, form))
            tables = MODULE_TABLES if isinstance(value, nn.Module) else ()
            attributes |= {key: namespace[key] for key in namespace if key not in tables}
        self.named(attributes, form, depth)
        self.open.setdefault(type(value), depth)

    def module(self, part: nn.Module, depth: int) -> None:
        """Add one module without its submodules."""
        namespace, form = vars(part), type(part).__name__ + ".{}"
        for table in map(namespace.get, _TABLES):
            if isinstance(table, dict):  # of a scripted module they are wrappers
                self.found.holders.append((table, form))
        for hooks in map(namespace.get, _HOOKS):
            self.each([*(hooks or {}).values()], depth)
        self.attributes(part, depth)

    def function(self, value: FunctionType, depth: int) -> None:
        code = value.__code__
        self.found.codes.append(code)
        cells = zip(code.co_freevars, map(gc.get_referents, value.__closure__ or ()), strict=True)
        variables = {name: inside[0] for name, inside in cells if inside}
        self.named(variables, "the variable {!r}", depth)
        if not _is_library(value.__module__):
            self.each([*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()], depth)
            self.named(vars(value), value.__qualname__ + ".{}", depth)
            self.scope(value.__globals__, str(value.__module__), _names(code), depth)

    def scope(self, scope: Mapping[str, Any], name: str, names: Set[str], depth: int) -> None:
        """Add what some names stand for in a module or a class, and in those among these."""
        for key in sorted(names & scope.keys()):
            value = scope[key]
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if not isinstance(value, ModuleType | type):
                self.named({key: value}, name + ".{}", depth)
            elif id(value) not in self.seen:
                self.seen[id(value)] = value
                if not _is_library(getattr(value, "__module__", value.__name__)):
                    self.scope(vars(value), value.__name__, names, depth)


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """Return all names in code that are not its own variables, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


@functools.lru_cache(maxsize=256)
def _members(kind: type) -> dict[str, type]:
    """Return the names in a class and its bases, each with that which has it. Libraries' are left
    out."""
    return {n: b for b in reversed(kind.__mro__) for n in vars(b) if not _is_library(b.__module__)}


def _is_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES
