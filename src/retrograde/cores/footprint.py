"""What steps take, in bytes: what the planner needs, read off the real thing.

The functions that will carry the schedule out are run here on short ranges under
:func:`retrograde.measure.allocations.measure`, on the caller's own tensors, so every temporary of
every kernel is counted. A core that is called step by step is measured on one step. A fused kernel
is measured on ranges of a few lengths: its bytes are affine in the length, and the larger lengths
decide the slope.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retrograde.cores.cell import StepCore, examine
from retrograde.cores.fused import HEAP_BYTES
from retrograde.discover.surroundings import muted_hooks
from retrograde.errors import BudgetError
from retrograde.measure.allocations import measure, measure_phases
from retrograde.plan.fit import Curve, Fit, Footprint, Highest, fit, predict_peak_bytes
from retrograde.run.core import Core, Emit, Gradients, RangeCore, Tape, as_leaf
from retrograde.run.executor import (
    advance,
    backpropagate,
    joins,
    record,
    run_ordinary,
)
from retrograde.run.inputs import Inputs
from retrograde.run.layout import Straight
from retrograde.run.states import laid_bytes, pack, stored_memory
from retrograde.schedule import Advance, Record
from retrograde.units import Memory, as_bytes

__all__ = [
    "FEW_BYTES",
    "FEW_STEPS",
    "LONGEST_MEASURED",
    "Candidate",
    "fit_fastest",
    "fit_measured",
    "footprint",
    "footprints",
    "gradients_like",
    "measure_pass",
    "noting",
    "ordinary_curve",
    "step_bytes",
]

#: How many steps are measured in any case, in whatever memory they take.
FEW_STEPS = 8

#: Bytes that measuring may take in any case: kernels hand out memory by pages, so that what a step
#: adds is hidden in less.
FEW_BYTES = 2**20

# What a measured call holds besides: outputs, their gradients, and what it found.
_BESIDE = 1.25

#: How far ordinary backpropagation is followed to learn what a step adds.
LONGEST_MEASURED = 256

# The lengths of the ranges that a fused core is measured on: a kernel's own room grows with a range
# up to some length, and then no more. Our own loops do that at several lengths.
_LENGTHS = (1, 2, 4, 16, 64)
_LENGTHS_OF_RANGES = (1, 2, 4, 8, 16, 32, 64)
_LENGTHS_OF_STEPS = (1, 2, 4)

# What recording a range of a cell's steps as one graph costs besides the steps, in forward steps: a
# call of autograd. Nominal, for a cell of a dozen small operations.
_RECORD_STEPS = 0.6

Tensors = list[Tensor]
Shapes = list[tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class _Bytes:
    """The bytes of one range, as :class:`Footprint` has them."""

    advance: int
    held: int
    record: int
    backward: int

    @property
    def most(self) -> int:
        """What the range takes at its peak."""
        return max(self.advance, self.record, self.held + self.backward)


def footprint(
    core: Core,
    inputs: Inputs,
    state: Tensors,
    *,
    ordinary: Curve | Highest | None = None,
    memory: Memory | None = None,
) -> Footprint:
    """Measure what the steps of a core take.

    Args:
        core: as the executor will run it.
        inputs: the inputs of all steps, time first; only the first few are used.
        state: the initial state.
        ordinary: what ordinary backpropagation takes, if it is known; measured otherwise.
        memory: the budget, which the measuring keeps to beyond :data:`FEW_STEPS` steps and
            :data:`FEW_BYTES`.

    Returns:
        The footprint, for :func:`retrograde.plan.fit.fit`.
    """
    length, device = len(inputs), core.ambient.device
    with core.ambient.measured(), muted_hooks(core.parameters):
        _measure_range(core, inputs, state, 1)  # what a first call allocates for good is not ours
        final = 0
        if ordinary is None:
            shortest = min(2, length)
            told = measure(lambda: _outputs_tell(core, inputs, state), device=device).value
            ordinary = ordinary_curve(
                lambda steps: _measure_ordinary(core, inputs, state, steps, whole=not told),
                length,
                memory,
            )
            # What comes on top: the last step, where the loss is of the final state as well, and
            # copies of gradients that are expanded scalars.
            sizes = [
                _measure_ordinary(core, inputs, state, shortest, whole=not core.sums, like=like)
                for like in (torch.ones_like, _expanded)
            ]
            final = max(0, max(map(max, sizes)) - ordinary(shortest))
        budget = None if memory is None else as_bytes(memory, ordinary(length))
        points: dict[int, _Bytes] = {}
        for steps in sorted({min(length, L) for L in _lengths(core)}):
            known = Curve(tuple((L, size.most) for L, size in points.items()))
            if budget is not None and steps > FEW_STEPS and known(steps) > max(budget, FEW_BYTES):
                break  # no schedule has room for such a range
            points[steps] = _measure_range(core, inputs, state, steps)
        # Two steps may take more than one: a state that is a view, what a step leaves behind.
        further = 0 if length < 2 or joins(core) else _advance_bytes(core, inputs, state, 2)
        trial = _trial_bytes(core, inputs, state) if isinstance(core, StepCore) else 0
        stored, laid = (0, 0) if core.fused else _stored_bytes(core, inputs, state)
    if not joins(core):  # any range is single steps: what is held grows, the rest does not
        one = points[1]
        points[2] = replace(one, held=2 * one.held, record=one.record + one.held)
        points[2] = points[3] = replace(points[2], advance=max(one.advance, further))
        points[3] = replace(points[3], held=3 * one.held, record=one.record + 2 * one.held)
    advance, held, record, backward = (
        Curve(tuple((L, getattr(size, name)) for L, size in points.items()))
        for name in ("advance", "held", "record", "backward")
    )
    gradient = sum(_rounded(t) for t in state if t.is_floating_point() or t.is_complex())
    gradient *= 2 if core.fused else 1  # a kernel may need zeros for a state without a gradient
    ambient = sum(map(_rounded, core.ambient.capture())) + core.ambient.place_bytes
    gradient += ambient  # what is put back after the last rerun
    if core.sums:  # what the loss's own gradient takes
        gradient += _rounded(torch.ones((), dtype=torch.float64, device=device))
    return Footprint(
        # A cell without a state is planned like one of a single byte.
        state_bytes=(max(stored, sum(map(_rounded, state))) + ambient) or 1,
        advance=advance,
        held=held,
        record=record,
        backward=backward,
        ordinary=ordinary,
        gradient_bytes=gradient,
        heap_bytes=HEAP_BYTES if core.fused and device.type == "cpu" else None,
        record_steps=_RECORD_STEPS if joins(core) and not core.fused else 0.0,
        scheduled=core.sums,
        # The surroundings at the call's beginning, for a second backward pass.
        call_bytes=laid + (0 if core.sums else ambient),
        final_bytes=final,
        trial_bytes=trial,
    )


def step_bytes(core: Core, inputs: Inputs, state: Tensors) -> Hashable:
    """What one step takes: quickly measured, to tell whether a footprint known before still holds.

    Args:
        core: as the executor will run it.
        inputs: the inputs of all steps, time first.
        state: the initial state.

    Returns:
        Bytes of each kind, to be compared.
    """
    with core.ambient.measured(), muted_hooks(core.parameters):
        _measure_range(core, inputs, state, 1)  # what a first call allocates for good is not ours
        return _measure_range(core, inputs, state, 1)


def _lengths(core: Core) -> tuple[int, ...]:
    """The lengths of the ranges that a core is measured on."""
    if isinstance(core, RangeCore):
        return _LENGTHS_OF_RANGES
    if core.fused:
        return _LENGTHS
    return _LENGTHS_OF_STEPS if joins(core) else (1,)


def fit_measured(
    core: Core, inputs: Inputs, state: Tensors, memory: Memory | None, sizes: Footprint
) -> tuple[Fit, Footprint]:
    """The fastest schedule for a core within a budget, every length that it uses being measured.

    Args:
        core: as the executor will run it.
        inputs: the inputs of all steps, time first.
        state: the initial state.
        memory: as :func:`retrograde.plan.fit.fit` takes it.
        sizes: the core's footprint.

    Returns:
        A fit whose predicted peak is within the budget, and the footprint with what was measured.

    Raises:
        BudgetError: even the least schedule does not fit.
    """
    while True:
        found = fit(len(inputs), memory, sizes)
        if found.ordinary or not joins(core):
            return found, sizes
        sizes = _corrected(sizes, found, core, inputs, state)
        if predict_peak_bytes(found.schedule, sizes) <= found.budget_bytes:
            return found, sizes


@dataclass(frozen=True)
class Candidate:
    """A core to choose, and what its steps cost.

    Attributes:
        core: as the executor would run it.
        pace: as :class:`Footprint` has it.
        call_steps: as :class:`Footprint` has it.
        record_steps: as :class:`Footprint` has it.
        backward_steps: as :class:`Footprint` has it.
        scheduled: as :class:`Footprint` has it.
        extra_bytes: as :class:`Footprint` has it.
    """

    core: Core
    pace: float = 1.0
    call_steps: float = 0.0
    record_steps: float = 0.0
    backward_steps: float = 2.0
    scheduled: bool = False
    extra_bytes: int = 0

    def footprint(
        self,
        inputs: Inputs,
        state: Tensors,
        ordinary: Curve | Highest | None,
        memory: Memory | None,
    ) -> Footprint:
        """Measure what its steps take; see :func:`footprint`."""
        return replace(
            footprint(self.core, inputs, state, ordinary=ordinary, memory=memory),
            extra_bytes=self.extra_bytes,
            pace=self.pace,
            call_steps=self.call_steps,
            record_steps=self.record_steps,
            backward_steps=self.backward_steps,
            scheduled=self.scheduled or self.core.sums,
        )


def footprints(
    candidates: Sequence[Candidate],
    inputs: Inputs,
    state: Tensors,
    ordinary: Curve | Highest | None = None,
    memory: Memory | None = None,
) -> list[Footprint]:
    """Measure what the steps of several cores take that compute the same.

    Args:
        candidates: the cores.
        inputs: the inputs of all steps, time first.
        state: the initial state.
        ordinary: what ordinary backpropagation takes; that of the first by default.
        memory: as :func:`footprint` takes it.

    Returns:
        A footprint for each.
    """
    found: list[Footprint] = []
    for one in candidates:
        known = found[0].ordinary if found and ordinary is None else ordinary
        found.append(one.footprint(inputs, state, known, memory))
    return found


def fit_fastest(
    candidates: Sequence[Candidate],
    sizes: list[Footprint],
    inputs: Inputs,
    state: Tensors,
    memory: Memory | None,
) -> tuple[int, Fit]:
    """The fastest of several cores that compute the same, with its schedule, within a budget.

    Args:
        candidates: the cores.
        sizes: their footprints, which learn what is measured here.
        inputs: the inputs of all steps, time first.
        state: the initial state.
        memory: as :func:`retrograde.plan.fit.fit` takes it.

    Returns:
        The number of the core to use, and the fit for it.

    Raises:
        BudgetError: the budget is too small for every core.
    """
    length = len(inputs)
    minimum = min(size.least_bytes(length) for size in sizes)
    best: tuple[int, Fit] | None = None
    refusals: list[BudgetError] = []
    for number in sorted(range(len(sizes)), key=lambda n: sizes[n].least_time(length)):
        if best is not None and sizes[number].least_time(length) >= best[1].time:
            break
        core = candidates[number].core
        try:
            found, sizes[number] = fit_measured(core, inputs, state, memory, sizes[number])
        except BudgetError as refusal:
            refusals.append(refusal)
            continue
        if best is None or found.time < best[1].time:
            best = number, found
    if best is None:
        raise min(refusals, key=lambda refusal: refusal.minimum_bytes)
    return best[0], replace(best[1], minimum_bytes=min(minimum, best[1].minimum_bytes))


def ordinary_curve(
    measured: Callable[[int], tuple[int, ...]], length: int, memory: Memory | None = None
) -> Highest:
    """Ordinary backpropagation's working bytes at doubling lengths, until they grow evenly, or
    would leave the budget.

    Forward and backward grow by different slopes, and which is the higher changes with the length.
    So each is followed by itself. Within the budget one may still be hidden by a kernel's own room.

    Args:
        measured: the bytes of so many steps, at the peak of each phase.
        length: the number of steps there are.
        memory: the budget, which holds beyond :data:`FEW_STEPS` steps and :data:`FEW_BYTES`; None
            for none.

    Returns:
        Bytes by steps.
    """
    points = {steps: measured(steps) for steps in sorted({1, min(2, length)})}
    while (last := max(points)) < min(length, LONGEST_MEASURED):
        steps, known = min(2 * last, length), Highest.of(points)
        if memory is not None and steps > FEW_STEPS:
            budget = as_bytes(memory, known(length))
            if known(length) > budget and _BESIDE * known(steps) > max(budget, FEW_BYTES):
                break
        points[steps] = measured(steps)
        if steps >= 16 and all(map(_is_even, Highest.of(points).curves)):
            break
    return Highest.of(points)


def _is_even(curve: Curve) -> bool:
    """Whether the last two slopes are equal; a kernel's own room may hide the growth at first."""
    (a, low), (b, middle), (c, high) = curve.points[-3:]
    slopes = (middle - low) / (b - a), (high - middle) / (c - b)
    return slopes[1] > 0 and abs(slopes[1] - slopes[0]) <= 1e-3 * slopes[1]


