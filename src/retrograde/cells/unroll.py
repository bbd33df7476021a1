"""``unroll``: any cell over a sequence, with its gradient within a memory budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, SupportsIndex, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrograde.cells.as_cell import TorchCell, as_cell
from retrograde.cells.cell import (
    Cell,
    StepCore,
    as_pair,
    begin,
    examine,
    idle_steps,
    largest_first,
    later_state,
)
from retrograde.cells.compiled_steps import BLOCK, compiled_steps
from retrograde.cells.gated import GatedCell, fit_gated, joined, net_of, parted, runs_by_loops
from retrograde.cells.open_end import Until, arrivals_of, is_iterated, refuse_open, unroll_open
from retrograde.cells.rehearsal import fit_cell, growth
from retrograde.cells.stateful import Stateful
from retrograde.errors import BudgetError, CellError
from retrograde.plan.fit import Fit
from retrograde.plan.footprint import Curve, Highest
from retrograde.recurrent.base import BudgetedRNN
from retrograde.recurrent.core import HeldLayers
from retrograde.recurrent.fastest import fit_measured
from retrograde.recurrent.plan import HeldPlan
from retrograde.replay.switches import autocast_as_now
from retrograde.replay.trees import LEAF, Structure, Tensors, flatten, flatten_inputs, flatten_state
from retrograde.run.autograd import run_schedule, run_without_gradient
from retrograde.run.autograd_core import run_ordinary
from retrograde.run.layout import InBlocks, Inputs, Layout, Rows, Straight, check_length
from retrograde.run.settled import Settled
from retrograde.run.states import bytes_of_gradients
from retrograde.run.transforms import is_transformed, is_unreal, refuse_transforms, uncompiled
from retrograde.schedule import Schedule
from retrograde.schedule.schedule import check_limit, check_schedule
from retrograde.sizes.cache import CellFits, LRUCache, signature
from retrograde.sizes.footprint import footprint, grown, node_bytes, partly_idle
from retrograde.sizes.timing import time_iterations
from retrograde.units import Memory, as_bytes

T = TypeVar("T")

# A cell is measured once for its shapes, and a schedule fitted once for a budget.
_FITS: CellFits[Fit] = CellFits()
_GATED: LRUCache[tuple[HeldPlan, Fit] | None] = LRUCache()
_LAYERS: LRUCache[tuple[BudgetedRNN, int] | None] = LRUCache()


@uncompiled
def unroll(
    cell: Cell,
    inputs: Any,
    state: Any = None,
    *,
    memory: Memory | None = None,
    schedule: Schedule | None = None,
    stateful: nn.Module | Sequence[nn.Module] = (),
    compile: bool = False,
    until: Until | None = None,
    length: SupportsIndex | None = None,
) -> tuple[Any, Any]:
    """Run a cell over a sequence; the exact gradient then takes at most ``memory``.

    Outputs and gradients are those of the plain loop ``y[t], state = cell(x[t], state)``. Input
    and state gradients are bitwise those of ordinary autograd on the same device (rule 1).

    Args:
        cell: ``cell(x_t, state) -> (y_t, state)``: a module, a function, a closure. It is called
            once more for step 0, to find what it depends on. For a new input shape it is also
            measured on short ranges. Neither leaves a trace but a cache. Within a budget on a CPU,
            the loops of a layer run torch's own cells, so that results differ from the plain
            loop's by rounding. A function around such a cell has the plain loop's bits.
        inputs: a pytree of tensors, each with time as its first dimension (T, …). Or an iterator
            whose items are the inputs of one step each, until it ends. They are held, beside the
            budget, so each must stay as it is. None, together with ``until``, is for no inputs.
        state: the initial state, a pytree of tensors and numbers, dataclasses included. Every step
            keeps its structure and shapes. Where it has a None, or a number, step 0 may determine
            the state's structure from then on.
        memory: the budget for the backward pass, beyond inputs, outputs and gradients: bytes
            (``67108864``), a size (``"64MiB"``), or a fraction of ordinary backpropagation's memory
            (``0.05``, ``"5%"``). None: ordinary backpropagation.
        schedule: the schedule to follow, instead of a budget.
        stateful: modules that keep a state in themselves: tensors that a step assigns to their
            attributes or buffers, and numbers that it counts. These belong to the state, and the
            last ones are left there, as the plain loop leaves them. Without ``state`` the cell is
            then ``cell(x_t) -> y_t``.
        compile: whether ``torch.compile`` compiles blocks of eight steps, as one graph each. A
            small cell then runs in about half the time of the plain loop, at any budget. The first
            call takes some ten seconds more and needs a C++ compiler, and results differ from the
            plain loop's by rounding. The cell must not draw random numbers or change anything. It
            cannot be combined with ``schedule`` and ``stateful``.
        until: ``until(y, state)``, called without gradients after each step. The loop ends with the
            first step for which it is true. While the end of a loop is unknown, ``memory`` must be
            bytes, and ``schedule`` and ``compile`` are refused. What it allocates is not counted.
        length: the most steps of a loop whose end is unknown. If it is reached without inputs, and
            ``until`` does not hold, that is an error.

    Returns:
        The outputs, stacked along a new first dimension (T, …), and the state after the last step.
        Where the end was unknown, outputs of several shapes are a list. Others are then held twice
        for the moment in which they are stacked.

    Raises:
        BudgetError: the budget is too small; the message names the smallest one that is enough.
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
    check_limit(memory, schedule)
    if compile:
        refuse_compiled(schedule=schedule, stateful=stateful or None)
    if until is not None or is_iterated(inputs) or length is not None:
        refuse_open(inputs, until, schedule=schedule, compile=compile or None)
        items = arrivals_of(inputs, length)
        if not stateful:
            return unroll_open(as_cell(cell), items, state, memory, until)
        first_step = pytree.tree_map_only(Tensor, lambda t: t[None], items[0])
        whole = Stateful.of(cell, stateful, first_step, state)
        outputs, last = unroll_open(whole, items, whole.first(state), memory, until)
        return outputs, whole.leave(last)
    if stateful:
        whole = Stateful.of(cell, stateful, inputs, state)
        outputs, last = unroll(whole, inputs, whole.first(state), memory=memory, schedule=schedule)
        return outputs, whole.leave(last)
    leaves, input_spec = flatten_inputs(inputs)
    layout = Straight(check_length(leaves), fused=False)
    call = CellCall(leaves, input_spec, layout, memory, schedule, compile)
    outputs, spec, last = call.run(as_cell(cell), state)
    return spec.unflatten(outputs), last


