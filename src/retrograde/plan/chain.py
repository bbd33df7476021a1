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
few enough, else rounded to the nearest. The schedule is then read off the table with the exact
bytes left at every place (:mod:`retrograde.plan.chain_walk`), so rounding never breaks a budget
and never loses one that would do. The same table with sizes rounded down proves a ``bound``.

Complexity: O(T³·M) for T layers and M levels, 4·T²·M bytes. More than :data:`LONGEST` layers are
taken in groups, each recorded whole or not at all, with kept states only between them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from retrograde.errors import BudgetError, ScheduleError
from retrograde.plan.baselines import store_all
from retrograde.plan.layers import Layers, layers_of
from retrograde.plan.unfold import NOTHING, Parts, recall
from retrograde.schedule import Action, Advance, Chain, Schedule, merge, simulate
from retrograde.units import Memory, as_bytes, format_bytes

if TYPE_CHECKING:
    from retrograde.plan.chain_kernel import Grid, Kinds

__all__ = ["LONGEST", "chain_minimum", "chain_trade_off", "plan_chain", "record_everything"]

LONGEST = 1200

_GROUPS = 600  # that a longer chain is taken in
_MOST_LEVELS = 4000
_MOST_WORK = 10**10  # additions in filling one table
_MOST_BYTES = 640 * 2**20

_Part = tuple[bool, int, int, int]  # from a kept state or not, first layer, end, bytes


def record_everything(chain: Chain) -> Schedule:
    """Ordinary backpropagation: every layer recorded once.

    Args:
        chain: what each layer takes.

    Returns:
        The schedule of the baseline ``store-all``.

    Example:
        >>> schedule = record_everything(Chain([1, 2], [1, 2], [10, 20]))
        >>> schedule.seconds, schedule.peak
        (6.0, 40)
    """
    return replace(merge(store_all(len(chain))), units=chain)


def plan_chain(
    chain: Chain,
    memory: Memory,
    policy: str = "msm",
    *,
    certify: bool = False,
    levels: int | None = None,
) -> Schedule:
    """The fastest persistent schedule of a chain whose peak is within a budget.

    Args:
        chain: what each layer takes.
        memory: bytes, a text such as ``"2GiB"``, or a share of what ``store-all`` holds.
        policy: ``"msm"``, ``"hsm"`` or ``"ism"``.
        certify: prove a bound even where levels are not exact; takes as long again.
        levels: to count bytes in, at most; by default as many as take a few seconds.

    Returns:
        A schedule with ``units=chain`` and a ``bound`` in seconds: its own where levels were exact,
        else a lower one with ``certify``, else None.

    Raises:
        BudgetError: the memory is below the least that the policy can do with.
        UnitError: the memory cannot be read.

    Example:
        >>> chain = Chain([1] * 5, [2] * 5, output_bytes=[1] * 5, internal_bytes=[3] * 5)
        >>> ordinary = plan_chain(chain, 100)
        >>> schedule = plan_chain(chain, ordinary.peak // 2)
        >>> ordinary.seconds, ordinary.peak, schedule.seconds, schedule.peak
        (15.0, 16, 19.0, 8)
    """
    ordinary = record_everything(chain)
    room = as_bytes(memory, ordinary.peak)
    solver = _Solver.of(chain, policy)
    solver.check(room)
    if solver.kinds.records and room >= ordinary.peak:
        return replace(ordinary, policy=policy, memory=room, bound=ordinary.seconds)
    filled = solver.filled(room, levels)
    schedule, bound = filled.schedule(room), filled.bound(room)
    if certify and bound is None:
        del filled  # its table, before there is another one
        filled = solver.filled(room, levels, rounded_down=True)
        schedule, bound = min(schedule, filled.schedule(room), key=_seconds), filled.bound(room)
    return replace(schedule, bound=None if bound is None else min(bound, _seconds(schedule)))


def chain_minimum(chain: Chain, policy: str = "msm") -> tuple[int, int]:
    """The smallest budget that a policy can keep, exactly.

    Args:
        chain: what each layer takes.
        policy: ``"msm"``, ``"hsm"`` or ``"ism"``.

    Returns:
        Bytes, and the layer that needs them.

    Example:
        >>> chain_minimum(Chain([1] * 3, [2] * 3, output_bytes=[1, 1, 50]))
        (52, 2)
    """
    solver = _Solver.of(chain, policy)
    return solver.least, solver.tightest()