def measure_pass(
    forward: Callable[[], None],
    backward: Callable[[], None],
    drop: Callable[[], None],
    device: torch.device,
) -> tuple[int, int]:
    """The working bytes of ordinary backpropagation: at the peak of forward, and of backward.

    Args:
        forward: runs forward.
        backward: runs backward.
        drop: lets go of all that a caller would be handed.
        device: whose allocations count.
    """
    one, other, _ = measure_phases([forward, backward, drop], device=device)
    return one.peak(0, 2), one.growth(0, 2) + other.peak(0, 2)


def _corrected(
    sizes: Footprint, found: Fit, core: Core, inputs: Inputs, state: Tensors
) -> Footprint:
    """The footprint, with the very lengths measured that a schedule is going to use."""
    schedule = found.schedule
    advances = {a.stop - a.start for a in schedule if isinstance(a, Advance)}
    records = {a.stop - a.start for a in schedule if isinstance(a, Record)}
    with core.ambient.measured(), muted_hooks(core.parameters):
        unknown = sorted(advances - {L for L, _ in sizes.advance.points})
        if unknown and not core.fused:  # a range is its steps: no shorter one takes more
            size = _advance_bytes(core, inputs, state, unknown[-1])
            known = {**dict(sizes.advance.points), **dict.fromkeys(unknown, size)}
            sizes = replace(sizes, advance=Curve(tuple(sorted(known.items()))))
        for steps in unknown if core.fused else ():
            size = _advance_bytes(core, inputs, state, steps)
            sizes = replace(sizes, advance=sizes.advance.through(steps, size))
        for steps in sorted(records - {L for L, _ in sizes.held.points}):
            range_ = _measure_range(core, inputs, state, steps)
            sizes = replace(
                sizes,
                held=sizes.held.through(steps, range_.held),
                record=sizes.record.through(steps, range_.record),
                backward=sizes.backward.through(steps, range_.backward),
            )
    return sizes


