"""What a schedule is: six verbs, a finite value made of them, and the machine that replays it.

Standard library and numpy only.
"""

from retrograde.schedule.account import Units
from retrograde.schedule.actions import Action, Advance, Backward, Free, Load, Record, Store, Verb
from retrograde.schedule.chain import Chain
from retrograde.schedule.schedule import Schedule, merge
from retrograde.schedule.simulate import Replay, simulate

__all__ = [
    "Action", "Advance", "Backward", "Chain", "Free", "Load", "Record", "Replay", "Schedule",
    "Store", "Units", "Verb", "merge", "simulate",
]  # fmt: skip