def chain_trade_off(
    chain: Chain, memories: Iterable[Memory], policy: str = "msm", *, levels: int | None = None
) -> list[Schedule]:
    """Schedules of one chain for many budgets, read off one table.

    Args:
        chain: what each layer takes.
        memories: as :func:`plan_chain` has each.
        policy: likewise.
        levels: of the largest; as :func:`plan_chain` has it.

    Returns:
        A schedule for each, in order, without bounds.

    Raises:
        BudgetError: as :func:`plan_chain`.
        UnitError: likewise.

    Example:
        >>> chain = Chain([1] * 5, [2] * 5, output_bytes=[1] * 5, internal_bytes=[3] * 5)
        >>> [schedule.seconds for schedule in chain_trade_off(chain, [6, 8, 16])]
        [22.0, 19.0, 15.0]
    """
    ordinary = record_everything(chain)
    rooms = [as_bytes(memory, ordinary.peak) for memory in memories]
    solver = _Solver.of(chain, policy)
    for room in rooms:
        solver.check(room)
    if not rooms:
        return []
    filled = solver.filled(max(rooms), levels)
    return [
        replace(ordinary, policy=policy, memory=room)
        if solver.kinds.records and room >= ordinary.peak
        else filled.schedule(room)
        for room in rooms
    ]


