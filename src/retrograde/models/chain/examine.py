"""Divide the layers of a chain into links, by a trial call of each layer.

A trial leaves no trace. It shows what a layer reads, writes and draws, and whether its output
shares memory with its input. Modules of torch's own behave alike if they are of one make and get
tensors of one form. So one trial serves all of them. If a layer of another kind comes later, every
layer before it is tried, because that layer must get a real state.
"""

import gc
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from retrograde.errors import CellError
from retrograde.models.chain.links import (
    WRITES,
    Laid,
    Link,
    Links,
    check_leaves,
    enter,
    run_layers,
)
from retrograde.replay.dry_run import DryRun, try_out
from retrograde.replay.referents import MODULE_TABLES, Referents, find_referents
from retrograde.replay.surroundings import Ambient, Steady, version
from retrograde.replay.trees import Structure
from retrograde.run.states import device_of, like_of

__all__ = [
    "check_anchors", "check_trial", "examine_layers", "made_up", "make_of", "parts_of", "reads_of",
]  # fmt: skip

Tensors = list[Tensor]


def examine_layers(
    layers: Sequence[tuple[str, nn.Module]],
    state: Tensors,
    structure: Structure,
) -> Links:
    """Divide one or more named layers into links, by trial calls that leave no trace.

    Raises:
        CellError: a layer cannot be run exactly; the message names it.
    """
    if any(t.is_inference() for t in state):
        raise CellError(
            "the input was made in inference mode: expected tensors that autograd can follow, for "
            "a gradient is wanted; clone() it, or make it under torch.no_grad"
        )
    found = _Examination(layers, state, structure)
    for number, (name, layer) in enumerate(layers):
        found.add(number, name, layer)
    links = found.links
    start = 1 + max((k for k, link in enumerate(links) if not any(link.passes)), default=-1)
    return _parted(links[:start], links[start:])


def _parted(prefix: list[Link], chain: list[Link]) -> Links:
    """Return the links as prefix and chain.

    A generator that no link draws from is checked once over the whole chain, not per link.
    """
    drawn = {source for link in chain for source in link.ambient.sources}
    still = {s: None for link in chain for s in link.ambient.steady.sources if s not in drawn}
    watching = []
    for link in chain:
        own = link.ambient.steady
        steady = replace(own, sources=tuple(s for s in own.sources if s in drawn))
        watching.append(replace(link, ambient=replace(link.ambient, steady=steady)))
    return Links(tuple(prefix), tuple(watching), Steady(tuple(still)))


@dataclass(frozen=True)
class _State:
    """A state between two layers.

    Without ``tensors`` only its form is known. ``made_by`` maps the address of memory to the link
    that made it.
    """

    laid: tuple[Laid, ...]
    wanted: tuple[bool, ...]
    structure: Structure
    tensors: Tensors | None
    made_by: dict[int, int]

    def values(self) -> Tensors:
        """Return the tensors, or made-up tensors of the same form."""
        return made_up(self.laid) if self.tensors is None else self.tensors


@dataclass(frozen=True, eq=False)
class _Tried:
    """The result of a trial call of some layers.

    Attributes:
        trial: the surroundings; it holds no tensor that the call made.
        outputs: the tensors that the call returned; None where another call was tried.
        laid: how the outputs lie in memory.
        wrote: whether the call wrote to its input.
        made: the addresses of memory that the output has and the input has not.
        shared: the addresses of memory that both have.
    """

    link: Link
    trial: DryRun[Any]
    outputs: Tensors | None
    laid: tuple[Laid, ...]
    wrote: bool
    made: list[int]
    shared: list[int]

    def serves_others(self) -> bool:
        """Return whether layers of the same make need no trial of their own."""
        simple = not self.shared or self.wrote or not self.link.output_bytes
        return self.link.make is not None and self.trial.repeatable() and simple

    def on(self, name: str, layers: tuple[nn.Module, ...]) -> "_Tried":
        """Return what a trial of other layers of the same make would show."""
        found = find_referents(layers)
        ambient = self.trial.on(found)
        own = _parameters_of(name, found.parts())
        link = replace(
            self.link,
            name=name,
            layers=layers,
            ambient=ambient,
            own=own,
            leaves=[get_gradient_edge(p).node for p in own],
            reads=reads_of(found, ambient),
        )
        return replace(self, link=link, made=[], shared=[])


