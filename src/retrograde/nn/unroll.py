"""``unroll``: any cell over a sequence, its gradient within a memory budget, or by a scan."""

import math
from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from retrograde.cores.cell import Cell, StepCore, as_pair, begin, examine
from retrograde.cores.fastest import fit_measured
from retrograde.cores.footprint import footprint, step_bytes
from retrograde.discover.surroundings import autocast_as_now
from retrograde.discover.trees import Structure, flatten
from retrograde.errors import CellError, ScheduleError
from retrograde.nn.cache import CellFits, signature
from retrograde.plan.fit import Fit
from retrograde.run.autograd import run_schedule, run_unrecorded, run_without_gradient
from retrograde.run.autograd_core import run_ordinary
from retrograde.run.inputs import Held, check_length
from retrograde.run.transforms import (
    is_transformed,
    is_unreal,
    refuse_transforms,
    uncompiled,
)
from retrograde.scan.any_cell import run_cell
from retrograde.schedule import Schedule
from retrograde.units import Memory, parse_memory

__all__ = ["check_schedule", "refuse_both", "unroll"]

Tensors = list[Tensor]

# A cell is measured once for its shapes, and a schedule fitted once for a budget.
_FITS: CellFits[Fit] = CellFits()


@uncompiled
def unroll(
    cell: Cell,
    inputs: Any,
    state: Any,
    *,
    memory: Memory | None = None,
    schedule: Schedule | None = None,
    backward: Literal["scan"] | None = None,
) -> tuple[Any, Any]:
    """Run a cell over a sequence; the exact gradient then takes no more than ``memory``.

    Outputs and gradients are those of the plain loop ``y[t], state = cell(x[t], state)``; input
    and state gradients are bitwise those of ordinary autograd on the same device (rule 1).

    Args:
        cell: ``cell(x_t, state) -> (y_t, state)``: a module, a function, a closure. It is called
            once more for step 0, to learn what it uses, and for a new input shape on short ranges,
            to be measured; of neither any trace is left.
        inputs: a pytree of tensors, each with time as its first dimension (T, …).
        state: the initial state, a pytree of tensors, whose structure and shapes every step keeps.
        memory: the budget for the backward pass, beyond inputs, outputs and gradients: bytes
            (``67108864``), a size (``"64MiB"``), or a fraction of what ordinary backpropagation
            would hold (``0.05``, ``"5%"``). None: as ordinary backpropagation does.
        schedule: the schedule to follow, in place of a budget.
        backward: ``"scan"``: by a parallel scan over the cell's Jacobians, which n + 2 passes
            through the cell give for a state of n numbers a sample (W20;
            :mod:`retrograde.scan.any_cell`). The first dimension of every tensor must be a batch of
            independent samples. The gradients then differ from ordinary autograd's by rounding.

    Returns:
        The outputs, stacked along a new first dimension (T, …), and the state after the last step.

    Raises:
        BudgetError: the budget is too small; the message names the smallest that would do.
        CellError: the cell cannot be run exactly.
        ScheduleError: the schedule is for another length, or is not legal.
        UnitError: the memory cannot be read.

    Example:
        >>> import torch
        >>> cell = torch.nn.GRUCell(3, 5)
        >>> x, h = torch.randn(100, 2, 3), torch.zeros(2, 5)
        >>> def step(x, h):
        ...     h = cell(x, h)
        ...     return h, h
        >>> ys, last = unroll(step, x, h, memory="20%")
        >>> ys.sum().backward()
        >>> ys.shape, bool((ys[-1] == last).all())
        (torch.Size([100, 2, 5]), True)
    """
    if memory is not None:
        parse_memory(memory)
    refuse_both(memory, schedule)
    if backward is not None:
        _check_scan(backward, memory, schedule)
    leaves, input_spec = flatten(inputs, "inputs")
    states, state_spec = flatten(state, "state")
    length = check_length(leaves)
    if schedule is not None:
        check_schedule(schedule, length)
    asked = not (memory is None and schedule is None and backward is None)
    unreal = is_unreal([*leaves, *states])
    if unreal or (is_transformed([*leaves, *states]) and not (asked and torch.is_grad_enabled())):
        return _plainly(cell, leaves, input_spec, state)
    if not torch.is_grad_enabled():
        core, first, after = begin(cell, [x[0] for x in leaves], input_spec, states, state_spec)
        outputs, after = run_unrecorded(core, length, leaves, first, after)
        return core.output_spec.unflatten(outputs), state_spec.unflatten(after)
    if asked:
        given = {"memory": memory, "schedule": schedule, "backward": backward}
        names = [name for name, value in given.items() if value is not None]
        refuse_transforms([*leaves, *states], names)
    with autocast_as_now(leaves[0].device):
        core = examine(cell, [x[0] for x in leaves], input_spec, states, state_spec)
    outputs, after = _recorded(core, leaves, states, memory, schedule, backward)
    return core.output_spec.unflatten(outputs), state_spec.unflatten(after)


