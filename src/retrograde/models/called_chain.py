"""A chain whose layers a model calls itself, within a byte budget.

A model may call its layers itself: the blocks of a transformer in a loop, or ``layer1`` to
``layer4`` of a ResNet in turn. Each such layer keeps its class. Its ``forward`` becomes a
:class:`Turn`, which passes the call to the :class:`CalledChain` of all of them. The chain is
measured and planned as a ``Sequential`` is (:mod:`retrograde.models.chain_plans`), and runs call by
call (:mod:`retrograde.models.chain.called`).

A layer may have arguments besides the state: a mask, positions, options. When the layer is
recomputed, it gets them again. A layer whose state is not the output of the layer before it runs by
ordinary backpropagation, and a warning says so.

A *rider* is an activation that writes to its input, such as an in-place ReLU. It is a part of the
layer before it.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from retrograde.errors import CellError
from retrograde.measure.allocations import MEASURING
from retrograde.models.chain.called import CalledRun
from retrograde.models.chain.links import Links
from retrograde.models.chain_plans import ChainFit, Plans
from retrograde.replay.surroundings import autocast_as_now, version
from retrograde.run.transforms import is_unreal, refuse_transforms, uncompiled
from retrograde.sizes.cache import signature
from retrograde.units import Memory

__all__ = [
    "CHANGES",
    "CalledChain",
    "CalledLayer",
    "Contents",
    "Given",
    "Turn",
    "own_forward",
    "passes_through",
    "release",
    "rides",
    "state_of",
    "take_turns",
]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CHANGES = "changes a list or a dict that it is given: expected it to return what is new"
_ACTIVATIONS = {  # their results depend on their input alone
    getattr(nn, name)
    for name in (
        "Threshold", "ReLU", "ReLU6", "Hardtanh", "Hardsigmoid", "SiLU", "Mish", "Hardswish",
        "ELU", "CELU", "SELU", "LeakyReLU",
    )
}  # fmt: skip
_MARK = "_retrograde_passage"  # an attribute of the tensor that a layer hands on


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

    def leaves(self) -> list[Any]:
        """Return all arguments besides the state, as the leaves of a pytree."""
        return [
            leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if leaf is not self.state
        ]

    def tensors(self) -> list[Tensor]:
        """Return the tensors among :meth:`leaves`."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, Tensor)]

    def wanting(self) -> list[Tensor]:
        """Return those of :meth:`tensors` that require a gradient, each once."""
        return list({id(t): t for t in self.tensors() if t.requires_grad}.values())

    def kind(self) -> Hashable:
        """Return their key: the structure, the tensors' signatures, and the other values."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        known = (signature(v) if isinstance(v, Tensor) else (type(v), v) for v in leaves)
        return str(spec), tuple(known)

    def refusal(self) -> str | None:
        """Return the reason why a layer cannot be recomputed with these arguments, or None."""
        for leaf in self.leaves():
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                return (
                    f"is given a {type(leaf).__name__}, which it may change: expected tensors and "
                    "numbers; of a language model, call it with use_cache=False"
                )
        return None

    def at(self, x: Tensor) -> "Given":
        """Return these arguments with another state."""
        return self.replaced({id(self.state): x})

    def replaced(self, others: dict[int, Tensor]) -> "Given":
        """Return these arguments with some tensors replaced, by their ids."""
        args, kwargs = pytree.tree_map(
            lambda leaf: others.get(id(leaf), leaf), (self.args, self.kwargs)
        )
        return Given(args, kwargs, self.slot)

    def without_tensors(self, first: "Given") -> "Given":
        """Return these arguments, each tensor replaced by its place in the first layer's."""
        theirs = {id(t): k for k, t in enumerate([first.state, *first.tensors()])}
        state = self.state

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return _Place(0 if leaf is state else theirs.get(id(leaf), -1))

        args, kwargs = pytree.tree_map(place, (self.args, self.kwargs))
        return Given(args, kwargs, self.slot)

    def with_tensors(self, first: "Given") -> "Given | None":
        """Return these arguments with the tensors of another call of the chain.

        It reverses :meth:`without_tensors`. The result is None if the first layer is not given one
        of the tensors.
        """
        tensors = dict(enumerate([first.state, *first.tensors()]))
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        if any(isinstance(leaf, _Place) and leaf.number not in tensors for leaf in leaves):
            return None
        found = (tensors[leaf.number] if isinstance(leaf, _Place) else leaf for leaf in leaves)
        args, kwargs = pytree.tree_unflatten(found, spec)
        return Given(args, kwargs, self.slot)

    @classmethod
    def state_only(cls) -> "Given":
        """Return :meth:`without_tensors` of a call that is given only the state."""
        return cls((_Place(0),), {}, 0)


