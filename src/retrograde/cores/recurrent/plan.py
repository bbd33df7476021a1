"""Which steps keep their gates, and how long a piece is: the fastest way to run held layers.

Where the caller holds the outputs, and the sequences between layers fit, no step is run forward
more than twice, and the second time all steps of a piece are one matrix product. So the plan is a
closed form: pieces as long as the cache allows and the budget has room for, and the rest of the
budget for gates, which saves a recomputation each. Where the sequences between layers, or the marks
of an LSTM, do not fit, ranges of steps are planned as for any other core.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from retrograde.cores.fused import HEAP_BYTES
from retrograde.cores.recurrent.bytes import Means, Shape
from retrograde.cores.recurrent.pieces import runs
from retrograde.kernels.cells import GATES
from retrograde.plan.fit import Curve, Fit, Footprint, fit, refusal, whole_fit
from retrograde.units import Memory, as_bytes, asks_for_all

__all__ = ["HeldPlan", "Planner", "Sequences"]

# Nominal costs, in forward steps: a call that advances, and one that records and goes back.
_CALL_STEPS, _RECORD_STEPS = 5.0, 15.0
# Nominal: operations to a microsecond; the microseconds of a piece besides its arithmetic.
_RATE, _PIECE = 1.35e5, 150.0
_PIECE_WEIGHT = 8e-4  # and for every weight, whose gradient it reads and writes
_TORCHS = 3e6  # operations of a step from which on oneDNN's LSTM is as fast as ours
_THREAD_ROWS = 128  # no thread of a backward pass has room for more


@dataclass(frozen=True)
class HeldPlan:
    """How held layers are run: in pieces of ``block`` rows, with gates kept for the last ``kept``
    steps of each track."""

    block: int
    kept: int = 0
    means: Means = "loops"


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
        found = [
            self._peak(lengths, HeldPlan(block, means="blas"))
            for block in _blocks(shape, lengths, self.most)
        ]
        if self._ranges:
            found.append(self._footprint("blas", shape.batch, lengths, 1).minimum_bytes())
        return min(found)

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

    @property
    def _ranges(self) -> bool:
        """Whether a part of the steps can be run at a time."""
        return len(self.shapes) == 1 and self.shapes[0].tracks == 1

    @property
    def _is_large(self) -> bool:
        """Whether torch's own pass is the faster one, where there is room for it."""
        shape = self.shapes[0]
        work = 2 * 4 * shape.batch * shape.size * (shape.size + shape.width)
        return shape.kind == "LSTM" and work > _TORCHS

    def _fastest(
        self, lengths: Sequences, budget: int, told: dict[str, int]
    ) -> tuple[HeldPlan, tuple[Fit, ...]]:
        """By the loops if there is room for them, and else with less; in one range if possible."""
        blocks = _blocks(self.shapes[0], lengths, self.most)
        tiers: tuple[tuple[Means, ...], ...] = (("loops", "sweeps"), ("blas",))
        for several in tiers:
            for means in several:
                plans = [self._keeping(lengths, block, means, budget) for block in blocks]
                found = [plan for plan in plans if plan is not None]
                if found:
                    best = min(found, key=lambda plan: self._time(lengths, plan))
                    return best, self._told(lengths, best, told)
            for means in several if self._ranges else ():
                for block in blocks:
                    sizes = self._footprint(means, block, lengths, told["ordinary_bytes"])
                    least = (means, block) == ("blas", blocks[-1])
                    if least or sizes.minimum_bytes() <= budget // 2:
                        fits = fit(lengths.length, budget, sizes)
                        fits = replace(fits, minimum_bytes=told["minimum_bytes"])
                        return HeldPlan(block, means=means), (fits,)
        raise AssertionError("the budget is at least the least")

    def _keeping(
        self, lengths: Sequences, block: int, means: Means, budget: int
    ) -> HeldPlan | None:
        """The plan with as many gates kept as there is room for; None where none fits."""
        plan = HeldPlan(block, means=means)
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
        """Microseconds, nominally, of what depends on the plan."""
        shape = self.shapes[0]
        weights = shape.count * GATES[shape.kind] * shape.size * (shape.size + shape.width)
        step = 2 * weights * lengths.rows / lengths.length / _RATE
        piece = _PIECE * shape.count + _PIECE_WEIGHT * weights
        return self._again(lengths, plan) * step + lengths.pieces(plan.block) * piece

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

    def _footprint(self, means: Means, block: int, lengths: Sequences, ordinary: int) -> Footprint:
        """What ranges of steps take, for any schedule over them."""
        shape, length = replace(self.shapes[0], means=means), lengths.length
        step = shape.below(shape.batch)

        def held(steps: int) -> int:
            pieces = -(-steps // (block // shape.batch))
            return step * steps + shape.mark(pieces) + shape.state

        work = shape.fixed(block) + shape.piece(block, kept=False)
        forward = shape.forward(block, shape.pass_rows(block))
        advance = shape.advance(shape.pass_rows(block)) + shape.state
        points = sorted({1, max(1, block // shape.batch), min(2, length), length})
        return Footprint(
            state_bytes=shape.state,
            advance=Curve(((1, advance),)),
            held=Curve(tuple((n, held(n)) for n in points)),
            record=Curve(tuple((n, held(n) + forward) for n in points)),
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
        shapes = [replace(shape, means=plan.means) for shape in self.shapes]
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
