"""Which way answers for hidden and internal states of given sizes: a closed form, or two tables.

===================  ==========================================  ===============================
sizes                ``"msm"``, the paper's recurrence           ``"best"``, the A of theorem C
===================  ==========================================  ===============================
s | β, α ≥ β + s     closed form (theorem A)                     the same
s | β, α = β         closed form (theorem A)                     two tables (theorem C)
other                a table                                     the same where α ≥ β + s, else
                                                                 two tables
===================  ==========================================  ===============================

Memory that is enough to record every step needs neither. Where a table would take more than
:data:`~retrograde.plan.steps.tables.MOST_SUMS`, ``"msm"`` is refused. ``"best"`` then rounds sizes
up to a larger unit, and its bound is that of :func:`~retrograde.plan.steps.tables.lower_bound`.
"""

from dataclasses import replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from retrograde.errors import ScheduleError
from retrograde.plan.steps.mixed import Mixed
from retrograde.plan.steps.tables import MOST_SUMS, Tables, lower_bound, sums
from retrograde.plan.steps.unfold import Segments
from retrograde.schedule import Schedule, Units

_MOST_LEVELS = 20_000  # units of memory, for a bound
_MOST_PARTS = 100  # into which a hidden state is divided, where sizes are rounded

_Ints = NDArray[np.int64]


def best_schedule(length: int, memory: int, units: Units, policy: str) -> Schedule:
    """Return the cheapest schedule of ``"msm"`` or ``"best"``, in the longest ranges. ``memory`` is
    in the unit of the sizes. ScheduleError where ``"msm"`` needs too large a table."""
    segments, is_held = Segments(), True
    if memory >= enough_for(length, units):
        root, bound = segments.add(0, length), length
    elif form := closed_form(memory, units, policy):
        root, bound = form.schedule(length, segments), form.cost(length)
    elif table := _table(length, memory, units, policy):
        room = memory // _divisor(units)
        root, is_held = table.schedule(length, room, segments)
        bound = int(table.cost(length, room))
    elif policy == "best":
        return _rounded(length, memory, units)
    else:
        raise _too_large(length, memory, units)
    return segments.schedule(
        root, length=length, policy=policy, memory=memory, units=units, bound=bound, is_held=is_held
    )


def best_cost(length: int, memory: int, units: Units, policy: str) -> int:
    """Return the cost of :func:`best_schedule`."""
    if memory >= enough_for(length, units):
        return length
    if form := closed_form(memory, units, policy):
        return form.cost(length)
    if table := _table(length, memory, units, policy):
        return int(table.cost(length, memory // _divisor(units)))
    return best_schedule(length, memory, units, policy).cost


def tabled_costs(lengths: _Ints, memories: _Ints, units: Units, policy: str) -> _Ints | None:
    """As :func:`best_cost`, for arrays of one shape and a state of 1; None if the table for all of
    them would be too large."""
    longest = int(lengths.max())
    most = min(int(memories.max()), enough_for(longest, units))
    if (table := _table(longest, most, units, policy)) is None:
        return None
    return np.asarray(table.cost(lengths, np.minimum(memories, most)), np.int64)


def enough_for(length: int, units: Units) -> int:
    """Return the memory in which every step is recorded (less than G16 says: erratum 5)."""
    return units.state + units.beta * (length - 1)


def closed_form(memory: int, units: Units, policy: str) -> Mixed | None:
    """Return the closed form of a policy, if there is one for these sizes."""
    state, alpha, beta = units.state, units.alpha, units.beta
    wide = alpha == beta and policy == "msm"
    if beta % state or not (wide or alpha >= beta + state):
        return None
    return Mixed(memory // state - 1, beta // state, wide)


def _divisor(units: Units) -> int:
    return gcd(units.state, units.alpha, units.beta)


def _table(length: int, memory: int, units: Units, policy: str) -> Tables | None:
    """Return the tables in the largest common unit; None where they would be too large."""
    unit = _divisor(units)
    if sums(length, memory // unit) > MOST_SUMS:
        return None
    reuse = policy == "best" and units.alpha < units.beta + units.state
    return Tables.fill(length, memory // unit, _scaled(units, unit), reuse=reuse)


def _scaled(units: Units, unit: int) -> Units:
    state, alpha, beta = units.state // unit, units.alpha // unit, units.beta // unit
    return Units(alpha=alpha, beta=beta, core=0, initial=state, state=state)


def _rounded(length: int, memory: int, units: Units) -> Schedule:
    """Return the cheaper of two schedules with sizes rounded up. Their unit is a hidden state, for
    the closed form, or a segment of it, the segment that fits best of those with small tables."""
    state, alpha, beta = units.state, units.alpha, units.beta

    def up(k: int) -> Units:
        sizes = {"alpha": -(-alpha * k // state), "beta": -(-beta * k // state)}
        return Units(**sizes, core=0, initial=k, state=k)

    schedules = [best_schedule(length, memory // state, up(1), "msm")]
    most = [k for k in range(2, _MOST_PARTS) if sums(length, memory * k // state) <= MOST_SUMS]
    if most:
        k = min(most, key=lambda k: max(up(k).alpha / (alpha * k), up(k).beta / (beta * k)))
        schedules.append(best_schedule(length, memory * k // state, up(k), "best"))
    best = min(schedules, key=lambda schedule: schedule.cost)
    bound = min(best.cost, _bound(length, memory, units))
    return replace(best, policy="best", memory=memory, units=units, bound=bound)


def _bound(length: int, memory: int, units: Units) -> int:
    """Return a lower bound of A(t, m), the cost of ``"best"``, from sizes rounded down."""
    unit = max(_divisor(units), -(-memory // _MOST_LEVELS))
    if unit > min(units.state, units.beta):
        return length
    return lower_bound(length, memory // unit, _scaled(units, unit))


def _too_large(length: int, memory: int, units: Units) -> ScheduleError:
    room = memory // _divisor(units)
    return ScheduleError(
        f"{length} steps in {room} units of memory, with state = {units.state}, alpha = "
        f"{units.alpha} and beta = {units.beta}, take a table of {length}² · {room} sums, expected "
        f"at most {MOST_SUMS}: give sizes in a larger unit, beta a multiple of state, or "
        "policy='best'"
    )
