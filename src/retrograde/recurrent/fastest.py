"""The fastest core and schedule within a budget, among several cores that compute the same.

A plan of few, long ranges wins where calls are expensive. A plan of little recomputation wins where
steps are. Which kernel is the fastest depends on both. The costs are nominal
(:mod:`retrograde.sizes.nominal`), so a budget gives the same schedule on every run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from retrograde.errors import BudgetError
from retrograde.kernels import kernels
from retrograde.plan.fit import Fit, fit, predict_peak_bytes
from retrograde.plan.footprint import Curve, Footprint, Highest
from retrograde.recurrent.dropout import Dropout
from retrograde.recurrent.fused import Fused, has_slopes, run_held
from retrograde.recurrent.vendor import Kernel, Layers, run_torch
from retrograde.replay.trees import Tensors
from retrograde.run.core import Core
from retrograde.run.layout import Inputs
from retrograde.sizes import nominal
from retrograde.sizes.footprint import footprint, measured_for
from retrograde.units import Memory


class Candidate(NamedTuple):
    """A core as the executor would run it, and its nominal costs by their names in
    :class:`Footprint`."""

    core: Core
    costs: Mapping[str, Any] = {}


def candidate(
    net: Layers, batch: int, kernel: Kernel = run_torch, dropout: Dropout | None = None
) -> Candidate:
    """Return the core by which a kernel runs layers of one direction. Torch's own module may run
    them instead, if ``kernel`` is torch's."""
    ours, costs = kernel is not run_torch, nominal.CUDA
    if net.weights[0].device.type == "cpu":
        costs = nominal.CPU["compiled" if ours else str(net.mode).split("_")[0]]
    weights = sum(w.numel() for w in net.weights if w.dim() == 2)
    step = costs.step + 2.0 * batch * weights / costs.rate
    by_name = {
        "step_time": step,
        "call_steps": (costs.call + costs.weight * weights) / step,
        "record_steps": (costs.record + costs.weighed * weights) / step,
        "backward_steps": costs.backward,
    }
    more = {"scheduled": True} if ours else {}
    return Candidate(Fused(net, kernel, dropout), by_name | more)


def candidates(net: Layers, batch: int) -> list[Candidate]:
    """Return the cores that can run layers of one direction: by torch's kernels, and by ours."""
    weight, several = net.weights[1], [candidate(net, batch)]
    use = kernels(weight.device.type, weight.dtype, weight.shape[1])
    if has_slopes(net) and use.backward is not None:
        several.append(candidate(net, batch, run_held))
    return several


def footprints(
    several: Sequence[Candidate], inputs: Inputs, state: Tensors, memory: Memory | None,
    first: Tensors | None,
) -> list[Footprint]:  # fmt: skip
    """Measure each candidate as :func:`footprint` does, which explains ``first``. The bytes of
    ordinary backpropagation are measured on the first candidate."""
    measured: list[Footprint] = []
    ordinary: Curve | Highest | None = None
    for core, costs in several:
        sizes = footprint(core, inputs, state, ordinary=ordinary, memory=memory, first=first)
        ordinary = sizes.ordinary
        measured.append(replace(sizes, **costs))
    return measured


def fit_measured(
    core: Core, inputs: Inputs, state: Tensors, memory: Memory | None, sizes: Footprint
) -> tuple[Fit, Footprint]:
    """Return the fastest schedule for a core within a budget, and its footprint. If steps are not
    known to take equal bytes, each length that the schedule uses is measured. This repeats until
    the predicted peak is within the budget. Raises BudgetError if even the smallest schedule does
    not fit."""
    while True:
        fitted = fit(len(inputs), memory, sizes)
        if fitted.ordinary or not core.records_ranges or sizes.even:
            return fitted, sizes
        sizes = measured_for(fitted.schedule, sizes, core, inputs, state)
        if predict_peak_bytes(fitted.schedule, sizes) <= fitted.budget_bytes:
            return fitted, sizes


def fit_fastest(
    several: Sequence[Candidate], sizes: list[Footprint], inputs: Inputs, state: Tensors,
    memory: Memory | None,
) -> tuple[int, Fit]:  # fmt: skip
    """Return the number of the fastest candidate within a budget, and its fit. ``sizes`` are
    updated in place. Raises BudgetError if the budget is too small for every core."""
    length = len(inputs)
    minimum = min(size.least_bytes(length) for size in sizes)
    best: tuple[int, Fit] | None = None
    refusals: list[BudgetError] = []
    for number in sorted(range(len(sizes)), key=lambda n: sizes[n].least_time(length)):
        if best is not None and sizes[number].least_time(length) >= best[1].time:
            break
        core = several[number].core
        try:
            fitted, sizes[number] = fit_measured(core, inputs, state, memory, sizes[number])
        except BudgetError as refusal:
            refusals.append(refusal)
            continue
        if best is None or fitted.time < best[1].time:
            best = number, fitted
    if best is None:
        raise min(refusals, key=lambda refusal: refusal.minimum_bytes)
    return best[0], replace(best[1], minimum_bytes=min(minimum, best[1].minimum_bytes))
