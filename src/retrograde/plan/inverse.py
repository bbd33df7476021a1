"""The inverse questions: the memory for a cost, the longest sequence, and the trade-off curve.

Every cost falls with memory and grows with length, so each question is a bisection over
:func:`retrograde.plan.cost`; every answer is exact. T(a, m), the longest sequence at a cost of at
most a forward steps for each step, is that of G16, appendix B.2. For the mixed policy it is not
proven that C(t, m)/t grows with t. But a convex function that begins at 0
(:mod:`retrograde.plan.steps.hull`), rounded up, bounds the cost from below. Once that function is
above a·t + 1, all longer sequences are too expensive.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.plan.arguments import BASELINES, check_policy, integer, units_of
from retrograde.plan.planner import cost
from retrograde.plan.steps.closed_form import hsm_cost, ism_cost
from retrograde.plan.steps.hull import LONGEST
from retrograde.plan.steps.msm import mixed_bounds

__all__ = ["TradeOff", "least_memory", "longest", "trade_off"]

_MOST_POINTS = 10**6


@dataclass(frozen=True, eq=False)
class TradeOff:
    """The trade-off curve: every memory at which the cost of a sequence drops.

    Attributes:
        length: steps.
        policy: ``"hsm"``, ``"ism"`` or ``"msm"``.
        memory: slots, increasing from the least feasible, shape (points,).
        cost: forward steps with that memory, and up to the next one, shape (points,).
        alpha: size of an internal state, for ``"msm"``.
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


def least_memory(
    length: int,
    cost: int,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
) -> int:
    """Return the least memory with which a sequence costs at most ``cost``.

    Args:
        length: steps, at least 1.
        cost: forward steps allowed in all, the first sweep included.
        policy, alpha, beta: ``"hsm"``, ``"ism"`` or ``"msm"``, and its sizes as
            :func:`~retrograde.plan.plan` has them.

    Returns:
        Slots, in the policy's units.

    Raises:
        ScheduleError: no memory is enough for that cost; an argument is out of range.

    Example:
        >>> least_memory(1000, 3000), least_memory(1000, 2000, "msm", alpha=5)
        (43, 88)
    """
    steps, allowed = _ask(length, policy, alpha, beta), integer("cost", cost)
    enough = _enough(steps, policy, alpha, beta)
    least = _cost(steps, enough, policy, alpha, beta)
    if allowed < least:
        raise ScheduleError(
            f"cost is {allowed}: no memory is enough; {steps} steps of {policy!r} take at least "
            f"{least} forward steps, with a memory of {enough}"
        )
    low, high = 0, 1  # doubled from below, since tables grow with the memory
    while high < enough and _cost(steps, high, policy, alpha, beta) > allowed:
        low, high = high, min(2 * high, enough)
    return _bisect(low, high, lambda m: _cost(steps, m, policy, alpha, beta) <= allowed)


