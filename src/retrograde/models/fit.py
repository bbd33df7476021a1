"""``fit``: the plan for a call and a budget, without running the call."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from retrograde.cells.any_recurrent import Recurrent
from retrograde.cells.as_cell import as_cell
from retrograde.cells.stateful import Stateful
from retrograde.cells.unroll import CellCall, refuse_compiled
from retrograde.errors import NotExactError
from retrograde.models.budget.replace_modules import twin
from retrograde.models.chain_plans import ChainFit
from retrograde.models.sequential import Sequential
from retrograde.plan.fit import Fit
from retrograde.replay.trees import flatten_inputs
from retrograde.run.layout import Straight, check_length
from retrograde.run.states import shaped
from retrograde.schedule.actions import Verb
from retrograde.sizes.timing import RangeTimes, time_steps
from retrograde.units import Memory, parse_memory

_REPEATS = 3  # timings of each kind of step


def fit(
    cell: Any,
    inputs: Any,
    state: Any = None,
    *,
    memory: Memory,
    stateful: nn.Module | Sequence[nn.Module] = (),
    compile: bool = False,
) -> Fit | ChainFit:
    """Return the plan for a call, which does not run: peak, least budget, forward steps, seconds.

    Args:
        cell: the callable: a cell as for :func:`retrograde.unroll`; an LSTM, a GRU or an RNN,
            torch's or ours; a ``Sequential``; or a :class:`retrograde.Recurrent`. Its own
            ``memory`` is ignored.
        inputs: as for the call; they require a gradient if they will then. Or a shape, of a tensor.
        state: the initial state, as for the call.
        memory: the budget: bytes (``67108864``), a size (``"64MiB"``), or a fraction of ordinary
            backpropagation's memory (``0.05``, ``"5%"``).
        stateful, compile: as for :func:`retrograde.unroll`.

    Returns:
        A :class:`~retrograde.plan.fit.Fit`; for a chain a
        :class:`~retrograde.models.chain_plans.ChainFit`. ``seconds`` are predicted from timed steps
        of a cell, or timed layers of a chain. For a recurrent module they are those of a nominal
        machine.

    Raises:
        BudgetError: the budget is too small; the message names the smallest one that is enough.
        NotExactError: the cell or the layers cannot be run exactly.
        UnitError: the memory cannot be read.

    Example:
        >>> import torch
        >>> cell = torch.nn.GRUCell(3, 5)
        >>> def step(x, h):
        ...     h = cell(x, h)
        ...     return h, h
        >>> found = fit(step, torch.randn(100, 2, 3), torch.zeros(2, 5), memory="20%")
        >>> found.peak_bytes <= found.budget_bytes, 100 < found.forward_steps < 200
        (True, True)
    """
    parse_memory(memory)
    inputs = shaped(inputs, cell)
    if compile:
        refuse_compiled(stateful=stateful or None)
        if isinstance(cell, nn.RNNBase | nn.Sequential | Recurrent):
            raise NotExactError(
                f"got compile=True for a {type(cell).__name__}: expected it for a cell alone; "
                "leave it out"
            )
    if isinstance(cell, nn.RNNBase) and not stateful:
        plan = twin(cell)._fit_within(memory, inputs, state)
        return replace(plan, seconds=1e-6 * plan.time)
    if isinstance(cell, nn.Sequential) and not stateful:
        if state is not None:
            raise NotExactError(
                f"got a state, a {type(state).__name__}, for a Sequential: expected none"
            )
        return Sequential(OrderedDict(cell._modules))._fit_within(memory, inputs)
    if isinstance(cell, Recurrent):
        call, cell, state = cell._call_of(inputs, state)
        call = replace(call, memory=memory, schedule=None)
    else:
        if stateful:
            cell = Stateful.of(cell, stateful, inputs, state)
            state = cell.first(state)
        leaves, spec = flatten_inputs(inputs)
        layout = Straight(check_length(leaves), fused=False)
        call = CellCall(leaves, spec, layout, memory, None, compile)
        cell = as_cell(cell)
    with torch.enable_grad():
        found, core, read, later = call.planned(cell, state, _REPEATS)
        if found.seconds is None:
            times = time_steps(core, read, later, _REPEATS)
            found = replace(found, seconds=iteration_seconds(found, times))
    return found


def iteration_seconds(found: Fit, times: RangeTimes) -> float:
    """Return the predicted time of an iteration by a schedule, from the times of ranges.

    A schedule records and backpropagates every step once, whatever else it runs forward. Ordinary
    backpropagation through a long sequence takes longer on CPUs: the system maps its memory again.
    """
    length, records = found.schedule.length, int(np.sum(found.schedule.kind == Verb.RECORD))
    again, calls = found.forward_steps - length, found.calls - 2 * records
    recorded = times.record(records, length) + times.backward(records, length)
    return times.forward(calls, again) + recorded
