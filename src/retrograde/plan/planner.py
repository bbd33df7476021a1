"""The questions a user asks first: the schedule, its cost, and what more memory buys.

HSM and ISM are closed forms (:mod:`retrograde.plan.steps.closed_form`), and so is MSM, the mix of
both (:mod:`~retrograde.plan.steps.mixed`). :mod:`~retrograde.plan.steps.best` says for which sizes
of states, and takes two tables (:mod:`~retrograde.plan.steps.tables`) for others.
:mod:`retrograde.plan.chains` plans a chain of unequal layers, where every policy counts
bytes.

===================  =========================================================  ================
policy               ``memory`` counts                                          also takes
===================  =========================================================  ================
``hsm``              hidden states, the initial one included
``ism``              internal states, the working core included
``msm``, ``best``    hidden states, the initial one included; or, with          alpha, beta,
                     ``state``, bytes                                           state
``store-all``        none: what it keeps is fixed                               alpha, beta
===================  =========================================================  ================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScheduleError
from retrograde.plan.arguments import check_chain_policy, check_policy, integer, integers, units_of
from retrograde.plan.chains import plan_chain
from retrograde.plan.steps.best import (
    best_cost,
    best_schedule,
    closed_form,
    enough_for,
    tabled_costs,
)
from retrograde.plan.steps.closed_form import hsm_cost, hsm_segments, ism_cost
from retrograde.plan.steps.mixed import Mixed
from retrograde.plan.steps.unfold import Segments, store_all
from retrograde.schedule import Chain, Schedule, Units
from retrograde.units import Memory, as_bytes

_ISM = Units(alpha=1, beta=1, core=1, initial=0)
_MOST_POINTS = 10**6  # of a curve
_LONGEST_AT_ONCE = 2**31 - 1  # steps in an array whose costs fit 64 bits for certain


def plan(
    length: int | Chain,
    memory: Memory | None = None,
    policy: str | None = None,
    *,
    alpha: int | None = None,
    beta: int | None = None,
    state: int | None = None,
    certify: bool = False,
) -> Schedule:
    """Return the schedule of a policy, in the longest ranges.

    Args:
        length: steps, at least 1; or a :class:`~retrograde.schedule.Chain` of unequal layers.
        memory: slots, in the policy's units, at least 1. For a chain, and where ``state`` is
            given, bytes: a text such as ``"64MiB"``, or a share of ordinary backpropagation's
            (``0.05``, ``"5%"``). None for ``"store-all"``.
        policy: ``"hsm"`` (the default for lengths), ``"ism"``, ``"msm"`` (the default for chains),
            or ``"store-all"``; for lengths also ``"best"``, the least that any legal schedule is
            known to take. It differs from ``"msm"`` where α < β + a hidden state.
        alpha: size of an internal state in hidden states, for ``"msm"`` and ``"best"`` (and for
            the peak of ``"store-all"``, where it is 2 by default); in bytes where ``state`` is
            given.
        beta: the same when its input hidden state is in memory; ``alpha`` less a hidden state by
            default, and at least 1.
        state: size of a hidden state in bytes, for ``"msm"`` and ``"best"`` with real sizes.
        certify: for a chain whose bytes have too many levels for an exact plan, find a ``bound``
            too; this takes as long again.

    Returns:
        The cheapest schedule of that policy whose peak is within ``memory``; of those, one by the
        rule for ties of its module. If it is not proven the cheapest, its ``bound`` is below its
        cost. For a chain, the schedule with the fewest seconds: see
        :mod:`retrograde.plan.chains`.

    Raises:
        ScheduleError: an argument is missing, not taken or out of range; the schedule, or a table
            that ``"msm"`` needs, would be too large.
        BudgetError: the memory is less than any schedule of a chain needs.
        UnitError: the memory cannot be read.

    Example:
        >>> schedule = plan(1000, 50, policy="hsm")
        >>> schedule.cost, schedule.peak
        (2948, 50)
        >>> print(plan(3, 3, "msm", alpha=2))
        store 0, record 0→3, backward 3→0, free 0
        >>> schedule = plan(1000, "5%", "best", state=65_536, alpha=458_752)
        >>> schedule.cost, schedule.peak <= schedule.memory
        (1953, True)
        >>> chain = Chain([1] * 5, [2] * 5, output_bytes=[1] * 5, internal_bytes=[3] * 5)
        >>> plan(chain, "50%").seconds, plan(chain, policy="store-all").seconds
        (19.0, 15.0)
    """
    if isinstance(length, Chain):
        foreign = {"alpha": alpha, "beta": beta, "state": state}
        policy = policy or "msm"
        check_chain_policy(policy, has_memory=memory is not None, **foreign)
        return plan_chain(length, memory, policy, certify=certify)
    policy = policy or "hsm"
    check_policy(policy, alpha=alpha, beta=beta, state=state, has_memory=memory is not None)
    steps = integer("length", length)
    if memory is None:
        return store_all(steps, units_of(2 if alpha is None else alpha, beta))
    if state is not None:
        sizes = units_of(alpha, beta, state)
        room = as_bytes(memory, enough_for(steps, sizes))
        if room < sizes.state:
            raise ScheduleError(
                f"memory is {room} bytes: expected at least {sizes.state}, the initial state alone"
            )
        return best_schedule(steps, room, sizes, policy)
    if isinstance(memory, str | float):
        raise ScheduleError(
            f"memory is {memory!r}: expected an integer, 1 or more; bytes and shares need all "
            "sizes in bytes: policy='best' with state=, alpha= and beta="
        )
    slots = integer("memory", memory)
    if policy in ("msm", "best"):
        return best_schedule(steps, slots, units_of(alpha, beta), policy)
    segments = Segments()
    if policy == "hsm":
        root, bound, units = hsm_segments(steps, slots, segments), hsm_cost(steps, slots), Units()
    else:
        root = Mixed(slots - 1, 1, wide=True).schedule(steps, segments)
        bound, units = ism_cost(steps, slots), _ISM
    return segments.schedule(
        root, length=steps, policy=policy, memory=slots, units=units, bound=bound
    )


@overload
def cost(
    length: int, memory: int | None = None, policy: str = "hsm", *, alpha: int | None = None,
    beta: int | None = None,
) -> int: ...  # fmt: skip


@overload
def cost(
    length: ArrayLike, memory: ArrayLike | None = None, policy: str = "hsm", *,
    alpha: int | None = None, beta: int | None = None,
) -> int | NDArray[np.int64]: ...  # fmt: skip


def cost(
    length: ArrayLike,
    memory: ArrayLike | None = None,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
) -> int | NDArray[np.int64]:
    """Return the forward steps that a policy runs, the first sweep included.

    Args:
        length: steps, at least 1; an integer or an array of integers.
        memory: slots, as :func:`plan` has it; an integer or an array that broadcasts with
            ``length``.
        policy, alpha, beta: as :func:`plan` has them.

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
    check_policy(policy, alpha=alpha, beta=beta, has_memory=memory is not None)
    if memory is None:
        return integers("length", length).copy() if np.ndim(length) else integer("length", length)
    cost_of = _one_cost(policy, alpha, beta)
    if np.ndim(length) == 0 and np.ndim(memory) == 0:
        return cost_of(integer("length", length), integer("memory", memory))
    lengths, memories = integers("length", length), integers("memory", memory)
    levels = np.unique(memories).tolist()
    lengths, memories = np.broadcast_arrays(lengths, memories)
    if lengths.size and int(lengths.max()) > _LONGEST_AT_ONCE:
        return _costs_one_by_one(lengths, memories, cost_of)
    costs = np.empty(lengths.shape, np.int64)
    for slots in levels:
        if (form := _form(policy, slots, alpha, beta)) is None:
            tabled = tabled_costs(lengths, memories, units_of(alpha, beta), policy)
            return _costs_one_by_one(lengths, memories, cost_of) if tabled is None else tabled
        where = memories == slots if len(levels) > 1 else ...
        costs[where] = form.costs(lengths[where])
    return costs


