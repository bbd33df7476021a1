"""The bytes and times of the steps of a recurrence, as functions of the number of steps."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Bytes as a function of the steps in a range: linear between measured ``points`` (steps,
    bytes). Steps increase. The curve is flat before the first point, and beyond the last it
    continues the last segment."""

    points: tuple[tuple[int, int], ...]

    @classmethod
    def affine(cls, fixed: int, per_step: int) -> "Curve":
        """Return the curve ``fixed + per_step · steps``."""
        return cls(((1, fixed + per_step), (2, fixed + 2 * per_step)))

    def __call__(self, steps: int) -> int:
        points = self.points
        if len(points) == 1 or steps <= points[0][0]:
            return points[0][1]
        right = min(max(1, bisect_left(points, (steps, 0))), len(points) - 1)
        (a, low), (b, high) = points[right - 1], points[right]
        return low - (low - high) * (steps - a) // (b - a)

    def most(self, limit: int, length: int) -> int:
        """Return the most steps, of 1 … length, up to which all are within a limit (1 if none)."""
        points = self.points
        above = next((i for i, (_, size) in enumerate(points) if size > limit), len(points))
        if above == 0 or len(points) == 1:
            return length if above else 1
        (a, low), (b, high) = points[above - 1 :][:2] if above < len(points) else points[-2:]
        if high <= low:
            return length
        return min(length, a + (limit - low) * (b - a) // (high - low))

    def through(self, steps: int, size: int) -> "Curve":
        """Return this curve, corrected by one more measurement."""
        return Curve(tuple(sorted({**dict(self.points), steps: size}.items())))


@dataclass(frozen=True)
class Highest:
    """The maximum of several curves, each continued beyond its own measurements."""

    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Mapping[int, Sequence[int]]) -> "Highest":
        """Make curves through measured values: several values for each number of steps."""
        columns = zip(*points.values(), strict=True)
        return cls(tuple(Curve(tuple(zip(points, column, strict=True))) for column in columns))

    def __call__(self, steps: int) -> int:
        return max(curve(steps) for curve in self.curves)


@dataclass(frozen=True)
class Footprint:
    """The bytes and times of the steps of a recurrence: measured, or derived from shapes.

    Attributes:
        state_bytes: one stored hidden state, with all that a rerun from it needs.
        advance, record: peak of a call that keeps nothing, and of one that records a range.
        held: bytes that a recorded range holds, its final state included.
        backward: peak of backpropagating a range, beyond the bytes that it holds.
        ordinary: working memory of ordinary backpropagation, as one graph.
        gradient_copy: added to ``ordinary`` for each step, where a kernel must copy the
            outputs' gradient.
        final_bytes: added to ``ordinary`` where the loss depends on the final state as well.
        gradient_bytes: the gradient of one hidden state, carried between ranges.
        call_bytes: held from the beginning of a schedule's call to its end.
        trial_bytes: bytes of trying one step, before the call.
        extra_bytes: bytes that may be added to all this at any moment.
        heap_bytes: the most that one recorded call should hold, for speed; None for no limit.
        call_steps: cost of an advancing call, its steps aside, in forward steps.
        record_steps: cost of recording and backpropagating a range, its steps aside.
        backward_steps: cost of recording and backpropagating a step, beyond running it
            forward; it matters only for comparing cores.
        step_time: time of a forward step, in the unit by which cores are compared.
        scheduled: whether a schedule runs every plan. ``ordinary`` is then only the base of
            fractions, since there is no ordinary graph to fall back on.
        even: whether the curves hold for ranges of any length, so that none need be measured.
        unit: the name of the steps in a message.
    """

    state_bytes: int
    advance: Curve
    held: Curve
    record: Curve
    backward: Curve
    ordinary: Curve | Highest
    gradient_bytes: int
    heap_bytes: int | None
    call_steps: float = 0.0
    record_steps: float = 0.0
    backward_steps: float = 2.0
    step_time: float = 1.0
    scheduled: bool = False
    extra_bytes: int = 0
    gradient_copy: int = 0
    final_bytes: int = 0
    call_bytes: int = 0
    trial_bytes: int = 0
    even: bool = False
    unit: str = "steps"

    def ordinary_bytes(self, length: int) -> int:
        """Return the base of fractions: ordinary backpropagation, or a trial step if larger."""
        return max(self.ordinary(length), self.trial_bytes)

    def whole_bytes(self, length: int) -> int:
        """Return the bytes of backpropagating all steps at once."""
        if self.scheduled:
            return max(self.overhead_bytes(length), self.trial_bytes)
        more = self.gradient_copy * length + self.extra_bytes + self.final_bytes
        return max(self.ordinary(length) + more, self.trial_bytes)

    def core_bytes(self, steps: int) -> int:
        """Return the working core: the peak of recording and backpropagating one range. It is at
        least the peak of advancing one step."""
        return max(self.record(steps), self.held(steps) + self.backward(steps), self.advance(1))

    def minimum_bytes(self) -> int:
        """Return the least peak of any schedule: the first and the current state, and one step."""
        return max(self.overhead_bytes(1) + self.state_bytes, self.trial_bytes)

    def least_bytes(self, length: int) -> int:
        """Return the least budget for a recurrence of so many steps."""
        return min(self.whole_bytes(length), self.minimum_bytes())

    def least_time(self, length: int) -> float:
        """Return a lower bound of the time: every step is run, recorded and backpropagated once."""
        return self.time(length, length, 0, 1)

    def time(self, length: int, forward_steps: int, advances: int, records: int) -> float:
        """Return the predicted time of an iteration, in units of ``step_time``."""
        calls = self.call_steps * advances + self.record_steps * records
        return self.step_time * (forward_steps + self.backward_steps * length + calls)

    def overhead_bytes(self, steps: int) -> int:
        """Return the working core for blocks of ``steps``, its initial state and the gradient."""
        beside_core = self.state_bytes + self.gradient_bytes + self.call_bytes + self.extra_bytes
        return self.core_bytes(steps) + beside_core
