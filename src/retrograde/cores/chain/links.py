"""The links of a deep chain: its layers, as far as each can be run apart from the others.

A layer that writes to its input (an in-place ReLU), or that only reshapes it (``Flatten``), shares
memory with the layer before it. Both become one link, so a state that is kept is never written to.
What a link depends on besides its input is learnt from one trial call, of which no trace is left.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from retrograde.cores.cell import Like, device_of, like_of
from retrograde.discover.captured import foreign_tensors
from retrograde.discover.dry_run import try_out
from retrograde.discover.referents import MODULE_TABLES, find_referents
from retrograde.discover.surroundings import Ambient, Steady, version
from retrograde.discover.trees import Structure, flatten
from retrograde.errors import CellError

__all__ = ["Link", "Links", "check_leaves", "enter", "examine_layers"]

Tensors = list[Tensor]
Laid = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


@dataclass(frozen=True, eq=False)
class Link:
    """One layer, or a few that share memory; ``given`` and ``returned`` are structures.

    Attributes:
        wanted: which tensors of its input a gradient is wanted for.
        passes: which tensors of its output pass a gradient on.
        own: its parameters that a gradient is wanted for, each once.
        leaves: the nodes of ``own`` in a graph.
        reads: parameters, buffers and captured tensors, without the buffers it changes.
        output_bytes: what its output takes beyond the memory of its input.
        hands_on: numbers of the earlier links whose output it hands on unchanged.
        laid: how each tensor of its input lies in memory: shape, strides, dtype, device, and the
            bytes around it.
        make: all that its bytes and seconds depend on besides ``laid``, if it is made of torch's
            own modules; else None.
    """

    name: str
    layers: tuple[nn.Module, ...]
    given: Structure
    returned: Structure
    like: tuple[Like, ...]
    wanted: tuple[bool, ...]
    passes: tuple[bool, ...]
    ambient: Ambient
    own: Tensors
    leaves: list[Any]
    reads: Tensors
    output_bytes: int
    hands_on: tuple[int, ...]
    laid: tuple[Laid, ...]
    make: Hashable

    def run(self, state: Tensors) -> Tensors:
        """The next state; refused if it differs in form from the trial's, or if its input was
        written to."""
        versions = [version(t) for t in state]
        outputs, returned = _run(self.layers, self.given, state, self.name)
        if versions != [version(t) for t in state]:
            raise CellError(_WRITES.format(self.name, "its input"))
        found = tuple(map(like_of, outputs))
        if returned != self.returned or found != self.like:
            raise CellError(
                f"layer {self.name} returned another structure, shape or dtype than for an input "
                "like this before: expected the same every time; use memory=None"
            )
        return outputs


@dataclass(frozen=True, eq=False)
class Links:
    """All links of a chain: ``prefix``, through which no gradient goes and which runs once, and
    ``chain``. No link of ``chain`` draws from the generators in ``steady``."""

    prefix: tuple[Link, ...]
    chain: tuple[Link, ...]
    steady: Steady

    @property
    def returned(self) -> Structure:
        """The structure of the last one's output."""
        return (*self.prefix, *self.chain)[-1].returned


