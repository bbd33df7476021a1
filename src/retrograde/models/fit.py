"""``fit``: the plan for a call and a budget, and its seconds; nothing is trained."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retrograde.cells.any_recurrent import Recurrent
from retrograde.cells.as_cell import as_cell
from retrograde.cells.stateful import Stateful
from retrograde.cells.unroll import CellCall, refuse_compiled
from retrograde.errors import NotExactError
from retrograde.models.budget.replace_modules import twin
from retrograde.models.budget.sample_run import untouched
from retrograde.models.rows.arguments import tensors_in
from retrograde.models.sequential import ChainFit, Sequential
from retrograde.plan.fit import Fit
from retrograde.recurrent.weights import last_weights, over_weights, stand_ins
from retrograde.replay.trees import flatten_inputs
from retrograde.run.layout import Straight, check_length
from retrograde.run.states import shaped
from retrograde.schedule.actions import Verb
from retrograde.sizes.ordinary import ordinary_bytes, time_pass
from retrograde.sizes.timing import Processor, RangeTimes, time_iterations, time_steps
from retrograde.units import Memory, parse_memory

_REPEATS = 3  # timings of each kind of step
_BYTES = 256 * 2**20  # of ordinary backpropagation, at most, which is timed on a part otherwise
_SHORT = 2.0  # seconds of an iteration, at most, which is timed; a longer one is predicted
_STEPS = 64  # of a cell, by which ordinary backpropagation is timed


def fit(
    cell: Any,
    inputs: Any,
    state: Any = None,
    *,
    memory: Memory,
    stateful: nn.Module | Sequence[nn.Module] = (),
    compile: bool = False,
) -> Fit | ChainFit:
    """Return the plan for a call: peak, least budget, forward steps, seconds. Nothing is trained.

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
        :class:`~retrograde.models.sequential.ChainFit`. A few iterations are timed for
        ``seconds``; long ones are predicted, from timed steps of a cell or layers of a chain.

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
    if inputs is not (example := shaped(inputs, cell)):
        inputs = example.normal_()
    if compile:
        refuse_compiled(stateful=stateful or None)
        if isinstance(cell, nn.RNNBase | nn.Sequential | Recurrent):
            raise NotExactError(
                f"got compile=True for a {type(cell).__name__}: expected it for a cell alone; "
                "leave it out"
            )
    if isinstance(cell, nn.RNNBase) and not stateful:
        return timed(twin(cell)._fit_within(memory, inputs, state), cell, inputs, state)
    if isinstance(cell, nn.Sequential) and not stateful:
        if state is not None:
            class_name = type(state).__name__
            raise NotExactError(f"got a state, a {class_name}, for a Sequential: expected none")
        return _fit_chain(cell, inputs, memory)
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
        plan, runs = call.planned(cell, state)
        if callable(runs):
            return replace(plan, seconds=runs())
        if isinstance(runs[0], nn.RNNBase):
            return timed(plan, *runs)
        core, read, later = runs
        with Processor() as processor, core.surroundings.measured():
            times, steps = time_steps(core, read, later, _REPEATS), min(_STEPS, len(read))
            run = partial(ordinary_bytes, core, read, later, steps, whole=True, by=time_pass)
            plain = median(run() for _ in range(_REPEATS)) * len(read) / steps
            seconds = plain * _ratio(plan, times)
            tensors = *call.tensors, *tensors_in(state), *core.parameters
            wanted = [t for t in tensors if t.requires_grad]
            if wanted and seconds < _SHORT:
                seconds = time_iterations(lambda: tensors_in(call.run(cell, state)[::2]), wanted)
    return replace(plan, seconds=seconds, ordinary_seconds=plain, is_busy=processor.is_busy)


def _ratio(plan: Fit, times: RangeTimes) -> float:
    """Return how much longer a plan takes than ordinary backpropagation. Steps that are timed one
    by one take longer than in a loop, so only the ratio counts."""
    whole = times.record(1, plan.schedule.length) + times.backward(1, plan.schedule.length)
    return 1.0 if plan.ordinary else iteration_seconds(plan, times) / whole


def _fit_chain(chain: nn.Sequential, inputs: Any, memory: Memory) -> ChainFit:
    """Return the plan of a chain. If it is short, a few iterations are timed."""
    layers = OrderedDict(chain._modules)
    ours, theirs = Sequential(layers, memory=memory), nn.Sequential(layers)
    plan = ours.fit(inputs)
    wanted = [t for t in (*tensors_in(inputs), *chain.parameters()) if t.requires_grad]
    if plan.seconds > _SHORT:
        return plan
    with untouched(chain):
        seconds = time_iterations(lambda: tensors_in(ours(inputs)), wanted)
        ordinary = seconds * plan.ordinary_seconds / plan.seconds
        if plan.ordinary_bytes <= _BYTES:
            ordinary = time_iterations(lambda: tensors_in(theirs(inputs)), wanted)
    return replace(plan, seconds=seconds, ordinary_seconds=ordinary)


def timed(plan: Fit, module: nn.RNNBase, inputs: Any, state: Any) -> Fit:
    """Return the plan of a recurrent module with its seconds, and those of torch's own kernels.
    Both are measured. Where torch's own would take much memory, it runs on a part of the steps, or
    on none of a packed batch."""
    weights, budgeted = stand_ins(last_weights(module)), twin(module)  # none is computed anew
    ours, theirs = over_weights(budgeted, weights, type(budgeted)), over_weights(budgeted, weights)
    ours.memory = plan.budget_bytes
    share = min(1.0, _BYTES / plan.ordinary_bytes)

    def seconds(shell: Any, part: Any) -> float:
        wanted = [t for t in (*weights, *tensors_in((part, state))) if t.requires_grad]
        return time_iterations(lambda: tensors_in(shell.forward(part, state)), wanted)

    with untouched(module):
        with Processor() as processor:
            plan = replace(plan, seconds=seconds(ours, inputs))
            whole = seconds(theirs, inputs) if share == 1 else None
        plan = replace(plan, ordinary_seconds=whole, is_busy=processor.is_busy)
        if share == 1:
            return plan
        if not isinstance(inputs, Tensor):  # a part of a packed batch is not like the whole
            return plan
        at = 1 if module.batch_first and inputs.dim() == 3 else 0
        part = inputs.narrow(at, 0, max(1, int(share * inputs.shape[at])))
        times = inputs.shape[at] / part.shape[at]
        return replace(plan, ordinary_seconds=times * seconds(theirs, part))


def iteration_seconds(plan: Fit, times: RangeTimes) -> float:
    """Return the predicted time of an iteration by a schedule, from the times of ranges. A schedule
    records and backpropagates every step once, whatever else it runs forward. Ordinary
    backpropagation through a long sequence takes longer on CPUs: the system maps its memory again.
    """
    length, records = plan.schedule.length, int(np.sum(plan.schedule.kind == Verb.RECORD))
    again, calls = plan.forward_steps - length, plan.calls - 2 * records
    recorded = times.record(records, length) + times.backward(records, length)
    return times.forward(calls, again) + recorded