def _advance_bytes(core: Core, inputs: Inputs, state: Tensors, steps: int) -> int:
    device = core.ambient.device
    emit = noting([])  # the first sweep's, which runs all of the core
    return measure(lambda: advance(core, inputs, 0, steps, state, emit), device=device).peak_bytes


def _stored_bytes(core: Core, inputs: Inputs, state: Tensors) -> tuple[int, int]:
    """A state after a step: what it takes as it is stored, and besides while it is current."""
    after = advance(core, inputs, 0, 1, state, None)
    return sum(map(_rounded, stored_memory(pack(after)))), laid_bytes(after)


def _trial_bytes(core: StepCore, inputs: Inputs, state: Tensors) -> int:
    """The peak of the trial step that precedes every call of a cell."""
    if core.fused:
        return 0

    def call() -> object:
        pairs = zip(inputs[0], inputs.differentiable, strict=True)
        x = [t.detach().requires_grad_(wanted) for t, wanted in pairs]
        return x, examine(core.cell, x, core.input_spec, state, core.state_spec)

    return measure(call, device=core.ambient.device).peak_bytes


def _measure_range(core: Core, inputs: Inputs, state: Tensors, steps: int) -> _Bytes:
    found = _measure_tape(core, inputs, state, steps)
    if steps > 1 and not core.fused:  # the first range has no gradients yet to add to
        first = _measure_tape(core, inputs, state, steps, begun=False)
        found = replace(found, backward=max(found.backward, first.backward))
    return found


