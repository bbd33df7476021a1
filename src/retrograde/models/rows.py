"""Layers that a model calls one after the other, within a byte budget.

A model may call its layers itself: the blocks of a transformer in a loop, or ``layer1`` to
``layer4`` of a ResNet in turn. Each such layer keeps its class. Its ``forward`` becomes a
:class:`Turn`, which passes the call to the :class:`CalledRow` of all of them. The row plans how
each call is kept (:mod:`retrograde.plan.calls`): whole, lean, or dropped and run again
(:mod:`retrograde.models.refill`).

The first pass with another kind of input drops all but its first input, and measures every call.
Its plan is made when it goes back. A layer that is not given the result of the layer
before it runs by ordinary backpropagation, and a warning says so.

A *rider* is an activation that writes to its input, such as an in-place ReLU. It is a part of the
layer before it.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from retrograde.errors import CellError
from retrograde.machine import MEASURING
from retrograde.models.call_sizes import Kind, Meter
from retrograde.models.refill import Dropped, Row, made_by, tensors_in
from retrograde.models.trials import parts_of, tensors_of, texts_of
from retrograde.plan.calls import kept_whole
from retrograde.replay.surroundings import version
from retrograde.run.transforms import is_unreal, refuse_sharded, refuse_transforms, uncompiled
from retrograde.sizes.cache import LRUCache, signature

__all__ = [
    "CHANGES", "CalledRow", "Contents", "Given", "Turn", "own_forward", "passes_through",
    "release", "rides", "take_turns",
]  # fmt: skip

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CHANGES = "changes a list or a dict that it is given: expected it to return what is new"
_ACTIVATIONS = {  # their results depend on their input alone
    getattr(nn, name)
    for name in (
        "Threshold", "ReLU", "ReLU6", "Hardtanh", "Hardsigmoid", "SiLU", "Mish", "Hardswish",
        "ELU", "CELU", "SELU", "LeakyReLU",
    )
}  # fmt: skip
_MARK = "_retrograde_pass"  # an attribute of the tensor that a layer hands on


@dataclass(frozen=True)
class Given:
    """The arguments of a layer. ``slot`` is the position or name of the state among them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int | str

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], slot: int | str) -> "Given":
        """Return the arguments of a call, with copies of the caller's lists and dicts."""
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        return cls(args, kwargs, slot)

    @property
    def state(self) -> Tensor:
        held: Any = self.args if isinstance(self.slot, int) else self.kwargs
        found: Tensor = held[self.slot]
        return found

    def kind(self) -> Hashable:
        """Return their key: the structure, the tensors' signatures, and the other values."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        known = (signature(v) if isinstance(v, Tensor) else (type(v), v) for v in leaves)
        return str(spec), tuple(known)

    def refusal(self) -> str | None:
        """Return the reason why a layer cannot be recomputed with these arguments, or None."""
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                return (
                    f"is given a {type(leaf).__name__}, which it may change: expected tensors and "
                    "numbers; of a language model, call it with use_cache=False"
                )
        return None


class Contents:
    """The contents of lists and dicts when a call began."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.leaves, self.spec = pytree.tree_flatten(value)

    def changed(self) -> bool:
        """Return whether the contents are different by now."""
        leaves, spec = pytree.tree_flatten(self.value)
        same = spec == self.spec and all(a is b for a, b in zip(leaves, self.leaves, strict=True))
        return not same


