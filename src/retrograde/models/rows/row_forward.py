"""How the calls of a model's layers come to their rows: each layer's ``forward`` passes them on."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from retrograde.models.rows.arguments import tensors_in
from retrograde.recurrent.base import BudgetedRNN
from retrograde.run.transforms import uncompiled

if TYPE_CHECKING:
    from retrograde.models.rows.layer_run import LayerRun

Named = Sequence[tuple[str, nn.Module]]  # modules by name
_LISTS = nn.ModuleList, nn.Sequential, nn.ModuleDict
_ROWS = "_retrograde_rows"  # an attribute of a model
_NEW = (
    "layer {} was not there when the model got its budget: it is run by ordinary backpropagation, "
    "beyond the budget; call budget() again"
)


class RowForward:
    """The ``forward`` of a module in a row, which passes its calls to the row. A module may be
    called at several places, each of which is a row and a number in it. The state that it is given
    tells which."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places: list[tuple[LayerRun, int]] = []

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What tells the signature, by which trainers choose what a model is given."""
        return own_forward(self.module)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_rider = is_inplace_activation(self.module)
        if is_rider or len(self.places) > 1:
            tensors = tensors_in((args, kwargs))
            for row, number in self.places:
                if (now := row.handed.to(tensors)) is not None and now.next == number:
                    return row.call(number, args, kwargs)
        if is_rider:  # it may also be called outside of its rows
            return own_forward(self.module)(*args, **kwargs)
        row, number = self.places[0]
        return row.call(number, args, kwargs)


class Attributes(dict[str, Any]):
    """The attributes of a module in a row. Whoever copies them gets them without the ``forward`` of
    the row. So a copy of the module, of any kind, computes with its own weights."""

    @classmethod
    def of(cls, module: nn.Module) -> "Attributes":
        if not isinstance(vars(module), cls):
            object.__setattr__(module, "__dict__", cls(vars(module)))
        return cast(Attributes, vars(module))

    def copy(self) -> dict[str, Any]:
        return {name: self[name] for name in super().__iter__() if name != "forward"}

    def keys(self) -> Any:
        return self.copy().keys()

    def items(self) -> Any:
        return self.copy().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


class Installed(RowForward):
    """The rows of a model, and its ``forward``, which tells if a layer of theirs or a recurrent
    module was exchanged. It is an attribute of the model, so a copy of that has its own rows."""

    def __init__(
        self, model: nn.Module, rows: "list[LayerRun]", layers: Named,
        children: dict[str, dict[str, nn.Module | None]],
    ) -> None:  # fmt: skip
        super().__init__(model)
        self.rows, self.layers, attributes = rows, layers, Attributes.of(model)
        self.ours, self.children = {id(layer) for _, layer in layers}, children
        each = ((f"{name}.{key}", m) for name, then in children.items() for key, m in then.items())
        self.ours |= {id(m) for name, m in each if name.lstrip(".") in children}
        attributes[_ROWS] = self
        attributes.setdefault("forward", self)
        for row in rows:
            row.install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        told = list[str]()
        for name, then in {} if torch.compiler.is_compiling() else self.children.items():
            if any(f"{name}.".startswith(f"{earlier}.") for earlier in told):
                continue
            above: nn.Module | None = self.module
            for key in filter(None, name.split(".")):
                above = None if above is None else above._modules.get(key)
            for key, now in () if above is None else above._modules.items():
                new = then.get(key) is not now and (key not in then or id(then[key]) in self.ours)
                budgeted = getattr(now, "memory", None) is not None
                if new and now is not None and not budgeted and torch.is_grad_enabled():
                    told.append(f"{name}.{key}".lstrip("."))
                    warnings.warn(_NEW.format(told[-1]), stacklevel=4)
        return own_forward(self.module)(*args, **kwargs)

    def __getstate__(self) -> Any:
        rows = [row for row in self.rows if row.is_installed()]
        return self.module, rows, self.layers, self.children

    def __setstate__(self, state: object) -> None:
        self.__init__(*state)  # type: ignore[misc]


@contextmanager
def released(model: nn.Module) -> Iterator[None]:
    """Give all modules their own forward pass in a block, so that no row gets their calls."""
    removed = _release(model)
    try:
        yield
    finally:
        _release(model)
        for attributes, forward in removed:
            attributes["forward"] = forward


def _release(model: nn.Module) -> list[tuple[dict[str, Any], RowForward]]:
    """Give all modules their own forward pass. Return their attributes, and what they had."""
    pairs = ((vars(module), vars(module).get("forward")) for module in model.modules())
    removed = [(attributes, each) for attributes, each in pairs if isinstance(each, RowForward)]
    for attributes, _ in removed:
        del attributes["forward"]
    return removed


def install(model: nn.Module, rows: "Sequence[LayerRun]") -> None:
    """Pass the calls of layers to these rows alone from now on, also in copies of the model. Notice
    layers and recurrent modules with a budget that are exchanged."""
    _release(model)
    for module in model.modules():
        vars(module).pop(_ROWS, None)
    ours = {id(layer) for row in rows for _, layer in row.calls}
    ours |= {id(m) for m in model.modules() if isinstance(m, BudgetedRNN) and m.memory is not None}
    if ours := ours - {id(model)}:
        every = model.named_modules(remove_duplicate=False)
        layers = [(name, m) for name, m in every if id(m) in ours]
        above = {name.rpartition(".")[0] for name, _ in layers}
        ups = {u for path in above for u in ("", *accumulate(path.split("."), "{}.{}".format))}
        above |= {name for name in ups if isinstance(model.get_submodule(name), _LISTS)}
        children = {name: {**model.get_submodule(name)._modules} for name in sorted(above)}
        Installed(model, [*rows], layers, children)


def is_inplace_activation(module: nn.Module) -> bool:
    """Return whether a module is a rider: an activation that works in place."""
    kind = type(module)
    is_activation = kind.__module__ == nn.ReLU.__module__ and kind is not nn.RReLU  # which draws
    return is_activation and bool(getattr(module, "inplace", False))


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward pass of a module's class, without a :class:`RowForward`."""
    return partial(type(module).forward, module)