def _measure_tape(
    core: Core, inputs: Inputs, state: Tensors, steps: int, *, begun: bool = True
) -> _Bytes:
    """A range that keeps nothing, one that is recorded, and going back through that."""
    shapes: Shapes = []
    tapes: list[Tape] = []
    kept: list[Tape] = []
    gradients: list[Gradients] = []

    def sweep() -> None:
        if core.ambient.left:  # what the step before left is still there
            advance(core, inputs, 0, 1, state, noting(shapes))
        advance(core, inputs, 0, steps, state, noting(shapes))

    def again() -> None:
        # What a cell leaves in an attribute must not be released while the next range is measured.
        if core.ambient.left:
            kept.append(record(core, inputs, 0, steps, state, None))

    def run() -> None:
        tapes.append(record(core, inputs, 0, steps, state, noting(shapes)))

    def prepare() -> None:
        gradients.append(gradients_like(core, tapes[0], shapes, steps))
        if not begun:
            gradients[0].parameters = [None] * len(core.parameters)

    def back() -> None:
        backpropagate(core, tapes.pop(), gradients[0])

    # What was left before is let go of first, or its release would be taken for room.
    bar = core.ambient.bar
    phases = [bar, sweep, bar, again, bar, run, prepare, back, gradients.clear]
    _, swept, *_, recorded, _, backward, _ = measure_phases(phases, device=core.ambient.device)
    return _Bytes(swept.peak(), recorded.growth(), recorded.peak(), backward.peak())


