"""The memory of a chain's schedule, layer by layer, beside what was measured."""

from collections.abc import Iterator

from matplotlib.figure import Figure

from retrograde.errors import ScheduleError
from retrograde.figures import Curve, draw_memory
from retrograde.schedule import Action, Advance, Backward, Chain, Record, Schedule, simulate

__all__ = ["draw_planned", "planned_memory"]


def draw_planned(
    planned: Curve, measured: Curve, budget_bytes: int, ordinary: tuple[Curve, Curve] | None = None
) -> Figure:
    """Draw the planned and the measured memory of one iteration of a chain.

    Args:
        planned: the curve of :func:`planned_memory`.
        measured: the same iteration, as it ran.
        budget_bytes: the budget.
        ordinary: ordinary backpropagation, planned and measured.

    Returns:
        The figure, of two panels on one scale.

    Example:
        >>> curve = Curve((0.0, 0.1, 0.2), (2**20, 3 * 2**20, 0))
        >>> len(draw_planned(curve, curve, 4 * 2**20).axes)
        2
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    others: tuple[Curve | None, Curve | None] = ordinary or (None, None)
    tops = []
    for ax, curve, other in zip(panels, (planned, measured), others, strict=True):
        draw_memory(curve, budget_bytes, other, ax)
        tops.append(ax.get_ylim()[1])
    for ax, title in zip(panels, ("Planned", "Measured"), strict=True):
        ax.set_ylim(0, max(tops))
        ax.set_title(title, loc="left", fontsize=11)
    panels[1].set_ylabel("")
    return figure


def planned_memory(schedule: Schedule) -> Curve:
    """Return the memory that a chain's schedule holds, layer by layer, as predicted.

    Returns:
        For each layer, the most that it holds while it runs, and what is held after it.

    Raises:
        ScheduleError: the schedule is of a recurrence, whose steps have no seconds; or not legal.

    Example:
        >>> from retrograde.plan import plan
        >>> curve = planned_memory(plan(Chain([1, 2], [1, 2], [10, 20]), policy="store-all"))
        >>> curve.seconds, curve.held_bytes
        ((0.0, 1.0, 3.0, 5.0, 6.0), (10, 10, 40, 20, 0))
    """
    if not isinstance(schedule.units, Chain):
        raise ScheduleError("the schedule's steps have no seconds: expected one of a chain")
    single, length = list(_single(schedule)), schedule.length
    replay = simulate(Schedule.from_actions(single, length=length, units=schedule.units))
    points: dict[float, int] = {0.0: 0}
    before = 0.0
    for high, kept, after in zip(replay.high, replay.kept, replay.clock, strict=True):
        points[before] = max(points[before], int(high))
        points[float(after)] = int(kept)
        before = float(after)
    return Curve(tuple(points), tuple(points.values()))


def _single(schedule: Schedule) -> Iterator[Action]:
    """Iterate over the same actions, a layer at a time."""
    for action in schedule:
        match action:
            case Advance(start, stop) | Record(start, stop):
                yield from (type(action)(k, k + 1) for k in range(start, stop))
            case Backward(start, stop):
                yield from (Backward(k, k + 1) for k in reversed(range(start, stop)))
            case _:
                yield action
