"""Pictures: any schedule, the memory of one iteration, the loss of a training run.

Each function draws on the axes that it is given, or on a figure of its own, and returns the figure;
nothing here touches pyplot or the choice of a backend, so it works without a display and inside
another program's figures alike.
"""

from retrograde.figures.losses import draw_losses
from retrograde.figures.memory import Curve, draw_memory
from retrograde.figures.schedules import draw_schedule
from retrograde.figures.style import save

__all__ = ["Curve", "draw_losses", "draw_memory", "draw_schedule", "save"]
