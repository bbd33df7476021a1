"""From bytes to a schedule: the fastest one that fits, for a recurrence of equal steps.

The sequence is cut into blocks of L steps, which are planned as steps of the mixed policy (G16
section 3.3) with sizes in bytes. The working core records one block at a time. The rest of the
budget keeps other blocks and hidden states. L = 1 is the policy of the paper. A larger L gives the
kernels longer ranges and the dynamic program fewer cells; a smaller one uses the budget more
finely. Every L of a geometric grid is planned, and the one with the least predicted time is taken,
in units of a forward step:

    time(L) = forward steps + (calls that advance) · (cost of a call)
            + (ranges recorded) · (cost of recording one and of going back through it)

No clock is read, so the same budget gives the same schedule, and the same sums, on every run. The
closed form of MSM (:mod:`retrograde.plan.steps.mixed`) gives a lower bound of the time for every L.
Block lengths are planned in the order of these bounds, until the next bound is above the best time.

Complexity: a cost in closed form for each L, and a few schedules of ⌈T/L⌉ blocks.
Known limit: a state is one whole, even where several layers have states of different size.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from retrograde.errors import BudgetError
from retrograde.plan.footprint import Footprint
from retrograde.plan.steps.blocks import Blocks
from retrograde.plan.steps.unfold import Segments, store_all
from retrograde.schedule import Schedule, Units, Verb
from retrograde.units import Memory, as_bytes, as_given, asks_for_all, format_bytes

_LEVELS = 1024  # units of memory, at most
_GRID = 1.2
_KEPT = 16


@lru_cache(8)
class _Sizes:
    """The curves of a footprint that a search reads, each computed once for a number of steps. A
    plan's last ranges are shorter. If a shorter one was measured to take more, ``core`` has that.
    """

    def __init__(self, footprint: Footprint) -> None:
        self.footprint, once = footprint, lru_cache(2**14)
        self.held, core = once(footprint.held), footprint.core_bytes
        measured = [(steps, core(steps)) for steps, _ in footprint.backward.points]
        self.core = once(lambda n: max([core(n), *(size for steps, size in measured if steps < n)]))
        self.beside_core = footprint.overhead_bytes(1) - core(1)

    def overhead(self, steps: int) -> int:
        return self.core(steps) + self.beside_core

    def chunk(self, length: int, block: int) -> int:
        """Return the most steps that one call may advance with temporaries in the working core."""
        return self.footprint.advance.most(self.core(block), length)


@dataclass(frozen=True)
class Fit:
    """A schedule for a budget, with its predicted time and peak; ``print`` shows it."""

    schedule: Schedule
    block: int  # the steps of one recorded range
    chunk: int  # the most steps of one advancing range
    forward_steps: int  # forward steps in all, the first sweep included
    calls: int  # calls of a kernel in all; a recorded range takes two
    time: float  # the predicted time of an iteration, in the unit of the footprint's ``step_time``
    budget_bytes: int
    peak_bytes: int
    ordinary_bytes: int
    minimum_bytes: int  # the least peak of a schedule of single steps
    ordinary: bool  # whether it is ordinary backpropagation, as one graph
    # About what autograd's nodes take of the process's memory, beside the peak, for the most steps
    # of a cell that are recorded at one time. No budget counts them.
    node_bytes: int = 0
    # The outputs with their gradient, and the gradients of parameters, inputs and states. They are
    # the caller's, so they come on top.
    beside_bytes: int = 0
    seconds: float | None = None  # the predicted seconds of an iteration, where they were asked for
    ordinary_seconds: float | None = None  # those of ordinary backpropagation, likewise
    is_busy: bool = False  # whether other processes wanted the processor meanwhile

    def __str__(self) -> str:
        time = ""
        if self.seconds is not None and self.ordinary_seconds is not None:
            ratio = self.seconds / self.ordinary_seconds
            time = f": {self.seconds:.3g} s an iteration, {ratio:.2f} times the ordinary one's"
            time += "; but the processor was busy, so time it again" if self.is_busy else ""
        tops = f"{format_bytes(self.beside_bytes)} of outputs and gradients come on top\n"
        if self.node_bytes:
            tops += f"about {format_bytes(self.node_bytes)} of autograd's own nodes do, too\n"
        return (
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
            f"ordinary backpropagation holds {format_bytes(self.ordinary_bytes)}, and "
            f"{format_bytes(self.minimum_bytes)} would do\n{tops}"
            f"{self.forward_steps:,} steps run forward for {self.schedule.length:,}{time}"
        )


def fit(length: int, memory: Memory | None, footprint: Footprint) -> Fit:
    """Return the fastest schedule for a recurrence of ``length`` steps within a budget. The budget
    None allows the bytes of ordinary backpropagation, and fractions are of those. Raises
    BudgetError, which names the least budget, if even the smallest schedule does not fit."""
    ordinary, whole = footprint.ordinary_bytes(length), footprint.whole_bytes(length)
    minimum = footprint.least_bytes(length)
    budget = ordinary if memory is None else as_bytes(memory, ordinary)
    if asks_for_all(memory) and not footprint.scheduled:
        budget = max(budget, whole)  # 100 % always allows ordinary backpropagation
    heap = math.inf if footprint.heap_bytes is None else footprint.heap_bytes
    sizes, scheduled = _Sizes(footprint), footprint.scheduled
    if budget >= whole and (not scheduled or footprint.held(length) <= heap):
        schedule, spent = in_one_range(length, _units(footprint)), (length, 0, 1)
        chunk = sizes.chunk(length, length) if scheduled else length
        return _describe(schedule, length, chunk, spent, budget, footprint, ordinary=not scheduled)
    if budget < minimum:
        raise refusal(length, memory, budget, minimum, ordinary, footprint.unit)
    best = _fastest(length, _grid(length, budget, sizes), budget, sizes)
    assert best.peak_bytes <= budget
    return best


def refusal(
    length: int, memory: Memory | None, budget: int, minimum: int, ordinary: int,
    unit: str = "steps",
) -> BudgetError:  # fmt: skip
    """Return the error for a ``budget`` below ``minimum`` (bytes), which ``memory`` asked for."""
    return BudgetError(
        f"the memory {as_given(memory, budget, ordinary)}, but {length} {unit} "
        f"need at least {minimum} bytes ({format_bytes(minimum)}), that is "
        f"{minimum / ordinary:.2%} of ordinary backpropagation's: raise the budget, or make "
        "the batch or the state smaller",
        minimum,
    )


def _fastest(length: int, blocks: Sequence[int], budget: int, sizes: _Sizes) -> Fit:
    """Return the plan of least time; of equal ones, the one with the shortest blocks. Block lengths
    are planned in the order of their bounds, until the next bound is above the best time. Only the
    chosen plan is written out."""
    footprint = sizes.footprint
    divided = {steps: _divided(length, steps, budget, sizes) for steps in blocks}
    least = {steps: _least_time(division, footprint) for steps, division in divided.items()}
    best = (math.inf, 0)
    for steps in sorted(blocks, key=lambda steps: (least[steps], steps)):
        if least[steps] > best[0]:
            break
        segments, division = Segments(), divided[steps]
        root, forward_steps, advances = division.plan(segments)
        spent = forward_steps, advances, division.count
        time = footprint.time(length, *spent)
        if (time, steps) < best:
            best, chosen = (time, steps), (division, segments, root, spent)
    division, segments, root, spent = chosen
    schedule = division.schedule(segments, root, _units(footprint))
    return _describe(schedule, division.steps, division.chunk, spent, budget, footprint)


def _divided(length: int, steps: int, budget: int, sizes: _Sizes) -> Blocks:
    """Return blocks of ``steps`` in what the budget leaves beside the working core."""
    memory = budget - sizes.overhead(steps)
    unit = max(1, sizes.footprint.state_bytes, -(-memory // _LEVELS))
    block_units = max(1, -(-sizes.held(steps) // unit))
    return Blocks(length, steps, memory // unit, block_units, sizes.chunk(length, steps))


def _least_time(blocks: Blocks, footprint: Footprint) -> float:
    """Return a lower bound of the time of every plan in such blocks. It has two calls for each: one
    to record it, one to backpropagate it."""
    more = blocks.least_repeated()
    steps, advances = blocks.length + more, more // blocks.chunk
    least = footprint.time(blocks.length, steps, advances, blocks.count)
    return least * (1 - 1e-12)  # a margin for the rounding of the times that it is compared with


def predict_peak_bytes(schedule: Schedule, footprint: Footprint) -> int:
    """Return the most bytes that a schedule holds, if every ``Record`` is one call."""
    advancing, held_by = cache(footprint.advance), cache(footprint.held)
    recording, going_back = cache(footprint.record), cache(footprint.backward)
    state, gradient, peak = footprint.state_bytes, 0, 0
    held_bytes, current = 0, 0
    stored: set[int] = set()
    tapes: dict[int, int] = {}  # the steps of each, by its last state
    for verb, start, stop in schedule.codes():
        base = held_bytes + gradient + (0 if current in stored or current in tapes else state)
        transient = 0
        if verb == Verb.ADVANCE:
            transient, current = advancing(stop - start), stop
        elif verb == Verb.RECORD:
            transient, current = recording(stop - start), stop
            tapes[stop] = stop - start
            held_bytes += held_by(stop - start)
        elif verb == Verb.BACKWARD:
            base += footprint.gradient_bytes - gradient
            gradient = footprint.gradient_bytes
            for end in [end for end in tapes if end > start]:
                steps = tapes.pop(end)
                held_bytes -= held_by(steps)
                transient = max(transient, going_back(steps))
        elif verb == Verb.LOAD:
            current = start
        elif verb == Verb.STORE:
            stored.add(start)
            held_bytes += state
        else:
            stored.remove(start)
            held_bytes -= state
        peak = max(peak, base + transient)
    return max(peak + footprint.call_bytes + footprint.extra_bytes, footprint.trial_bytes)


def _grid(length: int, budget: int, sizes: _Sizes) -> list[int]:
    """Return the block lengths to try: a geometric grid, and lengths that fill the budget. The
    latter hold 0, 1, 2, … recorded blocks beside the working core and the states between the other
    blocks."""
    footprint = sizes.footprint
    room = budget - footprint.state_bytes
    most = _most(length, room, sizes.overhead)
    if footprint.heap_bytes is not None:
        most = min(most, footprint.held.most(footprint.heap_bytes, length))
    count = max(1, math.ceil(math.log(most) / math.log(_GRID)))
    grid = {round(most ** (i / count)) for i in range(count + 1)}

    block = length
    for kept in range(_KEPT):

        def filled(block: int, kept: int = kept) -> int:
            return sizes.core(block) + kept * sizes.held(block)

        block = _most(block, room - sizes.beside_core, filled)
        states = max(0, -(-length // block) - kept - 1) * footprint.state_bytes
        grid.add(min(most, _most(block, room - sizes.beside_core - states, filled)))
    return sorted(block for block in grid if sizes.overhead(block) <= room)


def _most(length: int, limit: int, size: Callable[[int], int]) -> int:
    """Return the most steps, of 1 … length, whose size is within a limit (1 if none is). Every
    length is searched at the same numbers of steps, whose sizes are then known."""
    steps = range(1, 1 << length.bit_length())
    return min(length, max(1, bisect_right(steps, limit, key=size)))


def _units(footprint: Footprint) -> Units:
    """Return the sizes of one step in hidden states, rounded up, for the record in the schedule."""
    beta = max(1, -(-footprint.held(1) // max(1, footprint.state_bytes)))
    return Units(alpha=beta + 1, beta=beta, core=0, initial=1)


def _describe(
    schedule: Schedule, block: int, chunk: int, spent: tuple[int, int, int], budget: int,
    footprint: Footprint, *, ordinary: bool = False,
) -> Fit:  # fmt: skip
    """``spent`` is the forward steps, and the calls that advance and that record."""
    (forward_steps, advances, records), length = spent, schedule.length
    peak = footprint.whole_bytes(length) if ordinary else predict_peak_bytes(schedule, footprint)
    return Fit(
        schedule=schedule,
        block=block,
        chunk=chunk,
        forward_steps=forward_steps,
        calls=advances + 2 * records,
        time=footprint.time(length, *spent),
        budget_bytes=budget,
        peak_bytes=peak,
        ordinary_bytes=footprint.ordinary_bytes(length),
        minimum_bytes=footprint.minimum_bytes(),
        ordinary=ordinary,
    )


def whole_fit(length: int, block: int, **fields: Any) -> Fit:
    """Return a fit that records all steps in one range; ``fields`` are the rest of :class:`Fit`."""
    return Fit(schedule=in_one_range(length), block=block, chunk=length, ordinary=False, **fields)


def in_one_range(length: int, units: Units | None = None) -> Schedule:
    """Return the schedule that records all steps in one range."""
    return replace(store_all(length, units), policy="one-range")