@dataclass(frozen=True)
class _Place:
    """The number of a tensor among those that the first layer is given; 0 is the state."""

    number: int  # negative if the first layer is not given it


class _Held:
    """The arguments that a layer has while it is planned. They are no part of the layer itself.

    Attributes:
        leaves: the stand-ins of tensors that require a gradient, by number and kind.
    """

    def __init__(self) -> None:
        self.given: Given | None = None
        self.leaves: dict[Hashable, Tensor] = {}


class CalledLayer(nn.Module):
    """A layer of a chain while it is planned: a function of the state, with the rest held fixed.

    ``riders`` are the activations that write to the layer's output.
    """

    def __init__(self, name: str, layer: nn.Module, riders: Sequence[nn.Module]) -> None:
        super().__init__()
        self.name, self.layer, self.held = name, layer, _Held()
        self.riders = nn.ModuleList(riders)

    def forward(self, value: Any) -> Any:
        if self.held.given is None:
            raise CellError(
                f"layer {self.name} is given a tensor that the first layer of its chain is not, so "
                "an input of another kind cannot be planned beforehand: expected inputs like the "
                "sample; call rg.budget again with this one"
            )
        return self.run(value, self.held.given)

    def hold(self, given: Given | None) -> None:
        """Hold these arguments, besides the state; None to hold nothing.

        Each tensor that requires a gradient is replaced by a stand-in, a parameter of this module.
        """
        found = {} if given is None else {id(t): t for t in given.wanting()}
        others = {key: self._leaf(k, t) for k, (key, t) in enumerate(found.items())}
        self.held.given = None if given is None else given.replaced(others)
        names = (f"given{k}" for k in range(len(others)))
        self._parameters.clear()
        self._parameters.update(zip(names, others.values(), strict=True))  # type: ignore[arg-type]

    def _leaf(self, number: int, t: Tensor) -> Tensor:
        key = number, t.shape, t.dtype, t.device
        if key not in self.held.leaves:
            zero = torch.zeros((), dtype=t.dtype, device=t.device)
            self.held.leaves[key] = zero.expand(t.shape).requires_grad_()
        return self.held.leaves[key]

    def run(self, value: Any, given: Given) -> Any:
        """Run the layer and its riders on a state. Raises CellError if it changes its arguments."""
        given = given.at(state_of(value))
        before = Contents((given.args, given.kwargs))
        value = own_forward(self.layer)(*given.args, **given.kwargs)
        if before.changed():
            raise CellError(f"layer {self.name} {CHANGES}")
        for rider in self.riders:
            value = own_forward(rider)(state_of(value))
        return value


@dataclass(frozen=True)
class _Bound:
    """A layer with the arguments and the autocast options of one pass of the model."""

    layer: CalledLayer
    given: Given
    autocast: torch.autocast

    def __call__(self, value: Any) -> Any:
        with self.autocast:
            return self.layer.run(value, self.given)


