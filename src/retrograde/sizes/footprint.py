"""The bytes that a core's steps take, measured on short ranges for the planner.

The executor's own functions run on the caller's own tensors, so every temporary of every kernel is
counted. A core that is called step by step is measured on one step. If its steps can share one
graph, ranges of up to four steps are measured too. A fused kernel is measured on ranges of up to
64 steps. Its bytes are affine in the length, and the larger lengths determine the slope.
"""

from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograde.plan.footprint import Curve, Footprint, Highest
from retrograde.replay.surroundings import Values, muted_hooks
from retrograde.replay.trees import Tensors
from retrograde.run.autograd_core import AutogradCore
from retrograde.run.core import Core, Emit, Gradients, Tape
from retrograde.run.layout import InBlocks, InMemory, Inputs, Straight
from retrograde.run.states import like_of
from retrograde.schedule import Advance, Record, Schedule, Verb
from retrograde.sizes import nominal
from retrograde.sizes.allocations import apart, measure, measure_phases
from retrograde.sizes.ordinary import (
    FEW_BYTES,
    FEW_STEPS,
    expanded,
    ordinary_bytes,
    ordinary_curve,
    outputs_tell,
)
from retrograde.units import Memory, as_bytes

#: The most bytes that one recorded range should hold on a CPU. The C library's allocator maps
#: larger blocks afresh at every call, and the page faults cost more than long ranges save. (glibc's
#: DEFAULT_MMAP_THRESHOLD_MAX is 32 MiB; the margin is for the block's neighbours.)
HEAP_BYTES = 24 * 2**20