class _Examination:
    """The links of the layers examined so far."""

    def __init__(
        self, layers: Sequence[tuple[str, nn.Module]], state: Tensors, structure: Structure
    ) -> None:
        self.links: list[Link] = []
        laid, wanted = tuple(map(_laid, state)), tuple(t.requires_grad for t in state)
        self.after = _State(laid, wanted, structure, [t.detach() for t in state], {})
        self.before = self.after  # the input of the last link
        others = (n for n, (_, layer) in enumerate(layers) if make_of(parts_of([layer])) is None)
        self.needs_values = max(others, default=-1)  # the last layer that needs a real state
        self.known: dict[Hashable, _Tried] = {}

    def add(self, number: int, name: str, layer: nn.Module) -> None:
        """Make one more layer a link, or a part of the last link."""
        links = self.links
        tried = self._try(number, name, (layer,), self.after)
        apart = tried.link.output_bytes and not (len(links) == 1 and not links[0].output_bytes)
        if tried.wrote or (links and not apart):
            if not links:
                raise CellError(WRITES.format(name, "the chain's input"))
            last = links.pop()
            together = (*last.layers, layer)
            tried = self._try(number, f"{last.name}-{name}", together, self.before)
            if tried.wrote:
                whose = f"what layer {last.name} was given" if links else "the chain's input"
                raise CellError(WRITES.format(name, whose))
        else:
            self.before = self.after
        given_by = self.before.made_by
        handed = {key: given_by[key] for key in tried.shared if key in given_by}
        made_by = {**handed, **dict.fromkeys(tried.made, len(links))}
        link = replace(tried.link, hands_on=tuple(sorted({*handed.values()})))
        links.append(link)
        self.after = _State(tried.laid, link.passes, link.returned, tried.outputs, made_by)

    def _try(self, number: int, name: str, layers: tuple[nn.Module, ...], state: _State) -> _Tried:
        key = make_of(parts_of(layers)), state.laid, state.wanted, str(state.structure)
        if number > self.needs_values and key in self.known:
            return self.known[key].on(name, layers)
        anchors: list[weakref.ref[Tensor]] = []
        tried = _try(name, layers, state, anchors)
        check_anchors(name, anchors)
        if tried.serves_others():
            self.known[key] = replace(tried, outputs=None)
        return tried


def _try(
    name: str,
    layers: tuple[nn.Module, ...],
    state: _State,
    anchors: "list[weakref.ref[Tensor]]",
) -> _Tried:
    """Try some layers on a state. An anchor lives as long as a graph that begins at the state."""
    parts = parts_of(layers)
    own = _parameters_of(name, parts)
    inputs = state.values()
    versions = [version(t) for t in inputs]

    def call() -> tuple[Tensors, Structure]:
        mark = torch._C._autograd._get_sequence_nr()
        x, anchor = enter(inputs, state.wanted)
        anchors.append(weakref.ref(anchor))
        outputs, returned = run_layers(layers, state.structure, x, name)
        check_leaves(name, outputs, mark, [anchor, *own, *x])
        return outputs, returned

    trial = try_out(call, layers, device_of(*inputs), lambda result: result[0])
    outputs, returned = trial.value
    check_trial(name, trial)
    inside, outside = _storages(inputs), _storages(outputs)
    made = {key: size for key, size in outside.items() if key not in inside}
    link = Link(
        name=name,
        layers=layers,
        given=state.structure,
        returned=returned,
        like=tuple(map(like_of, outputs)),
        wanted=state.wanted,
        passes=tuple(t.requires_grad for t in outputs),
        ambient=trial.ambient,
        own=own,
        leaves=[get_gradient_edge(p).node for p in own],
        reads=reads_of(trial.found, trial.ambient),
        output_bytes=sum(made.values()),
        hands_on=(),
        laid=state.laid,
        make=make_of(parts),
    )
    return _Tried(
        link=link,
        trial=replace(cast(Any, trial), value=None),
        outputs=[t.detach() for t in outputs],
        laid=tuple(map(_laid, outputs)),
        wrote=versions != [version(t) for t in inputs],
        made=[*made],
        shared=[key for key in outside if key in inside],
    )


def check_trial(name: str, trial: DryRun[Any]) -> None:
    """Refuse a layer that may decide by random numbers, or leaves a tensor with a gradient."""
    if trial.decides:
        raise CellError(_DECIDES.format(name))
    for left in trial.ambient.left:
        for key in set(left.graphs) - _computed_names(left.place.holder):
            raise CellError(_LEAVES.format(name, left.place.called(key)))


def check_anchors(name: str, anchors: "Sequence[weakref.ref[Tensor]]") -> None:
    """Refuse a layer that leaves a tensor with a gradient where no search finds it. An anchor lives
    as long as a graph that the layer's trial made."""
    if any(anchor() is not None for anchor in anchors):
        gc.collect()  # of cycles
        if any(anchor() is not None for anchor in anchors):
            raise CellError(_LEAVES.format(name, "a place that cannot be found"))


