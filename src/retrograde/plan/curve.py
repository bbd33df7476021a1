"""The trade-off curve: every memory at which the cost of a sequence drops."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.plan.arguments import check_policy, integer, units_of
from retrograde.plan.planner import cost as cost_of
from retrograde.plan.steps.best import enough_for

_MOST_POINTS = 10**6


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
    costs = np.asarray(cost_of(steps, memories, policy, alpha=alpha, beta=beta))
    drops = np.flatnonzero(np.diff(costs, prepend=costs[0] + 1))
    sizes = (units.alpha, units.beta) if units else (None, None)
    return TradeOff(steps, policy, memories[drops], costs[drops], *sizes)
