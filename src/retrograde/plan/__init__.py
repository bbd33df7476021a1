"""How to find the best schedule: numbers in, a Schedule out. Knows no torch, clock or randomness.

Importing it loads neither torch nor numba: the mixed policy compiles on first use.
"""

from retrograde.plan.planner import BASELINES, POLICIES, cost, plan

__all__ = ["BASELINES", "POLICIES", "cost", "plan"]