class Called(Protocol):
    """The receiver of the calls of a :class:`Turn`."""

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Turn:
    """The ``forward`` of a module in a row, which passes its calls to the row.

    A rider may be called at several places, each of which is a row and a number in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places: list[tuple[Called, int]] = []

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        row, number = self.places[0]
        if rides(self.module):  # it may also be called outside of its rows
            now = _pass_of(args[0]) if args else None
            if now is None or (now.row, now.next) not in self.places:
                return own_forward(self.module)(*args, **kwargs)
            row, number = now.row, now.next
        return row.call(number, args, kwargs)


@dataclass
class _Pass:
    """A pass of a model through a row. It is an attribute of the tensor between two layers.

    Attributes:
        calls: the calls that are dropped; None if ordinary backpropagation runs.
        next: the number of the next call.
        made: the tensors of the last result; None for those that it was given.
        last: the call of the layer before, if it is dropped; riders may follow.
    """

    row: "CalledRow"
    kind: Kind
    calls: Row | None
    next: int = 0
    made: "list[ref[Tensor] | None]" = field(default_factory=list)
    last: Dropped | None = None


_Found = tuple[list[nn.Module], list[Tensor]]


class CalledRow:
    """Layers that a model calls one after the other, each once in a pass.

    Args:
        calls: the called modules, by name, in the order of the calls. Riders are parts of the
            layers before them.
        slots: the argument of each layer that is the state.
    """

    def __init__(self, calls: Sequence[tuple[str, nn.Module]], slots: Sequence[int | str]) -> None:
        self.calls, self.memory = [*calls], 0
        starts = [i for i, (_, module) in enumerate(calls) if not rides(module)]
        self.names, self.layers = [], list[list[nn.Module]]()
        self.slots: list[int | str] = []
        self.parts: list[tuple[int, int]] = []  # each call's layer, and 0 or its rider
        for k, (start, stop) in enumerate(pairwise([*starts, len(calls)])):
            self.names.append(calls[start][0])
            self.layers.append([module for _, module in calls[start:stop]])
            self.slots.append(slots[start])
            self.parts += [(k, part) for part in range(stop - start)]
        self.kinds: LRUCache[Kind] = LRUCache()
        self.meter = Meter()

    def install(self) -> None:
        """Pass the calls of the layers to this row from now on."""
        take_turns(self, [module for _, module in self.calls])

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of the model that has this number in the row."""
        k, part = self.parts[number]
        forward = own_forward(self.calls[number][1])
        slot = 0 if part else self.slots[k]
        held: Any = kwargs if isinstance(slot, str) else dict(enumerate(args))
        if not torch.is_grad_enabled() or not isinstance(held.get(slot), Tensor):
            return forward(*args, **kwargs)
        given = Given.of(args, kwargs, slot)
        if (reason := given.refusal()) is not None:
            raise CellError(f"layer {self.names[k]} {reason}")
        now = self._pass(number, given)
        if now is None or now.calls is None or k not in now.kind.active:
            result = forward(*args, **kwargs)
        elif part:
            result = forward(*args) if now.last is None else now.last.run(forward, args, kwargs)
        else:
            result = self._run(now, now.kind.active.index(k), forward, given)
        if now is not None and number + 1 < len(self.calls):
            now.next = number + 1
            if part or k not in now.kind.active:  # the same tensors as before
                made: list[Tensor | None] = [*tensors_in(result)]
            else:
                made = made_by(result, (args, kwargs))
                now.made = [y if y is None else ref(y) for y in made]
            for y in made:
                if y is not None:
                    setattr(y, _MARK, (now, version(y)))
        elif now is not None and now.calls is not None:
            now.last = None
            now.kind.plan(self.memory)  # raises if the budget is too small
        return result

    def _pass(self, number: int, given: Given) -> _Pass | None:
        """Return the pass of a call whose state is the output of the call before it.

        The call of the first active layer begins a pass. Otherwise the result is None, and the call
        of an active layer warns.
        """
        now = _pass_of(given.state)
        if now is not None and now.row is self and now.next == number:
            return now
        k, part = self.parts[number]
        active = self.active()
        if part == 0 and k == min(active, default=0):
            return self._begin(active, given)
        if k in active:
            warnings.warn(
                f"layer {self.names[k]} was not called on the output of the layer before "
                "it, as it was for the sample: it is run by ordinary backpropagation, beyond the "
                "budget",
                stacklevel=5,
            )
        return None

    def _begin(self, active: list[int], given: Given) -> _Pass:
        x, found = given.state, self.parts_and_tensors()
        if is_unreal([x]) or not (x.requires_grad or any(t.requires_grad for t in found[1])):
            return _Pass(self, Kind(active), None)
        refuse_transforms([x])
        refuse_sharded(*found)
        kind = self.kind_of(self.key_of(given, found), lambda: Kind(active), found)
        if not kind.is_measured:
            return _Pass(self, kind, Row((), lambda: kind.late_plan(self.memory)))
        parts = kind.plan(self.memory)
        return _Pass(self, kind, None if parts == kept_whole(kind.sizes) else Row(parts))

    def active(self) -> list[int]:
        """Return the layers that do not just return their input, in their present mode."""
        return [k for k, one in enumerate(self.layers) if not passes_through(one[0])]

    def kind_of(self, key: Hashable, make: Callable[[], Kind], found: _Found) -> Kind:
        """Return what is known of passes with a key; ``make`` it if nothing is."""
        return self.kinds.get(key, make, of=(*found[0], *found[1]))

    def key_of(self, given: Given, found: _Found) -> Hashable:
        """Return all that units and sizes depend on, given the first layer's arguments."""
        return given.kind(), texts_of(*found, fractions=False)

    def parts_and_tensors(self) -> _Found:
        """Return all modules in the layers, and their parameters and buffers."""
        parts = parts_of([layer for one in self.layers for layer in one])
        return parts, tensors_of(parts)

    def _run(self, now: _Pass, at: int, forward: Callable[..., Any], given: Given) -> Any:
        """Run a layer without its riders."""
        made = [None if y is None else y() for y in now.made]
        self.measure(now.kind, at, given, made)
        assert now.calls is not None
        result, now.last = now.calls.run(
            at, now.kind.units[at], forward, given.args, given.kwargs, made, now.last
        )
        return result

    def measure(self, kind: Kind, at: int, given: Given, made: Sequence[Tensor | None]) -> None:
        """Try and measure an active layer, if it is the next one that is not known. ``made`` are
        the tensors that the call before made."""
        if min(len(kind.units), len(kind.sizes)) > at:
            return
        k, call = kind.active[at], (given.args, given.kwargs)
        layers, of = self.layers[k], given.kind()

        def forward(*args: Any, **kwargs: Any) -> Any:
            value = own_forward(layers[0])(*args, **kwargs)
            for rider in layers[1:]:
                value = own_forward(rider)(value)
            return value

        with MEASURING:  # another thread may be measuring the same
            if len(kind.units) == at:
                tried = self.meter.try_call(self.names[k], forward, layers, of, call)
                kind.units.append(tried.unit)
            if len(kind.sizes) == at:
                state = [t for t in made if t is not None] if at else [given.state]
                found = self.meter.measure(kind.units[at], layers, of, call, state, first=at == 0)
                kind.add(found, last=at + 1 == len(kind.active))


