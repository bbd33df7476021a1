"""Pictures: any schedule, the memory of one iteration, a trade-off.

Each function draws on the given axes, or on a figure of its own, and returns the figure. Nothing
here touches pyplot or the choice of a backend, so it works without a display.
"""

from retrograde.figures.memory import Curve, draw_memory
from retrograde.figures.schedules import draw_schedule
from retrograde.figures.style import save
from retrograde.figures.trade_off import draw_trade_off

__all__ = ["Curve", "draw_memory", "draw_schedule", "draw_trade_off", "save"]
