"""What must not reach into a budgeted recurrence: torch.compile, torch.func, forward-mode autograd.

``torch.compile`` traces Python; what runs here looks at graphs, versions and generators, which no
trace has. So it is kept out, and what is compiled around it breaks its graph there. torch.func and
forward-mode derivatives are refused: a recomputation would have to be transformed as well.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from retrograde.errors import RetrogradeError

__all__ = ["NO_FORWARD_MODE", "is_transformed", "refuse_transforms", "uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])

NO_FORWARD_MODE = (
    "forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp) and torch.func's "
    "transforms cannot go through a budgeted recurrence: expected reverse mode, as by backward() "
    "or torch.autograd.grad; for these use memory=None (ordinary BPTT)"
)


def uncompiled(fn: F) -> F:
    """Keep ``torch.compile`` out of a function and of all that it calls.

    Args:
        fn: any function.

    Returns:
        The same function; what is compiled around it breaks its graph there.

    Example:
        >>> uncompiled(len)([1, 2])
        2
    """
    disabled: list[Any] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # nothing compiles, and to load it takes a second
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(fn))
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]


def is_transformed(tensors: Iterable[Tensor]) -> bool:
    """Whether a transform of torch.func is at work, or a tensor carries a forward-mode tangent."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    in_dual_level = forward_ad._current_level >= 0
    return in_dual_level and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def refuse_transforms(tensors: Iterable[Tensor]) -> None:
    """Say so before any work where a gradient is wanted that cannot be had (rule 6).

    Raises:
        RetrogradeError: :func:`is_transformed`.
    """
    if is_transformed(tensors):
        raise RetrogradeError(NO_FORWARD_MODE)
