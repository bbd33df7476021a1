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
        RankError,
        RetrogradeError,
        ScanError,
        ScheduleError,
        UnitError,
    )
    from retrograde.models.budget import Division, Share, budget
    from retrograde.models.fits import fit
    from retrograde.models.lean import lean
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

__all__: list[str] = []
_HOME_OF: dict[str, str] = {}  # the module of each public name


def _come_from(home: str) -> None:
    """Note the module of the names that were added to ``__all__`` since the last call."""
    _HOME_OF.update(dict.fromkeys(__all__[len(_HOME_OF) :], home))


__all__ += [
    "BudgetError",
    "CellError",
    "RankError",
    "RetrogradeError",
    "ScanError",
    "ScheduleError",
    "UnitError",
]
_come_from("retrograde.errors")

__all__ += ["Measurement", "measure"]
_come_from("retrograde.sizes.allocations")

__all__ += ["lean"]
_come_from("retrograde.models.lean")

__all__ += ["Recurrent"]
_come_from("retrograde.cells.any_recurrent")

__all__ += ["GatedCell"]
_come_from("retrograde.cells.gated")

__all__ += ["bptt"]
_come_from("retrograde.cells.bptt")

__all__ += ["Division", "Share", "budget"]
_come_from("retrograde.models.budget")

__all__ += ["fit"]
_come_from("retrograde.models.fits")

__all__ += ["Profile", "profile"]
_come_from("retrograde.models.profile")

__all__ += ["GRU", "LSTM", "RNN"]
_come_from("retrograde.recurrent.modules")

__all__ += ["Residual"]
_come_from("retrograde.scan.sparse.composition")

__all__ += ["Sequential"]
_come_from("retrograde.models.sequential")

__all__ += ["unroll"]
_come_from("retrograde.cells.unroll")

__all__ += ["TradeOff", "cost", "plan", "trade_off"]
_come_from("retrograde.plan")

__all__ += ["TimeSharded"]
_come_from("retrograde.ranks.time_sharded")

__all__ += [
    "Advance",
    "Backward",
    "Chain",
    "Free",
    "Load",
    "Record",
    "Schedule",
    "Store",
    "simulate",
]
_come_from("retrograde.schedule")


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
    return sorted({*globals(), *_HOME_OF})


class _Package(ModuleType):
    """This package: ``retrograde.plan`` is the function, whichever submodule is loaded first."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
