"""``Recurrent``: a module around any cell, like ``torch.nn.LSTM`` around its own.

Batches may be padded or packed, and a second cell may run through the sequences from their ends.
All samples run at every step; those that have ended keep their state and return zeros. Both
directions are one recurrence, whose step is a step of each, so one budget serves both.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.cells.cell import Cell, as_pair
from retrograde.cells.unroll import CellCall, refuse_compiled
from retrograde.errors import CellError, InputError
from retrograde.plan.fit import Fit
from retrograde.replay.trees import Tensors, flatten, flatten_state
from retrograde.run.autograd import refuse_both
from retrograde.run.layout import Layout, Ragged, Straight, check_length
from retrograde.run.transforms import uncompiled
from retrograde.schedule import Schedule
from retrograde.units import Memory, parse_memory


class Recurrent(nn.Module):
    """Any cell over whole sequences, with its gradient within a memory budget.

    Outputs and gradients are those of the loop ``y[t], state = cell(x[t], state)``. The cell's
    parameters are in ``state_dict`` under ``cell.``, those of ``reverse`` under ``reverse.``.

    Args:
        cell: a module ``cell(x_t, state) -> (y_t, state)``, or one of torch's ``RNNCell``,
            ``GRUCell`` and ``LSTMCell``, whose output is h. The state may be any pytree of tensors
            and numbers, with the samples as their first dimension (B, …).
        reverse: a second cell, which runs through the sequences from their ends; its outputs follow
            the first one's in the last dimension. None for one direction.
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
        >>> net = Recurrent(nn.GRUCell(3, 5), nn.GRUCell(3, 5), memory="30%", batch_first=True)
        >>> y, (first, last) = net(torch.randn(2, 60, 3), lengths=torch.tensor([60, 40]))
        >>> y.sum().backward()
        >>> y.shape, y[1, 40:].abs().sum().item(), sorted(net.state_dict())[0]
        (torch.Size([2, 60, 10]), 0.0, 'cell.bias_hh')
    """

    def __init__(
        self,
        cell: nn.Module,
        reverse: nn.Module | None = None,
        *,
        memory: Memory | None = None,
        schedule: Schedule | None = None,
        batch_first: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        for one in (cell, reverse):
            if one is not None and not isinstance(one, nn.Module):
                raise CellError(
                    f"the cell is a {type(one).__name__}: expected a module, so that its "
                    "parameters are this module's; for a function use rg.unroll"
                )
        if memory is not None:
            parse_memory(memory)
        refuse_both(memory, schedule)
        if compile:
            refuse_compiled(schedule=schedule)
        self.cell, self.reverse = cell, reverse
        self.memory, self.schedule, self.batch_first = memory, schedule, batch_first
        self.compiled = compile

    @uncompiled
    def forward(self, input: Any, state: Any = None, lengths: Any = None) -> tuple[Any, Any]:
        """Run the sequences.

        Args:
            input: a pytree of tensors (T, B, …), or (B, T, …) with ``batch_first``, or a
                ``PackedSequence``.
            state: the initial state, of all samples; a pair of states with ``reverse``. With None,
                torch's cells begin with zeros, and any other cell gets None.
            lengths: the steps of each sample (B,), for a padded batch. Inputs after them are not
                read, and the outputs there are zero. None: all have T.

        Returns:
            The outputs, laid out as the input, and the state of each sample after its last step.

        Raises:
            InputError: the lengths do not match the input.
        """
        call, cell, state = self._call_of(input, state, lengths)
        outputs, spec, last = call.run(cell, state)
        if isinstance(input, PackedSequence):
            if len(outputs) != 1:
                raise CellError(
                    f"the cell has {len(outputs)} tensors for its output: expected one with packed "
                    "sequences; pad them, and give lengths="
                )
            return input._replace(data=outputs[0]), _ordered(last, input.unsorted_indices)
        if self.batch_first:
            outputs = [y.transpose(0, 1) for y in outputs]
        if self.reverse is not None:  # the structure is that of a pair
            return spec.unflatten([*outputs, *outputs])[0], last
        return spec.unflatten(outputs), last

    def fit(self, input: Any, state: Any = None, lengths: Any = None) -> Fit:
        """Return the plan for a call with these arguments: peak, least budget, forward steps.
        Raises the errors of the call."""
        if self.memory is None:
            raise CellError("there is no budget to fit: give memory=, such as memory=0.05")
        call, cell, state = self._call_of(input, state, lengths)
        return call.planned(cell, state)[0]

    def extra_repr(self) -> str:
        asked = {"memory": self.memory, "batch_first": self.batch_first or None}
        asked["compile"] = self.compiled or None
        return ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None)

    def _call_of(
        self, input: Any, state: Any = None, lengths: Any = None
    ) -> tuple[CellCall, Cell, Any]:
        """Return the recurrence of a call: its sequences, its cell, and the initial state."""
        cells = tuple(_as_cell(c) for c in (self.cell, self.reverse) if c is not None)
        both = len(cells) > 1
        if both and state is None:
            state = None, None
        if both and not (isinstance(state, tuple | list) and len(state) == 2):
            raise InputError(
                f"the initial state is a {type(state).__name__}: expected a pair, one for each "
                "direction"
            )
        if both:
            state = tuple(state)
        packed = isinstance(input, PackedSequence)
        leaves, structure = flatten(input.data if packed else input, "input")
        if self.batch_first and not packed:
            leaves = [x.transpose(0, 1) for x in leaves]
        length = check_length(leaves)
        layout: Layout
        if packed:
            if lengths is not None:
                raise InputError("given both lengths and packed sequences: expected one")
            layout = _packed_layout(input, both)
            state = _ordered(state, input.sorted_indices)
        elif lengths is None and not both:
            layout = Straight(length, fused=False)
        else:
            layout = Ragged(length, _checked(lengths, leaves), both=both)
        cell, spec = cells[0], structure
        if isinstance(layout, Ragged):
            cell = _Directions(cells)
            trees = tuple(structure.unflatten(leaves) for _ in cells)
            spec = flatten((trees, layout.lengths), "input")[1]
        made = CellCall(leaves, spec, layout, self.memory, self.schedule, self.compiled)
        return made, cell, state


@dataclass(frozen=True)
class _Directions:
    """A step of one cell, or of one for each direction. Samples that have ended keep their state,
    and their output is zero."""

    cells: tuple[Cell, ...]

    def __call__(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        xs, goes_on = inputs
        if len(self.cells) == 1:
            return _masked(self.cells[0], xs[0], state, goes_on)
        (y, after), (z, other) = (
            _masked(cell, x, s, goes_on) for cell, x, s in zip(self.cells, xs, state, strict=True)
        )
        _check_pair(y, z)
        return (y, z), (after, other)


def _masked(cell: Cell, x: Any, state: Any, goes_on: Tensor | None) -> tuple[Any, Any]:
    y, after = as_pair(cell(x, state))
    if goes_on is None:
        return y, after
    outputs, output_spec = flatten(y, "output of the cell")
    outputs = [torch.where(_over(goes_on, t), t, torch.zeros_like(t)) for t in outputs]
    (new, spec), (old, before) = flatten_state(after), flatten_state(state)
    if spec == before:  # else it is the first step, which every sample has
        pairs = zip(new, old, strict=True)
        new = [t if not t.dim() else torch.where(_over(goes_on, t), t, then) for t, then in pairs]
    return output_spec.unflatten(outputs), spec.unflatten(new)


def _over(goes_on: Tensor, t: Tensor) -> Tensor:
    """Return the mask in the shape of a step's tensor."""
    if t.shape[:1] != goes_on.shape:
        raise CellError(
            f"the cell returned a tensor {tuple(t.shape)}: expected the samples as its first "
            f"dimension ({len(goes_on)}, …), since their lengths differ; transpose it"
        )
    return goes_on.view(-1, *[1] * (t.dim() - 1))


