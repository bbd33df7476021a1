"""A trial of a call, which shows what it depends on besides its arguments.

The call runs by itself, without the graph that its arguments came from, and leaves no trace.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from retrograde.errors import NotExactError
from retrograde.models.rows.arguments import (
    Arguments,
    RerunArguments,
    ResultBytes,
    alone,
    made_by,
    tensors_in,
)
from retrograde.models.rows.checks import Noted, Reruns
from retrograde.models.rows.rerun import Recomputable, is_free
from retrograde.models.rows.rest_of_model import FILLS, filling
from retrograde.replay.fingerprints import fingerprints
from retrograde.replay.referents import MODULE_TABLES
from retrograde.replay.surroundings import ABSENT, Slot, Surroundings, try_out, version
from retrograde.run.core import hooked
from retrograde.run.states import device_of
from retrograde.run.transforms import hooks_of_all
from retrograde.sizes.cache import signature


def try_call(
    name: str, forward: Callable[..., Any], layers: Sequence[nn.Module], arguments: Arguments
) -> tuple[Recomputable, Tensor | None]:
    """Run a call of some layers once. Return it, and its result without a graph, if that is one
    tensor. Nothing else that the call made is held.

    If random numbers may decide what it does, it also runs with the smallest and the largest. The
    trial in which it did the most counts, and no result is returned. A call that cannot be run
    again is refused.
    """
    tried, result = _tried(name, forward, layers, arguments, None)
    if tried.decides:
        result = None
        others = [_tried(name, forward, layers, arguments, fill)[0] for fill in FILLS]
        sources = tried.surroundings.sources
        tried = max(*others, tried, key=lambda one: one.made.nbytes)
        surroundings = tried.surroundings
        more = (source for source in surroundings.sources if source.is_torchs)  # others were filled
        surroundings = replace(surroundings, sources=(*dict.fromkeys((*sources, *more)),))
        tried = replace(tried, surroundings=surroundings)
    return tried, result


def _tried(
    name: str, forward: Callable[..., Any], layers: Sequence[nn.Module], arguments: Arguments,
    fill: float | None,
) -> tuple[Recomputable, Tensor | None]:  # fmt: skip
    """Run a call of some layers once, with few numbers that it draws as ``fill`` says."""
    tensors = arguments.tensors
    versions = [version(t) for t in tensors]
    saved: list[ref[Tensor]] = []
    reruns, bytes_made, prints = Reruns(counts=False), ResultBytes(), list[Any]()

    def call() -> Any:
        args, kwargs, entered = RerunArguments(arguments).enter(arguments.leaves)
        noted, ours = Noted(reruns), {*map(id, entered)}

        def pack(t: Tensor) -> Tensor:
            saved.append(ref(detached := t.detach()))
            if not is_free(t, ours):
                noted.add(t)
            return detached

        with filling(fill), saved_tensors_hooks(pack, lambda t: t), bytes_made:
            result = forward(*args, **kwargs)
        noted.settle()
        prints.append((noted.prints, fingerprints(tensors_in(result))))
        return result

    device = device_of(*tensors)
    with hooked(f"layer {name}"):
        result, surroundings, _ = try_out(call, [*layers, *hooks_of_all()], device)
    kept = [s for s in surroundings.changing if s not in surroundings.moving]
    kept = [slot for slot in kept if slot.key not in _computed_names(slot.holder)]
    left_bytes = surroundings.left_bytes + sum(surroundings.left.get(slot, 0) for slot in kept)
    surroundings = replace(surroundings, left_bytes=left_bytes)
    if kept and _reads_what_it_left(call, kept, surroundings, prints):
        surroundings = replace(surroundings, moving=(*surroundings.moving, *kept))
    outputs = tensors_in(result)
    if any(t.layout is not torch.strided for t in (*tensors, *outputs)):
        raise NotExactError(
            f"layer {name} is given or returns a sparse tensor: expected dense ones"
        )
    made, changing = made_by(result, tensors), {*map(id, surroundings.buffers)}
    changing |= {id(slot.read()) for slot in surroundings.changing}
    read = (*tensors_of(surroundings.found.parts()), *surroundings.found.tensors)
    reads = [t for t in read if id(t) not in changing]
    tried = Recomputable(
        name, forward, surroundings, reads,
        shares_casts=_shares_casts(outputs, device),
        reruns=replace(reruns, counts=True),
        fill=fill,
        is_apart=any(t is not None and t.untyped_storage().nbytes() for t in made),
        writes=versions != [version(t) for t in tensors],
        made=bytes_made,
    )  # fmt: skip
    handed = alone(result) if isinstance(result, Tensor) else None
    del result, outputs, made
    if any(reference() is not None for reference in saved):  # what a graph saved lives with it
        gc.collect()  # of cycles
    if any(reference() is not None for reference in saved):
        raise NotExactError(_LEAVES.format(name))
    return tried, handed


def _reads_what_it_left(
    call: Callable[[], object], kept: Sequence[Slot], surroundings: Surroundings, prints: list[Any]
) -> bool:
    """Return whether a call computes something else, or raises, if one before it left something in
    some attributes, or if they are not there. Each call appends the fingerprints of what it
    computes to ``prints``."""
    begun = surroundings.capture()

    def again() -> None:
        call()
        surroundings.restore(begun)
        call()
        surroundings.restore(begun)
        for slot in kept:
            slot.write(ABSENT)
        call()

    try:
        try_out(again, surroundings.found.made_of, surroundings.device)
    except Exception:
        return True
    return any(each != prints[0] for each in prints[-2:])


def by_name(slots: Iterable[Slot]) -> dict[tuple[int, Any], Slot]:
    """Return attributes by dict and name."""
    return {(id(slot.holder), slot.key): slot for slot in slots}


class Leave(torch.autograd.Function):
    """The end of a recorded call, whose backward pass takes the gradients out of ``seeds``.
    ``torch.autograd.grad`` would hold gradients passed to it until it returns."""

    @staticmethod
    def forward(ctx: Any, seeds: list[Tensor], *state: Tensor) -> Tensor:
        ctx.seeds = seeds
        return torch.empty(0, device=state[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None, *ctx.seeds)
        ctx.seeds.clear()
        return gradients


def _shares_casts(outputs: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether two casts of one parameter are in a graph that was made without a cache."""
    casts = torch.is_autocast_enabled(device.type)
    pending, seen, cast = [t.grad_fn for t in outputs if casts], set[Any](), set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        inner = [source for source, _ in node.next_functions]
        if node.name() == "ToCopyBackward0" and hasattr(inner[0], "variable"):
            if inner[0] in cast:
                return True
            cast.add(inner[0])
        pending += inner
    return False


