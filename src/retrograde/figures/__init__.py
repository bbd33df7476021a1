"""Pictures: any schedule, the memory of one iteration, a training run's loss, a paper's figures.

Each function draws on the axes that it is given, or on a figure of its own, and returns the figure;
nothing here touches pyplot or the choice of a backend, so it works without a display and inside
another program's figures alike. A figure of a paper is a :class:`Plate`, which holds its numbers
too: ``GRUSLYS`` has those of Gruslys et al. (2016) by name, ``WANG`` those of Wang (2020), ``DEEP``
those of deep networks within a budget, ``RANKS`` those of many ranks, and ``PLATES`` all of them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from retrograde.figures.deep import DEEP
from retrograde.figures.gruslys import GRUSLYS
from retrograde.figures.gruslys_seconds import Seconds, figure_2b
from retrograde.figures.losses import draw_losses
from retrograde.figures.memory import Curve, draw_memory, draw_planned, planned_memory
from retrograde.figures.plates import Plate, save_plate
from retrograde.figures.ranks import RANKS
from retrograde.figures.schedules import draw_schedule
from retrograde.figures.style import save
from retrograde.figures.trade_off import draw_trade_off
from retrograde.figures.wang import WANG

__all__ = [
    "DEEP",
    "GRUSLYS",
    "PLATES",
    "RANKS",
    "WANG",
    "Curve",
    "Plate",
    "Seconds",
    "draw_losses",
    "draw_memory",
    "draw_planned",
    "draw_schedule",
    "draw_trade_off",
    "figure_2b",
    "planned_memory",
    "save",
    "save_plate",
]

PLATES: Mapping[str, Callable[[], Plate]] = MappingProxyType({**GRUSLYS, **WANG, **DEEP, **RANKS})