def longest(
    cost_per_step: float | Fraction,
    memory: int,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
) -> int:
    """Return T(a, m), the longest sequence at a cost of at most a = ``cost_per_step`` a step.

    Args:
        cost_per_step: forward steps allowed for each step, at least 1; used exactly as given.
        memory: slots, in the policy's units.
        policy, alpha, beta: ``"hsm"``, ``"ism"`` or ``"msm"``, and its sizes as
            :func:`~retrograde.plan.plan` has them.

    Returns:
        Steps; of any size for ``"hsm"`` and ``"ism"``.

    Raises:
        ScheduleError: an argument is out of range; or the answer is beyond what ``"msm"`` can
            plan.

    Example:
        >>> longest(2, 50), longest(3, 50), longest(2, 50, "ism")
        (52, 1378, 1375)
    """
    _ask(1, policy, alpha, beta)
    slots = integer("memory", memory)
    try:
        allowed = Fraction(cost_per_step)
    except (TypeError, ValueError, OverflowError):
        allowed = Fraction(0)
    if allowed < 1:
        raise ScheduleError(
            f"cost_per_step is {cost_per_step!r}: expected 1 or more, since every step is run once"
        )
    if policy == "msm":
        return _longest_mixed(allowed, slots, alpha, beta)

    def is_too_long(steps: int) -> bool:
        return _cost(steps, slots, policy, alpha, beta) > allowed * steps

    high = 2
    while not is_too_long(high):
        high *= 2
    return _bisect(high // 2, high, is_too_long) - 1


def trade_off(
    length: int, policy: str = "hsm", *, alpha: int | None = None, beta: int | None = None
) -> TradeOff:
    """Return the trade-off curve: every memory at which the cost drops.

    Args:
        length: steps, at least 1.
        policy, alpha, beta: ``"hsm"``, ``"ism"`` or ``"msm"``, and its sizes as
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
    steps = _ask(length, policy, alpha, beta)
    enough = _enough(steps, policy, alpha, beta)
    if enough > _MOST_POINTS:
        raise ScheduleError(
            f"the curve for {steps} steps has {enough} memories, expected at most {_MOST_POINTS}: "
            "ask for the cost at those of interest"
        )
    memories = np.arange(1, enough + 1)
    if policy == "msm":
        costs = np.asarray(cost(steps, memories, policy, alpha=alpha, beta=beta))
    else:
        costs = np.array([_cost(steps, m, policy) for m in range(1, enough + 1)], np.int64)
    drops = np.flatnonzero(np.diff(costs, prepend=costs[0] + 1))
    units = units_of(alpha, beta) if policy == "msm" else None
    return TradeOff(
        steps, policy, memories[drops], costs[drops],
        units.alpha if units else None, units.beta if units else None,
    )  # fmt: skip


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the least number in (``low``, ``high``] for which a monotone condition holds. Unlike
    :mod:`bisect`, this takes integers of any size."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _ask(length: int, policy: str, alpha: int | None, beta: int | None) -> int:
    """Check the policy and the length; return the length."""
    if policy in BASELINES:
        raise ScheduleError(
            f"the policy {policy!r} takes no memory, since what it keeps is fixed: use 'hsm', "
            "'ism' or 'msm'"
        )
    check_policy(policy, alpha=alpha, beta=beta)
    if policy == "msm":
        units_of(alpha, beta)
    return integer("length", length)


def _enough(length: int, policy: str, alpha: int | None, beta: int | None) -> int:
    """Return the memory above which nothing is cheaper (less than G16 says: its erratum 5)."""
    if policy == "msm":
        return 1 + units_of(alpha, beta).beta * (length - 1)
    return length if policy == "ism" else max(1, length - 1)


def _cost(
    length: int, memory: int, policy: str, alpha: int | None = None, beta: int | None = None
) -> int:
    if policy == "msm":
        return int(cost(length, memory, policy, alpha=alpha, beta=beta))
    return (hsm_cost if policy == "hsm" else ism_cost)(length, memory)


def _longest_mixed(allowed: Fraction, memory: int, alpha: int | None, beta: int | None) -> int:
    units = units_of(alpha, beta)
    sizes = {"alpha": units.alpha, "beta": units.beta}
    high = 2
    while int(mixed_bounds(high, memory, **sizes)) <= allowed * high + 1:
        high *= 2
        if high > LONGEST:
            raise ScheduleError(
                f"cost_per_step is {float(allowed):g} and memory {memory}: the longest sequence is "
                f"beyond {LONGEST // 2} steps, which 'msm' can plan; name less of either, or 'hsm'"
            )
    bounds = mixed_bounds(np.arange(1, high), memory, **sizes).tolist()
    # Integer arithmetic, since the allowed cost may be any fraction.
    share, whole = allowed.numerator, allowed.denominator
    may_fit = (t for t in range(high - 1, 0, -1) if bounds[t - 1] * whole <= share * t)
    return next(t for t in may_fit if _cost(t, memory, "msm", alpha, beta) * whole <= share * t)
