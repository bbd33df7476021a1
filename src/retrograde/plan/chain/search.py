"""Heterogeneous chains: layers of unequal seconds and bytes (G16, appendix C).

The schedules searched are *persistent*: a kept state stays until backpropagation reaches it, and
nothing before it is touched until then. Few chains gain from other schedules. One kind frees a
state before its own layer, whose tape does not refer to it. Another records a layer while the
gradient is small.

A segment is the layers x … e − 1; the caller keeps state x, and m is the bytes beyond that.
For one layer, u is the forward seconds, s its input state, and p its internal state without input
and output. U(x, j) is the seconds of the layers x … j − 1. The least forward seconds are

    C(x, e, m) = min of  Q1: U(x, j) + W(j, e, m) + C(x, j, m)         x < j < e
                         Q3: u_x + V(x+1, e, m − p_x)
    V(j, e, m) = C(j, e, m − s_j)  where the tape of layer j − 1 refers to state j,  else W(j, e, m)
    W(j, e, m) = min of  C(j, e, m − s_j)                              store state j
                         u_j + V(j+1, e, m − p_j)                      record layer j, and let j go
    V(e, e, ·) = 0

wherever running, recording and backpropagating fit the m bytes at that moment. Transient bytes and
the gradient of state e count as in :mod:`retrograde.schedule.account`. Q3 with e = x + 1 is one
layer recorded and backpropagated at once. If every tape refers to both ends and nothing is
transient, this is appendix C with its start state counted.

- ``msm`` has all of it.
- ``hsm`` keeps no internal state while it works on later layers (Q3 at e = x + 1 only).
- ``ism`` stores no hidden state except the chain's input (no first line of W).
- *Ties*: recording at once before advancing, earlier states to advance to before later ones,
  recording before storing.

*Levels.* Bytes are counted in levels. Levels are exact where the kept sizes have a common divisor
that gives few enough; else seconds are interpolated between two levels. The schedule is then read
from the table with the exact bytes left at every place (:mod:`retrograde.plan.chain.walk`). So
levels never break a budget and never miss one that is feasible. Where bytes are not multiples, the
best of a few walks, which start at slightly shifted levels, is taken.

*Bound.* An exact table gives an exact schedule. Otherwise :mod:`retrograde.plan.chain.bound` bounds
it, in milliseconds, and the same table with sizes rounded down can prove another bound.

*Long chains.* Nearly all recomputation is of a few layers from one kept state. So the tables of
long chains have a band of short segments and a few ends (:mod:`retrograde.plan.chain.segments`):
O(T) rows, and more levels. Chains are long beyond 600 layers, and beyond 200 where bytes are not
multiples. More than 3000 layers are taken in groups. Each group is recorded whole or not at all,
and states are kept only between groups: ``hsm`` then keeps the tapes of one. The minimum is over
all segments up to 1200 layers.

Complexity: O(T³·M) for T layers and M levels, 4·T²·M bytes; with a band of b layers and n ends
O(T·M·(b² + n·(b + n))).
"""

from collections.abc import Iterable
from dataclasses import replace

from retrograde.plan.chain.solver import LONGEST, Solver, seconds_of
from retrograde.plan.steps.unfold import store_all
from retrograde.schedule import Chain, Schedule
from retrograde.units import Memory, as_bytes

__all__ = ["chain_minimum", "chain_trade_off", "plan_chain", "record_everything"]

_CLOSE = 1.01  # a schedule within this factor of its bound is not improved further


def record_everything(chain: Chain) -> Schedule:
    """Ordinary backpropagation, every layer recorded once: the baseline ``store-all``."""
    return store_all(len(chain), chain)


def plan_chain(
    chain: Chain,
    memory: Memory,
    policy: str = "msm",
    *,
    certify: bool = False,
    levels: int | None = None,
) -> Schedule:
    """The fastest persistent schedule of a chain within a budget, with its ``bound`` in seconds.

    Arguments and errors are those of :func:`~retrograde.plan.planner.plan`. ``levels`` is the most
    levels to count bytes in; None allows as many as take a few seconds. Up to 600 layers,
    ``certify`` fills a second table where the bound is more than 1 % away, for a higher bound
    or a faster schedule.

    >>> chain = Chain([1] * 5, [2] * 5, output_bytes=[1] * 5, internal_bytes=[3] * 5)
    >>> schedule = plan_chain(chain, "50%")
    >>> schedule.seconds, schedule.peak, plan_chain(chain, "100%").seconds
    (19.0, 8, 15.0)
    """
    ordinary = record_everything(chain)
    room = as_bytes(memory, ordinary.peak)
    solver = Solver.of(chain, policy)
    records = solver.table.kinds.records
    if records and room >= ordinary.peak:
        return replace(ordinary, policy=policy, memory=room, bound=ordinary.seconds)
    solver.check(room, ordinary.peak if records else None)
    filled = solver.filled(room, levels)
    schedule = filled.schedule(room)
    bound = None if any(chain.hands_on) else filled.bound(room)
    del filled  # free the table before another one is made
    if bound is None:
        from retrograde.plan.chain.bound import least_seconds

        bound = least_seconds(chain, room, solver.table.kinds)
        if certify and seconds_of(schedule) > _CLOSE * bound and len(chain) <= LONGEST:
            down = solver.filled(room, levels, rounded_down=True)
            bound = max(bound, down.bound(room) or 0.0)
            schedule = min(schedule, down.schedule(room), key=seconds_of)
    return replace(schedule, bound=min(bound, seconds_of(schedule)))


def chain_minimum(chain: Chain, policy: str = "msm") -> tuple[int, int]:
    """Return the smallest budget that a policy can keep, in bytes, and the layer that needs it. It
    is exact up to 1200 layers."""
    solver = Solver.of(chain, policy)
    least = (
        min(solver.least, record_everything(chain).peak)
        if solver.table.kinds.records
        else solver.least
    )
    return least, solver.tightest()


def chain_trade_off(
    chain: Chain, memories: Iterable[Memory], policy: str = "msm", *, levels: int | None = None
) -> list[Schedule]:
    """Return schedules of one chain for many budgets, in their order, from one table and without
    bounds. Arguments and errors are those of :func:`plan_chain`; ``levels`` is that of the largest
    budget."""
    ordinary = record_everything(chain)
    rooms = [as_bytes(memory, ordinary.peak) for memory in memories]
    solver = Solver.of(chain, policy)
    for room in rooms:
        solver.check(room)
    if not rooms:
        return []
    filled = solver.filled(max(rooms), levels)
    return [
        replace(ordinary, policy=policy, memory=room)
        if solver.table.kinds.records and room >= ordinary.peak
        else filled.schedule(room)
        for room in rooms
    ]
