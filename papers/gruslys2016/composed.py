"""Figures 3 and 8 of Gruslys et al. (2016): the policy itself, and how dear ones are composed.

Section B.2 of the supplement takes T(a, m), the longest sequence that m hidden states can
backpropagate at a cost per step of at most a, and composes: a first sweep that stores a state after
T(a, m), T(a, m−1), … steps, and a cost per step of a within each part, make a+1. It takes
T(2, m) = m, which is what storing every state gives. In truth, by the closed form of the cost
(:mod:`retrograde.plan.steps.closed_form`), for a ≤ m+1,

    T(a, m) = binom(m + a, a − 1),     so T(2, m) = m + 2.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from math import factorial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gruslys2016.bounds import longest
from retrograde.figures.schedules import draw_schedule
from retrograde.figures.style import INK
from retrograde.plan import plan
from retrograde.schedule import Action, Advance, Backward, Load, Record, Schedule, Store, merge
from retrograde_papers.plates import Column, Plate, captioned

__all__ = ["compose", "figure_3", "figure_8"]

_MEMORY = 4
_COSTS_PER_STEP = (2, 3, 4, 5)
_MEMORIES = range(1, 21)


def figure_3() -> Plate:
    """Figure 3: the schedule of HSM with four hidden states, for 4 and for 10 steps.

    Example:
        >>> plate = figure_3()
        >>> plate.table["panel"][0], plate.table["action"][:2]
        ('a', ['store 0', 'advance 0→1'])
    """
    schedules = {"a": plan(4, _MEMORY), "b": plan(10, _MEMORY)}
    figure = _side_by_side(schedules)
    rows = [
        (panel, number, str(action))
        for panel, schedule in schedules.items()
        for number, action in enumerate(schedule)
    ]
    table: dict[str, Column] = {
        "panel": [panel for panel, _, _ in rows],
        "number": [number for _, number, _ in rows],
        "action": [action for _, _, action in rows],
    }
    note = (
        "The sequence runs from left to right, execution from top to bottom. The initial state is "
        "one of the four hidden states; the step being backpropagated is beside them."
    )
    return captioned("figure_3", "schedules of HSM, four hidden states", table, figure, note)


def figure_8() -> Plate:
    """Figure 8: a strategy of cost per step 3, composed of strategies of cost per step 2.

    The table has T(a, m) and the lower bound of proposition 2.

    Example:
        >>> plate = figure_8()
        >>> [column[3] for column in plate.table.values()][:5]
        [4, 6, 4.0, 21, 8.0]
    """
    schedules = {"a": plan(_MEMORY, _MEMORY), "b": compose(_MEMORY)}
    figure = _side_by_side(schedules)
    left, right = figure.axes
    _bracket(left, 0, _MEMORY, f"T(2,{_MEMORY}) ≥ {_MEMORY}")
    for slots, start in zip(range(_MEMORY, 0, -1), _starts(_MEMORY), strict=True):
        _bracket(right, start, start + slots, f"T(2,{slots}) ≥ {slots}" if slots > 1 else "1")
    table: dict[str, Column] = {"memory": list(_MEMORIES)}
    for a in _COSTS_PER_STEP:
        table[f"T({a},m) (steps)"] = [longest(a, m) for m in _MEMORIES]
        table[f"proposition 2: m^{a - 1}/{a - 1}! (steps)"] = [
            m ** (a - 1) / factorial(a - 1) for m in _MEMORIES
        ]
    note = (
        "T(a,m): the longest sequence that m hidden states backpropagate at a cost per step of at "
        "most a. On the right four strategies of cost per step 2 at most, each with a slot less "
        "than the one before, and a first sweep over all of them: 3 at most, and here "
        f"{schedules['b'].cost} for 10 steps. The optimum for 10 steps is "
        f"{plan(10, _MEMORY).cost} (figure 3), and T(2,m) is m + 2."
    )
    return captioned(
        "figure_8", "T(a,m): dear strategies composed of cheap ones", table, figure, note
    )


def compose(memory: int) -> Schedule:
    """The strategy of figure 8(b): m, m−1, …, 1 steps, each part with every state of it stored.

    It takes m(m+1)/2 steps at a cost per step below 3.

    Example:
        >>> schedule = compose(4)
        >>> schedule.length, schedule.peak, schedule.cost
        (10, 4, 25)
    """
    starts = _starts(memory)
    parts = list(zip(starts, range(memory, 0, -1), strict=True))
    actions: list[Action] = []
    for start, slots in parts[:-1]:
        actions += [Store(start), Advance(start, start + slots)]
    actions += _shifted(plan(1, 1), starts[-1])
    for start, slots in reversed(parts[:-1]):
        _, *rest = _shifted(plan(slots, slots), start)  # its first state is stored already
        actions += [Load(start), *rest]
    length = starts[-1] + 1
    return merge(Schedule.from_actions(actions, length=length, policy="composed", memory=memory))


def _starts(memory: int) -> list[int]:
    return list(accumulate(range(memory, 1, -1), initial=0))


def _shifted(schedule: Schedule, steps: int) -> Iterator[Action]:
    """The actions of a schedule for a sequence that begins later."""
    for action in schedule:
        match action:
            case Advance(start, stop) | Record(start, stop) | Backward(start, stop):
                yield replace(action, start=start + steps, stop=stop + steps)
            case _:
                yield replace(action, at=action.at + steps)


def _side_by_side(schedules: dict[str, Schedule]) -> Figure:
    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    panels = figure.subplots(1, len(schedules), width_ratios=(2, 3))
    for (letter, schedule), axes in zip(schedules.items(), panels, strict=True):
        draw_schedule(schedule, axes)
        title = axes.get_title(loc="left").replace(", memory", ",\nmemory")
        axes.set_title(f"({letter}) {title}", loc="left", fontsize=11)
    for axes in panels[:-1]:  # one legend is enough, where there is room for it
        axes.get_legend().remove()
    return figure


def _bracket(axes: Axes, start: int, stop: int, text: str) -> None:
    """An arrow above the picture, from one state to another."""
    across = ("data", "axes fraction")
    axes.annotate(
        "", (start, 1.02), xycoords=across, xytext=(stop, 1.02), textcoords=across,
        arrowprops={"arrowstyle": "|-|, widthA=0.3, widthB=0.3", "color": INK, "shrinkA": 1,
                    "shrinkB": 1},
    )  # fmt: skip
    axes.annotate(
        text, ((start + stop) / 2, 1.03), xycoords=across, ha="center", va="bottom", fontsize=9,
        color=INK,
    )  # fmt: skip
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=11, color=INK, pad=22)
