"""Functions that numba compiles once, and that later processes load from disk.

To compile, numba first sets itself up, which takes time and memory. What is on disk loads without
that. ``benchmarks/resident.py weight`` measures what is left.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import binding
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.runtime import _nrt_python  # type: ignore[attr-defined]


class _Disk(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, which loads machine code before numba is set up."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        _name_helpers()
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]


@cache
def _name_helpers() -> None:
    """Name the functions of numba's runtime that machine code calls, under numba's names."""
    for name, address in _nrt_python.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Return a function as numba compiles it with some options, on its first call."""
    dispatcher = njit(**options)(function)
    dispatcher._cache = _Disk(function)  # type: ignore[no-untyped-call]
    return dispatcher