_DECIDES = (
    "layer {} draws random numbers of Python's, which may decide what it computes, so its bytes "
    "cannot be known before: expected drawn tensors; multiply by a drawn mask, as "
    "torchvision.ops.StochasticDepth does, or use memory=None"
)
_LEAVES = (
    "layer {} leaves a tensor with a gradient in {}: expected it to return it, since no budget "
    "covers what is left; return it, leave its detach(), or use memory=None"
)


def _computed_names(attributes: Any) -> set[str]:
    """Return the names of weights that torch's hooks compute before each call, as pruning does."""
    hooks = attributes.get("_forward_pre_hooks", {}) if isinstance(attributes, dict) else {}
    options = (vars(hook).values() for hook in hooks.values() if hasattr(hook, "__dict__"))
    return {value for values in options for value in values if isinstance(value, str)}


def parts_of(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules in some layers, each once."""
    return list({id(part): part for layer in layers for part in layer.modules()}.values())


def reads_of(found: Referents, ambient: Ambient) -> Tensors:
    """Return the parameters, buffers and captured tensors that a link reads and does not change."""
    changing = {id(b) for b in ambient.buffers}
    tables = (table for part in found.parts() for table in (part._parameters, part._buffers))
    owned = (t for table in tables for t in table.values() if t is not None)
    return [t for t in (*owned, *found.tensors) if id(t) not in changing]


def _laid(t: Tensor) -> Laid:
    return t.shape, t.stride(), t.dtype, t.device, t.untyped_storage().nbytes()


def made_up(laid: Sequence[Laid]) -> Tensors:
    """Return tensors of the given form, of ones, or of zeros where they may be indices."""
    found = []
    for shape, stride, dtype, device, size in laid:
        value = 1 if dtype.is_floating_point or dtype.is_complex else 0
        memory = torch.full((size // dtype.itemsize,), value, dtype=dtype, device=device)
        found.append(memory.as_strided(shape, stride))
    return found


def make_of(parts: Sequence[nn.Module]) -> Hashable:
    """Return a description of some modules, equal for modules that behave alike.

    It has their classes, options and sizes, and which of them share a module or a tensor. It is
    None unless all are torch's own, without hooks.
    """
    numbers: dict[int, int] = {}

    def number(value: object) -> int:
        return numbers.setdefault(id(value), len(numbers))

    found = []
    for part in parts:
        kind, own = type(part), vars(part)
        if not kind.__module__.startswith("torch.nn.modules."):
            return None
        options = {name: own[name] for name in own.keys() - MODULE_TABLES - {"forward"}}
        simple = all(map(_is_simple, options.values()))
        hooked = any(own[name] for name in own if name.endswith("_hooks"))
        if hooked or not simple:
            return None
        tables = own["_parameters"], own["_buffers"]
        tensors = tuple(
            (name, t if t is None else (number(t), t.requires_grad, *_laid(t)))
            for table in tables
            for name, t in table.items()
        )
        within = tuple((name, number(child)) for name, child in own["_modules"].items())
        found.append((kind, number(part), repr(sorted(options.items())), tensors, within))
    return tuple(found)


def _is_simple(value: Any) -> bool:
    """Return whether an option's text says all of it; a function of torch's is one object."""
    torchs = callable(value) and str(getattr(value, "__module__", "")).startswith("torch.")
    return torchs or isinstance(value, bool | int | float | str | tuple | None)


def _parameters_of(name: str, parts: Sequence[nn.Module]) -> Tensors:
    """Return the parameters of a link that need a gradient, each once."""
    found = (p for part in parts for p in part._parameters.values() if p is not None)
    every = {id(p): p for p in found}.values()
    if any(p.grad_fn is not None for p in every):
        raise CellError(
            f"a parameter of layer {name} was computed from other tensors, as "
            "torch.func.functional_call puts them there: expected leaves; use memory=None"
        )
    return [p for p in every if p.requires_grad]


def _storages(tensors: Tensors) -> dict[int, int]:
    """Return the memory of some tensors, as a map from its address to its bytes."""
    kinds = {str(t.layout) for t in tensors if t.layout is not torch.strided}
    if kinds:
        raise CellError(
            f"a state has the layout {', '.join(kinds)}: expected dense tensors between layers"
        )
    found = (t.untyped_storage() for t in tensors)
    return {memory.data_ptr(): memory.nbytes() for memory in found if memory.nbytes()}
