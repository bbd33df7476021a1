"""Find the best schedule: numbers in, a Schedule out, without torch, clock or randomness.

Importing it loads neither torch nor numba: kernels are compiled on first use.
"""

from retrograde.plan.arguments import CHAIN_POLICIES, POLICIES
from retrograde.plan.chains import chain_minimum
from retrograde.plan.planner import TradeOff, cost, plan, trade_off

__all__ = ["CHAIN_POLICIES", "POLICIES", "TradeOff", "chain_minimum", "cost", "plan", "trade_off"]