class _Enter(torch.autograd.Function):
    """A state as the layer before would have returned it: autograd would hold a leaf, even one
    that no layer refers to, as long as the graph."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in state)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        raise AssertionError("gradients are taken before they get here")


def enter(state: Tensors, wanted: Sequence[bool]) -> tuple[Tensors, Tensor]:
    """A state to record a link from, with gradients where they are ``wanted``, and the leaf that it
    comes from in the graph."""
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    x = [t.detach() for t in state]
    if any(wanted):
        some = _Enter.apply(anchor, *(t for t, want in zip(x, wanted, strict=True) if want))  # type: ignore[no-untyped-call]
        rest = iter(some)
        x = [next(rest) if want else t for t, want in zip(x, wanted, strict=True)]
    return x, anchor


def examine_layers(
    layers: Sequence[tuple[str, nn.Module]], state: Tensors, structure: Structure
) -> Links:
    """Divide one or more named layers into links, by a trial call of each that leaves no trace.
    Raises CellError, naming the layer, if one cannot be run exactly."""
    if any(t.is_inference() for t in state):
        raise CellError(
            "the input was made in inference mode: expected tensors that autograd can follow, for "
            "a gradient is wanted; clone() it, or make it under torch.no_grad"
        )
    links: list[Link] = []
    wanted = tuple(t.requires_grad for t in state)
    before = after = [t.detach() for t in state]  # the last link's input and output
    made_by: dict[int, int] = {}  # what the input of the next link holds, and which link made it
    given_by = made_by  # likewise of the last link's input
    for name, layer in layers:
        tried = _try(name, (layer,), structure, after, wanted)
        apart = tried.link.output_bytes and not (len(links) == 1 and not links[0].output_bytes)
        if tried.wrote or (links and not apart):
            if not links:
                raise CellError(_WRITES.format(name, "the chain's input"))
            last = links.pop()
            together = (*last.layers, layer)
            tried = _try(f"{last.name}-{name}", together, last.given, before, last.wanted)
            if tried.wrote:
                whose = f"what layer {last.name} was given" if links else "the chain's input"
                raise CellError(_WRITES.format(name, whose))
        else:
            before, given_by = after, made_by
        handed = {key: given_by[key] for key in tried.shared if key in given_by}
        made_by = {**handed, **dict.fromkeys(tried.made, len(links))}
        links.append(replace(tried.link, hands_on=tuple(sorted({*handed.values()}))))
        after, structure, wanted = tried.outputs, links[-1].returned, links[-1].passes
    start = 1 + max((k for k, link in enumerate(links) if not any(link.passes)), default=-1)
    return _parted(links[:start], links[start:])


def _parted(prefix: list[Link], chain: list[Link]) -> Links:
    """The links; a generator that none of them draws from is left to be watched over all."""
    drawn = {source for link in chain for source in link.ambient.sources}
    still = {s: None for link in chain for s in link.ambient.steady.sources if s not in drawn}
    watching = []
    for link in chain:
        own = link.ambient.steady
        steady = replace(own, sources=tuple(s for s in own.sources if s in drawn))
        watching.append(replace(link, ambient=replace(link.ambient, steady=steady)))
    return Links(tuple(prefix), tuple(watching), Steady(tuple(still)))


_WRITES = (
    "layer {} writes in place to {}, which is used again: expected it to leave that as it is; give "
    "it inplace=False, or let it return a new tensor"
)


@dataclass(frozen=True, eq=False)
class _Tried:
    """What a trial call of some layers showed. ``made`` are the addresses of memory that their
    output has and their input has not; ``shared`` is memory of both."""

    link: Link
    outputs: Tensors
    wrote: bool
    made: list[int]
    shared: list[int]


def _try(
    name: str,
    layers: tuple[nn.Module, ...],
    given: Structure,
    state: Tensors,
    wanted: tuple[bool, ...],
) -> _Tried:
    parts = tuple({id(part): part for layer in layers for part in layer.modules()}.values())
    own = _parameters_of(name, parts)
    versions = [version(t) for t in state]

    def call() -> tuple[Tensors, Structure]:
        mark = torch._C._autograd._get_sequence_nr()
        x, anchor = enter(state, wanted)
        outputs, returned = _run(layers, given, x, name)
        check_leaves(name, outputs, mark, [anchor, *own, *x])
        return outputs, returned

    found = find_referents(layers)
    trial = try_out(call, found, device_of(*state), lambda result: result[0])
    outputs, returned = trial.value
    inside, outside = _storages(state), _storages(outputs)
    made = {key: size for key, size in outside.items() if key not in inside}
    changing = {id(b) for b in trial.ambient.buffers}
    tables = (table for part in parts for table in (part._parameters, part._buffers))
    owned = (t for table in tables for t in table.values() if t is not None)
    link = Link(
        name=name,
        layers=layers,
        given=given,
        returned=returned,
        like=tuple(map(like_of, outputs)),
        wanted=wanted,
        passes=tuple(t.requires_grad for t in outputs),
        ambient=trial.ambient,
        own=own,
        leaves=[get_gradient_edge(p).node for p in own],
        reads=[t for t in (*owned, *found.tensors) if id(t) not in changing],
        output_bytes=sum(made.values()),
        hands_on=(),
        laid=tuple(map(_laid, state)),
        make=_make(parts),
    )
    wrote = versions != [version(t) for t in state]
    shared = [key for key in outside if key in inside]
    return _Tried(link, [t.detach() for t in outputs], wrote, [*made], shared)


def _laid(t: Tensor) -> Laid:
    return t.shape, t.stride(), t.dtype, t.device, t.untyped_storage().nbytes()


def _make(parts: Sequence[nn.Module]) -> Hashable:
    """What some modules are, if all are torch's own, without hooks: classes, options and sizes."""
    found = []
    for part in parts:
        kind, own = type(part), vars(part)
        if not kind.__module__.startswith("torch.nn.modules."):
            return None
        options = {name: own[name] for name in own.keys() - MODULE_TABLES}
        tables = own["_parameters"], own["_buffers"]
        tensors = [(n, t if t is None else _laid(t)) for table in tables for n, t in table.items()]
        wanted = [p is not None and p.requires_grad for p in own["_parameters"].values()]
        simple = all(isinstance(v, _SIMPLE) or v is None for v in options.values())
        hooked = any(own[name] for name in own if name.endswith("_hooks"))
        if hooked or not simple:
            return None
        found.append((kind, repr(sorted(options.items())), tuple(tensors), tuple(wanted)))
    return tuple(found)


