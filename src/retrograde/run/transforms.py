"""Transforms that must not enter a budgeted recurrence, and hooks that a fused form would miss.

They are torch.compile, torch.func and forward-mode autograd. ``torch.compile`` traces Python, but
this code inspects graphs, versions and generators, which no trace has. So it is excluded, and
compiled code around it has a graph break there. The others are refused, and so are batches of
gradients and ``torch.jit.trace``: a recomputation would have to be transformed or traced as well.
Tensors without numbers are not refused, but nothing can be measured on them.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as of_modules

from retrograde.errors import RetrogradeError
from retrograde.torch_private import (
    compiler_callback,
    has_no_memory,
    is_batched,
    is_tracing,
    sharded_modules,
    top_transform,
    traces_unreal,
)

F = TypeVar("F", bound=Callable[..., Any])

#: Whether ``torch.export`` is running, which must see torch's own forward pass.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)

# The tables of a module's hooks. Torch has a global one for each, for all modules.
_HOOKS = {
    "_backward_pre_hooks": "a full backward pre-hook",
    "_backward_hooks": "a backward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
}


def besides_forward(module: nn.Module) -> str | None:
    """Return what a call of a module does that its class's ``forward`` does not; None if nothing.
    Only where it is None may anything stand in for the call, such as a compiled loop."""
    for table, name in _HOOKS.items():
        if getattr(module, table):
            return name
        if getattr(of_modules, f"_global{table}"):
            return f"{name} of all modules"
    if "forward" in vars(module):
        return "a forward of its own"
    return None if type(module).__call__ is nn.Module.__call__ else "a __call__ of its own"


def hooks_of_all() -> list[Any]:
    """Return the hooks of all modules, on which every call of one depends."""
    return [hook for t in _HOOKS for hook in getattr(of_modules, f"_global{t}").values()]


def no_forward_mode(options: Sequence[str] = ("memory",)) -> str:
    """Return the message that refuses forward-mode derivatives with some options."""
    refused = " and ".join(f"{name}=" for name in options)
    remedy = " and ".join(f"{name}=None" for name in options)
    return (
        "forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp) and torch.func's "
        f"transforms cannot go through a call with {refused}: expected reverse mode, as by "
        f"backward() or torch.autograd.grad; for these use {remedy} (ordinary backpropagation)"
    )


def uncompiled(fn: F) -> F:
    """Exclude ``torch.compile`` from a function and everything that it calls."""
    disabled: list[Any] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and compiler_callback() is None:
            return fn(*args, **kwargs)  # else torch would load its compiler, and each call wait
        if not disabled:
            disabled.append(torch.compiler.disable(fn))
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]


def is_unreal(tensors: Iterable[Tensor]) -> bool:
    """Return whether a call has fake, functional, proxy or meta tensors, which have no bytes, so
    that nothing may be measured or kept: it should run torch's own operations."""
    return traces_unreal() or any(map(has_no_memory, tensors))


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Return whether a transform of torch.func is active, or a tensor has a tangent."""
    if top_transform() is not None:
        return True
    in_dual_level = forward_ad._current_level >= 0
    return in_dual_level and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def refuse_transforms(tensors: Iterable[Tensor], options: Sequence[str] = ("memory",)) -> None:
    """Refuse a call, before any work, if :func:`is_transformed` holds or ``torch.jit.trace`` runs
    (rule 6)."""
    if is_transformed(tensors):
        raise RetrogradeError(no_forward_mode(options))
    if is_tracing():
        refused = " and ".join(f"{name}=" for name in options)
        raise RetrogradeError(
            f"torch.jit.trace cannot follow a call with {refused}: expected a call that is not "
            f"traced; trace it under torch.no_grad(), or without {refused}"
        )


def refuse_sharded(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> None:
    """Refuse modules whose parameters FSDP2 gathers for a call and frees after it. They are in a
    module to which ``fully_shard`` was applied, or have a DTensor."""
    fsdp_module = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    roots = [m for m in sharded_modules() if isinstance(m, fsdp_module)]
    sharded = {id(part) for root in roots for part in root.modules()}
    spread: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if (sharded and any(id(m) in sharded for m in modules)) or (
        spread is not None and any(isinstance(p, spread) for p in parameters)
    ):
        raise RetrogradeError(
            "got parameters that torch.distributed shards, and gathers only for a call: expected "
            "whole parameters, since a recomputation needs them again; use DDP, or leave memory= "
            "and rg.budget out of what fully_shard shards"
        )


def refuse_batches(gradients: Iterable[Tensor | None]) -> None:
    """Refuse a backward pass of a batch of gradients at once, as by ``is_grads_batched=True`` and
    ``torch.func.vmap`` (rule 6)."""
    if any(is_batched(g) for g in gradients if g is not None):
        raise RetrogradeError(
            "got a batch of gradients (is_grads_batched=True, jacobian(vectorize=True) or vmap) to "
            "backpropagate with memory=, schedule= or backward=: expected one; call "
            "torch.autograd.grad for each of them (vectorize=False), or leave these options out"
        )