def _form(policy: str, slots: int, alpha: int | None, beta: int | None) -> Mixed | None:
    """Return the closed form of a policy; HSM and ISM are MSM of extreme sizes."""
    if policy == "hsm":
        return Mixed(slots - 1, slots)
    if policy == "ism":
        return Mixed(slots - 1, 1, wide=True)
    return closed_form(slots, units_of(alpha, beta), policy)


def _one_cost(policy: str, alpha: int | None, beta: int | None) -> Callable[[int, int], int]:
    if policy == "hsm":
        return hsm_cost
    if policy == "ism":
        return ism_cost
    units = units_of(alpha, beta)
    return lambda length, memory: best_cost(length, memory, units, policy)


def _costs_one_by_one(
    lengths: NDArray[np.int64], memories: NDArray[np.int64], cost_of: Callable[[int, int], int]
) -> NDArray[np.int64]:
    costs = [*map(cost_of, lengths.ravel().tolist(), memories.ravel().tolist())]
    if max(costs) >= 2**63:
        raise ScheduleError(
            f"a cost in the array is {max(costs)}: expected less than 2**63, for 64-bit integers; "
            "ask for it alone, as an int"
        )
    return np.array(costs, dtype=np.int64).reshape(lengths.shape)


@dataclass(frozen=True, eq=False)
class TradeOff:
    """The trade-off curve: every memory at which the cost of a sequence drops.

    Attributes:
        length: steps.
        policy: ``"hsm"``, ``"ism"``, ``"msm"`` or ``"best"``.
        memory: slots, increasing from the least feasible, shape (points,).
        cost: forward steps with that memory, and up to the next one, shape (points,).
        alpha: size of an internal state, for ``"msm"`` and ``"best"``.
        beta: the same where its input is in memory.

    Example:
        >>> trade_off(4, "ism").cost.tolist()
        [10, 6, 5, 4]
    """

    length: int
    policy: str
    memory: NDArray[np.int64] = field(repr=False)
    cost: NDArray[np.int64] = field(repr=False)
    alpha: int | None = None
    beta: int | None = None

    def __len__(self) -> int:
        return len(self.memory)

    def at(self, memory: int) -> int:
        """Return the cost with ``memory`` slots, at least 1, whether or not it is a point.

        Example:
            >>> trade_off(4, "ism").at(100)
            4
        """
        slots = integer("memory", memory)
        return int(self.cost[np.searchsorted(self.memory, slots, side="right") - 1])


