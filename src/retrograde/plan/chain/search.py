"""Heterogeneous chains: layers of unequal seconds and bytes (G16, appendix C).

The schedules looked at are *persistent*: what is kept stays until backpropagation has come to it,
and nothing before it is touched until then. Few chains gain by others: a state freed in front of
its own layer, whose tape does not refer to it; or a layer recorded while the gradient is small.
A segment is the layers x … e − 1, with state x kept by whoever called; m is the bytes beyond that;
u, s, p are a layer's forward seconds, its input state, its internal state without input and output;
U(x, j) are the seconds of the layers x … j − 1. Least forward seconds:

    C(x, e, m) = min of  Q1: U(x, j) + W(j, e, m) + C(x, j, m)         x < j < e
                         Q3: u_x + V(x+1, e, m − p_x)
    V(j, e, m) = C(j, e, m − s_j)  where the tape of layer j − 1 refers to state j,  else W(j, e, m)
    W(j, e, m) = min of  C(j, e, m − s_j)                              store state j
                         u_j + V(j+1, e, m − p_j)                      record layer j, and let j go
    V(e, e, ·) = 0

wherever running, recording and backpropagating fit the m bytes there and then: with what a layer
takes for a while and with the gradient of state e, as :mod:`retrograde.schedule.account` counts.
Q3 with e = x + 1 is one layer recorded and backpropagated at once. With every tape referring to
both ends, and nothing taken for a while, this is appendix C with its start state counted.

- ``msm`` has all of it; ``hsm`` keeps no internal state while it works on later layers (Q3 at
  e = x + 1 only); ``ism`` stores no hidden state (no first line of W) but the chain's input.
- *Ties*: recording at once goes before advancing, the earliest state to advance to before later
  ones, recording before storing.

*Levels.* Bytes are counted in levels: exactly, where what is kept has a common divisor that gives
few enough, else in proportion between two levels. The schedule is then read off the table with the
exact bytes left at every place (:mod:`retrograde.plan.chain.walk`), so levels never break a budget
and never lose one that would do. Where bytes are no multiples, a few walks that start at slightly
shifted levels are compared.

*Bound.* Where the table is exact, so is the schedule. Else :mod:`retrograde.plan.chain.bound`
bounds it, in milliseconds, and the same table with sizes rounded down can prove another bound.

*Long chains.* Nearly all that is run again is a few layers from one kept state, so chains of more
than 600 layers, and of more than 200 where bytes are no multiples, have a table with a band of
short segments and a few ends only (:mod:`retrograde.plan.chain.segments`): O(T) rows, more levels.
More than 3000 layers are taken in groups, each recorded whole or not at all, with kept states only
between them: ``hsm`` then keeps the tapes of one. The minimum is that of all segments up to 1200
layers.

Complexity: O(T³·M) for T layers and M levels, 4·T²·M bytes; with a band of b layers and n ends
O(T·M·(b² + n·(b + n))).
"""

from collections.abc import Iterable
from dataclasses import replace

from retrograde.plan.chain.solver import LONGEST, Solver, seconds_of
from retrograde.plan.steps.baselines import store_all
from retrograde.schedule import Chain, Schedule, merge
from retrograde.units import Memory, as_bytes

__all__ = ["chain_minimum", "chain_trade_off", "plan_chain", "record_everything"]

_CLOSE = 1.01  # times its bound: near enough to leave it at that


def record_everything(chain: Chain) -> Schedule:
    """Ordinary backpropagation, every layer recorded once: the baseline ``store-all``."""
    return replace(merge(store_all(len(chain))), units=chain)


def plan_chain(
    chain: Chain,
    memory: Memory,
    policy: str = "msm",
    *,
    certify: bool = False,
    levels: int | None = None,
) -> Schedule:
    """The fastest persistent schedule of a chain within a budget, with its ``bound`` in seconds.

    Arguments and errors are those of :func:`~retrograde.plan.planner.plan`; ``levels`` is the most
    levels to count bytes in, None for as many as take a few seconds. Up to 600 layers,
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
    if solver.table.kinds.records and room >= ordinary.peak:
        return replace(ordinary, policy=policy, memory=room, bound=ordinary.seconds)
    solver.check(room)
    filled = solver.filled(room, levels)
    schedule = filled.schedule(room)
    bound = None if any(chain.hands_on) else filled.bound(room)
    del filled  # its table, before there is another one
    if bound is None:
        from retrograde.plan.chain.bound import least_seconds

        bound = least_seconds(chain, room, solver.table.kinds)
        if certify and seconds_of(schedule) > _CLOSE * bound and len(chain) <= LONGEST:
            down = solver.filled(room, levels, rounded_down=True)
            bound = max(bound, down.bound(room) or 0.0)
            schedule = min(schedule, down.schedule(room), key=seconds_of)
    return replace(schedule, bound=min(bound, seconds_of(schedule)))


def chain_minimum(chain: Chain, policy: str = "msm") -> tuple[int, int]:
    """The smallest budget that a policy can keep, in bytes, and the layer that needs it; exact up
    to 1200 layers."""
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
    """Schedules of one chain for many budgets, in their order and without bounds, read off one
    table. Arguments and errors are those of :func:`plan_chain`; ``levels`` is that of the largest
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