def _recorded(
    core: StepCore,
    leaves: Tensors,
    states: Tensors,
    memory: Memory | None,
    schedule: Schedule | None,
    backward: Literal["scan"] | None,
) -> tuple[Tensors, Tensors]:
    """Run a cell so that it can be backpropagated as asked, if anything is to be."""
    length = len(leaves[0])
    if not any(t.requires_grad for t in (*leaves, *states, *core.parameters)):
        return run_without_gradient(core, length, length, leaves, states)
    if backward is not None:
        return _scanned(core, leaves, states)
    if schedule is None and memory is not None:
        found = _fitted(core, leaves, states, memory)
        schedule = None if found.ordinary else found.schedule
    if schedule is None:
        return run_ordinary(core, leaves, states)
    return run_schedule(core, schedule, leaves, states)


def _plainly(cell: Cell, leaves: Tensors, input_spec: Structure, state: Any) -> tuple[Any, Any]:
    """The plain loop, and nothing that a transform of torch.func could not go through."""
    outputs = []
    for x in zip(*(t.unbind() for t in leaves), strict=True):
        y, state = as_pair(cell(input_spec.unflatten(list(x)), state))
        outputs.append(flatten(y, "output of the cell"))
    stacked = [torch.stack(ys) for ys in zip(*(ys for ys, _ in outputs), strict=True)]
    return outputs[0][1].unflatten(stacked), state


def _check_scan(backward: Any, memory: Memory | None, schedule: Schedule | None) -> None:
    if backward != "scan":
        raise CellError(
            f"unknown backward={backward!r}: expected 'scan', or None for ordinary backpropagation"
        )
    if memory is not None or schedule is not None:
        raise CellError(
            "got backward='scan' together with memory= or schedule=: a cell of which nothing is "
            "known is scanned with all its states kept; leave one out, or use rg.RNN, rg.GRU or "
            "rg.LSTM, which take both"
        )


def _scanned(core: StepCore, leaves: Tensors, states: Tensors) -> tuple[Tensors, Tensors]:
    """Run a cell by the scan, once it is known to have Jacobians a sample."""
    if core.ambient.moves:
        does = "draws random numbers" if core.ambient.draws else "changes its buffers or attributes"
        raise CellError(
            f"the cell {does}: expected one whose steps can be run all at once; use backward=None"
        )
    if core.targets is not core.parameters:
        raise CellError(
            "the cell captures tensors that were computed from one another, or from a parameter "
            "that it uses too: expected none of them under backward='scan'; pass them as part of "
            "the inputs, or use backward=None"
        )
    samples = {s.shape[0] if s.dim() else None for s in states}
    samples |= {x.shape[1] if x.dim() > 1 else None for x in leaves}
    if len(samples) > 1 or None in samples or not all(s.is_floating_point() for s in states):
        raise CellError(
            "the cell has no Jacobian a sample: expected inputs (T, B, …) and a real state (B, …), "
            f"got {[tuple(x.shape) for x in leaves]} and {[tuple(s.shape) for s in states]}; use "
            "backward=None"
        )

    def step(inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        y, after = core.cell(core.input_spec.unflatten(inputs), core.state_spec.unflatten(state))
        return flatten(y, "output of the cell")[0], flatten(after, "state")[0]

    chunk = max(1, round(math.sqrt(len(leaves[0]) / 2)))
    return run_cell(step, core.parameters, leaves, states, chunk)


def refuse_both(memory: Memory | None, schedule: Schedule | None) -> None:
    """Refuse a budget beside a schedule, by a ScheduleError."""
    if memory is not None and schedule is not None:
        raise ScheduleError("given both memory and schedule: expected one; leave one out")


def check_schedule(schedule: Schedule, length: int) -> None:
    """Refuse a schedule for another length, and one that is not legal, by a ScheduleError."""
    if schedule.length != length:
        raise ScheduleError(
            f"the schedule is for {schedule.length} steps, but the inputs have {length}: "
            f"plan one for {length}"
        )
    _ = schedule.cost  # replayed, and so checked, once


def _fitted(core: StepCore, leaves: Tensors, states: Tensors, memory: Memory) -> Fit:
    ambient = core.ambient
    changing = tuple(b.nbytes for b in ambient.buffers), len(ambient.sources), ambient.place_bytes
    tensors = map(signature, (*leaves, *states, *core.parameters))
    # Of two precisions that a state has, the larger one is measured (see rule 7).
    widest = [
        s.to(torch.promote_types(s.dtype, dtype))
        for s, (_, dtype, _) in zip(states, core.state_like, strict=True)
    ]
    shapes = changing, torch.get_num_threads(), *tensors

    def step() -> Hashable:
        return step_bytes(core, Held(leaves), widest)

    def find() -> Fit:
        sizes = footprint(core, Held(leaves), widest, memory=memory)
        return fit_measured(core, Held(leaves), widest, memory, sizes)[0]

    parts = [(core.found, ambient.steady.places)]
    return _FITS.fit(parts, shapes, repr(memory), step, find)
