"""Caches of measurements and fits, of bounded size.

Measuring a cell and fitting a schedule take as long as many steps, so results are kept. But cells
are often made again at every call (a closure in ``forward``, a bound method), and lengths vary. So
the key of a cell is its code and its referents (:func:`identity`). The cache keeps none of them
alive, and only the most recent fits.

Two cells with one key share a fit, not a gradient. Results stay right, since the cell itself is
examined at every call. Numbers and texts that a cell reads are part of its key, since the bytes of
a step may depend on them.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from retrograde.machine import MEASURING
from retrograde.replay.referents import Referents
from retrograde.run.settled import Settled
from retrograde.sizes.allocations import is_profiled

T = TypeVar("T")

_MOST = 48


class Recent(dict[Hashable, T]):
    """The ``most`` newest entries of a dict."""

    def __init__(self, most: int = 32 * _MOST) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Hashable, value: T) -> None:
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]


@dataclass(frozen=True)
class _Known(Generic[T]):
    result: T
    of: list[weakref.ref[object]]
    exact: bool  # if not, it serves only measurements

    def alive(self) -> bool:
        return all(reference() is not None for reference in self.of)


class LRUCache(Generic[T]):
    """The ``most`` most recent results of slow measurements, by key. Threads may share it; a
    pickled copy is empty."""

    def __init__(self, most: int = _MOST) -> None:
        self._most, self._lock = most, threading.Lock()
        self._found: OrderedDict[Hashable, _Known[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def known(self, key: Hashable) -> T | None:
        """Return the result for a key, or None if it is not known."""
        cached = self._look_up(key)
        return None if cached is None else cached.result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._most,)  # measurements of this process are useless elsewhere

    def get(self, key: Hashable, find: Callable[[], T], of: Iterable[object] = ()) -> T:
        """Return the result for a key; ``find`` computes it if it is not known. ``of`` lists the
        objects whose ids are in the key. The result is dropped when one of them is deleted."""
        cached = self._look_up(key)
        if cached is not None:
            return cached.result
        with MEASURING:  # another thread may be computing the same
            cached = self._look_up(key)
            if cached is None:
                exact = not is_profiled()  # with another profiler, bytes are not quite certain
                cached = _Known(find(), [weakref.ref(value) for value in of], exact)
                with self._lock:
                    for old in [old for old, each in self._found.items() if not each.alive()]:
                        del self._found[old]
                    self._found[key] = cached
                    while len(self._found) > self._most:
                        self._found.popitem(last=False)
        return cached.result

    def _look_up(self, key: Hashable) -> _Known[T] | None:
        with self._lock:
            cached = self._found.get(key)
            if cached is None or not cached.alive() or not (cached.exact or is_profiled()):
                return None
            self._found.move_to_end(key)
            return cached


class CellFits(LRUCache[T]):
    """Fits for cells: a step is measured for each cell, a fit is computed for each kind. Cells that
    differ only in numbers or texts, such as an annealed one, are of one kind. They share a fit if
    their steps take the same bytes."""

    def __init__(self, most: int = _MOST) -> None:
        super().__init__(most)
        self._steps: LRUCache[tuple[Hashable, Settled]] = LRUCache(most)

    def fit(
        self, referents: Sequence[Referents], shapes: Hashable, budget: Hashable,
        step: Callable[[], tuple[Hashable, Settled]], find: Callable[[Settled], T],
    ) -> tuple[T, Settled]:  # fmt: skip
        """Return the fit for a cell, and properties that its calls have settled. ``find`` computes
        the fit for the largest step that was seen; ``step`` measures a step. ``referents`` are what
        it refers to. ``shapes`` is all else that these bytes depend on, and ``budget`` all else
        that the fit depends on."""
        made_of, kinds = (
            tuple(identity(part, values=values) for part in referents) for values in (True, False)
        )
        modules = [module for part in referents for module in part.modules]
        step_bytes, settled = self._steps.get((made_of, shapes), step, of=modules)
        key = kinds, step_bytes, shapes, budget, settled.level()
        return self.get(key, lambda: find(settled), of=modules), settled


def signature(t: Tensor) -> tuple[Any, ...]:
    """Return all that the bytes of a step depend on in one of its tensors."""
    device_type = t.device.type
    autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, autocast


def identity(referents: Referents, *, values: bool = True) -> Hashable:
    """Return a key of a cell, equal for two closures of the same code over the same values. It
    keeps no module and no tensor alive, and holds while the modules live. Without ``values`` only
    the types of numbers and texts count."""
    entries = ((name, type(value), value if values else None) for name, value in referents.values)
    modules = tuple(map(id, referents.modules))
    return modules, tuple(referents.codes), tuple(map(signature, referents.tensors)), tuple(entries)
