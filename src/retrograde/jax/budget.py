"""From bytes to a schedule for a scan: sizes come from the types of one step, none is run.

Counted are stored states, recorded steps, the carry and its cotangent, and what one step works
with. Constants, inputs, outputs and the gradients of all three are the caller's.
"""

from dataclasses import dataclass, replace

from retrograde.errors import ScheduleError
from retrograde.jax.step import Recorded, bytes_of
from retrograde.jax.table import Table, table_of
from retrograde.plan.fit import Curve, Fit, Footprint, fit
from retrograde.schedule import Schedule
from retrograde.units import Memory, parse_memory

__all__ = ["Asked", "find_table", "fit_scan"]

# Bytes that a buffer is rounded up by; some are loop counters.
_ALIGNMENT = 64

# What starting a range costs, in steps; a loop's iteration is compiled, so it is little.
_CALL_STEPS = 0.25
_RECORD_STEPS = 0.5


@dataclass(frozen=True)
class Asked:
    """What a caller asked of the backward pass: a budget or a schedule; neither for all at once."""

    memory: Memory | None = None
    schedule: Schedule | None = None

    def check(self, length: int) -> None:
        """Raise ScheduleError or UnitError before any work."""
        if self.memory is not None:
            parse_memory(self.memory)
        if self.memory is not None and self.schedule is not None:
            raise ScheduleError("given both memory and schedule: expected one; leave one out")
        if self.schedule is not None and self.schedule.length != length:
            raise ScheduleError(
                f"the schedule is for {self.schedule.length} steps, but the scan has {length}: "
                f"plan one for {length}"
            )
        if self.schedule is not None:
            _ = self.schedule.cost  # replayed, and so checked


def fit_scan(recorded: Recorded, length: int, memory: Memory) -> tuple[Fit, Table | None]:
    """What a budget buys, and the table that keeps to it; None to hold all residuals, as
    ``jax.lax.scan`` does. Raises BudgetError, which names the least.

    Slots and tape are buffers of fixed size, while a plan's states give way to recorded steps as
    it goes on. So plans are made for less and less, until the buffers of one are in the budget."""
    sizes = _footprint(recorded)
    first = found = fit(length, memory, sizes)
    while not found.ordinary:
        table = table_of(found.schedule, again=bool(recorded.step.y))
        buffers = table.slots * sizes.state_bytes + table.tape * bytes_of(recorded.held)
        peak = buffers + sizes.backward(1) + 2 * sizes.state_bytes + sizes.extra_bytes
        if peak <= first.budget_bytes:
            return replace(
                found,
                peak_bytes=peak,
                budget_bytes=first.budget_bytes,
                forward_steps=table.steps,
            ), table
        less = found.budget_bytes - (peak - first.budget_bytes)
        assert found.budget_bytes > found.minimum_bytes, "the least plan fits"
        found = fit(length, max(less, found.minimum_bytes), sizes)
    return found, None


def _footprint(recorded: Recorded) -> Footprint:
    """What the carry, a recorded step and the work of a step take."""
    state, held = bytes_of(recorded.step.carry), bytes_of(recorded.held)
    work = recorded.work + held + 2 * state
    return Footprint(
        state_bytes=max(1, state),
        advance=Curve(((1, work),)),
        held=Curve.affine(state, held),
        record=Curve.affine(state + work, held),
        backward=Curve(((1, work),)),
        ordinary=Curve.affine(state + work, held),
        gradient_bytes=state,
        heap_bytes=None,
        call_steps=_CALL_STEPS,
        record_steps=_RECORD_STEPS,
        call_bytes=state,
        extra_bytes=_ALIGNMENT * (16 + 3 * len(recorded.step.carry) + 3 * len(recorded.held)),
    )


def find_table(recorded: Recorded, length: int, asked: Asked) -> Table | None:
    """The table to follow; None to hold all residuals."""
    if asked.schedule is not None:
        return table_of(asked.schedule)
    assert asked.memory is not None, "without either, jax.lax.scan is called"
    return fit_scan(recorded, length, asked.memory)[1]