def trade_off(
    length: int, policy: str = "hsm", *, alpha: int | None = None, beta: int | None = None
) -> TradeOff:
    """Return the trade-off curve: every memory at which the cost drops.

    Args:
        length: steps, at least 1.
        policy, alpha, beta: ``"hsm"``, ``"ism"``, ``"msm"`` or ``"best"``, and its sizes as
            :func:`~retrograde.plan.plan` has them.

    Returns:
        Memories and costs; the last cost is the least of all.

    Raises:
        ScheduleError: an argument is out of range, or there are more than a million memories.

    Example:
        >>> curve = trade_off(1000, "msm", alpha=5)
        >>> len(curve), int(curve.memory[-1]), int(curve.cost[-1]), curve.at(300)
        (1085, 3997, 1000, 1928)
    """
    check_policy(policy, alpha=alpha, beta=beta)
    units = units_of(alpha, beta) if policy in ("msm", "best") else None
    steps = integer("length", length)
    # Less than G16 says: erratum 5.
    enough = steps if policy == "ism" else max(1, steps - 1)
    if units is not None:
        enough = enough_for(steps, units)
    if enough > _MOST_POINTS:
        raise ScheduleError(
            f"the curve for {steps} steps has {enough} memories, expected at most {_MOST_POINTS}: "
            "ask for the cost at those of interest"
        )
    memories = np.arange(1, enough + 1)
    costs = np.asarray(cost(steps, memories, policy, alpha=alpha, beta=beta))
    drops = np.flatnonzero(np.diff(costs, prepend=costs[0] + 1))
    sizes = (units.alpha, units.beta) if units else (None, None)
    return TradeOff(steps, policy, memories[drops], costs[drops], *sizes)
