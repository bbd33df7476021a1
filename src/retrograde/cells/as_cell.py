"""What people give as a cell: torch's own cells work, and whole layers and models are refused."""

import inspect
from typing import Any, cast

from torch import Tensor, nn

from retrograde.cells.cell import Cell
from retrograde.errors import CellError


def as_cell(cell: Any) -> Cell:
    """Return what runs a step. Torch's own cells return their state alone.

    Raises:
        CellError: it runs whole sequences itself, or takes no state.
    """
    kind = type(cell)
    if getattr(kind, "forward", None) in _TORCHS and "forward" not in vars(cell):

        def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
            after = cell(x, state)
            return after[0] if isinstance(cell, nn.LSTMCell) else after, after

        return step
    if isinstance(cell, nn.RNNBase) and kind.forward.__module__.startswith(("torch.", "retro")):
        name = cell.mode.partition("_")[0]
        raise CellError(
            f"got a {kind.__name__}, which runs all steps of a sequence itself: expected a cell, "
            f"which runs one; use rg.{name}(…, memory=), or torch.nn.{name}Cell"
        )
    if isinstance(cell, nn.Module) and not _takes_a_state(cell):
        raise CellError(
            f"the forward of this {kind.__name__} does not take an input and a state: expected a "
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
