"""Exact backpropagation on a budget of memory and time.

A user names a budget in bytes and gets the gradient of ordinary backpropagation by the fastest
schedule that fits (Gruslys et al., Memory-Efficient Backpropagation Through Time, 2016), or asks
for a faster backward pass, by a parallel scan over the steps' Jacobians (Wang, BPPSA, 2020;
:mod:`retrograde.scan`).

Names are loaded when they are first used: planning needs no torch, and importing this package
loads neither torch nor numba.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograde import scan as scan
    from retrograde.errors import (
        BudgetError,
        CellError,
        RankError,
        RetrogradeError,
        ScanError,
        ScheduleError,
        UnitError,
    )
    from retrograde.interchange import from_checkpoint_schedules, to_checkpoint_schedules
    from retrograde.measure.allocations import Measurement, measure
    from retrograde.nn.backward_choice import Explanation, explain
    from retrograde.nn.bptt import bptt
    from retrograde.nn.budget import Division, Share, budget
    from retrograde.nn.profile import Offer, Offers, Profile, profile
    from retrograde.nn.recurrent import GRU, LSTM, RNN
    from retrograde.nn.sequential import Residual, Sequential
    from retrograde.nn.unroll import unroll
    from retrograde.plan import TradeOff, cost, least_memory, longest, plan, split, trade_off
    from retrograde.ranks.layer_sharded import LayerSharded
    from retrograde.ranks.time_sharded import TimeSharded
    from retrograde.schedule import (
        Advance,
        Backward,
        Chain,
        Free,
        Load,
        Record,
        Schedule,
        Store,
        simulate,
    )

__version__ = "0.1.0"

_HOMES = {
    "retrograde.errors": (
        "BudgetError",
        "CellError",
        "RankError",
        "RetrogradeError",
        "ScanError",
        "ScheduleError",
        "UnitError",
    ),
    "retrograde.schedule": (
        "Advance",
        "Backward",
        "Chain",
        "Free",
        "Load",
        "Record",
        "Schedule",
        "Store",
        "simulate",
    ),
    "retrograde.interchange": ("from_checkpoint_schedules", "to_checkpoint_schedules"),
    "retrograde.plan": (
        "TradeOff",
        "cost",
        "least_memory",
        "longest",
        "plan",
        "split",
        "trade_off",
    ),
    "retrograde.measure.allocations": ("Measurement", "measure"),
    "retrograde.nn.bptt": ("bptt",),
    "retrograde.nn.budget": ("Division", "Share", "budget"),
    "retrograde.nn.unroll": ("unroll",),
    "retrograde.nn.backward_choice": ("Explanation", "explain"),
    "retrograde.ranks.layer_sharded": ("LayerSharded",),
    "retrograde.nn.profile": ("Offer", "Offers", "Profile", "profile"),
    "retrograde.nn.recurrent": ("GRU", "LSTM", "RNN"),
    "retrograde.nn.sequential": ("Residual", "Sequential"),
    "retrograde.ranks.time_sharded": ("TimeSharded",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Advance",
    "Backward",
    "BudgetError",
    "CellError",
    "Chain",
    "Division",
    "Explanation",
    "Free",
    "LayerSharded",
    "Load",
    "Measurement",
    "Offer",
    "Offers",
    "Profile",
    "RankError",
    "Record",
    "Residual",
    "RetrogradeError",
    "ScanError",
    "Schedule",
    "ScheduleError",
    "Sequential",
    "Share",
    "Store",
    "TimeSharded",
    "TradeOff",
    "UnitError",
    "bptt",
    "budget",
    "cost",
    "explain",
    "from_checkpoint_schedules",
    "least_memory",
    "longest",
    "measure",
    "plan",
    "profile",
    "simulate",
    "split",
    "to_checkpoint_schedules",
    "trade_off",
    "unroll",
]


def __getattr__(name: str) -> Any:
    if name == "scan":
        return import_module("retrograde.scan")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'retrograde' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"retrograde.{name} needs torch: install it with pip install 'retrograde[torch]'",
            name="torch",
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})


class _Package(ModuleType):
    """This package: ``retrograde.plan`` is the function, whichever submodule is loaded first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
