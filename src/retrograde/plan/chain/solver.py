"""The table of one chain and one class of schedules, and the schedules that are read from it.

:mod:`retrograde.plan.chain.search` defines the problem and the algorithm. This module joins the
compiled kernels. Nothing is compiled before the first chain is planned.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from retrograde.errors import BudgetError, ScheduleError
from retrograde.plan.chain.columns import Layers, layers_of
from retrograde.plan.chain.segments import Cells, all_cells, band_of_cells
from retrograde.plan.steps.unfold import NOTHING, Parts
from retrograde.schedule import Action, Advance, Chain, Schedule, merge, simulate
from retrograde.schedule.schedule import forward_ranges
from retrograde.units import format_bytes

if TYPE_CHECKING:
    from retrograde.plan.chain.fill import Table

__all__ = ["LONGEST", "Solver", "seconds_of"]

LONGEST = 600  # layers up to which a table has all segments, if it is exact or certified

_SHORT = 200  # layers up to which a table has all segments in any case
_BAND = 48  # layers of the longest segments of other tables, a few ends aside
_ENDS = 16
_MINIMUM = 1200  # layers up to which the minimum is over all segments
_GROUPS = 3000  # layers up to which each layer is planned by itself
_SHIFTS = (0.0, -0.5, 0.5)  # shifts to try walks with, in levels
_MOST_LEVELS = 4000
_MOST_WORK = 10**10  # additions in filling one table
_MOST_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Solver:
    """One chain and one class of schedules. ``places`` are the states that may be kept; ``table``
    has no levels until it is filled."""

    chain: Chain
    policy: str
    places: list[int]
    table: "Table"

    @classmethod
    def of(cls, chain: Chain, policy: str) -> "Solver":
        """Make a solver without levels, which expects that every layer recomputes everything."""
        from retrograde.plan.chain.fill import LANES, Grid, Kinds, Table
        from retrograde.plan.chain.walk import minima

        kinds = Kinds(stores=policy != "ism", records=policy != "hsm")
        places = _places(chain)
        layers = layers_of(chain, places if len(places) <= len(chain) else None)
        size = len(layers.tape)
        cells = all_cells(size) if size <= _MINIMUM else _band(layers)
        nothing = np.empty((0, cells.rows, LANES))
        kept, current = minima(layers, kinds, cells)
        grid = Grid(1, 0, False)
        return cls(chain, policy, places, Table(layers, kinds, grid, cells, kept, current, nothing))

    @property
    def least(self) -> int:
        """The smallest budget, in bytes."""
        return int(self.table.kept[0, -1]) + self.chain.standing_bytes

    def check(self, room: int, ordinary: int | None = None) -> None:
        """Refuse a budget that is too small; the bytes of ordinary backpropagation may be less."""
        if room < self.least:
            least = self.least if ordinary is None else min(self.least, ordinary)
            layer = self.tightest()
            raise BudgetError(
                f"memory is {room} bytes ({format_bytes(room)}): expected at least {least} "
                f"({format_bytes(least)}), which layer {self.chain.names[layer]!r} needs, "
                f"for the policy {self.policy!r}; give that much, or a smaller batch",
                least,
            )

    def tightest(self) -> int:
        """Return the layer at which the smallest budget is fully used."""
        actions: list[Action] = []
        for action in self._walk(self.least, self.table):
            if isinstance(action, Advance):
                actions += [Advance(k, k + 1) for k in range(action.start, action.stop)]
            else:
                actions.append(action)
        schedule = Schedule.from_actions(actions, length=len(self.chain), units=self.chain)
        action = actions[int(np.argmax(simulate(schedule).high))]
        return int(getattr(action, "start", 0))

    def filled(self, room: int, levels: int | None, rounded_down: bool = False) -> "Solver":
        """Return this solver with the table for a budget, and for all smaller ones."""
        from retrograde.plan.chain.fill import LANES, Grid, fill

        layers, size = self.table.layers, len(self.table.layers.tape)
        enough = min(room - self.chain.standing_bytes, _enough(layers))
        common = gcd(*layers.state.tolist(), *layers.tape.tolist()) or enough + 1
        cells = all_cells(size)
        most = _levels(cells) if levels is None else levels
        is_exact = enough // common < most
        asked = is_exact or rounded_down or levels is not None or not self.table.kinds.records
        if size > LONGEST or not (asked or size <= _SHORT):
            cells = _band(layers)
            most = _levels(cells) if levels is None else levels
            is_exact = enough // common < most
        unit = common if is_exact else enough // most + 1
        grid = Grid(unit, enough % unit, not rounded_down and not is_exact)
        seconds = np.empty((enough // unit // LANES + 1, cells.rows, LANES))
        table = self.table._replace(cells=cells, grid=grid, seconds=seconds)
        fill(table)
        return replace(self, table=table)

    def bound(self, room: int) -> float | None:
        """Return a lower bound of the seconds of every schedule of the class. None where levels are
        interpolated, layers joined, or segments left out."""
        layers, grid, cells, seconds = (
            self.table.layers, self.table.grid, self.table.cells, self.table.seconds,
        )  # fmt: skip
        size = len(layers.tape)
        if grid.between or size < len(self.chain) or cells.rows < size * (size + 1) // 2:
            return None
        enough = min(room - self.chain.standing_bytes, _enough(layers))
        level = -((grid.rest - enough) // grid.unit)
        chunk, lane = divmod(level, seconds.shape[2])
        forward = seconds[chunk, cells.row[-1], lane]
        return float(forward) + sum(self.chain.backward_seconds)

    def schedule(self, room: int) -> Schedule:
        """Return the schedule for a budget, in the longest ranges: the best of a few walks."""
        unit, rest = self.table.grid.unit, self.table.grid.rest
        tried = {rest} if self._is_exact(room) else {int(rest + k * unit) for k in _SHIFTS}
        grids = (self.table.grid._replace(rest=rest) for rest in sorted(tried))
        walks = (self._walk(room, self.table._replace(grid=grid)) for grid in grids)
        found = min(walks, key=_forward_seconds)
        return merge(replace(found, memory=room))

    def _is_exact(self, room: int) -> bool:
        """Return whether every possible remainder of a budget is a level."""
        layers, grid = self.table.layers, self.table.grid
        rest = room - self.chain.standing_bytes - grid.rest
        sizes = (*layers.state.tolist(), *layers.tape.tolist(), rest)
        return all(size % grid.unit == 0 for size in sizes)

    def _walk(self, room: int, table: "Table") -> Schedule:
        """Return the schedule of one walk: see :mod:`retrograde.plan.chain.walk`."""
        from retrograde.plan.chain.walk import walk

        found = walk(room - self.chain.standing_bytes, table)
        parts, at, numbers = Parts(), self.places, {NOTHING: NOTHING}
        inside_first = np.argsort(found[:, -1], kind="stable").tolist()
        rows = found.tolist()
        for number in inside_first:
            x, j, stop, right, left, _ = rows[number]
            advance, steps = at[j] - at[x], at[stop] - at[j]
            inside = numbers[right], numbers[left]
            numbers[number] = (
                parts.record(advance, steps, *inside) if steps else parts.store(advance, *inside)
            )
        return parts.unfold(
            numbers[0], length=len(self.chain), policy=self.policy, units=self.chain
        )


def _forward_seconds(schedule: Schedule) -> float:
    chain = schedule.units
    assert isinstance(chain, Chain)
    before = np.concatenate(([0.0], np.cumsum(chain.forward_seconds)))
    starts, stops = forward_ranges(schedule)
    return float((before[stops] - before[starts]).sum())


def seconds_of(schedule: Schedule) -> float:
    """Return the seconds of an iteration, of a schedule of a chain."""
    if schedule.seconds is None:
        raise ScheduleError("the schedule has no seconds: expected one of a chain")
    return schedule.seconds


def _places(chain: Chain) -> list[int]:
    """Return the states that may be kept: all, or in a very long chain the smallest of each few."""
    length = len(chain)
    if length <= _GROUPS:
        return list(range(length + 1))
    width, sizes = -(-length // _GROUPS), chain.state_bytes
    windows = (range(k, min(k + width, length)) for k in range(1, length, width))
    return [0, *(min(window, key=sizes.__getitem__) for window in windows), length]


def _enough(layers: Layers) -> int:
    """Return bytes that are enough for every schedule."""
    moves = max(int(np.max(column)) for column in layers[4:8])
    return int(layers.state.sum() + layers.tape.sum() + layers.gradient.max()) + moves


def _levels(cells: Cells) -> int:
    """Return the most levels of a table, by its work and its bytes."""
    lengths = np.arange(len(cells.first)) - cells.first
    work = max(1, int((lengths * np.minimum(lengths, np.median(lengths))).sum() // 2))
    return max(32, min(_MOST_LEVELS, _MOST_WORK // work, _MOST_BYTES // (8 * cells.rows)))


def _band(layers: Layers) -> Cells:
    """Return the segments of a long chain's table; small states are its ends."""
    size = len(layers.tape)
    borders = np.linspace(0, size, _ENDS + 1).astype(int).tolist()[1:]
    windows = (range(*pair) for pair in pairwise(borders))
    ends = [min(window, key=layers.state.__getitem__) for window in windows]
    return band_of_cells(size, _BAND, [*ends, size])
