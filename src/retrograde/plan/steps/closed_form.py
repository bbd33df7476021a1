"""HSM and ISM without a table: costs, splits and bounds in closed form.

HSM keeps hidden states. With m slots, the initial state included, and the working core free,

    C(t, m) = min over 1 ≤ y < t of  y + C(t−y, m−1) + C(y, m),     C(t, 1) = t(t+1)/2

(Gruslys et al. 2016, eqs. 1 to 3). With r the least integer such that t ≤ binom(m+r, m),

    C(t, m) = t + r·t − binom(m+r, m+1),

which is Revolve (Griewank & Walther 2000) plus the t forward steps of the working core: no step is
run more than r+1 times. A split y is optimal where both parts stay in range, that is where
binom(m+r−2, m) ≤ y ≤ binom(m+r−1, m) and binom(m+r−2, m−1) ≤ t−y ≤ binom(m+r−1, m−1).

ISM keeps internal states. With m slots, the working core included, and the initial state free,

    C(t, m) = min over 1 ≤ y ≤ t of  y + C(y−1, m) + C(t−y, m−1),   C(0, m) = 0

(eqs. 4, 5), and C_ISM(t, m) = C_HSM(t+1, m) − (t+1), with the splits of HSM at t+1.

A cost or a split takes a few binomials. Scalars are exact at any size. Arrays are exact too, and
fast for lengths below 2³¹; a cost in an array that does not fit 64 bits is refused.
"""

from math import comb, factorial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScheduleError

__all__ = [
    "hsm_cost",
    "hsm_costs",
    "hsm_linear_bound",
    "hsm_split",
    "ism_cost",
    "ism_costs",
    "ism_linear_bound",
    "ism_split",
    "repetitions",
    "split_of",
]

_LONGEST_AT_ONCE = 2**31 - 1


def hsm_cost(length: int, memory: int) -> int:
    """The fewest forward steps with ``memory`` hidden states, the initial one included."""
    r = repetitions(length, memory)
    return length + r * length - comb(memory + r, memory + 1)


def ism_cost(length: int, memory: int) -> int:
    """The fewest forward steps with ``memory`` internal states, the working core included."""
    return hsm_cost(length + 1, memory) - (length + 1)


def hsm_costs(length: ArrayLike, memory: ArrayLike) -> NDArray[np.int64]:
    """As :func:`hsm_cost`, for arrays that broadcast; ScheduleError beyond 64 bits."""
    lengths, memories = np.broadcast_arrays(np.asarray(length), np.asarray(memory))
    if lengths.size and int(lengths.max()) > _LONGEST_AT_ONCE:
        return _costs_one_by_one(lengths, memories)
    costs = np.empty(lengths.shape, dtype=np.int64)
    for m in np.unique(memories).tolist():
        where = memories == m if memories.size > 1 else ...
        costs[where] = _costs_of_one_memory(lengths[where].astype(np.int64), m)
    return costs


def ism_costs(length: ArrayLike, memory: ArrayLike) -> NDArray[np.int64]:
    """As :func:`ism_cost`, for arrays that broadcast; ScheduleError beyond 64 bits."""
    longer = np.asarray(length, dtype=np.int64) + 1
    costs: NDArray[np.int64] = hsm_costs(longer, memory) - longer
    return costs


def hsm_split(length: int, memory: int) -> int:
    """Return the largest D(t, m), position of the next stored state (G16 eq. 3), with fewest
    actions.

    Fewest actions means fewest parts of one step. Let r be that of the module's docstring. There
    are z = binom(m+r−2, r−1) such parts up to t = binom(m+r−1, m) + z, and one more for each later
    step. Up to there, a part may take a second step for free; later steps are parts of their own.
    By Pascal's rule z is the sum of both parts' z, so both use their free steps first.
    """
    return split_of(length, memory, repetitions(length, memory))


def ism_split(length: int, memory: int) -> int:
    """Return an optimal position D(t, m) = y (G16 eq. 5), 1 to length: step y − 1 is recorded."""
    return hsm_split(length + 1, memory)


def hsm_linear_bound(length: int, memory: int) -> int | None:
    """Return an upper bound of HSM's cost: (a+1)·t for the least a with t < mᵃ/a!. None where there
    is no such a. G16, section 3.5."""
    for a in range(1, memory + 1):
        if length * factorial(a) < memory**a:
            return (a + 1) * length
    return None


def ism_linear_bound(length: int, memory: int) -> int | None:
    """Return an upper bound of ISM's cost: a·t for the least a with t ≤ mᵃ/a!. None where there is
    no such a. G16, supplement."""
    for a in range(1, memory + 1):
        if length * factorial(a) <= memory**a:
            return a * length
    return None


def repetitions(length: int, memory: int) -> int:
    """Return the most times that a step is run again: the least r with t ≤ binom(m + r, m)."""
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


def split_of(length: int, memory: int, r: int) -> int:
    """Return the :func:`hsm_split` of a part whose steps are run again r ≥ 1 times at most. The
    part has binom(memory + r − 1, memory) to binom(memory + r, memory) steps, at least 2. Its left
    part has r − 1 repetitions, its right part a slot less."""
    if r == 1:
        return 1
    least = _within(memory, r - 2)
    beyond = length - least - _within(memory - 1, r - 1)
    free, free_right = _free(memory, r - 1), _free(memory - 1, r)
    if beyond <= free + free_right:
        return least + min(beyond, free)
    return min(_within(memory, r - 1), least + beyond - free_right)


def _within(m: int, r: int) -> int:
    """Return binom(m+r, m), the longest sequence with no step run more than r+1 times."""
    return comb(m + r, r)


def _free(m: int, r: int) -> int:
    """Return the steps beyond the least that add no part of one step: binom(m+r−2, r−1)."""
    return comb(m + r - 2, r - 1) if m else 0


def _costs_one_by_one(lengths: NDArray[Any], memories: NDArray[Any]) -> NDArray[np.int64]:
    pairs = zip(lengths.ravel().tolist(), memories.ravel().tolist(), strict=True)
    costs = [hsm_cost(t, m) for t, m in pairs]
    if max(costs) >= 2**63:
        raise ScheduleError(
            f"a cost in the array is {max(costs)}: expected less than 2**63, for 64-bit integers; "
            "ask for it alone, as an int"
        )
    return np.array(costs, dtype=np.int64).reshape(lengths.shape)


def _costs_of_one_memory(lengths: NDArray[np.int64], memory: int) -> NDArray[np.int64]:
    if memory == 1:
        return lengths * (lengths + 1) // 2
    longest = int(lengths.max())
    reach, excess = [1], [0]  # binom(m+r, m) and binom(m+r, m+1) for r = 0, 1, …
    while reach[-1] < longest:
        r = len(reach)
        reach.append(reach[-1] * (memory + r) // r)
        excess.append(reach[-1] * r // (memory + 1))
    # The last entry may not fit 64 bits. The longest length will do in its place.
    reach[-1] = min(reach[-1], longest)
    repetitions = np.searchsorted(np.array(reach, dtype=np.int64), lengths)
    costs: NDArray[np.int64] = (repetitions + 1) * lengths - np.array(excess)[repetitions]
    return costs