_SIMPLE = (bool, int, float, str, tuple, torch.Size)


def _parameters_of(name: str, parts: Sequence[nn.Module]) -> Tensors:
    """The parameters of a link that a gradient is wanted for, each once."""
    found = (p for part in parts for p in part._parameters.values() if p is not None)
    every = {id(p): p for p in found}.values()
    if any(p.grad_fn is not None for p in every):
        raise CellError(
            f"a parameter of layer {name} was computed from other tensors, as "
            "torch.func.functional_call puts them there: expected leaves; use memory=None"
        )
    return [p for p in every if p.requires_grad]


def check_leaves(
    name: str, outputs: Tensors, mark: int, known: Tensors, nodes: Collection[Any] = ()
) -> None:
    """Raise CellError if a link uses a tensor other than ``known`` whose gradient would be lost
    (rule 5). ``mark`` is autograd's sequence number when recording began. ``nodes``, those of known
    leaves, only save time."""
    leaves, older = foreign_tensors(outputs, mark, expected=nodes)
    if older or (leaves and not {id(t) for t in leaves} <= {id(t) for t in known}):
        raise CellError(
            f"layer {name} uses a tensor that wants a gradient and is none of its parameters: "
            "expected parameters only; register it as one, hand it on from layer to layer as part "
            "of a tuple, or use memory=None"
        )


def _run(
    layers: Sequence[nn.Module], given: Structure, state: Tensors, name: str
) -> tuple[Tensors, Structure]:
    value = given.unflatten(state)
    del state
    for layer in layers:
        value = layer(value)
    return flatten(value, f"output of layer {name}")


def _storages(tensors: Tensors) -> dict[int, int]:
    """The memory of some tensors: its address, and its bytes."""
    kinds = {str(t.layout) for t in tensors if t.layout is not torch.strided}
    if kinds:
        raise CellError(
            f"a state has the layout {', '.join(kinds)}: expected dense tensors between layers"
        )
    found = (t.untyped_storage() for t in tensors)
    return {memory.data_ptr(): memory.nbytes() for memory in found if memory.nbytes()}
