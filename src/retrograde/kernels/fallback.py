"""Fall back to torch's own operations where Triton cannot launch a kernel, with one warning.

Triton needs a C compiler when a kernel is first launched. It also needs a ptxas that supports the
card, and a card with enough shared memory. A kernel that was not launched has written nothing, so
the plain form can run on the same arguments. Its results differ by rounding.
"""

import functools
import subprocess
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Fallback:
    """Joins kernels to their plain forms. After one kernel fails, all plain forms run instead."""

    reason: str | None = None  # why the kernels cannot be launched; None while they can

    def join(self, kernel: Callable[P, T], plain: Callable[P, T]) -> Callable[P, T]:
        """Return a function that runs the kernel, or its plain form once a launch has failed."""

        @functools.wraps(kernel)
        def call(*args: P.args, **options: P.kwargs) -> T:
            if self.reason is None:
                try:
                    return kernel(*args, **options)
                except Exception as error:
                    if not _is_about_launching(error):
                        raise
                    self.reason = f"{type(error).__name__}: {error}"
                    _warn(self.reason)
            return plain(*args, **options)

        return call


def _is_about_launching(error: Exception) -> bool:
    """Return whether an error says that this machine cannot compile a kernel or has no room."""
    error_type = type(error)
    if error_type.__module__.startswith("triton."):
        return error_type.__name__ in ("OutOfResources", "PTXASError")
    # The compiler is missing, fails (no Python.h), or is not where CC points.
    compiling = subprocess.CalledProcessError, FileNotFoundError
    return isinstance(error, compiling) or "Failed to find C compiler" in str(error)


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"Triton cannot launch a kernel here ({reason}): torch's own operations run instead, with "
        "the same results and slower; Triton needs a C compiler with Python's headers and a GPU "
        "that it supports",
        RuntimeWarning,
        stacklevel=4,
    )
