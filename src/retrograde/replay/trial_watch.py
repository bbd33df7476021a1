"""What a call does, while it is tried, that no rerun within a budget could repeat.

A gradient that is taken inside a call needs a graph, which a first run without gradients has not.
Pyro would record a site again at every rerun. A drawn number that becomes a number of Python's, as
in layer drop, may decide what a call computes. Then its bytes are not known before.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrograde.errors import CellError
from retrograde.machine import MEASURING
from retrograde.replay.referents import frames

_FEW = 64  # numbers: more are drawn for a mask, not for a decision
_MOST_FILLED = 1000  # a loop that draws until a number is large enough has to end
_UNIFORM = {"rand", "rand_like", "uniform_"}
_DRAWS = _UNIFORM | {
    "bernoulli", "bernoulli_", "exponential_", "multinomial", "normal", "normal_", "poisson",
    "randint", "randint_like", "randn", "randn_like", "random_", "randperm",
}  # fmt: skip
_TO_PYTHON = {
    "__array__", "__bool__", "__float__", "__index__", "__int__",
    "allclose", "equal", "is_nonzero", "item", "numpy", "tolist",
}  # fmt: skip
_GRADIENTS = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    Tensor.backward: "Tensor.backward",
}


class DrawWatch(TorchFunctionMode):
    """Watches what becomes of random numbers that torch draws.

    ``decides`` says whether one became a number of Python's. With ``fill``, this number replaces
    all uniform draws of few numbers, which shows what they decide.
    """

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self.fill, self.decides = fill, False
        self.drawn: dict[int, Tensor] = {}  # by id; held, so that no id is used again

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        draws = name in _DRAWS
        if not draws and not self.drawn:
            return result
        if draws or any(id(v) in self.drawn for v in pytree.tree_leaves((args, kwargs))):
            leaves = pytree.tree_leaves(result)
            few = [t for t in leaves if isinstance(t, Tensor) and t.numel() <= _FEW]
            if self.fill is not None and name in _UNIFORM and len(self.drawn) < _MOST_FILLED:
                for t in few:
                    t.fill_(self.fill)
            self.drawn.update((id(t), t) for t in few)
            self.decides = self.decides or name in _TO_PYTHON
        return result


class _TrialWatch(DrawWatch):
    """Watches a trial call, and refuses one that takes a gradient, or checkpoints by itself."""

    depth: int
    outside: bool
    hooks: Any

    def __enter__(self) -> Any:
        self.depth, self.outside, self.hooks = MEASURING.depth, in_checkpoint(), _hooks()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ours = MEASURING.depth > self.depth  # a measurement within the trial
        if func in _GRADIENTS and not ours and _functorch.peek_interpreter_stack() is None:
            raise CellError(
                f"the cell calls {_GRADIENTS[func]}, which needs a graph, but within a budget a "
                "step first runs without one: expected a step without gradients inside; take them "
                "by torch.func.grad, or use memory=None"
            )
        # A checkpoint works by hooks, or without gradients; to look for one takes some µs.
        unusual = _hooks() != self.hooks or not torch.is_grad_enabled()
        if unusual and not self.outside and in_checkpoint():
            raise CellError(
                "the cell runs torch.utils.checkpoint, but within a budget it is recomputed "
                "anyway: expected it without; turn its checkpointing off, or use memory=None"
            )
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def watched(*, reruns: bool) -> Iterator[DrawWatch]:
    """Watch a trial call, and refuse what no rerun could repeat, if there will be ``reruns``."""
    with _sites(reruns), _TrialWatch() if reruns else DrawWatch() as watch:
        yield watch


@contextmanager
def _sites(refuse: bool) -> Iterator[None]:
    """Keep Pyro's sites in a block from the caller's handlers, or refuse them."""
    poutine: Any = sys.modules.get("pyro.poutine")
    if poutine is None:
        yield
        return
    names: list[str] = []

    def hides(site: dict[str, Any]) -> bool:
        if site["type"] in ("sample", "param"):
            names.append(site["name"])
        return True

    with poutine.block(hide_fn=hides):
        yield
    if names and refuse:
        raise CellError(
            f"the cell has the Pyro site {names[0]!r}, which would be recorded again at every "
            "rerun: expected a cell without sites; sample before, and give the values as inputs, "
            "or use memory=None"
        )


def _hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_checkpoint() -> bool:
    """Return whether ``torch.utils.checkpoint`` runs the caller of this function."""
    file = getattr(sys.modules.get("torch.utils.checkpoint"), "__file__", None)
    return file is not None and any(frame.f_code.co_filename == file for frame in frames())
