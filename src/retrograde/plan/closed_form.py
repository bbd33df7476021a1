"""HSM and ISM without a table: costs, splits, schedules and bounds in closed form.

HSM keeps hidden states. With m slots, the initial state's among them, and the working core free,

    C(t, m) = min over 1 ≤ y < t of  y + C(t−y, m−1) + C(y, m),     C(t, 1) = t(t+1)/2

(Gruslys et al. 2016, eqs. 1 to 3). With r the least integer such that t ≤ binom(m+r, m),

    C(t, m) = t + r·t − binom(m+r, m+1),

which is Revolve (Griewank & Walther 2000) plus the t forward steps of the working core: no step is
run more than r+1 times. A split y is optimal where both parts stay in range, that is where
binom(m+r−2, m) ≤ y ≤ binom(m+r−1, m) and binom(m+r−2, m−1) ≤ t−y ≤ binom(m+r−1, m−1).

ISM keeps internal states. With m slots, the working core's among them, and the initial state free,

    C(t, m) = min over 1 ≤ y ≤ t of  y + C(y−1, m) + C(t−y, m−1),   C(0, m) = 0

(eqs. 4, 5), and C_ISM(t, m) = C_HSM(t+1, m) − (t+1), with the splits of HSM at t+1.

Of the optimal splits the largest is taken. A cost or a split takes a few binomials, a schedule time
and memory linear in its actions. Scalars are exact at any size; arrays take lengths below 2³¹.
"""

from collections.abc import Callable
from functools import cache
from math import comb, factorial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScheduleError
from retrograde.schedule import Schedule, Units, Verb
from retrograde.schedule.actions import Code

__all__ = [
    "hsm_cost",
    "hsm_costs",
    "hsm_linear_bound",
    "hsm_power_bound",
    "hsm_schedule",
    "hsm_split",
    "ism_cost",
    "ism_costs",
    "ism_linear_bound",
    "ism_schedule",
    "ism_split",
]

_ADVANCE, _STORE, _RECORD, _LOAD, _FREE, _BACKWARD = (verb.value for verb in Verb)
_HSM_UNITS = Units(alpha=2, beta=1, core=0, initial=1)
_ISM_UNITS = Units(alpha=1, beta=1, core=1, initial=0)
_LONGEST_IN_ARRAYS = 2**31 - 1


def hsm_cost(length: int, memory: int) -> int:
    """The fewest forward steps with hidden states kept (G16 eqs. 1, 2, in closed form).

    Args:
        length: steps, at least 1.
        memory: hidden states, the initial one included, at least 1.

    Returns:
        Forward steps, exact.

    Example:
        >>> hsm_cost(1000, 50), hsm_cost(10**5, 1000)
        (2948, 298998)
    """
    r = _repetitions(length, memory)
    return length + r * length - comb(memory + r, memory + 1)


def ism_cost(length: int, memory: int) -> int:
    """The fewest forward steps with internal states kept (G16 eq. 4, in closed form).

    Args:
        length: steps, at least 0.
        memory: internal states, the working core included, at least 1.

    Returns:
        Forward steps, exact.

    Example:
        >>> ism_cost(1000, 50)
        1950
    """
    return hsm_cost(length + 1, memory) - (length + 1)


def hsm_costs(length: ArrayLike, memory: ArrayLike) -> NDArray[np.int64]:
    """As :func:`hsm_cost`, for arrays that broadcast.

    Args:
        length: steps, any shape, 1 to 2³¹ − 1.
        memory: hidden states, any shape that broadcasts with it.

    Returns:
        Forward steps, of the broadcast shape.

    Raises:
        ScheduleError: a length is too large for exact 64-bit arithmetic.

    Example:
        >>> hsm_costs([4, 10], 4).tolist()
        [7, 24]
    """
    lengths, memories = np.broadcast_arrays(np.asarray(length), np.asarray(memory))
    if lengths.size and int(lengths.max()) > _LONGEST_IN_ARRAYS:
        raise ScheduleError(
            f"length {int(lengths.max())} in an array: expected at most {_LONGEST_IN_ARRAYS}, "
            "where 64-bit costs are exact; ask for it alone, as an int"
        )
    costs = np.empty(lengths.shape, dtype=np.int64)
    for m in np.unique(memories).tolist():
        where = memories == m
        costs[where] = _costs_of_one_memory(lengths[where].astype(np.int64), m)
    return costs