def _check_pair(y: Any, z: Any) -> None:
    shapes = [[tuple(t.shape) for t in flatten(one, "output of the cell")[0]] for one in (y, z)]
    if shapes[0] != shapes[1]:
        raise CellError(
            f"the outputs of the two cells are {shapes[0]} and {shapes[1]}: expected equal shapes, "
            "since they are joined in their last dimension"
        )


def _as_cell(module: nn.Module) -> Cell:
    """Return a module as a cell; torch's own return only their state."""
    if isinstance(module, nn.LSTMCell | nn.RNNCell | nn.GRUCell):

        def step(x: Tensor, state: Any) -> tuple[Tensor, Any]:
            after = module(x, state)
            return after[0] if isinstance(module, nn.LSTMCell) else after, after

        return step
    return module


def _packed_layout(input: PackedSequence, both: bool) -> Ragged:
    sizes = input.batch_sizes
    samples = torch.arange(int(sizes[0]), device=sizes.device)
    lengths = (sizes.unsqueeze(-1) > samples).sum(0).to(input.data.device)
    starts = (sizes.cumsum(0) - sizes).to(input.data.device)
    return Ragged(len(sizes), lengths, starts, both)


def _checked(lengths: Any, leaves: Tensors) -> Tensor | None:
    """Return the lengths as a tensor, after a check that they match the samples."""
    if lengths is None:
        return None
    length, samples = leaves[0].shape[0], {x.shape[1] if x.dim() > 1 else 0 for x in leaves}
    found = torch.as_tensor(lengths, device=leaves[0].device)
    fits = found.shape == (next(iter(samples)),) and len(samples) == 1
    if not fits or found.is_floating_point() or not bool(((found >= 1) & (found <= length)).all()):
        raise InputError(
            f"lengths={lengths!r}: expected an integer from 1 to {length} for each of "
            f"{', '.join(map(str, samples))} samples"
        )
    return found.long()


def _ordered(state: Any, order: Tensor | None) -> Any:
    if order is None or state is None:
        return state
    leaves, spec = flatten_state(state)
    return spec.unflatten([t.index_select(0, order) if t.dim() else t for t in leaves])