def _outputs_tell(core: Core, inputs: Inputs, state: Tensors) -> bool:
    """Whether the gradient of the outputs goes through all of the state; else a loss may be of the
    final state, as of a rollout that has no outputs."""
    if core.fused or core.sums or len(inputs) < 2:
        return core.fused or core.sums
    with torch.enable_grad(), core.recording():
        _, after = core(inputs[0], [as_leaf(t) for t in state])
        outputs, _ = core(inputs[1], after)
    pending: list[Any] = [y.grad_fn for y in outputs]
    reached: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += [inner for inner, _ in node.next_functions]
    return all(t.grad_fn in reached for t in after)


def _measure_ordinary(
    core: Core,
    inputs: Inputs,
    state: Tensors,
    steps: int,
    *,
    whole: bool,
    like: Callable[[Tensor], Tensor] = torch.ones_like,
) -> tuple[int, int]:
    """The working bytes of ordinary backpropagation through the first steps, as one graph; of the
    outputs, or of the whole, the final state included."""
    numbers = inputs[0:steps][-1:] if core.sums else []  # ours, and not the caller's
    roots: Tensors = []
    leaves: Tensors = []
    handed: list[Any] = []

    def forward() -> None:
        with torch.enable_grad(), core.recording():
            x = [
                t.detach().requires_grad_(wanted)
                for t, wanted in zip(inputs[0:steps], inputs.differentiable, strict=True)
            ]
            x[len(x) - len(numbers) :] = numbers
            start = [t.detach().requires_grad_(t.requires_grad) for t in state]
            run = run_ordinary if core.fused or not core.sums else _run_summing
            outputs, after = run(core, x, start)
        ends = [*outputs, *after] if whole else outputs
        roots.extend({id(y): y for y in ends if y.requires_grad}.values())
        leaves.extend(t for t in (*x, *start, *core.targets) if t.requires_grad)
        handed.extend((outputs, after))

    def backward() -> None:
        seeds = [like(y) for y in roots]
        found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True) if roots else ()
        handed.extend((seeds, found))

    def drop() -> None:
        for one in (roots, leaves, handed):
            one.clear()

    return measure_pass(forward, backward, drop, core.ambient.device)


