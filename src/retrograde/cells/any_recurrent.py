"""``Recurrent``: a module around any cell, like ``torch.nn.LSTM`` around its own.

Batches may be padded. All samples run at every step; those that have ended keep their state and
return zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.cells.as_cell import as_cell
from retrograde.cells.cell import Cell, as_pair
from retrograde.cells.unroll import CellCall, refuse_compiled
from retrograde.errors import CellError, InputError
from retrograde.plan.fit import Fit
from retrograde.replay.trees import Tensors, flatten, flatten_state
from retrograde.run.layout import Layout, Ragged, Straight, check_length, over
from retrograde.run.states import shaped
from retrograde.run.transforms import uncompiled
from retrograde.schedule import Schedule
from retrograde.schedule.schedule import check_limit
from retrograde.units import Memory, MemoryAttribute


class Recurrent(nn.Module):
    """Any cell over whole sequences, with its gradient within a memory budget.

    Outputs and gradients are those of the loop ``y[t], state = cell(x[t], state)``. The cell's
    parameters are in ``state_dict`` under ``cell.``.

    Args:
        cell: a module ``cell(x_t, state) -> (y_t, state)``, or one of torch's ``RNNCell``,
            ``GRUCell`` and ``LSTMCell``, whose output is h. The state may be any pytree of tensors
            and numbers, with the samples as their first dimension (B, …).
        memory: the budget for the backward pass, beyond inputs, outputs and gradients: bytes
            (``67108864``), a size (``"64MiB"``), or a fraction of ordinary backpropagation's memory
            (``0.05``, ``"5%"``). None: ordinary backpropagation.
        schedule: the schedule to follow, instead of a budget, for sequences of its length.
        batch_first: whether inputs and outputs are (B, T, …), not (T, B, …).
        compile: whether blocks of steps are compiled, as by :func:`retrograde.unroll`.

    Raises:
        CellError: the cell is not a module; at a call, it cannot be run exactly.
        BudgetError: at a call, the budget is too small; the message names the smallest.
        ScheduleError: both memory and schedule are given; at a call, the schedule does not match.
        UnitError: the memory cannot be read.

    Example:
        >>> net = Recurrent(nn.GRUCell(3, 5), memory="30%", batch_first=True)
        >>> y, last = net(torch.randn(2, 60, 3), lengths=torch.tensor([60, 40]))
        >>> y.sum().backward()
        >>> y.shape, y[1, 40:].abs().sum().item(), sorted(net.state_dict())[0]
        (torch.Size([2, 60, 5]), 0.0, 'cell.bias_hh')
    """

    memory = MemoryAttribute()

    def __init__(
        self,
        cell: nn.Module,
        *,
        memory: Memory | None = None,
        schedule: Schedule | None = None,
        batch_first: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(cell, nn.Module):
            raise CellError(
                f"the cell is a {type(cell).__name__}: expected a module, so that its parameters "
                "are this module's; for a function use rg.unroll"
            )
        check_limit(memory, schedule)
        if compile:
            refuse_compiled(schedule=schedule)
        self.cell = cell
        self.memory, self.schedule, self.batch_first = memory, schedule, batch_first
        self.compiled = compile

    @uncompiled
    def forward(self, input: Any, state: Any = None, lengths: Any = None) -> tuple[Any, Any]:
        """Run the sequences.

        Args:
            input: a pytree of tensors (T, B, …), or (B, T, …) with ``batch_first``.
            state: the initial state, of all samples. With None, torch's cells begin with zeros, and
                any other cell gets None.
            lengths: the steps of each sample (B,), for a padded batch. Inputs after them are not
                read, and the outputs there are zero. None: all have T.

        Returns:
            The outputs, laid out as the input, and the state of each sample after its last step.

        Raises:
            InputError: the lengths do not match the input.
        """
        call, cell, state = self._call_of(input, state, lengths)
        outputs, spec, last = call.run(cell, state)
        if self.batch_first:
            outputs = [y.transpose(0, 1) for y in outputs]
        return spec.unflatten(outputs), last

    def fit(self, input: Any, state: Any = None, lengths: Any = None) -> Fit:
        """Return the plan for a call with these arguments, or an input of a shape.
        Raises the errors of the call."""
        if self.memory is None:
            raise CellError("there is no budget to fit: give memory=, such as memory=0.05")
        call, cell, state = self._call_of(shaped(input, self), state, lengths)
        return call.planned(cell, state)[0]

    def extra_repr(self) -> str:
        asked = {"memory": self.memory, "batch_first": self.batch_first or None}
        asked["compile"] = self.compiled or None
        return ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None)

    def _call_of(
        self, input: Any, state: Any = None, lengths: Any = None
    ) -> tuple[CellCall, Cell, Any]:
        """Return the recurrence of a call: its sequences, its cell, and the initial state."""
        if isinstance(input, PackedSequence):
            raise InputError(
                "the input is packed: expected a padded batch; give lengths=, as "
                "torch.nn.utils.rnn.pad_packed_sequence returns both"
            )
        leaves, spec = flatten(input, "input")
        if self.batch_first:
            leaves = [x.transpose(0, 1) for x in leaves]
        length, cell = check_length(leaves), as_cell(self.cell)
        layout: Layout = Straight(length, fused=False)
        if lengths is not None:
            layout = Ragged(length, _checked(lengths, leaves))
            cell = _Masked(cell)
            spec = flatten((spec.unflatten(leaves), layout.lengths), "input")[1]
        made = CellCall(leaves, spec, layout, self.memory, self.schedule, self.compiled)
        return made, cell, state


@dataclass(frozen=True)
class _Masked:
    """A cell of which samples that have ended keep their state, and return zeros."""

    cell: Cell

    def __call__(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        x, goes_on = inputs
        y, after = as_pair(self.cell(x, state))
        outputs, output_spec = flatten(y, "output of the cell")
        outputs = [over(_checked_samples(goes_on, t), t) for t in outputs]
        (new, spec), (old, before) = flatten_state(after), flatten_state(state)
        if spec == before:  # else it is the first step, which every sample has
            pairs = zip(new, old, strict=True)
            new = [over(_checked_samples(goes_on, t), t, s) if t.dim() else t for t, s in pairs]
        return output_spec.unflatten(outputs), spec.unflatten(new)


def _checked_samples(goes_on: Tensor, t: Tensor) -> Tensor:
    """Return the mask, after a check that a step's tensor has the samples first."""
    if t.shape[:1] != goes_on.shape:
        raise CellError(
            f"the cell returned a tensor {tuple(t.shape)}: expected the samples as its first "
            f"dimension ({len(goes_on)}, …), since their lengths differ; transpose it"
        )
    return goes_on


def _checked(lengths: Any, leaves: Tensors) -> Tensor:
    """Return the lengths as a tensor, after a check that they match the samples."""
    length, samples = leaves[0].shape[0], {x.shape[1] if x.dim() > 1 else 0 for x in leaves}
    steps = torch.as_tensor(lengths, device=leaves[0].device)
    fits = steps.shape == (next(iter(samples)),) and len(samples) == 1
    if not fits or steps.is_floating_point() or not bool(((steps >= 1) & (steps <= length)).all()):
        raise InputError(
            f"lengths={lengths!r}: expected an integer from 1 to {length} for each of "
            f"{', '.join(map(str, samples))} samples"
        )
    return steps.long()
