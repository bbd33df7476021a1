"""The questions a user asks first: the schedule, its cost and its split.

HSM and ISM are closed forms (:mod:`retrograde.plan.steps.closed_form`); their schedules come from
:mod:`~retrograde.plan.steps.hsm` and :mod:`~retrograde.plan.steps.ism`. MSM is a dynamic program
around a convex bound (:mod:`retrograde.plan.steps.msm`). Baselines are in
:mod:`retrograde.plan.steps.baselines`. :mod:`retrograde.plan.chain.search` plans a chain of unequal
layers, where every policy counts bytes. :mod:`retrograde.plan.inverse` has the inverse questions.

===================  =========================================================  ================
policy               ``memory`` counts                                          also takes
===================  =========================================================  ================
``hsm``              hidden states, the initial one included
``ism``              internal states, the working core included
``msm``              hidden states, the initial one included; or, with          alpha, beta,
                     ``state``, bytes                                           state
``store-all`` …      none: what it keeps is fixed                               alpha, beta
``chen-recursive``   none                                                       alpha, beta,
                                                                                segments
===================  =========================================================  ================
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScheduleError
from retrograde.plan.arguments import (
    check_chain_policy,
    check_policy,
    integer,
    integers,
    units_of,
)
from retrograde.plan.chain.search import plan_chain, record_everything
from retrograde.plan.steps import baselines, closed_form
from retrograde.plan.steps import msm as mixed
from retrograde.plan.steps.coarse import coarsen
from retrograde.plan.steps.hsm import hsm_schedule
from retrograde.plan.steps.ism import ism_schedule
from retrograde.plan.steps.unfold import check_size
from retrograde.schedule import Chain, Schedule, Units, merge
from retrograde.schedule.schedule import forward_ranges
from retrograde.units import Memory, as_bytes

__all__ = ["cost", "plan", "split"]

_BASELINES: Mapping[str, Callable[[int, Units], Schedule]] = MappingProxyType(
    {
        "store-all": baselines.store_all,
        "store-hidden": baselines.store_hidden,
        "recompute-all": baselines.recompute_all,
        "chen-sqrt": baselines.chen_sqrt,
        "chen-recursive": baselines.chen_recursive,
    }
)
_ACTIONS_PER_STEP = {"store-hidden": 6, "recompute-all": 4, "chen-recursive": 6}  # at most


def plan(
    length: int | Chain,
    memory: Memory | None = None,
    policy: str | None = None,
    *,
    alpha: int | None = None,
    beta: int | None = None,
    state: int | None = None,
    segments: int | None = None,
    certify: bool = False,
) -> Schedule:
    """Return the schedule of a policy, in the longest ranges.

    Args:
        length: steps, at least 1; or a :class:`~retrograde.schedule.Chain` of unequal layers.
        memory: slots, in the policy's units, at least 1. For a chain, and where ``state`` is
            given, bytes: a text such as ``"64MiB"``, or a share of ordinary backpropagation's
            (``0.05``, ``"5%"``). None for a baseline.
        policy: ``"hsm"`` (the default for lengths), ``"ism"``, ``"msm"`` (the default for chains),
            or a baseline: ``"store-all"``; for lengths ``"store-hidden"``, ``"recompute-all"``,
            ``"chen-sqrt"`` and ``"chen-recursive"`` too.
        alpha: size of an internal state in hidden states, for ``"msm"`` (and for the peak of a
            baseline, where it is 2 by default); in bytes where ``state`` is given.
        beta: the same when its input hidden state is in memory; ``alpha`` less a hidden state by
            default, and at least 1.
        state: size of a hidden state in bytes, for ``"msm"`` with real sizes. Sizes are rounded to
            units so coarse that at most 1 % of the memory is wasted.
        segments: parts at each division, for ``"chen-recursive"``; 2 by default.
        certify: for a chain whose ``bound`` is more than 1 % away, look for a higher bound and a
            faster schedule; this takes as long again.

    Returns:
        The cheapest schedule of that policy whose peak is within ``memory``; of those, one with the
        fewest actions. If it is not proven the cheapest, its ``bound`` is below its cost. For a
        chain, the schedule with the fewest seconds: see :mod:`retrograde.plan.chain.search`.

    Raises:
        ScheduleError: an argument is missing, not taken or out of range; the schedule, or the
            table that finds it, would be too large.
        BudgetError: the memory is less than any schedule of a chain needs.
        UnitError: the memory cannot be read.

    Example:
        >>> schedule = plan(1000, 50, policy="hsm")
        >>> schedule.cost, schedule.peak
        (2948, 50)
        >>> print(plan(3, 3, "msm", alpha=2))
        store 0, record 0→3, backward 3→0, free 0
        >>> schedule = plan(1000, "5%", "msm", state=65_536, alpha=430_080)
        >>> schedule.cost, schedule.peak <= schedule.memory
        (1954, True)
        >>> chain = Chain([1] * 5, [2] * 5, output_bytes=[1] * 5, internal_bytes=[3] * 5)
        >>> plan(chain, "50%").seconds, plan(chain, policy="store-all").seconds
        (19.0, 15.0)
    """
    if isinstance(length, Chain):
        foreign = {"alpha": alpha, "beta": beta, "state": state, "segments": segments}
        policy = policy or "msm"
        check_chain_policy(policy, has_memory=memory is not None, **foreign)
        if memory is None:
            return record_everything(length)
        return plan_chain(length, memory, policy, certify=certify)
    policy = policy or "hsm"
    check_policy(
        policy, alpha=alpha, beta=beta, state=state, segments=segments,
        has_memory=memory is not None,
    )  # fmt: skip
    steps = integer("length", length)
    if memory is None:
        return merge(_baseline(steps, policy, alpha, beta, segments))
    if state is not None:
        return _plan_bytes(steps, memory, units_of(alpha, beta, state))
    if isinstance(memory, str | float):
        raise ScheduleError(
            f"memory is {memory!r}: expected an integer, 1 or more; bytes and shares need all "
            "sizes in bytes: policy='msm' with state=, alpha= and beta="
        )
    slots = integer("memory", memory)
    if policy == "hsm":
        return merge(hsm_schedule(steps, slots))
    if policy == "ism":
        return merge(ism_schedule(steps, slots))
    units = units_of(alpha, beta)
    return mixed.plan_blocks(steps, slots, alpha=units.alpha, beta=units.beta)


@overload
def cost(
    length: int,
    memory: int | None = None,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
    segments: int | None = None,
) -> int: ...


@overload
def cost(
    length: ArrayLike,
    memory: ArrayLike | None = None,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
    segments: int | None = None,
) -> int | NDArray[np.int64]: ...


def cost(
    length: ArrayLike,
    memory: ArrayLike | None = None,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
    segments: int | None = None,
) -> int | NDArray[np.int64]:
    """Return the forward steps that a policy runs, the first sweep included.

    Args:
        length: steps, at least 1; an integer or an array of integers.
        memory: slots, as :func:`plan` has it; an integer or an array that broadcasts with
            ``length``.
        policy, alpha, beta, segments: as :func:`plan` has them.

    Returns:
        An exact integer of any size; for arrays, 64-bit integers of the broadcast shape.

    Raises:
        ScheduleError: as :func:`plan`; also if a cost in an array does not fit 64 bits.

    Example:
        >>> cost(1000, 50)
        2948
        >>> cost(1000, [1, 50, 1000], policy="ism").tolist()
        [500500, 1950, 1000]
    """
    check_policy(policy, alpha=alpha, beta=beta, segments=segments, has_memory=memory is not None)
    if np.ndim(length) == 0 and (memory is None or np.ndim(memory) == 0):
        slots = None if memory is None else integer("memory", memory)
        return _cost_of_one(integer("length", length), slots, policy, alpha, beta, segments)
    lengths = integers("length", length)
    if memory is None:
        one = [
            _cost_of_one(t, None, policy, alpha, beta, segments) for t in lengths.ravel().tolist()
        ]
        return np.array(one, dtype=np.int64).reshape(lengths.shape)
    memories = integers("memory", memory)
    if policy == "hsm":
        return closed_form.hsm_costs(lengths, memories)
    if policy == "ism":
        return closed_form.ism_costs(lengths, memories)
    units = units_of(alpha, beta)
    return mixed.mixed_costs(lengths, memories, alpha=units.alpha, beta=units.beta)


def split(length: int, memory: int, policy: str = "hsm") -> int:
    """Return where HSM or ISM keeps its first state, D(t, m), without a table (G16 eqs. 3, 5).

    Args:
        length: steps; at least 2 for ``"hsm"``, where one step has no split.
        memory: slots, as :func:`plan` has it.
        policy: ``"hsm"`` or ``"ism"``.

    Returns:
        An optimal position y: HSM stores the hidden state y, and ISM records the step y − 1.
        HSM's is the position of :func:`plan`; ISM's is HSM's for one step more.

    Raises:
        ScheduleError: an argument is out of range, or the policy is another.

    Example:
        >>> split(1000, 50), split(10**12, 10**6, "ism")
        (51, 2000001)
    """
    if policy not in ("hsm", "ism"):
        check_policy(policy, alpha=1)
        raise ScheduleError(
            f"the policy {policy!r} keeps states of two kinds: expected 'hsm' or 'ism'; read the "
            "actions of a plan instead"
        )
    slots = integer("memory", memory)
    if policy == "hsm":
        return closed_form.hsm_split(integer("length", length, 2), slots)
    return closed_form.ism_split(integer("length", length), slots)


def _plan_bytes(length: int, memory: Memory, units: Units) -> Schedule:
    """MSM with sizes in bytes: both the plan and its bound are found in coarser units."""
    room = as_bytes(memory, units.state + units.beta * (length - 1))
    if room < units.state:
        raise ScheduleError(
            f"memory is {room} bytes: expected at least {units.state}, the initial state alone"
        )
    if room >= units.state + units.beta * (length - 1):
        schedule = merge(baselines.store_all(length, units))
        return replace(schedule, policy="msm", memory=room, bound=length)
    coarse = coarsen(room, units)
    sizes = {"state": coarse.state, "alpha": coarse.alpha, "beta": coarse.beta}
    schedule = mixed.plan_blocks(length, coarse.memory, **sizes)
    bound = schedule.bound
    if coarse.most > coarse.memory:
        bound = int(mixed.mixed_bounds(length, coarse.most, **sizes))
    return replace(schedule, memory=room, units=units, bound=bound)


def _cost_of_one(
    length: int,
    memory: int | None,
    policy: str,
    alpha: int | None,
    beta: int | None,
    segments: int | None,
) -> int:
    if memory is None:
        starts, stops = forward_ranges(_baseline(length, policy, alpha, beta, segments))
        return int((stops - starts).sum())
    if policy == "hsm":
        return closed_form.hsm_cost(length, memory)
    if policy == "ism":
        return closed_form.ism_cost(length, memory)
    units = units_of(alpha, beta)
    return int(mixed.mixed_costs(length, memory, alpha=units.alpha, beta=units.beta)[()])


def _baseline(
    length: int, policy: str, alpha: int | None, beta: int | None, segments: int | None
) -> Schedule:
    units = units_of(2 if alpha is None else alpha, beta)
    parts = None if segments is None else integer("segments", segments, 2)
    check_size(length, _ACTIONS_PER_STEP.get(policy, 0) * length)
    if parts is None:
        return _BASELINES[policy](length, units)
    return baselines.chen_recursive(length, units, segments=parts)