@dataclass(frozen=True)
class CellCall:
    """Sequences for a cell, and how to run them. It has the ``tensors`` of all steps, their layout,
    the structure of a step's leaves, and the options of the backward pass."""

    tensors: Tensors
    spec: Structure
    layout: Layout
    memory: Memory | None
    schedule: Schedule | None
    compile: bool = False

    @property
    def steps(self) -> Inputs:
        return self.layout.read(self.tensors)

    @property
    def whole(self) -> Tensors:
        """The leaves of all steps."""
        straight = isinstance(self.layout, Straight)
        return self.tensors if straight else self.steps[0 : len(self.steps)]

    @property
    def calls(self) -> Layout:
        """The layout of the core's calls, which are single steps or compiled blocks."""
        return InBlocks(self.layout, len(self.steps), BLOCK) if self.compile else self.layout

    @property
    def read(self) -> Inputs:
        """The leaves of the core's calls."""
        return self.calls.read(self.tensors)

    @property
    def asked(self) -> list[str]:
        """The options beyond ordinary backpropagation."""
        return [n for n in ("memory", "schedule") if getattr(self, n) is not None]

    def run(self, cell: Cell, state: Any) -> tuple[Tensors, Structure, Any]:
        """Return the outputs of all steps, the structure of one step's, and the last state."""
        states, state_spec = flatten_state(state)
        if self.schedule is not None:
            check_schedule(self.schedule, len(self.steps))
        tensors = [*self.tensors, *states]
        usual = not (self.asked and torch.is_grad_enabled())
        if is_unreal(tensors) or (is_transformed(tensors) and usual):
            return self._plainly(cell, state)
        if usual and not self.compile:
            core, outputs, after = begin(cell, self.read[0], self.spec, states, state_spec)
            if torch.is_grad_enabled():
                outputs, after = run_ordinary(core, self.whole, after, outputs)
            else:
                outputs, after = run_without_gradient(core, self.read, after, self.layout, outputs)
        else:
            if self.asked:
                refuse_transforms(tensors, self.asked)
            if (layer := self._layer(cell, state)) is not None:
                y, after = layer[0](self.tensors[0], layer[1])
                return [y], LEAF, cast(TorchCell, cell).left(after)
            loops = self._fit_loops(cell, state)
            if loops is not None:
                y, *after = self._by_loops(*loops[:3])
                return [y], LEAF, loops[3].unflatten(parted(after))
            core = self.examine(cell, states, state_spec)
            outputs, after = self._recorded(core, states)
        return outputs, core.output_spec, core.state_spec.unflatten(after)

    def _by_loops(self, fit: Fit, loops: HeldLayers, states: Tensors) -> Tensors:
        """Return the outputs of compiled loops, and the parts of a layer's last state."""
        parts = joined(states)
        outputs, after = run_schedule(loops, fit.schedule, self.tensors, parts, loops.rows)
        return [*outputs, *after]

    def planned(self, cell: Cell, state: Any) -> tuple[Fit, Any]:
        """Return the plan for a cell and its initial state, and what it can be timed by. That is a
        core or a layer, with inputs and a state, or an iteration. Nothing is trained."""
        states, spec = flatten_state(state)
        with torch.enable_grad():
            layer, loops = self._layer(cell, state), self._fit_loops(cell, state)
            core = self.examine(cell, states, spec)
            step = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in core.output_like)
            wants = bytes_of_gradients((*self.tensors, *states, *core.parameters))
            beside = 2 * len(self.read) * step + wants
            if layer is None and loops is None:
                fit, later = self.fit(core, states)[0], later_state(core, self.read, states)
                return replace(fit, beside_bytes=beside), (core, self.read, later)
            try:  # single steps may do with less
                least = self.fit(core, states)[0].minimum_bytes
            except BudgetError as refusal:
                least = refusal.minimum_bytes
            runs: Any = layer and (layer[0], self.tensors[0], layer[1])
            if loops is not None:
                fit, layers, initial, _ = loops
                tensors = *self.tensors, *initial, *layers.parameters
                wanted = [t for t in tensors if t.requires_grad]
                runs = partial(time_iterations, partial(self._by_loops, *loops[:3]), wanted)
            elif layer is not None:
                fit = replace(layer[0].fit(*runs[1:]), ordinary_bytes=layer[2])
            least = min(fit.minimum_bytes, least)
            return replace(fit, minimum_bytes=least, beside_bytes=beside), runs

    def examine(self, cell: Cell, states: Tensors, spec: Structure) -> StepCore:
        """Return the core of a cell, tried on the first step."""
        with autocast_as_now(self.tensors[0].device), torch.enable_grad():
            core = examine(cell, self.steps[0], self.spec, states, spec)
        return compiled_steps(core) if self.compile else core

    def fit(self, core: StepCore, states: Tensors) -> tuple[Fit, Settled]:
        """Return the plan for a cell, and properties that earlier calls have settled. Raises
        BudgetError if the budget is too small."""
        inputs, memory = self.read, cast(Memory, self.memory)

        def find(settled: Settled, later: Tensors) -> Fit:
            measured = largest_first(core, inputs, later, settled.step)
            idle = idle_steps(core, inputs, later)
            sizes = footprint(core, measured, later, memory=memory, first=states, ran=True)
            sizes = grown(sizes, growth(core, settled))
            if idle:
                step = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in core.output_like)
                sizes = partly_idle(sizes, idle, len(inputs), step)
            fit = fit_measured(core, measured, later, memory, sizes)[0]
            operations = max(settled.planned, core.settled.seen)
            return replace(fit, node_bytes=node_bytes(fit.schedule, operations))

        context = self.compile, *map(signature, self.tensors)
        return fit_cell(_FITS, core, inputs, states, find, repr(memory), context)

    def _fit_loops(
        self, cell: Cell, state: Any
    ) -> tuple[Fit, HeldLayers, Tensors, Structure] | None:
        """Return the plan of compiled loops within a budget, their core, and their first state. It
        is None if there is no budget, or none that loops can keep and single steps cannot."""
        usual = self.memory is None or self.compile or not isinstance(self.layout, Straight)
        if usual or not isinstance(cell, GatedCell) or len(self.tensors) != 1:
            return None
        memory, zeros = cast(Memory, self.memory), state is None
        states, spec = flatten_state(cell.zeros(self.steps[0][0]) if zeros else state)
        if not runs_by_loops(cell, self.tensors, states):
            return None
        if not any(t.requires_grad for t in (*self.tensors, *states, *cell.parameters())):
            return None

        state_bytes = sum(t.nbytes for t in states)
        extra = state_bytes * zeros + 3 * state_bytes * (len(states) > 2)

        def fit(usual: Curve | Highest) -> tuple[HeldPlan, Fit]:
            return fit_gated(cell, self.tensors[0], memory, usual(len(self.steps)), extra)

        tensors = map(signature, (*self.tensors, *states, *cell.parameters()))
        key = id(type(cell)), repr(memory), zeros, torch.get_num_threads(), *tensors
        fitted = _GATED.get(key, partial(self._unless_steps, fit, cell, state), [type(cell)])
        if fitted is None:
            return None
        (length, samples), (plan, loop_fit) = self.tensors[0].shape[:2], fitted
        return loop_fit, HeldLayers(net_of(cell), Rows(length), samples, plan), states, spec

    def _layer(self, cell: Cell, state: Any) -> tuple[BudgetedRNN, Any, int] | None:
        """Return the layer that runs one of torch's cells within a budget, its first state, and the
        bytes of ordinary backpropagation. It is None as for loops."""
        usual = self.memory is None or self.compile or not isinstance(self.layout, Straight)
        if usual or not isinstance(cell, TorchCell) or len(self.tensors) != 1:
            return None
        (x,), (states, _), memory = self.tensors, flatten_state(state), cast(Memory, self.memory)
        if not cell.is_a_layer(x, states):
            return None
        entry = cell.entry(states)

        def fit(usual: Curve | Highest) -> tuple[BudgetedRNN, int]:
            ordinary = usual(len(x))
            empty = cell.empty(as_bytes(memory, ordinary))
            cell.layer(empty).fit(x, entry)
            return empty, ordinary

        tensors = map(signature, (x, *states, *cell.cell.parameters()))
        key = id(cell.cell), repr(memory), torch.get_num_threads(), *tensors
        fitted = _LAYERS.get(key, partial(self._unless_steps, fit, cell, state), [cell.cell])
        return None if fitted is None else (cell.layer(fitted[0]), entry, fitted[1])

    def _unless_steps(
        self, fit: Callable[[Curve | Highest], T], cell: Cell, state: Any
    ) -> T | None:
        """Return how compiled loops keep a budget, by what ordinary backpropagation takes; None if
        they cannot, but single steps can, since loops copy weights."""
        states, spec = flatten_state(state)
        core = self.examine(cell, states, spec)
        later = later_state(core, self.read, states)
        usual = footprint(core, self.read, later, memory=self.memory, first=states).ordinary
        try:
            return fit(usual)
        except BudgetError as refused:
            try:
                self.fit(core, states)
            except BudgetError as other:
                raise min(refused, other, key=lambda error: error.minimum_bytes) from None
        return None

    def _recorded(self, core: StepCore, states: Tensors) -> tuple[Tensors, Tensors]:
        """Run a cell so that it can be backpropagated as asked, if anything requires a gradient."""
        wanted = any(t.requires_grad for t in (*self.tensors, *states, *core.parameters))
        if not (wanted and torch.is_grad_enabled()):
            return run_without_gradient(core, self.read, states, self.calls)
        schedule = self.schedule
        if self.memory is not None:
            fit, settled = self.fit(core, states)
            core = replace(core, settled=settled)
            schedule = None if fit.ordinary else fit.schedule
        if schedule is not None:
            return run_schedule(core, schedule, self.tensors, states, self.calls)
        return run_ordinary(core, self.whole, states)

    def _plainly(self, cell: Cell, state: Any) -> tuple[Tensors, Structure, Any]:
        """Run the plain loop, through which every transform of torch.func can go."""
        outputs = []
        for leaves in map(self.steps.__getitem__, range(len(self.steps))):
            y, state = as_pair(cell(self.spec.unflatten(leaves), state))
            outputs.append(flatten(y, "output of the cell"))
        stacked = [torch.stack(ys) for ys in zip(*(ys for ys, _ in outputs), strict=True)]
        return stacked, outputs[0][1], state


def refuse_compiled(**options: object) -> None:
    """Refuse options for single steps together with compiled blocks, by a CellError."""
    for name, value in options.items():
        if value is not None:
            raise CellError(
                f"got compile=True together with {name}=: expected one of them, since "
                f"compile=True runs blocks of steps and {name}= works on single steps"
            )