def _run_summing(core: Core, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
    """All steps of a cell with its loss, as a plain loop sums it."""
    total: Tensor | None = None
    for x in zip(*(t.unbind() for t in inputs), strict=True):
        (value,), state = core(list(x), state)
        total = value if total is None else total + value
    return [] if total is None else [total], state


def _expanded(t: Tensor) -> Tensor:
    return torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)


def noting(shapes: Shapes) -> Emit:
    """An emitter that keeps no output, only the shapes and dtypes."""

    def emit(start: int, stop: int, values: Tensors) -> None:
        shapes[:] = [(y.shape, y.dtype) for y in values]

    return emit


def gradients_like(
    core: Core,
    tape: Tape,
    shapes: Shapes,
    steps: int,
) -> Gradients:
    """Gradients of the layout that costs most: expanded scalars, which kernels must copy."""
    outputs = [
        torch.ones((), dtype=dtype, device=core.ambient.device).expand(shape)
        for shape, dtype in shapes
    ]
    return _Probe(
        outputs=outputs,
        states=[
            torch.ones_like(t) if passes else None
            for t, passes in zip(tape.state_after, tape.passes, strict=True)
        ],
        inputs=[
            torch.empty_like(x) if wanted else None
            for x, wanted in zip(tape.inputs, tape.wanted, strict=True)
        ],
        parameters=[
            torch.zeros_like(p) if total is None else total
            for p, total in zip(core.parameters, core.totals(), strict=True)
        ],
        length=tape.stop,
        layout=Straight(steps, core.fused),
        outside=torch.autocast(core.ambient.device.type, enabled=False),
    )


@dataclass
class _Probe(Gradients):
    """Gradients of one call, wherever its steps are."""

    layout: Straight

    def of_outputs(self, index: int | slice) -> Sequence[Tensor | None]:
        if not isinstance(index, slice) or self.layout.fused:
            return self.outputs
        steps = index.stop - index.start  # of a cell, recorded together
        return [None if t is None else t.expand(steps, *t.shape) for t in self.outputs]

    def of_inputs(self, index: int | slice) -> Sequence[Tensor | None]:
        return self.inputs

    def take_inputs(self, index: int | slice, shares: list[Tensor | None]) -> None:
        for total, share in zip(self.inputs, shares, strict=True):
            if total is not None and share is not None:
                total.copy_(share)


def _rounded(t: Any) -> int:
    """The bytes of a tensor (or state) as an allocator counts them: CUDA's rounds up to 512."""
    size = t.nbytes() if isinstance(t, torch.UntypedStorage) else int(t.nbytes)
    return -(-size // 512) * 512 if t.is_cuda else size