def ism_costs(length: ArrayLike, memory: ArrayLike) -> NDArray[np.int64]:
    """As :func:`ism_cost`, for arrays that broadcast.

    Args:
        length: steps, any shape, 0 to 2³¹ − 2.
        memory: internal states, any shape that broadcasts with it.

    Returns:
        Forward steps, of the broadcast shape.

    Raises:
        ScheduleError: a length is too large for exact 64-bit arithmetic.

    Example:
        >>> ism_costs(1000, [1, 50, 1000]).tolist()
        [500500, 1950, 1000]
    """
    longer = np.asarray(length, dtype=np.int64) + 1
    costs: NDArray[np.int64] = hsm_costs(longer, memory) - longer
    return costs


def hsm_split(length: int, memory: int) -> int:
    """The largest optimal position D(t, m) of the next stored state (G16 eq. 3), without a table.

    Args:
        length: steps, at least 2.
        memory: hidden states, the initial one included.

    Returns:
        The position, 1 to length − 1. A last part of one step needs no slot.

    Example:
        >>> hsm_split(10, 4)
        5
    """
    return _split(length, memory, _repetitions(length, memory), _states_within())


def ism_split(length: int, memory: int) -> int:
    """The largest optimal position D(t, m) of the next internal state (G16 eq. 5).

    Args:
        length: steps, at least 1.
        memory: internal states, the working core included.

    Returns:
        The position y, 1 to length: step y − 1 is the one to record.

    Example:
        >>> ism_split(10, 1)
        10
    """
    return hsm_split(length + 1, memory)


def hsm_schedule(length: int, memory: int) -> Schedule:
    """The schedule of HSM, in single recorded steps.

    Args:
        length: steps.
        memory: hidden states, the initial one included.

    Returns:
        A schedule that costs :func:`hsm_cost`.

    Example:
        >>> print(hsm_schedule(2, 1))
        store 0, advance 0→1, record 1→2, backward 2→1, load 0, record 0→1, backward 1→0, free 0
    """
    within = _states_within()
    codes: list[Code] = [(_STORE, 0, 0)]
    waiting: list[
        tuple[int, int, int, int, bool]
    ] = []  # left parts, and whether the split is stored
    base, steps, slots, r = 0, length, memory, _repetitions(length, memory)
    while True:
        while steps > 1:
            y = _split(steps, slots, r, within)
            codes.append((_ADVANCE, base, base + y))
            if steps - y > 1:
                codes.append((_STORE, base + y, base + y))
            waiting.append((base, y, slots, r - 1, steps - y > 1))
            base, steps, slots = base + y, steps - y, slots - 1
        codes += [(_RECORD, base, base + 1), (_BACKWARD, base, base + 1)]
        if not waiting:
            break
        base, steps, slots, r, stored = waiting.pop()
        if stored:
            codes.append((_FREE, base + steps, base + steps))
        codes.append((_LOAD, base, base))
    codes.append((_FREE, 0, 0))
    return Schedule.from_codes(codes, length=length, policy="hsm", memory=memory, units=_HSM_UNITS)


