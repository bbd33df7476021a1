"""The fastest core and schedule within a budget, of several cores that compute the same."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from retrograde.cores.footprint import footprint, measured_for
from retrograde.errors import BudgetError
from retrograde.plan.fit import Curve, Fit, Footprint, Highest, fit, predict_peak_bytes
from retrograde.run.core import Core
from retrograde.run.inputs import Inputs
from retrograde.units import Memory

__all__ = ["Candidate", "fit_fastest", "fit_measured", "footprints"]

Tensors = list[Tensor]


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
        if found.ordinary or not core.joins:
            return found, sizes
        sizes = measured_for(found.schedule, sizes, core, inputs, state)
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
