"""How a call follows a schedule of a chain.

The first sweep runs in the caller's graph. There recorded links stay ordinary layers, and
recomputed links are nodes. So no state can be loaded from the sweep's recordings. A state that will
be loaded is stored instead. The nodes perform the rest of the schedule.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from retrograde.errors import CellError
from retrograde.models.chain.links import Link
from retrograde.schedule import (
    Action,
    Advance,
    Backward,
    Chain,
    Free,
    Load,
    Record,
    Schedule,
    Store,
)

__all__ = ["SplitSchedule", "loads_of", "split_schedule"]

_TOGETHER = 0.01  # bytes of a node's parameters, as a share of ordinary backpropagation's


@dataclass(frozen=True)
class SplitSchedule:
    """A schedule, split into the parts that a call performs.

    Attributes:
        sweep: the actions up to the first ``Backward``, in the caller's graph.
        actions: the part of the sweep that a second backward pass repeats, then the other actions.
        begin: the index in ``actions`` at which a backward pass begins.
        repeated: the most links that a second backward pass repeats.
        starts: where each range of recomputed links starts.
        cuts: where the nodes of these ranges begin and end.
    """

    sweep: list[Action]
    actions: tuple[Action, ...]
    begin: int
    repeated: int
    starts: list[int]
    cuts: list[int]

    def nodes(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the nodes for a range of recomputed links."""
        inside = self.cuts[bisect_right(self.cuts, start) : bisect_left(self.cuts, stop)]
        return list(pairwise([start, *inside, stop]))

    def after(self, stop: int) -> int | None:
        """Return the start of the next range of nodes at or after ``stop``; None after the last."""
        return next((start for start in self.starts if start >= stop), None)


def split_schedule(schedule: Schedule, links: Sequence[Link]) -> SplitSchedule:
    """Split a schedule that goes straight up to its first ``Backward``."""
    if schedule.length != len(links):
        raise CellError(
            f"the schedule is for {schedule.length} layers, but {len(links)} run: expected layers "
            "that do the same at every call; use memory=None"
        )
    every = _held_in_sweep(tuple(schedule))
    first = next(i for i, action in enumerate(every) if isinstance(action, Backward))
    sweep, rest = every[:first], every[first:]
    ranges = [(a.start, a.stop) for a in sweep if isinstance(a, Advance)]
    last = max([stop for _, stop in ranges] + [a.at for a in sweep if isinstance(a, Store)] + [0])
    again: list[Action] = []
    for action in sweep:
        match action:
            case Store():
                again.append(action)
            case Advance(start, stop) | Record(start, stop) if start < last:
                again.append(Advance(start, min(stop, last)))
    starts = [start for start, _ in ranges]
    cuts = _cuts(rest) | {edge for pair in ranges for edge in pair}
    assert isinstance(schedule.units, Chain)
    _divide(cuts, ranges, links, most=_TOGETHER * sum(schedule.units.internal_bytes))
    return SplitSchedule(sweep, (*again, *rest), len(again), last, starts, sorted(cuts))


def _cuts(actions: Sequence[Action]) -> set[int]:
    """Return where a node has to begin or end: at recordings, backward actions and loads."""
    found: set[int] = set()
    for action in actions:
        match action:
            case Record(start, stop) | Backward(start, stop):
                found |= {start, stop}
            case Load(at):
                found.add(at)
    return found


def _divide(
    cuts: set[int], ranges: list[tuple[int, int]], links: Sequence[Link], most: float
) -> None:
    """Add cuts so that nodes have few parameters, and links with shared ones are separate nodes.

    A node returns its gradients together. Those of shared parameters must be summed in autograd's
    order.
    """
    uses = Counter(id(p) for link in links for p in link.own)
    shares = [any(uses[id(p)] > 1 for p in link.own) for link in links]
    sizes = [sum(p.nbytes for p in link.own) for link in links]
    most = max(most, *sizes)
    for start, stop in ranges:
        together = 0.0
        for k in range(start, stop):
            together = sizes[k] + (0 if k in cuts else together)
            if together > most or shares[k] or shares[k - 1]:
                cuts.add(k)
                together = sizes[k]


def _held_in_sweep(actions: tuple[Action, ...]) -> list[Action]:
    """Rewrite the actions so that no state is loaded from the sweep's recordings.

    Such a state is stored. A store that nothing loads is left out, since the graph holds what it
    needs.
    """
    first = next(i for i, action in enumerate(actions) if isinstance(action, Backward))
    origins = _origins(actions)
    last_load = {
        action.at: i
        for i, action in enumerate(actions)
        if isinstance(action, Load) and origins[i] < first
    }
    found: list[Action] = []
    for i, action in enumerate(actions):
        match action:
            case Store() if i < first:
                pass
            case Free() if origins[i] < first:
                pass
            case Record(start, stop) | Advance(start, stop) if i < first:
                inside = (at for at in range(start + 1, stop) if at in last_load)
                for a, b in pairwise([start, *inside, stop]):
                    found += [Store(a)] if a in last_load else []
                    found.append(type(action)(a, b))
            case _:
                found.append(action)
        if isinstance(action, Load) and last_load.get(action.at) == i:
            found.append(Free(action.at))
    return found


def loads_of(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return the states that are loaded from a recording instead of a store.

    They are pairs (number of the recording action, number of the state). The action is needed
    because a layer may be recorded again and again.
    """
    origins = _origins(actions)
    return frozenset(
        (origins[i], action.at)
        for i, action in enumerate(actions)
        if isinstance(action, Load) and isinstance(actions[origins[i]], Record)
    )


def _origins(actions: Sequence[Action]) -> dict[int, int]:
    """Return, for each load and release of a state, the action that stored or recorded it.

    Actions are given by number.
    """
    recorded: dict[int, int] = {}
    stored: dict[int, int] = {}
    found: dict[int, int] = {}
    for i, action in enumerate(actions):
        match action:
            case Record(start, stop):
                recorded.update(dict.fromkeys(range(start + 1, stop + 1), i))
            case Store(at):
                stored[at] = i
            case Load(at):
                found[i] = stored[at] if at in stored else recorded[at]
            case Free(at):
                found[i] = stored.pop(at)
    return found
