"""Exact backpropagation on a budget of memory and time.

A user names a budget in bytes, and the fastest schedule that fits computes the gradient of ordinary
backpropagation (Gruslys et al., 2016). Or the user asks for a faster backward pass, by a parallel
scan over the steps' Jacobians (Wang, BPPSA, 2020; :mod:`retrograde.scan`).

Names are loaded on first use. So planning needs no torch, and importing this package loads neither
torch nor numba. The imports below and the literals of ``__all__`` are for type checkers and
editors; they import nothing when the package runs.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograde import scan as scan
    from retrograde.cells.any_recurrent import Recurrent
    from retrograde.cells.bptt import bptt
    from retrograde.cells.gated import GatedCell
    from retrograde.cells.unroll import unroll
    from retrograde.errors import (
        BudgetError,
        CellError,
        NotExactError,
        RankError,
        RetrogradeError,
        ScanError,
        ScheduleError,
        UnitError,
    )
    from retrograde.machine import quiet
    from retrograde.models.budget.budget import Division, Share, budget
    from retrograde.models.fit import fit
    from retrograde.models.lean.lean import lean
    from retrograde.models.profile import Profile, profile
    from retrograde.models.sequential import Sequential
    from retrograde.plan import TradeOff, cost, plan, trade_off
    from retrograde.ranks.time_sharded import TimeSharded
    from retrograde.recurrent.modules import GRU, LSTM, RNN
    from retrograde.scan.sparse.composition import Residual
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
    from retrograde.sizes.allocations import Measurement, measure

__version__ = "0.1.0"

__all__ = [
    "GRU", "LSTM", "RNN", "Advance", "Backward", "BudgetError", "CellError", "Chain", "Division",
    "Free", "GatedCell", "Load", "Measurement", "NotExactError", "Profile", "RankError", "Record",
    "Recurrent", "Residual", "RetrogradeError", "ScanError", "Schedule", "ScheduleError",
    "Sequential", "Share", "Store", "TimeSharded", "TradeOff", "UnitError", "bptt", "budget",
    "cost", "fit", "lean", "measure", "plan", "profile", "quiet", "simulate", "trade_off", "unroll",
]  # fmt: skip
_HOMES = {
    "cells.any_recurrent": "Recurrent",
    "cells.bptt": "bptt",
    "cells.gated": "GatedCell",
    "cells.unroll": "unroll",
    "machine": "quiet",
    "models.budget.budget": "Division Share budget",
    "models.fit": "fit",
    "models.lean.lean": "lean",
    "models.profile": "Profile profile",
    "models.sequential": "Sequential",
    "plan": "TradeOff cost plan trade_off",
    "ranks.time_sharded": "TimeSharded",
    "recurrent.modules": "GRU LSTM RNN",
    "scan.sparse.composition": "Residual",
    "schedule": "Advance Backward Chain Free Load Record Schedule Store simulate",
    "sizes.allocations": "Measurement measure",
}
_HOME_OF = dict.fromkeys(__all__, "retrograde.errors") | {
    name: f"retrograde.{home}" for home, names in _HOMES.items() for name in names.split()
}


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
            f"retrograde.{name} needs torch: install it with pip install torch", name="torch"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOME_OF, "scan", "__version__"})


class _Package(ModuleType):
    """This package: ``retrograde.plan`` is the function, whichever submodule is loaded first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