@dataclass(frozen=True)
class _Solver:
    """One chain and one class of schedules; with a table, once it is filled.

    Args:
        chain: what each layer takes.
        policy: its name.
        kinds: what it may keep.
        places: the states that may be kept.
        layers: what the moves between them need.
        minimum: bytes that each segment needs at least.
        grid: how bytes are counted in levels.
        table: least seconds of each segment, for each level.
    """

    chain: Chain
    policy: str
    kinds: "Kinds"
    places: list[int]
    layers: Layers
    minimum: tuple[Any, Any]
    grid: "Grid"
    table: Any

    @classmethod
    def of(cls, chain: Chain, policy: str) -> "_Solver":
        """No table yet: what is estimated is that everything is run again for every layer."""
        from retrograde.plan.chain_kernel import LANES, Grid, Kinds
        from retrograde.plan.chain_walk import minima

        kinds = Kinds(stores=policy != "ism", records=policy != "hsm")
        places = _places(chain)
        layers = layers_of(chain, places if len(places) <= len(chain) else None)
        size = len(layers.tape)
        table = np.empty((0, size * (size + 1) // 2, LANES))
        minimum = minima(layers, kinds)
        return cls(chain, policy, kinds, places, layers, minimum, Grid(1, 0, 0), table)

    @property
    def least(self) -> int:
        """The smallest budget, in bytes."""
        return int(self.minimum[0][0, -1]) + self.chain.overhead_bytes

    def check(self, room: int) -> None:
        """Refuse a budget that is too small."""
        if room < self.least:
            layer = self.tightest()
            raise BudgetError(
                f"memory is {room} bytes ({format_bytes(room)}): expected at least {self.least} "
                f"({format_bytes(self.least)}), which layer {self.chain.names[layer]!r} needs, "
                f"for the policy {self.policy!r}; give that much, or a smaller batch",
                self.least,
            )

    def tightest(self) -> int:
        """The layer at which the smallest budget is all held."""
        actions: list[Action] = []
        for action in self._walk(self.least):
            if isinstance(action, Advance):
                actions += [Advance(k, k + 1) for k in range(action.start, action.stop)]
            else:
                actions.append(action)
        schedule = Schedule.from_actions(actions, length=len(self.chain), units=self.chain)
        action = actions[int(np.argmax(simulate(schedule).high))]
        return int(getattr(action, "start", 0))

    def filled(self, room: int, levels: int | None, rounded_down: bool = False) -> "_Solver":
        """With the table for a budget, and for all smaller ones."""
        from retrograde.plan.chain_kernel import LANES, Grid, fill

        layers = self.layers
        enough = min(room - self.chain.overhead_bytes, _enough(layers))
        common = gcd(*layers.state.tolist(), *layers.tape.tolist()) or enough + 1
        most = _levels(len(layers.tape)) if levels is None else levels
        unit = common
        if enough // common >= most:
            unit = enough // most + 1
        grid = Grid(unit, enough % unit, 0 if rounded_down or unit == common else unit // 2)
        table = np.empty((enough // unit // LANES + 1, *self.table.shape[1:]))
        fill(layers, self.kinds, grid, self.minimum[0], table)
        return replace(self, grid=grid, table=table)

    def bound(self, room: int) -> float | None:
        """The seconds that no schedule of the class undercuts; None where sizes were rounded up."""
        if self.grid.more:
            return None
        enough = min(room - self.chain.overhead_bytes, _enough(self.layers))
        level = -((self.grid.rest - enough) // self.grid.unit)
        chunk, lane = divmod(level, self.table.shape[2])
        forward = self.table[chunk, len(self.layers.tape) - 1, lane]
        return float(forward) + sum(self.chain.backward_seconds)

    def schedule(self, room: int) -> Schedule:
        """The schedule for a budget, in the longest ranges."""
        return merge(replace(self._walk(room), memory=room))

    def _walk(self, room: int) -> Schedule:
        parts = Parts()
        whole = (True, 0, len(self.layers.tape), room - self.chain.overhead_bytes)
        root = recall(whole, lambda part, number: self._describe(parts, part, number))
        return parts.unfold(root, length=len(self.chain), policy=self.policy, units=self.chain)

    def _describe(self, parts: Parts, part: _Part, number: Callable[[_Part], int]) -> int:
        """Add a part: see :mod:`retrograde.plan.chain_walk` for what is chosen."""
        kept, x, e, room = part
        at = self.places
        if not kept:
            if self._stores(x, e, room):
                inside = (True, x, e, room - int(self.layers.state[x]))
                return parts.store(0, number(inside), NOTHING)
            return self._record(parts, (x, x, e, self._beside(x, room)), NOTHING, number)
        j = self._move(x, e, room)
        if j == x:
            return self._record(parts, (x, x, e, room), NOTHING, number)
        left = number((True, x, j, room))
        if self._stores(j, e, room):
            right = number((True, j, e, room - int(self.layers.state[j])))
            return parts.store(at[j] - at[x], right, left)
        return self._record(parts, (x, j, e, self._beside(j, room)), left, number)

    def _record(
        self, parts: Parts, where: tuple[int, int, int, int], left: int,
        number: Callable[[_Part], int],
    ) -> int:  # fmt: skip
        """Advance from x to j, record layer j, and go on with the bytes that are left."""
        x, j, e, room = where
        at, layers, right = self.places, self.layers, NOTHING
        rest = room - int(layers.tape[j])
        if e > j + 1 and layers.keeps_output[j]:
            right = number((True, j + 1, e, rest - int(layers.state[j + 1])))
        elif e > j + 1:
            right = number((False, j + 1, e, rest))
        return parts.record(at[j] - at[x], at[j + 1] - at[j], right, left)

    def _beside(self, x: int, room: int) -> int:
        """The bytes beside state x once layer x is recorded and nothing else holds it."""
        return room - (int(self.layers.state[x]) if self.layers.keeps_input[x] else 0)

    def _stores(self, x: int, e: int, room: int) -> bool:
        """Whether to store state x, rather than to record layer x at once."""
        from retrograde.plan.chain_walk import after_current

        shared = (self.layers, self.kinds, self.grid, self.minimum, self.table)
        if not after_current(x, e, room, *shared)[1]:
            return False
        return self._move(x, e, room - int(self.layers.state[x])) != x

    def _move(self, x: int, e: int, room: int) -> int:
        """Where to advance to from state x, which is kept; x itself to record layer x."""
        from retrograde.plan.chain_walk import best_move

        shared = (self.layers, self.kinds, self.grid, self.minimum, self.table)
        return int(best_move(x, e, room, *shared))


def _seconds(schedule: Schedule) -> float:
    if schedule.seconds is None:
        raise ScheduleError("the schedule has no seconds: expected one of a chain")
    return schedule.seconds


def _places(chain: Chain) -> list[int]:
    """The states that may be kept: all, or the smallest of each few in a long chain."""
    length = len(chain)
    if length <= LONGEST:
        return list(range(length + 1))
    width, sizes = -(-length // _GROUPS), chain.state_bytes
    windows = (range(k, min(k + width, length)) for k in range(1, length, width))
    return [0, *(min(window, key=sizes.__getitem__) for window in windows), length]


def _enough(layers: Layers) -> int:
    """Bytes beyond which no schedule goes."""
    moves = max(int(np.max(column)) for column in layers[4:8])
    return int(layers.state.sum() + layers.tape.sum() + layers.gradient.max()) + moves


def _levels(size: int) -> int:
    """How many a table of ``size`` layers may have."""
    cells = size * (size + 1) // 2
    work = max(1, cells * size // 3)
    return max(32, min(_MOST_LEVELS, _MOST_WORK // work, _MOST_BYTES // (8 * cells)))