Shapes = list[tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class _Bytes:
    """The bytes of one range, named as in :class:`Footprint`."""

    advance: int
    held: int
    record: int
    backward: int

    @property
    def most(self) -> int:
        """The peak bytes of the range."""
        return max(self.advance, self.record, self.held + self.backward)

    def above(self, other: "_Bytes") -> int:
        """Return the most by which this range exceeds another, over all kinds of bytes."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return int(max(0, *(mine - theirs for mine, theirs in pairs)))


def footprint(
    core: Core, inputs: Inputs, state: Tensors, *, ordinary: Curve | Highest | None = None,
    memory: Memory | None = None, first: Tensors | None = None, ran: bool = False,
) -> Footprint:  # fmt: skip
    """Measure the bytes of the first few steps of a core, which may have ``ran`` both ways before.

    ``ordinary`` gives the bytes of ordinary backpropagation; if None, they are measured too.
    ``first`` is the initial state, if its structure differs from that of ``state``. Measurements
    that exceed both :data:`FEW_STEPS` steps and :data:`FEW_BYTES` bytes stay within the budget
    ``memory``.
    """
    length, device = len(inputs), core.surroundings.device
    begins = state if first is None else first
    with core.surroundings.measured(), muted_hooks([*core.parameters, *begins]):
        if not ran:  # a first call's permanent allocations do not count
            _measure_range(core, inputs, state, 1)
        final = 0
        if ordinary is None:
            assert isinstance(core, AutogradCore), "what ordinary autograd takes is to be told"
            ordinary, final = _ordinary(core, inputs, begins, memory)
        budget = None if memory is None else as_bytes(memory, ordinary(length))
        points: dict[int, _Bytes] = {}
        # A fused kernel's own workspace grows only up to some length.
        lengths = (1, 2, 4, 16, 64) if core.fused else (1, 2, 3, 4) if core.records_ranges else (1,)
        for steps in dict.fromkeys(min(length, L) for L in lengths):
            peaks = Curve(tuple((L, size.most) for L, size in points.items()))
            if budget is not None and steps > FEW_STEPS and peaks(steps) > max(budget, FEW_BYTES):
                break  # no schedule has room for such a range
            points[steps] = _measure_range(core, inputs, state, steps)
            if told := _evenly(core, inputs, points):
                break
        # Two steps may take more than one, if a state is a view, or if a step leaves something
        # behind.
        further = 0 if length < 2 or core.records_ranges else _advance_bytes(core, inputs, state, 2)
        more = 0
        if [*map(like_of, begins)] != [*map(like_of, state)]:
            more = _measure_range(core, inputs, begins, 1).above(points[1])
        single, blocks = inputs, None
        if isinstance(inputs, InMemory) and isinstance(inputs.layout, InBlocks):
            single, blocks = inputs.layout.steps.read(inputs.tensors), inputs.layout
        stored, trial = 0 if core.fused else _stored_bytes(core, inputs, state), 0
        if isinstance(core, AutogradCore) and not core.fused:
            trial = measure(partial(core.try_first, single, begins), device=device).peak_bytes
    # A state's plain numbers become tensors of ours, before the call and after it.
    numbers = 2 * sum(_rounded(t) for t in begins if not t.dim())
    if not core.records_ranges:  # ranges are single steps: only held bytes grow
        step = replace(points[1], advance=max(points[1].advance, further))
        for n in (2, 3):
            points[n] = replace(step, held=n * step.held, record=step.record + (n - 1) * step.held)

    points, most = dict(sorted((told or points).items())), core.settled.most_steps
    if length > most and not core.fused:  # each graph of a long range has a state of its own
        more = -(-2 * sum(map(_rounded, state)) // most)
        for n, taken in points.items():
            points[n] = replace(taken, held=taken.held + n * more, record=taken.record + n * more)

    def curve(name: str) -> Curve:
        return Curve(tuple((L, getattr(size, name)) for L, size in points.items()))

    gradient = sum(_rounded(t) for t in state if t.is_floating_point() or t.is_complex())
    gradient *= 2 if core.fused else 1  # a kernel may need zeros where a state has no gradient
    surroundings = sum(_rounded(t) for t in core.surroundings.capture() if isinstance(t, Tensor))
    gradient += surroundings  # restored after the last recomputation
    if core.output_is_total:  # the loss's own gradient
        gradient += _rounded(torch.ones((), dtype=torch.float64, device=device))
    return Footprint(
        # A cell without a state is planned as if its state took one byte.
        state_bytes=(max(stored, sum(map(_rounded, state))) + surroundings) or 1,
        advance=curve("advance"),
        held=curve("held"),
        record=curve("record"),
        backward=curve("backward"),
        ordinary=ordinary,
        gradient_bytes=gradient,
        heap_bytes=HEAP_BYTES if core.fused and device.type == "cpu" else None,
        record_steps=nominal.RECORD_GRAPH_STEPS if core.records_ranges and not core.fused else 0.0,
        scheduled=core.output_is_total,
        unit=f"blocks of {blocks.size} steps" if blocks else "steps",
        even=told is not None,
        # The surroundings at the beginning of the call are kept for a second backward pass.
        call_bytes=more + (0 if core.output_is_total else surroundings),
        final_bytes=final,
        trial_bytes=trial + numbers,
        extra_bytes=numbers,
    )


def _ordinary(
    core: AutogradCore, inputs: Inputs, state: Tensors, memory: Memory | None
) -> tuple[Highest, int]:
    """Return the bytes of ordinary backpropagation by number of steps, and the most to be added. A
    loss of the final state may add bytes, and so may copies of expanded gradients."""
    told = apart(lambda: outputs_tell(core, inputs, state), core.surroundings.device)
    measured = partial(ordinary_bytes, core, inputs, state, whole=not told)
    few = core.records_ranges and not (core.fused or core.numbers)
    curve = ordinary_curve(measured, len(inputs), memory, few=few)
    shortest = min(2, len(inputs))
    sizes = [
        ordinary_bytes(core, inputs, state, shortest, whole=not core.output_is_total, like=like)
        for like in (torch.ones_like, expanded)
    ]
    return curve, max(0, max(map(max, sizes)) - curve(shortest))


def step_bytes(core: AutogradCore, inputs: Inputs, state: Tensors) -> Hashable:
    """Return one step's bytes, measured quickly to check whether a known footprint still holds."""
    with core.surroundings.measured(), muted_hooks(core.parameters):
        if core.fused or core.per_call > 1:  # others were rehearsed
            _measure_range(core, inputs, state, 1)
        return _measure_range(core, inputs, state, 1)


_ALIKE = 1.05


def grown(sizes: Footprint, factor: float) -> Footprint:
    """Return a footprint of steps that take more than those that were measured by a factor. A few
    operations more are views of a state."""
    if factor <= _ALIKE:
        return sizes
    names = ("advance", "held", "record", "backward")
    more: dict[str, Any] = {name: _times(factor, getattr(sizes, name)).curves[0] for name in names}
    return replace(sizes, **more, ordinary=_times(factor, sizes.ordinary), even=True)


def partly_idle(sizes: Footprint, steps: int, length: int, output_bytes: int) -> Footprint:
    """Return a footprint where some of all steps hold nothing but their outputs."""
    rest = steps * (1 / length - output_bytes / sizes.ordinary(length))
    return replace(sizes, ordinary=_times(1 - max(0.0, rest), sizes.ordinary))


def _times(factor: float, curve: Curve | Highest) -> Highest:
    every = (single.points for single in (curve.curves if isinstance(curve, Highest) else (curve,)))
    return Highest(tuple(Curve(tuple((n, int(factor * size)) for n, size in o)) for o in every))


def _evenly(core: Core, inputs: Inputs, points: dict[int, _Bytes]) -> dict[int, _Bytes] | None:
    """Return the points with one more length predicted, or None if steps are not seen to be equal.

    If every further step of a cell takes what the steps before it took, no longer range has to be
    measured. The gradients of a range's inputs are held twice, beside these as they were read, and
    grow with its length. The peak stays flat where a larger earlier allocation covers it, while the
    bytes that the tape holds shrink. A number in the state may make a later step different.
    """
    cell = isinstance(core, AutogradCore) and not core.fused and not core.numbers
    if not cell or max(points) < 3:
        return None
    (m, a), (n, b), (last, c) = ((n, astuple(size)) for n, size in sorted(points.items())[-3:])
    before = [(y - x) / (n - m) for x, y in zip(a, b, strict=True)]
    later = [(y - x) / (last - n) for x, y in zip(b, c, strict=True)]
    held, record = map(int, later[1:3])
    wanted = [x for x, wants in zip(inputs[0], inputs.differentiable, strict=True) if wants]
    read = measure(lambda: inputs[0:1], device=core.surroundings.device).retained_bytes
    unseen = max(0, read + 2 * sum(map(_rounded, wanted)) - held)
    if later[:3] != [0, *before[1:3]] or later[3] > unseen:
        return None
    return {**points, last + 1: _Bytes(c[0], c[1] + held, c[2] + record, c[3] + unseen)}


def node_bytes(schedule: Schedule, operations: int) -> int:
    """Return about what autograd's nodes take where the most steps of so many operations are
    recorded. A node, with what it saves but tensors' bytes, took 750 to 1,100 bytes in eight small
    cells (x86-64, torch 2.13)."""
    steps = schedule.stop - schedule.start
    records, drops = (schedule.kind == verb for verb in (Verb.RECORD, Verb.BACKWARD))
    recorded = np.cumsum(steps * records - steps * drops)
    return 1024 * operations * int(recorded.max())


def measured_for(
    schedule: Schedule, sizes: Footprint, core: Core, inputs: Inputs, state: Tensors
) -> Footprint:
    """Correct a footprint by measuring exactly those lengths that a schedule will use."""
    advances = {a.stop - a.start for a in schedule if isinstance(a, Advance)}
    records = {a.stop - a.start for a in schedule if isinstance(a, Record)}
    with core.surroundings.measured(), muted_hooks(core.parameters):
        unknown = sorted(advances - {L for L, _ in sizes.advance.points})
        # A cell's range is single steps, so no shorter range takes more than the longest.
        lengths = unknown if core.fused else unknown[-1:]
        taken = {steps: _advance_bytes(core, inputs, state, steps) for steps in lengths}
        points = dict(sizes.advance.points)
        points |= {steps: taken.get(steps, taken[unknown[-1]]) for steps in unknown}
        sizes = replace(sizes, advance=Curve(tuple(sorted(points.items()))))
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
    device = core.surroundings.device
    emit = noting([])  # as in the first sweep, which runs the whole core
    return measure(lambda: core.advance(inputs, 0, [steps], state, emit), device=device).peak_bytes


def _stored_bytes(core: Core, inputs: Inputs, state: Tensors) -> int:
    """Return the bytes of a state after a step."""
    (after,) = core.advance(inputs, 0, [1], state, None)
    storages = (t.untyped_storage() for t in after)
    return sum(map(_rounded, {s.data_ptr(): s for s in storages}.values()))


def _measure_range(core: Core, inputs: Inputs, state: Tensors, steps: int) -> _Bytes:
    """Measure a range three ways: run without recording, recorded, and backpropagated."""
    shapes: Shapes = []
    tapes: list[Tape] = []
    kept: list[Tape] = []
    gradients: list[Gradients] = []

    def sweep() -> None:
        if core.surroundings.changing:  # the previous step's leftovers are still there
            core.advance(inputs, 0, [1], state, noting(shapes))
        core.advance(inputs, 0, [steps], state, noting(shapes))

    def again() -> None:
        # What a cell leaves in an attribute must not be released while the next range is measured.
        if core.surroundings.changing:
            kept.append(core.record(inputs, 0, steps, state, None))

    def run() -> None:
        tapes.append(core.record(inputs, 0, steps, state, noting(shapes)))

    def prepare(begun: bool) -> None:
        gradients.append(gradients_like(core, tapes[0], shapes, inputs, steps))
        if not begun:
            gradients[0].parameters = [None] * len(core.parameters)

    def back() -> None:
        core.backpropagate(tapes.pop(), gradients[0])

    # What steps leave is put back first. Otherwise its release would count as free memory.
    bar = Values(core.surroundings.found).restore
    phases = [bar, sweep]
    # The first range of several steps has no gradients yet to add to.
    for begun in (True, False) if steps > 1 and not core.fused else (True,):
        phases += [bar, again, bar, run, partial(prepare, begun), back, gradients.clear]
    measured = measure_phases(phases, device=core.surroundings.device)
    backward = max(phase.peak() for phase in measured[7::7])
    return _Bytes(measured[1].peak(), measured[5].growth(), measured[5].peak(), backward)


def _rounded(t: Any) -> int:
    """Return the bytes of a tensor or storage; CUDA's allocator rounds up to 512 bytes."""
    size = t.nbytes() if isinstance(t, torch.UntypedStorage) else int(t.nbytes)
    return -(-size // 512) * 512 if t.is_cuda else size


def noting(shapes: Shapes) -> Emit:
    """Return an emitter that keeps no output, only the shapes and dtypes."""

    def emit(start: int, stop: int, values: Tensors, *_: Tensors) -> None:
        shapes[:] = [(y.shape, y.dtype) for y in values]

    return emit


def gradients_like(core: Core, tape: Tape, shapes: Shapes, inputs: Inputs, steps: int) -> Gradients:
    """Return gradients of the most expensive layout: expanded scalars, which kernels must copy."""
    device = core.surroundings.device
    return _Probe(
        outputs=[
            torch.ones((), dtype=dtype, device=device).expand(shape) for shape, dtype in shapes
        ],
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
        read=inputs,
        outside=torch.autocast(device.type, enabled=False),
    )


@dataclass
class _Probe(Gradients):
    """Gradients of one call that do not depend on where its steps are in the sequence."""

    layout: Straight

    def of_outputs(self, index: int | slice) -> Sequence[Tensor | None]:
        if not isinstance(index, slice) or self.layout.fused:
            return self.outputs
        steps = index.stop - index.start  # a cell's steps that are recorded together
        return [None if t is None else t.expand(steps, *t.shape) for t in self.outputs]

    def take_inputs(self, index: int | slice, shares: list[Tensor | None]) -> None:
        for total, share in zip(self.inputs, shares, strict=True):
            if total is not None and share is not None:
                total.copy_(share)
