"""``rg.lean()``: a forward pass that saves less, as cheap values are computed again backward."""

import threading
import warnings
from contextlib import ExitStack
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from retrograde.errors import NotExactError, RetrogradeError
from retrograde.models.lean.recipes import unpack
from retrograde.models.lean.tape import LeanTape
from retrograde.run.core import hooked
from retrograde.torch_private import default_saved_hooks, saved_hooks_are_on, sharded_modules
from retrograde.units import format_bytes

Module = TypeVar("Module", bound=nn.Module)
_running = threading.local()  # the passes of wrapped models that have begun


class Lean:
    """A forward pass with a lean tape. ``print`` of it says what was let go.

    Attributes:
        kept_bytes: of the tensors that were saved and kept, but for parameters and small ones.
        let_go_bytes: of those that were let go, by the operation that computes them again.
        aside: why ordinary autograd runs instead, or None.
    """

    def __init__(self) -> None:
        self.aside: str | None = "no pass was begun"
        self._tape: LeanTape | None = None
        self._stack: ExitStack | None = None

    @property
    def kept_bytes(self) -> int:
        return self._tape.kept if self._tape else 0

    @property
    def let_go_bytes(self) -> dict[str, int]:
        totals = self._tape.let_go.most_common() if self._tape else []
        return {name: size for name, size in totals if size}

    def __enter__(self) -> "Lean":
        if torch.compiler.is_compiling():
            return self
        if self._stack is not None:
            raise RetrogradeError("this lean pass has begun already: make another by rg.lean()")
        self.aside = _why_not()
        if self.aside is None:
            self._tape, self._stack = LeanTape(parameters_stay=not sharded_modules()), ExitStack()
            self._stack.enter_context(hooked("a lean pass"))
            self._stack.callback(self._tape.close)
            self._stack.enter_context(self._tape)
            self._stack.enter_context(saved_tensors_hooks(self._tape.pack, unpack))
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None and not torch.compiler.is_compiling():
            stack, self._stack = self._stack, None
            stack.__exit__(*error)

    def __str__(self) -> str:
        if self.aside is not None:
            return f"ordinary autograd: {self.aside}"
        let_go = self.let_go_bytes
        operations = ", ".join(f"{name} {format_bytes(size)}" for name, size in let_go.items())
        total = f"kept {format_bytes(self.kept_bytes)}, let go {format_bytes(sum(let_go.values()))}"
        return f"{total}: {operations}" if operations else total


@overload
def lean() -> Lean: ...
@overload
def lean(model: Module) -> Module: ...
def lean(model: nn.Module | None = None) -> Any:
    """Save less in a forward pass, and compute it again in the backward pass, with the same bits.

    Autograd keeps what cheap operations made, although it keeps what they made it from:
    activations, normalisations, products, casts, dropout. Within this context such tensors are let
    go. The backward pass computes each when it is first read, by the same function.

    Args:
        model: wrap its forward for good, and return it; without one, return a context manager.
            The wrapped model's state dict, copies and pickles are what they were.

    Raises:
        NotExactError: ``model`` is not a module.

    Example:
        >>> import torch, retrograde as rg
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(),
        ...                             torch.nn.Linear(1024, 256))
        >>> with rg.lean() as tape:
        ...     loss = model(torch.randn(64, 256)).square().mean()
        >>> loss.backward()
        >>> print(tape)
        kept 256 KiB, let go 256 KiB: Gelu 256 KiB
    """
    if model is None:
        return Lean()
    if not isinstance(model, nn.Module):
        raise NotExactError(
            f"rg.lean() takes a torch.nn.Module, or nothing to return a context manager, not "
            f"{type(model).__name__}: wrap the module that holds the forward pass"
        )
    if hasattr(model, "_orig_mod"):
        warnings.warn(
            "rg.lean() steps aside for what torch.compile made: the compiler itself computes cheap "
            "operations again, so nothing changes",
            stacklevel=2,
        )
    elif _begin not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin)
        model.register_forward_hook(_end, always_call=True)
    return model


def _why_not() -> str | None:
    """Return why a pass is left to ordinary autograd, or None."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        return "nothing is saved without gradients"
    if not saved_hooks_are_on():
        return "torch.func takes no hooks for saved tensors"
    hooks = default_saved_hooks(True)
    if hooks is None:
        return None
    nested = isinstance(getattr(hooks[0], "__self__", None), LeanTape)
    return "another lean pass runs" if nested else "hooks of the caller's save its tensors"


def _begin(module: nn.Module, args: object) -> None:
    if not torch.compiler.is_compiling():
        _running.passes = [*getattr(_running, "passes", []), (module, Lean().__enter__())]


def _end(module: nn.Module, args: object, result: object) -> None:
    if not torch.compiler.is_compiling():
        passes = getattr(_running, "passes", [])
        if passes and passes[-1][0] is module:  # else an earlier hook failed, and none began
            passes.pop()[1].__exit__(None, None, None)
