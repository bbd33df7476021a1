"""``bptt``: backpropagation through time for a sequence that is never held, within a budget.

It is the streaming form of algorithm 2 of Gruslys et al., *Memory-Efficient Backpropagation Through
Time* (2016). Inputs are read when a step needs them, the loss is computed step by step, and outputs
are dropped at once. Only what the schedule keeps is in memory.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrograde.cells.as_cell import as_cell
from retrograde.cells.cell import Cell, StepCore
from retrograde.cells.loss import Loss, RangeLoss, StepLoss, examine_loss, state_only
from retrograde.cells.open_end import Until, arrivals_of, is_iterated, open_plan, refuse_open
from retrograde.cells.rehearsal import fit_cell, growth
from retrograde.errors import CellError, RetrogradeError
from retrograde.plan import plan
from retrograde.plan.fit import Fit
from retrograde.plan.open_end import OpenPlan, bytes_of
from retrograde.recurrent.base import BudgetedRNN
from retrograde.recurrent.fastest import Candidate, candidates, fit_fastest, footprints
from retrograde.recurrent.fused import Fused, run_held
from retrograde.recurrent.vendor import Layers, Mode
from retrograde.replay.referents import find_referents
from retrograde.replay.switches import autocast_as_now
from retrograde.replay.trees import Structure, Tensors, flatten, flatten_state
from retrograde.run.arriving import Arrivals, OpenEnd
from retrograde.run.core import Core
from retrograde.run.settled import Settled
from retrograde.run.sources import Stream, TimeFirst, open_source
from retrograde.run.streaming import Progress, TakeInput, run_stream
from retrograde.run.transforms import besides_forward, refuse_transforms, uncompiled
from retrograde.schedule import Schedule
from retrograde.schedule.schedule import check_limit, check_schedule
from retrograde.sizes.cache import CellFits
from retrograde.sizes.footprint import grown
from retrograde.torch_private import flat_weights
from retrograde.units import Memory

# A cell with its loss is measured once for its shapes and a budget: the core, and its fit.
_FITS: CellFits[tuple[int, Fit]] = CellFits()

_RANGES = {nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward, BudgetedRNN.forward}


@uncompiled
def bptt(
    cell: Cell | nn.RNNBase,
    inputs: Any,
    state: Any = None,
    *,
    loss: Loss,
    memory: Memory | None = None,
    schedule: Schedule | None = None,
    length: SupportsIndex | None = None,
    input_gradient: TakeInput | None = None,
    progress: Progress | None = None,
    until: Until | None = None,
) -> tuple[Tensor, Any]:
    """Backpropagate the sum of the losses of all steps; neither inputs nor outputs are ever held.

    The gradients are those of the loop ``y, state = cell(x[t], state); total += loss(t, y)`` and
    ``total.backward()``. They accumulate into ``.grad`` of parameters, captured tensors, the
    initial state, and input tensors that require a gradient.

    Args:
        cell: ``cell(x_t, state) -> (y_t, state)``, as for :func:`retrograde.unroll`. Or an LSTM, a
            GRU or an RNN, of torch's or of this library, in one direction and without dropout
            between layers, with inputs (B, I) a step. Then one call of the fused kernel runs a
            range of steps, and the budget is the one given here.
        inputs: a pytree of tensors or arrays (a memory map, a data set in a file), each with time
            first; anything that has a length and is indexed by the step; or a function of the
            step. A step is read more than once, and must give the same values. For a cell also an
            iterator, whose items are held beside the budget, or with ``until`` None for no inputs.
        state: the initial state, a pytree of tensors; for a module torch's, or None for zeros.
        loss: ``loss(t, y_t)``, a scalar tensor, or None for a step without one. With a module it is
            ``loss(range, y)`` with y (steps, B, H), the *sum* of the losses of those steps. The
            budget determines how long ranges are. It is called again for steps that run again.
        memory: the budget. It does not count inputs given as tensors, parameters, gradients and
            results; it does count inputs that are read from elsewhere. Bytes (``67108864``), a size
            (``"64MiB"``), or a fraction of ordinary backpropagation's memory (``0.05``, ``"5%"``).
            None: every step is kept.
        schedule: the schedule to follow, instead of a budget.
        length: the number of steps, where the inputs do not have it, or fewer than they have. With
            an iterator or ``until``, the most steps.
        input_gradient: called as ``input_gradient(t, gradient)`` with the gradient of each step's
            input, from the last step to the first; with a module t is a range. None stands for an
            input without a gradient.
        progress: called as ``progress(done, work)``, in forward and backward steps. While the end
            is unknown, ``work`` is what is done.
        until: ``until(y, state)`` ends the loop of a cell with the first step for which it is true,
            as for :func:`retrograde.unroll`. Then, and with an iterator, ``memory`` must be bytes.

    Returns:
        The sum of the losses, a detached scalar in double precision, and the detached final state.

    Raises:
        BudgetError: the budget is too small; the message names the smallest one that is enough.
        CellError: cell, loss or inputs cannot be run exactly. As with every exception, every
            ``.grad`` is unchanged then.
        RetrogradeError: gradients are disabled.
        ScheduleError: the schedule is for another length, or is not legal.
        UnitError: the memory cannot be read.

    Example:
        >>> import torch
        >>> lstm = torch.nn.LSTM(3, 5)
        >>> def read(t):
        ...     return torch.full((2, 3), t / 200)
        >>> total, (h, c) = bptt(
        ...     lstm, read, loss=lambda steps, y: y.square().sum(), length=200, memory="20%"
        ... )
        >>> total.dtype, h.shape, lstm.weight_hh_l0.grad.shape
        (torch.float64, torch.Size([1, 2, 5]), torch.Size([20, 5]))
    """
    _check_asked(loss, memory, schedule)
    refuse_transforms(flatten_state(state)[0])
    is_module = getattr(type(cell), "forward", None) in _RANGES
    if until is not None or is_iterated(inputs):
        refuse_open(inputs, until, schedule=schedule)
        if is_module:
            _check_module(cast(nn.RNNBase, cell), is_open=True)
        return _open(cell, inputs, state, loss, memory, length, input_gradient, progress, until)
    prepare = _module if is_module else _cell
    task = prepare(cast(Any, cell), inputs, state, loss, length, input_gradient is not None)
    if schedule is not None:
        check_schedule(schedule, len(task.stream))
    core = task.core
    if schedule is None and memory is None:
        schedule = plan(len(task.stream), policy="store-all")
    elif schedule is None:
        core, schedule = _fitted(task, inputs, cast(Memory, memory))
    total, after = run_stream(core, task.stream, schedule, task.state, input_gradient, progress)
    return total, task.state_spec.unflatten(after)


@dataclass(frozen=True)
class _Task:
    """A prepared call. It has equivalent cores (torch's choice first), the inputs, the inputs to
    measure with, the flat initial state, and the structure of the last state."""

    cores: list[Candidate]
    stream: Stream
    probed: Stream
    state: Tensors
    state_spec: Structure

    @property
    def core(self) -> Core:
        """The first core. Raises CellError if nothing requires a gradient."""
        core = self.cores[0].core
        if core.parameters or any(self.stream.wanted) or any(s.requires_grad for s in self.state):
            return core
        raise CellError(
            "nothing requires a gradient: expected a parameter, an initial state or an input that "
            "does, or input_gradient="
        )


def _open(
    cell: Cell, inputs: Any, state: Any, loss: Loss, memory: Memory | None,
    length: SupportsIndex | None, take: TakeInput | None, progress: Progress | None,
    until: Until | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Run a loop of which nobody knows the end. What is read by the step is not held."""
    items, plan = None, OpenPlan()
    if memory is not None:
        bytes_of(memory)
    if inputs is None or is_iterated(inputs):
        items = inputs = arrivals_of(inputs, length)
    elif length is None and callable(inputs) and not hasattr(inputs, "__len__"):
        length = sys.maxsize
    task = _cell(cell, inputs, state, loss, length, take is not None)
    core, stream = cast(StepCore, task.core), task.stream
    if memory is not None:
        referents = [] if items else [find_referents([inputs])]
        core, plan = open_plan(core, task.probed, task.state, memory, referents)
    end = OpenEnd(plan, lambda step: step < len(stream), until)
    if items:
        end.more, end.check = items.take, items.check
    core = replace(core, cell=replace(cast(StepLoss, core.cell), note=end.note))
    total, after = run_stream(core, stream, end, task.state, take, progress)
    return total, task.state_spec.unflatten(after)


def _check_asked(loss: Any, memory: Memory | None, schedule: Schedule | None) -> None:
    check_limit(memory, schedule)
    if not callable(loss):
        raise CellError(
            f"loss is a {type(loss).__name__}: expected a function of the step and its output"
        )
    if not torch.is_grad_enabled():
        raise RetrogradeError(
            "gradients are disabled (by torch.no_grad() or the like), but bptt computes only "
            "gradients: call it outside of that, or run the forward pass alone"
        )


def _cell(
    cell: Cell,
    inputs: Any,
    state: Any,
    loss: Loss,
    length: SupportsIndex | None,
    wants_inputs: bool,
) -> _Task:
    """Prepare any cell, where a step is a call."""
    states, state_spec = flatten_state(state)
    leaves = inputs.steps[0] if isinstance(inputs, Arrivals) else pytree.tree_leaves(inputs)
    tensors = [t for t in (*states, *leaves) if isinstance(t, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    with autocast_as_now(device):
        stream = Stream.of(open_source(inputs, length, device), device, wants_inputs)
        core, probed = examine_loss(
            StepLoss(as_cell(cell), loss, device), stream, states, state_spec
        )
    return _Task([Candidate(core)], stream, probed, states, core.state_spec)


def _module(
    module: nn.RNNBase, inputs: Any, state: Any, loss: Loss, length: SupportsIndex | None,
    wants_inputs: bool,
) -> _Task:  # fmt: skip
    """Prepare a recurrent module, where a range of steps is a call."""
    _check_module(module)
    weights: Tensors = flat_weights(module, anew=True)  # as torch's forward does
    device = weights[0].device
    net = Layers(cast(Mode, module.mode), weights, module.num_layers, module.bias)
    with autocast_as_now(device):
        stream = Stream.of(open_source(inputs, length, device), device, wants_inputs)
        states, state_spec = _module_state(module, stream, state)
        kernels = candidates(net, states[0].shape[1])
        lightest = cast(Fused, kernels[0].core)
        if module.mode == "LSTM" and len(kernels) > 1 and weights[0].dtype == torch.float32:
            # A trial must fit the least budget, but oneDNN's LSTM copies its weights.
            lightest = Fused(net, partial(run_held, lightly=True))
        part = RangeLoss(lightest, loss, device)
        core, probed = examine_loss(part, stream, states, flatten(states, "state")[1])
    part = cast(RangeLoss, core.cell)
    losses = [replace(part, kernel=cast(Fused, kernel.core)) for kernel in kernels]
    cores = [replace(core, cell=part, without_outputs=partial(state_only, part)) for part in losses]
    several = [kernel._replace(core=outer) for kernel, outer in zip(kernels, cores, strict=True)]
    return _Task(several, stream, probed, states, state_spec)


def _check_module(module: nn.RNNBase, *, is_open: bool = False) -> None:
    """Refuse modules that cannot be run in ranges, or a loop whose end is unknown."""
    dropped = module.dropout and module.training and module.num_layers > 1
    refused = {
        "an unknown number of steps": is_open,
        "bidirectional=True": module.bidirectional,
        f"dropout={module.dropout} between layers": dropped,
        "batch_first=True": module.batch_first,
        f"{besides_forward(module)}": besides_forward(module),
    }
    for option, applies in refused.items():
        if applies:
            raise CellError(
                f"bptt does not run a {type(module).__name__} with {option}: expected one "
                "direction, no dropout between layers, time first and no hooks; or write a cell, "
                "whose every step is a call"
            )


def _module_state(module: nn.RNNBase, stream: Stream, state: Any) -> tuple[Tensors, Structure]:
    """Return the initial state, flat, and the structure of torch's; zeros if there is none."""
    (x, *more), weight = stream.read(0), flat_weights(module)[0]
    if more or x.dim() != 2 or x.shape[1] != module.input_size:
        actual = ", ".join(str(tuple(t.shape)) for t in (x, *more))
        raise CellError(
            f"the input of a step is {actual}: expected one tensor (B, {module.input_size}), that "
            f"is inputs (T, B, {module.input_size})"
        )
    sizes = [module.proj_size or module.hidden_size]
    sizes += [module.hidden_size] if module.mode == "LSTM" else []
    shapes = [(module.num_layers, x.shape[0], size) for size in sizes]
    if state is None:
        zeros = [weight.new_zeros(shape) for shape in shapes]
        state = tuple(zeros) if module.mode == "LSTM" else zeros[0]
    states, state_spec = flatten(state, "state")
    state_shapes = [tuple(s.shape) for s in states]
    if state_shapes != shapes:
        raise CellError(f"the initial state has the shapes {state_shapes}: expected {shapes}")
    for name, t in (("the input", x), *(("the initial state", s) for s in states)):
        cast_anyway = torch.is_autocast_enabled(weight.device.type)
        if t.device != weight.device or (t.dtype != weight.dtype and not cast_anyway):
            raise CellError(
                f"{name} is {t.dtype} on {t.device}, the parameters are {weight.dtype} on "
                f"{weight.device}: convert one of them, with .to(...)"
            )
    return states, state_spec


def _fitted(task: _Task, inputs: Any, memory: Memory) -> tuple[Core, Schedule]:
    """Return the core and the schedule for a budget."""
    source, first_core = task.stream.source, cast(StepCore, task.cores[0].core)
    referents = []
    read: tuple[Any, ...] = (type(source),)
    if isinstance(source, TimeFirst):
        read += tuple(isinstance(t, Tensor) for t in source.leaves)
    else:
        referents.append(find_referents([inputs]))  # the bytes of reading depend on it

    def find(settled: Settled, state: Tensors) -> tuple[int, Fit]:
        sizes = footprints(task.cores, task.probed, state, memory, first=task.state)
        sizes = [grown(footprint, growth(first_core, settled)) for footprint in sizes]
        return fit_fastest(task.cores, sizes, task.probed, state, memory)

    key, context = (repr(memory), len(source)), (task.stream.wanted, read)
    (number, fit), settled = fit_cell(
        _FITS, first_core, task.probed, task.state, find, key, context, referents
    )
    core = replace(cast(StepCore, task.cores[number].core), settled=settled)
    return core, fit.schedule
