"""What a cell refers to: its modules, the tensors that it captured, its generators.

A cell is a module, a function, a closure, a method, a ``functools.partial`` or any object that can
be called. What it is made of is found by looking: at what a function closes over and the globals
that it names, at what a method is bound to, at the attributes of objects and modules, and into
lists, tuples and dicts, a few levels deep.
"""

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from retrograde.execute.chance import is_generator

__all__ = ["Reach", "reach"]

T = TypeVar("T")

_DEPTH = 3
_ITEMS = 1000  # of a longer list, as a data set may be, the rest is not looked at
_USUAL = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Reach:
    """What a cell refers to.

    Attributes:
        modules: those that were found, not their submodules.
        tensors: what it captured, and what its modules hold that is not registered with torch.
        generators: of random numbers.
    """

    modules: list[nn.Module]
    tensors: list[Tensor]
    generators: list[Any]

    def parts(self) -> list[nn.Module]:
        """Every module, submodules included, each once."""
        return _each([part for module in self.modules for part in module.modules()])


def reach(parts: Sequence[Any]) -> Reach:
    """Look for all that some parts of a cell refer to.

    Args:
        parts: the cell, or the functions and objects that it was made from.

    Returns:
        A :class:`Reach`.

    Example:
        >>> import torch
        >>> linear, scale = nn.Linear(2, 2), torch.ones(2)
        >>> found = reach([lambda x, h: linear(x) * scale + h])
        >>> found.modules == [linear], found.tensors[0] is scale
        (True, True)
    """
    modules: list[nn.Module] = []
    tensors: list[Tensor] = []
    generators: list[Any] = []
    for value in (value for part in parts for value in _referents(part, _DEPTH)):
        if isinstance(value, nn.Module):
            modules.append(value)
        elif isinstance(value, Tensor):
            tensors.append(value)
        elif is_generator(value):
            generators.append(value)
    return Reach(_each(modules), _each(tensors), _each(generators))


def _each(found: list[T]) -> list[T]:
    return list({id(value): value for value in found}.values())


def _referents(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth == 0 or isinstance(value, Tensor):
        return
    for item in _within(value):
        yield from _referents(item, depth - 1)


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return [*_own_attributes(value), type(value).forward]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*names.nonlocals.values(), *names.globals.values(), *defaults]
    if isinstance(value, dict):
        return list(value.values())[:_ITEMS]
    if isinstance(value, list | tuple):
        return value[:_ITEMS]
    if hasattr(value, "__dict__") and not (inspect.ismodule(value) or inspect.isclass(value)):
        return [*vars(value).values(), *([type(value).__call__] if callable(value) else [])]
    return []


def _own_attributes(module: nn.Module) -> list[Any]:
    """What a module and its submodules hold that torch does not register."""
    found = []
    for part in module.modules():
        found += [value for name, value in vars(part).items() if name not in _USUAL]
    return found