def _pass_of(t: Any) -> _Pass | None:
    """Return the pass that a tensor belongs to; None if it was written to since then."""
    now, then = getattr(t, _MARK, (None, 0))
    return now if then == version(t) else None


def passes_through(layer: nn.Module) -> bool:
    """Return whether a layer returns the very tensor that it is given."""
    if isinstance(layer, nn.Identity):
        return True
    return isinstance(layer, _DropoutNd) and (not layer.training or layer.p == 0)


def take_turns(called: Called, modules: Sequence[nn.Module]) -> None:
    """Pass the calls of some modules to ``called``, with their numbers."""
    for number, module in enumerate(modules):
        turn = vars(module).setdefault("forward", Turn(module))
        turn.places.append((called, number))


def release(modules: Iterable[nn.Module]) -> None:
    """Give all modules their own forward pass again, so that no row gets their calls."""
    for module in modules:
        if isinstance(vars(module).get("forward"), Turn):
            del vars(module)["forward"]


def rides(module: nn.Module) -> bool:
    """Return whether a module is a rider: an activation that works in place."""
    return type(module) in _ACTIVATIONS and bool(getattr(module, "inplace", False))


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward pass of a module's class, without a :class:`Turn`."""
    forward: Callable[..., Any] = partial(type(module).forward, module)
    return forward