_LEAVES = (
    "layer {} leaves a tensor with a gradient in a place that cannot be found: expected it to "
    "return it, or to keep it in an attribute; do so, leave its detach(), or use memory=None"
)


def _computed_names(attributes: object) -> set[str]:
    """Return the names of weights that torch's hooks compute before each call, as pruning does."""
    hooks = attributes.get("_forward_pre_hooks", {}) if isinstance(attributes, dict) else {}
    options = (vars(hook).values() for hook in hooks.values() if hasattr(hook, "__dict__"))
    return {value for values in options for value in values if isinstance(value, str)}


def parts_of(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules in some layers, each once. It is faster than torch's ``modules``."""
    modules: dict[int, nn.Module] = {}
    pending = [*reversed(layers)]
    while pending:
        part = pending.pop()
        if id(part) not in modules:
            modules[id(part)] = part
            pending += [child for child in reversed(part._modules.values()) if child is not None]
    return [*modules.values()]


def tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of some modules, without those inside of these."""
    tables = (table for part in modules for table in (part._parameters, part._buffers))
    return [t for table in tables for t in table.values() if t is not None]


def options_key(
    modules: Sequence[nn.Module], tensors: Sequence[Tensor], moved: Collection[int] = ()
) -> Hashable:
    """Return all that trials and sizes of some modules depend on, besides what they are given: the
    objects, their options, and their ``tensors``. It keeps none of these alive. A fraction may be
    annealed, so it tells only whether it is zero. Of tensors with ids in ``moved``, which each call
    replaces, only the forms count."""
    options: list[Any] = [
        bool(value) if isinstance(value, float) else value
        for part in modules
        for value in vars(part).values()
        if value.__class__ not in _TABLES and isinstance(value, _OPTIONS)  # the first is faster
    ]
    options += map(id, modules)
    stays = (0 if id(t) in moved else id(t) for t in tensors)
    forms = ((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
    return tuple(options), tuple(stays), tuple(forms), torch.get_num_threads()


_OPTIONS, _TABLES = (bool, int, float, str, type(None)), {dict, OrderedDict, set}


def architecture_key(modules: Sequence[nn.Module]) -> Hashable:
    """Return a description of some modules, equal for modules that behave alike. It has their
    classes, options and sizes, and which of them share a module or a tensor. It is None unless all
    are torch's own, without hooks."""
    numbers: dict[int, int] = {}

    def number(value: object) -> int:
        return numbers.setdefault(id(value), len(numbers))

    described = []
    for part in modules:
        part_class, own = type(part), vars(part)
        if not part_class.__module__.startswith("torch.nn.modules."):
            return None
        options = {name: own[name] for name in own.keys() - MODULE_TABLES - {"forward"}}
        simple = all(map(_is_simple, options.values()))
        hooked = any(own[name] for name in own if name.endswith("_hooks"))
        replaced = "forward" in own and not hasattr(own["forward"], "places")  # not by a row
        if hooked or replaced or not simple:
            return None
        tables = own["_parameters"], own["_buffers"]
        tensors = tuple(
            (name, t if t is None else (number(t), signature(t), t.untyped_storage().nbytes()))
            for table in tables
            for name, t in table.items()
        )
        within = tuple((name, number(child)) for name, child in own["_modules"].items())
        described.append((part_class, number(part), repr(sorted(options.items())), tensors, within))
    return tuple(described)


def _is_simple(value: object) -> bool:
    """Return whether an option's text says all of it; a function of torch's is one object."""
    torchs = callable(value) and str(getattr(value, "__module__", "")).startswith("torch.")
    return torchs or isinstance(value, bool | int | float | str | tuple | None)
