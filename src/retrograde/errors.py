"""The errors of this library: one family, so that a caller can catch all of them at once.

Every message says what was given, what was expected and what to do.
"""

__all__ = [
    "BudgetError", "CellError", "InputError", "RankError", "RetrogradeError", "ScanError",
    "ScheduleError", "UnitError",
]  # fmt: skip


class RetrogradeError(Exception):
    """The base of every error that retrograde raises on purpose."""


class ScheduleError(RetrogradeError, ValueError):
    """A schedule is not legal, or the arguments of a plan make no sense."""


class UnitError(RetrogradeError, ValueError):
    """A size or a fraction could not be read."""


class BudgetError(RetrogradeError, ValueError):
    """A memory budget is too small; ``minimum_bytes`` is the smallest that is enough.

    Args:
        message: what was given, what was expected, and what to do.
        minimum_bytes: the smallest feasible budget, in bytes.
    """

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class CellError(RetrogradeError, TypeError):
    """A cell cannot be run exactly: its state, its inputs or its side effects are not supported."""


class NotExactError(CellError):
    """A layer or a model cannot be run exactly within a budget, or a rerun gave other bits."""


class InputError(CellError, ValueError, RuntimeError):
    """An input or a state that torch's own module refuses too, by a ValueError or RuntimeError."""


class ScanError(RetrogradeError, ValueError):
    """The elements of a scan do not match, or the arguments of a scan make no sense."""


class RankError(RetrogradeError, RuntimeError):
    """Ranks of a process group do not agree, or one of them does not answer."""
