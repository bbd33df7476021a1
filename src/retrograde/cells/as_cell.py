"""What people give as a cell: torch's own cells work, and whole layers and models are refused."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from retrograde.cells.cell import Cell
from retrograde.errors import CellError, InputError
from retrograde.recurrent.base import BudgetedRNN
from retrograde.recurrent.modules import GRU, LSTM, RNN
from retrograde.run.transforms import besides_forward
from retrograde.torch_private import flat_weights

_LAYERS: dict[type[nn.Module], type[BudgetedRNN]]
_LAYERS = {nn.LSTMCell: LSTM, nn.GRUCell: GRU, nn.RNNCell: RNN}
_EXACT = torch.float32, torch.float64


@dataclass(frozen=True)
class TorchCell:
    """One of torch's own cells, which return their state alone. Within a budget, the loops of a
    layer run it."""

    cell: nn.RNNCellBase

    def __call__(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        is_pair = isinstance(self.cell, nn.LSTMCell)
        if state is not None and isinstance(state, Tensor) == is_pair:
            expected = "the pair (h, c)" if is_pair else "a tensor"
            raise InputError(f"the state is a {type(state).__name__}: expected {expected}")
        after = self.cell(x, state)
        return after[0] if is_pair else after, after

    def is_a_layer(self, x: Tensor, state: Sequence[Tensor]) -> bool:
        """Return whether a layer computes the same, of inputs (T, B, I) or (T, I), with something
        to backpropagate."""
        cell, count = self.cell, 2 if type(self.cell) is nn.LSTMCell else 1
        tensors = [x, *state, *cell.parameters()]
        return (
            type(cell) in _LAYERS
            and besides_forward(cell) is None
            and all(type(t) in (Tensor, nn.Parameter) and t.is_cpu for t in tensors)
            and any(t.requires_grad for t in tensors)
            and x.dtype in _EXACT
            and {t.dtype for t in tensors} == {x.dtype}
            and not torch.is_autocast_enabled("cpu")
            and x.dim() in (2, 3)
            and x.shape[1:-1] != (0,)
            and x.shape[-1] == cell.input_size
            and [t.shape for t in state] in ([], [(*x.shape[1:-1], cell.hidden_size)] * count)
        )

    def entry(self, state: Sequence[Tensor]) -> Any:
        """Return a cell's state in the form of a layer's."""
        whole = tuple(s.unsqueeze(0) for s in state)
        return (whole if len(whole) > 1 else whole[0]) if whole else None

    def left(self, state: Any) -> Any:
        """Return a layer's state in the form of a cell's."""
        return tuple(map(self.left, state)) if isinstance(state, tuple) else state.squeeze(0)

    def empty(self, memory: int) -> BudgetedRNN:
        """Return a layer of the cell's kind and sizes, with a budget and without its weights."""
        cell = self.cell
        options: Any = {"nonlinearity": cell.nonlinearity} if type(cell) is nn.RNNCell else {}
        sizes = cell.input_size, cell.hidden_size
        layer = _LAYERS[type(cell)](*sizes, bias=cell.bias, device="meta", **options)
        layer.memory = memory
        return layer

    def layer(self, empty: BudgetedRNN) -> BudgetedRNN:
        """Return an empty layer over the parameters that the cell has now. They share plans."""
        parameters = {f"{name}_l0": p for name, p in self.cell._parameters.items() if p is not None}
        layer: BudgetedRNN = object.__new__(type(empty))
        vars(layer).update(vars(empty), _parameters=parameters)
        flat_weights(layer, anew=True)
        return layer


def as_cell(cell: Any) -> Cell:
    """Return what runs a step; torch's own cells return their state alone. Raises CellError if it
    runs whole sequences itself, or takes no state."""
    class_ = type(cell)
    if getattr(class_, "forward", None) in _TORCHS and "forward" not in vars(cell):
        return TorchCell(cell)
    if isinstance(cell, nn.RNNBase) and class_.forward.__module__.startswith(("torch.", "retro")):
        name = cell.mode.partition("_")[0]
        raise CellError(
            f"got a {class_.__name__}, which runs all steps of a sequence itself: expected a cell, "
            f"which runs one; use rg.{name}(…, memory=), or torch.nn.{name}Cell"
        )
    if isinstance(cell, nn.Module) and not _takes_a_state(cell):
        raise CellError(
            f"the forward of this {class_.__name__} does not take an input and a state: expected a "
            "cell, cell(x_t, state); a whole model gets a budget, and tells what it takes, by "
            "rg.budget(model, memory, sample)"
        )
    return cast(Cell, cell)


_TORCHS = nn.LSTMCell.forward, nn.RNNCell.forward, nn.GRUCell.forward


def _takes_a_state(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it tells no signature
        pass
    return True