def ism_schedule(length: int, memory: int) -> Schedule:
    """The schedule of ISM, in single recorded steps.

    Args:
        length: steps.
        memory: internal states, the working core included.

    Returns:
        A schedule that costs :func:`ism_cost`.

    Example:
        >>> print(ism_schedule(2, 1))
        store 0, advance 0→1, record 1→2, backward 2→1, load 0, record 0→1, backward 1→0, free 0
    """
    within = _states_within()
    codes: list[Code] = [(_STORE, 0, 0)]
    waiting: list[tuple[int, int, int, int]] = []  # left parts: base, steps + 1, slots, repetitions
    base, more, slots, r = 0, length + 1, memory, _repetitions(length + 1, memory)
    while more > 1:
        while more > 1:
            y = _split(more, slots, r, within)
            if y > 1:
                codes.append((_ADVANCE, base, base + y - 1))
            codes.append((_RECORD, base + y - 1, base + y))
            waiting.append((base, y, slots, r - 1))
            base, more, slots = base + y, more - y, slots - 1
        while waiting and more == 1:
            base, more, slots, r = waiting.pop()
            codes.append((_BACKWARD, base + more - 1, base + more))
        if more > 1:
            codes.append((_LOAD, base, base))
    codes.append((_FREE, 0, 0))
    return Schedule.from_codes(codes, length=length, policy="ism", memory=memory, units=_ISM_UNITS)


def hsm_power_bound(length: int, memory: int) -> float:
    """An upper bound of HSM's cost: m·t^(1 + 1/m) (G16, proposition 1).

    Args:
        length: steps.
        memory: hidden states.

    Returns:
        Forward steps.

    Example:
        >>> hsm_power_bound(100, 2)
        2000.0
    """
    return float(memory * length ** (1 + 1 / memory))


def hsm_linear_bound(length: int, memory: int) -> int | None:
    """An upper bound of HSM's cost: (a+1)·t for the least a with t < mᵃ/a! (G16, section 3.5).

    Args:
        length: steps.
        memory: hidden states.

    Returns:
        Forward steps, or None where no a will do.

    Example:
        >>> hsm_linear_bound(1000, 50)
        3000
    """
    for a in range(1, memory + 1):
        if length * factorial(a) < memory**a:
            return (a + 1) * length
    return None


def ism_linear_bound(length: int, memory: int) -> int | None:
    """An upper bound of ISM's cost: a·t for the least a with t ≤ mᵃ/a! (G16, supplement).

    Args:
        length: steps.
        memory: internal states.

    Returns:
        Forward steps, or None where no a will do.

    Example:
        >>> ism_linear_bound(1000, 50)
        2000
    """
    for a in range(1, memory + 1):
        if length * factorial(a) <= memory**a:
            return a * length
    return None


def _repetitions(length: int, memory: int) -> int:
    """The least r with length ≤ binom(memory + r, memory): doubled, then halved."""
    high = 1
    while comb(memory + high, memory) < length:
        high *= 2
    low = high // 2 if length > 1 else -1
    while high - low > 1:
        middle = (low + high) // 2
        if comb(memory + middle, memory) < length:
            low = middle
        else:
            high = middle
    return high


def _states_within() -> Callable[[int, int], int]:
    """binom(m+r, m), the longest sequence with no step run more than r+1 times; remembered."""

    @cache
    def within(m: int, r: int) -> int:
        return comb(m + r, m) if r >= 0 else 0

    return within


def _split(length: int, memory: int, r: int, within: Callable[[int, int], int]) -> int:
    right_at_least = within(memory - 1, r - 1)
    return min(length - 1, within(memory, r - 1), length - right_at_least)


def _costs_of_one_memory(lengths: NDArray[np.int64], memory: int) -> NDArray[np.int64]:
    if memory == 1:
        return lengths * (lengths + 1) // 2
    longest = int(lengths.max())
    reach, excess = [1], [0]  # binom(m+r, m) and binom(m+r, m+1) for r = 0, 1, …
    while reach[-1] < longest:
        r = len(reach)
        reach.append(reach[-1] * (memory + r) // r)
        excess.append(reach[-1] * r // (memory + 1))
    # The last may pass 64 bits. It need only be as long as the longest; its excess stays below.
    reach[-1] = min(reach[-1], longest)
    repetitions = np.searchsorted(np.array(reach, dtype=np.int64), lengths)
    costs: NDArray[np.int64] = (repetitions + 1) * lengths - np.array(excess)[repetitions]
    return costs
