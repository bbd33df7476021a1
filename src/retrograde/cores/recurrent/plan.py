"""Which steps keep their gates, and how long a piece is: the fastest way to run held layers.

Where the caller holds the outputs, and the sequences between layers fit, no step is run forward
more than twice, and the second time all steps of a piece are one matrix product. So the plan is a
closed form: pieces as long as the cache allows and the budget has room for, and the rest of the
budget for gates, which saves a recomputation each. Where the sequences between layers, or the marks
of an LSTM, do not fit, ranges of steps are planned as for any other core.

What fits is compared by its nominal time: operations at the rate of a machine with two cores, and
what pieces, calls and single steps cost besides. No clock is read, so a budget gives one plan.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

from retrograde.cores.fused import HEAP_BYTES
from retrograde.cores.recurrent.bytes import Means, Shape
from retrograde.cores.recurrent.pieces import runs
from retrograde.kernels.cells import GATES
from retrograde.plan.fit import Curve, Fit, Footprint, fit, refusal, whole_fit
from retrograde.plan.steps.closed_form import hsm_cost
from retrograde.units import Memory, as_bytes, asks_for_all

__all__ = ["HeldPlan", "Planner", "Sequences"]

# Nominal costs, in forward steps: a call that advances, and one that records and goes back.
_CALL_STEPS, _RECORD_STEPS = 5.0, 15.0
# Nominal microseconds of two cores: operations to one; of a number of an LSTM's gates and of its
# elements; of a call that runs a range.
_RATE, _ELEMENT, _CALL = 1.35e5, 2.5e-3, 100.0
# Of a piece of a layer, and for each of its weights: one loop sums their gradients apart.
_PIECE: dict[bool, tuple[float, float]] = {True: (180.0, 3e-4), False: (230.0, 1.1e-3)}
# Of a step by BLAS in one direction, and for each hidden weight, which is not laid out for it.
_STEP, _STEP_WEIGHT = 11.0, 1.7e-4
_SWEEPS = 0.6  # forward passes that a GRU's separate sweeps take beyond one loop
_TORCHS = 3e6  # operations of a step from which on oneDNN's LSTM is as fast as ours
_THREAD_ROWS = 128  # no thread of a backward pass has room for more


@dataclass(frozen=True)
class HeldPlan:
    """How held layers are run: in pieces of ``block`` rows, with gates kept for the last ``kept``
    steps of each track. ``onward`` runs all layers forward; ``back`` has what goes back through
    each, from the lowest up, or loops through all if it is empty."""

    block: int
    kept: int = 0
    onward: Means = "loops"
    back: tuple[Means, ...] = ()


@dataclass(frozen=True)
class Sequences:
    """The lengths of a batch: T, B and, if packed, ``offsets``: the first row of every step, then
    the number of rows."""

    length: int
    batch: int
    offsets: Sequence[int] | None = None

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """How many steps in a row have the same number of sequences, and which."""
        return [(self.length, self.batch)] if self.offsets is None else runs(self.offsets)

    @property
    def rows(self) -> int:
        """Steps of sequences in all."""
        return self.length * self.batch if self.offsets is None else self.offsets[-1]

    def pieces(self, block: int) -> int:
        """The sequences in the pieces of some rows, added up, in units of the batch, rounded up."""
        total = sum(n * -(-steps // max(1, block // n)) for steps, n in self.runs)
        return -(-total // self.batch)

    def largest(self, block: int) -> int:
        """The most rows of a piece."""
        return max(n * min(steps, max(1, block // n)) for steps, n in self.runs)

    def last(self, steps: int, both: bool) -> int:
        """Rows of the last steps; in two directions, of a direction on average."""
        if self.offsets is None:
            return steps * self.batch
        late = self.offsets[-1] - self.offsets[self.length - steps]
        return -(-(late + self.offsets[steps]) // 2) if both else late

    def most_kept(self, rows: int, both: bool) -> int:
        """The most last steps that have at most so many rows."""
        steps = range(self.length + 1)
        return bisect_right(steps, rows, key=lambda k: self.last(k, both)) - 1


def _blocks(shape: Shape, lengths: Sequences, most: int) -> list[int]:
    """Lengths of a piece to try, the longest first."""
    found, steps = [], max(1, min(most // shape.batch, lengths.length))
    while steps > 1:
        found.append(steps * shape.batch)
        steps = steps * 2 // 3
    return [*found, shape.batch]


@dataclass(frozen=True)
class Planner:
    """Plans for held layers, for any lengths.

    Attributes:
        shapes: of one recurrence; with several layers in two directions, one for each layer.
        most: the rows of a piece that the cache allows.
        extra: bytes that may come on top at any moment.
        gradient_copy: bytes a step that torch's own pass takes on top.
        torchs: whether torch's own module computes the same.
    """

    shapes: tuple[Shape, ...]
    most: int
    extra: int = 0
    gradient_copy: int = 0
    torchs: bool = True

    def least_bytes(self, lengths: Sequences) -> int:
        """The least budget for held layers."""
        shape = self.shapes[0]
        plan = replace(self._means[-1], block=shape.batch)
        least = self._peak(lengths, plan)
        for block in _blocks(shape, lengths, self.most)[-2::-1]:
            peak = self._peak(lengths, replace(plan, block=block))
            if peak > 1.1 * least:
                break  # fewer marks, but more for a piece than they take
            least = min(least, peak)
        if self._ranges:
            least = min(least, self._footprint(plan, lengths, 1).minimum_bytes())
        return least

    def fit(
        self, lengths: Sequences, memory: Memory | None, ordinary: int
    ) -> tuple[HeldPlan | None, tuple[Fit, ...]]:
        """The fastest plan within a budget (``ordinary`` bytes if ``memory`` is None), and a fit
        for each recurrence. The plan is None, with one fit, where torch's own module is to run.
        Raises BudgetError, which names the least, if the memory is too little."""
        budget = ordinary if memory is None else as_bytes(memory, ordinary)
        least, length = self.least_bytes(lengths), lengths.length
        usual = ordinary + self.gradient_copy * length + self.extra
        minimum = min(least, usual) if self.torchs else least
        if self.torchs and asks_for_all(memory):
            budget = max(budget, usual)  # whatever torch's own pass takes
        if budget < minimum:
            raise refusal(length, memory, budget, minimum, ordinary)
        told = {"budget_bytes": budget, "ordinary_bytes": ordinary, "minimum_bytes": minimum}
        if self.torchs and budget >= usual and (budget < least or self._is_large):
            peak = {"peak_bytes": usual, "forward_steps": length, "calls": 2, "time": 3.0 * length}
            return None, (replace(whole_fit(length, length, **peak, **told), ordinary=True),)
        return self._fastest(lengths, budget, told)

    def _run_by(self, plan: HeldPlan) -> list[Shape]:
        """The shapes, with what a plan runs them by."""
        key = plan.onward, plan.back
        if key not in self._known:
            self._known[key] = [replace(s, onward=key[0], back=key[1]) for s in self.shapes]
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[Means, tuple[Means, ...]], list[Shape]]:
        return {}

    @property
    def _ranges(self) -> bool:
        """Whether a part of the steps can be run at a time."""
        return len(self.shapes) == 1 and self.shapes[0].tracks == 1

    @property
    def _is_large(self) -> bool:
        """Whether torch's own pass is the faster one, where there is room for it."""
        shape = self.shapes[0]
        if shape.onward == "torch":
            return True
        work = 2 * 4 * shape.batch * shape.size * (shape.size + shape.width)
        return shape.kind == "LSTM" and work > _TORCHS

    def _fastest(
        self, lengths: Sequences, budget: int, told: dict[str, int]
    ) -> tuple[HeldPlan, tuple[Fit, ...]]:
        """The plan of least nominal time; in one range of all steps if any fits."""
        shape, best, least = self.shapes[0], None, inf
        blocks = _blocks(shape, lengths, self.most)
        if all(shape.loops(k) for k in range(shape.count)):  # these need no pieces for the cache
            whole = self._keeping(lengths, HeldPlan(lengths.length * shape.batch), budget)
            if whole is not None and not self._again(lengths, whole):
                return whole, self._told(lengths, whole, told)
        for means in self._means:
            longer = inf
            for block in blocks:
                plan = self._keeping(lengths, replace(means, block=block), budget)
                time = inf if plan is None else self._time(lengths, plan)
                if time < least:
                    best, least = plan, time
                elif time > longer:
                    break  # shorter pieces save memory, but no more time
                longer = time
            if best is not None and best.block == blocks[0]:
                break  # no other means has longer pieces
        if best is not None:
            return best, self._told(lengths, best, told)
        return self._in_ranges(lengths, blocks, budget, told)

    @cached_property
    def _means(self) -> list[HeldPlan]:
        """What may run the layers, the fastest first: loops want the weights laid out for them,
        of all layers in the backward pass; BLAS, for as many of the lower layers as it takes."""
        shape = self.shapes[0]
        if shape.onward == "torch":
            return [HeldPlan(0, onward="torch", back=shape.back)]
        sweeps: tuple[Means, ...] = tuple(["sweeps"] * shape.count)
        blas: tuple[Means, ...] = tuple(["blas"] * shape.count)
        found = [HeldPlan(0)]
        if any(shape.loops(k) for k in range(shape.count)):
            found.append(HeldPlan(0, back=sweeps))
        for lower in range(1, shape.count + 1):
            found.append(HeldPlan(0, back=blas[:lower] + sweeps[lower:]))
        return [*found, HeldPlan(0, onward="blas", back=blas)]

    def _in_ranges(
        self, lengths: Sequences, blocks: list[int], budget: int, told: dict[str, int]
    ) -> tuple[HeldPlan, tuple[Fit, ...]]:
        """A plan in ranges of steps. What runs them, and the piece, are those of least nominal time
        if ranges are single pieces, as Revolve would run them again; then ranges are planned."""
        found: list[tuple[float, HeldPlan, Footprint]] = []
        for means in self._means:
            for block in blocks:
                plan = replace(means, block=block)
                sizes = self._footprint(plan, lengths, told["ordinary_bytes"])
                if sizes.minimum_bytes() <= budget:
                    found.append((self._time_in_ranges(lengths, plan, budget, sizes), plan, sizes))
        _, plan, sizes = min(found, key=lambda one: one[0])
        fits = fit(lengths.length, budget, sizes)
        return plan, (replace(fits, minimum_bytes=told["minimum_bytes"]),)

    def _keeping(self, lengths: Sequences, plan: HeldPlan, budget: int) -> HeldPlan | None:
        """The plan with as many gates kept as there is room for; None where none fits."""
        held, first, later = self._sizes(lengths, plan)
        room = budget - held
        if max(first, later) > room:
            return None
        whole = sum(shape.gates(1) for shape in self.shapes)
        if whole == 0:
            return plan
        rows = (room - first) // whole
        if waiting := self._waiting(1):
            rows = min(rows, int((room - later) / waiting))
        kept = lengths.most_kept(rows, self.shapes[0].tracks > 1)
        return replace(plan, kept=max(0, kept))

    def _again(self, lengths: Sequences, plan: HeldPlan) -> int:
        """Steps whose gates are computed a second time, which memory would spare: an LSTM's."""
        return lengths.length - plan.kept if self.shapes[0].kind == "LSTM" else 0

    def _time(self, lengths: Sequences, plan: HeldPlan) -> float:
        """Nominal microseconds of what depends on the plan, if all steps are one range."""
        again = self._again(lengths, plan) / lengths.length
        return self._pass_time(lengths, plan, onward=1.0, again=again)

    def _time_in_ranges(
        self, lengths: Sequences, plan: HeldPlan, budget: int, sizes: Footprint
    ) -> float:
        """The same of ranges, of one piece or several. Steps that run a second time follow the
        outputs of a single layer by products; of several layers all but the top one run step by
        step. Where a range has several pieces, the gates of most are computed again."""
        shape, length, best = self.shapes[0], lengths.length, inf
        steps = piece = max(1, plan.block // shape.batch)
        weights = sum(4 * shape.size * (shape.size + width) for width in shape.widths)
        while (room := budget - sizes.overhead_bytes(min(steps, length))) >= 0:
            ranges = -(-length // steps)
            runs = int(hsm_cost(ranges, 1 + room // sizes.state_bytes))
            more, onward, again = runs / ranges - 1, 1.0, 0.0
            if shape.count > 1:
                onward += more
                again += shape.kind == "LSTM"
            elif shape.kind == "LSTM":
                again += more + (steps > piece)
            calls = (runs + ranges) * (_CALL * shape.count + 1e-3 * weights)
            time = self._pass_time(lengths, plan, onward=onward, again=again) + calls
            best, steps = min(best, time), 2 * steps
            if ranges == 1:
                break
        return best

    def _pass_time(
        self, lengths: Sequences, plan: HeldPlan, *, onward: float, again: float
    ) -> float:
        """Nominal microseconds: ``onward`` forward passes step by step, gates computed ``again``
        by products, as a part of all, and a backward pass."""
        shape = self._run_by(plan)[0]
        pieces, gates, total = lengths.pieces(plan.block), GATES[shape.kind], 0.0
        for k, width in enumerate(shape.widths):
            weights, hidden = gates * shape.size * (shape.size + width), gates * shape.size**2
            step = _STEP + _STEP_WEIGHT * hidden
            run = 2 * weights * lengths.rows / _RATE + _ELEMENT * lengths.rows * gates * shape.size
            each, of_weight = _PIECE[shape.loops(k)]
            total += (again + onward - 1) * run + pieces * (each + of_weight * weights)
            if plan.onward == "blas":
                total += onward * lengths.length * step
            if plan.back and plan.back[k] == "blas":
                total += lengths.length * step
            if shape.kind == "GRU" and plan.back and not shape.loops(k):
                total += _SWEEPS * run
        return total

    def _told(self, lengths: Sequences, plan: HeldPlan, told: dict[str, int]) -> tuple[Fit, ...]:
        """The fit of each recurrence; bytes are those of all of them."""
        length, again = lengths.length, self._again(lengths, plan)
        one = whole_fit(
            length,
            max(1, plan.block // self.shapes[0].batch),
            forward_steps=length + again,
            calls=2,
            time=float(3 * length + again),
            peak_bytes=self._peak(lengths, plan),
            **told,
        )
        return (one,) * len(self.shapes)

    def _footprint(self, plan: HeldPlan, lengths: Sequences, ordinary: int) -> Footprint:
        """What ranges of steps take, for any schedule over them. A range of one piece keeps the
        gates of its top layer, which a longer one needs again when it goes back."""
        shape = self._run_by(plan)[0]
        length, block = lengths.length, plan.block
        step, most = shape.below(shape.batch), max(1, block // shape.batch)

        def held(steps: int) -> int:
            return without(steps) + shape.top_gates(min(steps, most) * shape.batch)

        def without(steps: int) -> int:
            pieces = 1 if steps <= most else steps // most + 1
            return step * steps + shape.mark(pieces) + shape.state

        def record(steps: int) -> int:
            return max(without(steps) + forward, held(steps) + keeping)

        later = shape.piece(block, kept=False) - shape.top_gates(block)
        work = shape.fixed(block) + max(shape.piece(block, kept=True), later)
        along = shape.along(block)
        forward, keeping = (
            max(along, shape.forward(block, rows)) for rows in (shape.pass_rows(block), 0)
        )
        advance = shape.advance(shape.pass_rows(block))
        if shape.count == 1:
            advance = max(advance, along + shape.top_gates(block))
        advance += shape.state
        points = sorted({n for n in (1, 2, most, most + 1, length) if n <= length})
        return Footprint(
            state_bytes=shape.state,
            advance=Curve(((1, advance),)),
            held=Curve(tuple((n, held(n)) for n in points)),
            record=Curve(tuple((n, record(n)) for n in points)),
            backward=Curve(((1, work),)),
            ordinary=Curve(((length, ordinary),)),
            gradient_bytes=2 * shape.state,
            heap_bytes=HEAP_BYTES,
            call_steps=_CALL_STEPS,
            record_steps=_RECORD_STEPS,
            scheduled=True,
            extra_bytes=self.extra,
        )

    def _between(self, lengths: Sequences) -> int:
        """The sequences between layers of two directions, and the gradient of one; of two, where
        the layer that goes back is neither the first nor the last."""
        shape, many = self.shapes[0], len(self.shapes)
        if many == 1:
            return 0
        sequences = many + (many > 2)
        return lengths.rows * 2 * shape.size * shape.item * sequences + 2 * many * shape.state

    def _peak(self, lengths: Sequences, plan: HeldPlan) -> int:
        """The most bytes of a call."""
        held, first, later = self._sizes(lengths, plan)
        rows = lengths.last(plan.kept, self.shapes[0].tracks > 1)
        gates = sum(shape.gates(rows) for shape in self.shapes)
        if plan.kept >= lengths.length:
            later = first
        return held + max(gates + first, ceil(self._waiting(rows)) + later)

    def _waiting(self, rows: int) -> float:
        """Bytes of gates that wait while another track, or a layer above, goes back."""
        *lower, top = (shape.gates(rows) for shape in self.shapes)
        return sum(lower) + (top / 2 if self.shapes[0].tracks > 1 else 0)

    def _sizes(self, lengths: Sequences, plan: HeldPlan) -> tuple[int, int, int]:
        """Bytes besides kept gates: held throughout, at the peak while gates are kept, and later.
        Gates are kept until the backward pass is through their pieces."""
        shapes = self._run_by(plan)
        rows = threads = lengths.largest(plan.block)
        pieces = lengths.pieces(plan.block) + 1  # one more where the gates begin to be kept
        held = sum(s.mark(pieces) + s.below(lengths.rows) + 2 * s.state for s in shapes)
        held += self._between(lengths) + self.extra
        if lengths.offsets is not None:  # fewer sequences may have more rows at a time in a thread
            threads = max(rows, min(plan.block, _THREAD_ROWS))
            held += held // 64 + _THREAD_ROWS * shapes[0].item
        forward = max(s.forward(rows, s.pass_rows(rows)) for s in shapes)
        keeping = forward
        if self._ranges and shapes[0].count == 1:  # nothing runs forward beside kept gates
            keeping = shapes[0].forward(rows, 0)
        first = max(s.fixed(threads) + s.piece(rows, kept=True) for s in shapes)
        later = max(s.fixed(threads) + s.piece(rows, kept=False) for s in shapes)
        return held, max(keeping, first), max(forward, later)
