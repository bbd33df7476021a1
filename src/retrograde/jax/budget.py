"""Find a schedule for a scan from a budget in bytes.

Sizes come from the types of one step; no step is run. The budget covers stored states, recorded
steps, the carry, its cotangent, and the temporary arrays of one step. It does not cover constants,
inputs, outputs or the gradients of these.
"""

from dataclasses import dataclass, replace

from retrograde.jax.step import Recorded, bytes_of
from retrograde.jax.table import Table, table_of
from retrograde.plan.fit import Fit, fit
from retrograde.plan.footprint import Curve, Footprint
from retrograde.schedule import Schedule
from retrograde.schedule.schedule import check_limit, check_schedule
from retrograde.units import Memory

# The bytes by which each buffer is rounded up. Some buffers are loop counters.
_ALIGNMENT = 64

# The cost of starting a range, in steps. It is small, since a loop's iteration is compiled.
_CALL_STEPS = 0.25
_RECORD_STEPS = 0.5


@dataclass(frozen=True)
class Asked:
    """What a caller asks for: a budget, a schedule, or neither, which keeps all residuals."""

    memory: Memory | None = None
    schedule: Schedule | None = None

    def check(self, length: int) -> None:
        """Check the arguments before any work; raises ScheduleError or UnitError."""
        check_limit(self.memory, self.schedule)
        if self.schedule is not None:
            check_schedule(self.schedule, length)

    def table(self, recorded: Recorded, length: int) -> Table | None:
        """Return the table to follow, or None to hold all residuals."""
        if self.schedule is not None:
            return table_of(self.schedule)
        assert self.memory is not None, "without either, jax.lax.scan is called"
        return fit_scan(recorded, length, self.memory)[1]


def fit_scan(recorded: Recorded, length: int, memory: Memory) -> tuple[Fit, Table | None]:
    """Return the fit for a budget, and the table that stays within it.

    The table is None if all residuals fit, as ``jax.lax.scan`` holds them. A plan reuses the memory
    of freed states for recorded steps, but the slots and the tape are buffers of fixed size. So
    plans are made for smaller and smaller budgets, until the buffers of one are within the budget.
    Raises BudgetError, which names the least.
    """
    sizes = _footprint(recorded)
    full_fit = plan = fit(length, memory, sizes)
    while not plan.ordinary:
        table = table_of(plan.schedule, again=bool(recorded.step.y))
        buffers = table.slots * sizes.state_bytes + table.tape * bytes_of(recorded.held)
        peak = buffers + sizes.backward(1) + 2 * sizes.state_bytes + sizes.extra_bytes
        if peak <= full_fit.budget_bytes:
            return replace(
                plan, peak_bytes=peak, budget_bytes=full_fit.budget_bytes, forward_steps=table.steps
            ), table
        less = plan.budget_bytes - (peak - full_fit.budget_bytes)
        assert plan.budget_bytes > plan.minimum_bytes, "the least plan fits"
        plan = fit(length, max(less, plan.minimum_bytes), sizes)
    return plan, None


def _footprint(recorded: Recorded) -> Footprint:
    """Return the bytes of the carry, of a recorded step and of a step's temporary arrays."""
    state, residuals = bytes_of(recorded.step.carry), bytes_of(recorded.held)
    work = recorded.work + residuals + 2 * state
    return Footprint(
        state_bytes=max(1, state),
        advance=Curve(((1, work),)),
        held=Curve.affine(state, residuals),
        record=Curve.affine(state + work, residuals),
        backward=Curve(((1, work),)),
        ordinary=Curve.affine(state + work, residuals),
        gradient_bytes=state,
        heap_bytes=None,
        call_steps=_CALL_STEPS,
        record_steps=_RECORD_STEPS,
        call_bytes=state,
        extra_bytes=_ALIGNMENT * (16 + 3 * len(recorded.step.carry) + 3 * len(recorded.held)),
    )
