"""torch's modules turned into ours, in place: the object stays, its class changes.

So all references to a module stay valid: its parents under all their names, its parameters, an
optimizer made before, its hooks, its ``state_dict``. A :func:`twin` answers questions before
anything changes.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from retrograde.errors import NotExactError
from retrograde.models.sequential import Sequential
from retrograde.recurrent.base import BudgetedRNN
from retrograde.recurrent.modules import GRU, LSTM, RNN
from retrograde.recurrent.weights import TORCHS_OWN
from retrograde.run.states import is_real

# torch's classes, even if a program has replaced torch's names by ours.
_OURS: dict[type[nn.Module], type[BudgetedRNN]] = dict(
    zip(TORCHS_OWN, (RNN, GRU, LSTM), strict=True)
)


def is_chain(module: nn.Module) -> TypeGuard[Sequential]:
    """Return whether a module is a ``Sequential`` of ours whose layers a budget may divide."""
    return type(module) is Sequential and module.backward is None


def twin(module: nn.RNNBase) -> BudgetedRNN:
    """Return a module of ours with another's options, parameters and mode, but not its hooks or
    budget. A module of ours keeps its ``backward``. The other module is unchanged. Raises CellError
    if it may compute something else: an unknown class, or a replaced ``forward``."""
    twin_class = _class_for(module)
    other: Any = twin_class.__new__(twin_class)
    ours = (base for base in _OURS.values() if issubclass(twin_class, base))
    fresh = next((vars(base(1, 1, device="meta")) for base in ours), {})
    vars(other).update({**fresh, **vars(module), "memory": None})
    vars(other).update({name: OrderedDict() for name in vars(other) if name.endswith("_hooks")})
    if "schedule" in vars(other):
        other.schedule = None
    return cast(BudgetedRNN, other)


def replace_module(module: nn.RNNBase, other: BudgetedRNN) -> None:
    """Turn a module into its :func:`twin`, in place, once the twin's ``memory`` is set."""
    asked = ("memory", "schedule")
    new = [name for name in vars(other) if name in asked or name not in vars(module)]
    vars(module).update({name: vars(other)[name] for name in new})
    module.__class__ = type(other)


def wrapped(derived: type[nn.Module]) -> type[nn.Module] | None:
    """Return torch's class from which a class is derived without a change to its computation. The
    class may add to torch's, or wrap its ``forward``. None otherwise, and for torch's own
    classes."""
    base = next((base for base in _OURS if issubclass(derived, base) and derived is not base), None)
    if base is None or issubclass(derived, BudgetedRNN):
        return None
    theirs = [c for c in derived.__mro__ if not issubclass(base, c)]
    named = {name for c in (BudgetedRNN, nn.RNNBase, base) for name in vars(c)}
    changed = ({name for c in theirs for name in vars(c)} & named) - _FREE
    return None if any(not name.startswith("__") for name in changed) else base


_FREE = {"forward", "extra_repr", "reset_parameters"}  # what a derived class may change


@functools.lru_cache
def _derived(derived: type[nn.Module], base: type[nn.Module]) -> type[BudgetedRNN]:
    """Return the same class, with ours as the class that ``super().forward`` finds."""
    return type(derived.__name__, (derived, _OURS[base]), {"__module__": derived.__module__})


def _class_for(module: nn.RNNBase) -> type[BudgetedRNN]:
    current = type(module)
    if issubclass(current, BudgetedRNN):
        return current
    if "forward" in vars(module):
        raise NotExactError(
            f"the forward of this {current.__name__} was replaced by a function: expected torch's "
            "own; divide the budget before other tools wrap the model"
        )
    if current in _OURS:
        return _OURS[current]
    if parametrize.is_parametrized(module) and current.__bases__[0] in _OURS:
        own = {key: v for key, v in vars(current).items() if key not in ("__dict__", "__weakref__")}
        return type(current.__name__, (_OURS[cast(Any, current.__bases__[0])],), own)
    if (base := wrapped(current)) is not None:
        return _derived(cast(Any, current), cast(Any, base))
    raise NotExactError(
        f"{current.__name__} is a class of its own: expected torch.nn's RNN, GRU or LSTM, or one "
        f"that only wraps its forward; derive it from rg.{module.mode.split('_')[0]}, and it is "
        "given a budget as it is"
    )


def as_if_recorded(outputs: object, used: Sequence[Tensor]) -> Any:
    """Return outputs that require a gradient as recorded ones do; they may be written to."""

    def recorded(t: Tensor) -> Any:
        return _Historied.apply(t.detach(), *used) if is_real(t) else t  # type: ignore[no-untyped-call]

    return pytree.tree_map_only(Tensor, recorded, outputs)


class _Historied(torch.autograd.Function):
    """The same tensor, with a history that keeps nothing in memory."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, *used: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotExactError(
            "the model's forward pass differentiates through a budgeted module: budget() runs it "
            "on the sample without recording that; expected a model that is differentiated by its "
            "caller"
        )