@dataclass
class _Passage:
    """A pass of a model through a chain. It is an attribute of the tensor between two layers.

    Attributes:
        active: the layers that do not just return their input, each with the number of its link.
        run: None if ordinary backpropagation fits the budget.
        next: the number of the next call.
        version: the version of the tensor between the two layers.
    """

    chain: "CalledChain"
    active: dict[int, int]
    links: Links | None = None
    run: CalledRun | None = None
    next: int = 0
    version: int = 0


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
    """The ``forward`` of a module in a chain, which passes its calls to the chain.

    A rider may be called at several places, each of which is a chain and a number in it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places: list[tuple[Called, int]] = []

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chain, number = self.places[0]
        if rides(self.module):  # it may also be called outside of its chains
            passage = _passage_of(args[0]) if args else None
            if passage is None or (passage.chain, passage.next) not in self.places:
                return own_forward(self.module)(*args, **kwargs)
            chain, number = passage.chain, passage.next
        return chain.call(number, args, kwargs)


class CalledChain:
    """Layers that a model calls one after the other, each once.

    Args:
        calls: the called modules, by name, in the order of the calls. Riders are parts of the
            layers before them.
        sample: the arguments of each layer; None if each is given the state only.
        holds: for each layer, the earlier layers whose outputs the model holds while it calls it.
    """

    def __init__(
        self,
        calls: Sequence[tuple[str, nn.Module]],
        sample: Sequence[Given] | None,
        holds: dict[str, list[str]],
    ) -> None:
        self.calls = [*calls]
        starts = [i for i, (_, module) in enumerate(calls) if not rides(module)]
        self.layers = []
        self.parts: list[tuple[int, int]] = []  # each call's layer, and 0 or its rider
        for k, (start, stop) in enumerate(pairwise([*starts, len(calls)])):
            self.layers.append(CalledLayer(*calls[start], [m for _, m in calls[start + 1 : stop]]))
            self.parts += [(k, part) for part in range(stop - start)]
        if sample is None:
            self.sample = [Given.state_only()] * len(self.layers)
        else:
            self.sample = [given.without_tensors(sample[0]) for given in sample]
        self.memory: Memory = "100%"
        self.networks: dict[tuple[int, ...], nn.Sequential] = {}
        self.plans = Plans(holds=holds)

    def fit(self, memory: Memory, given: Sequence[Given]) -> ChainFit:
        """Return the fit for layers with these arguments; errors are those of a ``Sequential``."""
        with self._given(given):
            network = self._network(self._active())
            return self.plans.find(network, memory, given[0].state, given[0].kind())[1]

    def install(self) -> None:
        """Pass the calls of the layers to this chain from now on."""
        take_turns(self, [module for _, module in self.calls])

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of the model that has this number in the chain."""
        k, part = self.parts[number]
        module = self.calls[number][1]
        given = self._read(k, part, args, kwargs)
        passage = None if given is None else self._passage(number, given)
        if given is None or passage is None or passage.run is None or k not in passage.active:
            result = own_forward(module)(*args, **kwargs)
        elif part:
            result = self._ride(passage, number, given.state)
        else:
            result = self._step(passage, number, given)
        if passage is not None and number + 1 < len(self.calls):
            y = state_of(result)
            passage.next, passage.version = number + 1, version(y)
            setattr(y, _MARK, passage)
        return result

    def _passage(self, number: int, given: Given) -> _Passage | None:
        """Return the pass of a call whose state is the output of the call before it.

        The call of the first active layer begins a pass. Otherwise the result is None, and the call
        of an active layer warns.
        """
        passage = _passage_of(given.state)
        if passage is not None and passage.chain is self and passage.next == number:
            return passage
        k, part = self.parts[number]
        active = self._active()
        if part == 0 and k == min(active, default=0):
            return self._begin(active, given)
        if k in active:
            warnings.warn(
                f"layer {self.calls[number][0]} was not called on the output of the layer before "
                "it, as it was for the sample: it is run by ordinary backpropagation, beyond the "
                "budget",
                stacklevel=5,
            )
        return None

    def _begin(self, active: list[int], given: Given) -> _Passage:
        passage = _Passage(self, {k: number for number, k in enumerate(active)})
        x = given.state
        trained = (p for one in self.layers for p in one.parameters())
        if is_unreal([x]) or not (x.requires_grad or any(p.requires_grad for p in trained)):
            return passage
        refuse_transforms([x])
        with self._given([one.with_tensors(given) for one in self.sample]):
            links, fit = self.plans.find(self._network(active), self.memory, x, given.kind())
        if not fit.ordinary:
            if len(links.prefix) + len(links.chain) != len(active):
                together = next(link for link in links.chain if len(link.layers) > 1)
                raise CellError(_TOGETHER.format(together.name))
            passage.links, passage.run = links, CalledRun(links.chain, fit.schedule, x.device)
        return passage

    def _step(self, passage: _Passage, number: int, given: Given) -> Any:
        """Run a layer without its riders."""
        links, run, x = passage.links, passage.run, given.state
        assert links is not None
        assert run is not None
        k, _ = self.parts[number]
        layer, wanting = self.layers[k], given.wanting()
        autocast = autocast_as_now(x.device)
        # Recomputation keeps these arguments, so they must hold neither the state nor a graph.
        leaves = {id(t): t.detach().requires_grad_() for t in wanting}
        kept = given.replaced({id(x): torch.empty(0, device="cpu"), **leaves})
        at = passage.active[k]
        link = (*links.prefix, *links.chain)[at]
        parameters = link.own[len(wanting) :]
        own = [*leaves.values(), *parameters]
        again = replace(
            link,
            layers=(_Bound(layer, kept, autocast),),  # type: ignore[arg-type]
            own=own,
            leaves=[get_gradient_edge(t).node for t in own],
            reads=[*link.reads, *kept.tensors()],
        )
        alone = CalledLayer(layer.name, layer.layer, ()) if layer.riders else layer
        now = replace(link, layers=(_Bound(alone, given, autocast),))  # type: ignore[arg-type]
        at -= len(links.prefix)
        if at < 0:
            return link.returned.unflatten(now.run([x]))
        used = [*wanting, *parameters]
        y = run.step(at, again, now, x, used, ridden=bool(layer.riders))
        return link.returned.unflatten([y])

    def _ride(self, passage: _Passage, number: int, y: Tensor) -> Tensor:
        """Run a rider on the output of its layer."""
        assert passage.links is not None
        assert passage.run is not None
        k, part = self.parts[number]
        at = passage.active[k] - len(passage.links.prefix)
        forward = own_forward(self.calls[number][1])
        last = part == len(self.layers[k].riders)
        return passage.run.ride(at, forward, y, last=last) if at >= 0 else forward(y)

    def _read(
        self, k: int, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Given | None:
        """Return the arguments of a layer or a rider; None if no gradient is recorded.

        The result is also None if the state is not a tensor.
        """
        slot = 0 if part else self.sample[k].slot
        held: Any = kwargs if isinstance(slot, str) else dict(enumerate(args))
        if not torch.is_grad_enabled() or not isinstance(held.get(slot), Tensor):
            return None
        given = Given.of(args, kwargs, slot)
        if (reason := given.refusal()) is not None:
            raise CellError(f"layer {self.layers[k].name} {reason}")
        return given

    def _active(self) -> list[int]:
        """Return the layers that do not just return their input, in their present mode."""
        return [k for k, one in enumerate(self.layers) if not passes_through(one.layer)]

    def _network(self, active: Sequence[int]) -> nn.Sequential:
        key = tuple(active)
        if key not in self.networks:
            self.networks[key] = network = nn.Sequential()
            network._modules.update({self.layers[k].name: self.layers[k] for k in active})
        return self.networks[key]

    @contextmanager
    def _given(self, given: Sequence[Given | None]) -> Iterator[None]:
        """Hold these arguments in the layers while they are planned, in one thread at a time."""
        with MEASURING:
            for one, what in zip(self.layers, given, strict=True):
                one.hold(what)
            try:
                yield
            finally:
                for one in self.layers:
                    one.hold(None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "networks": {}, "plans": Plans(holds=self.plans.holds)}


def passes_through(layer: nn.Module) -> bool:
    """Return whether a layer returns the very tensor that it is given."""
    if isinstance(layer, nn.Identity):
        return True
    return isinstance(layer, _DropoutNd) and (not layer.training or layer.p == 0)


def state_of(value: Any) -> Tensor:
    """Return the only tensor in a layer's result. Raises CellError if it has none, or several."""
    found = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    if len(found) != 1:
        raise CellError(f"a layer returned {len(found)} tensors: expected one")
    return found[0]


def take_turns(called: Called, modules: Sequence[nn.Module]) -> None:
    """Pass the calls of some modules to ``called``, with their numbers."""
    for number, module in enumerate(modules):
        turn = vars(module).setdefault("forward", Turn(module))
        turn.places.append((called, number))


def release(modules: Iterable[nn.Module]) -> None:
    """Give all modules their own forward pass again, so that no chain gets their calls."""
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


def _passage_of(t: Any) -> _Passage | None:
    """Return the pass that a tensor belongs to; None if it was written to since then."""
    passage: _Passage | None = getattr(t, _MARK, None)
    return passage if passage is not None and passage.version == version(t) else None


_TOGETHER = "layers {} share memory: expected each to return a new tensor; give them inplace=False"
