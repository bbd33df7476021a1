"""Share a loop among torch's own threads.

Between two parallel operations, torch's OpenMP threads spin for milliseconds. Threads of any other
kind would wait for a processor longer than the loops here take. So the loops run on torch's own
team of threads. They enter it by ``GOMP_parallel`` in the OpenMP library that torch loaded. It is
the entry point for compilers in libgomp, libiomp5 and, on Linux, libomp. If it is not found, one
thread runs the whole loop.
"""

import ctypes
import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

__all__ = ["Range", "ranges", "share"]

_Part = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

Range = tuple[int, int]


def ranges(count: int, threads: int) -> list[Range]:
    """Cut 0 … count − 1 into about equal ranges (first, last), one for each thread.

    ``last`` is excluded. All lengths but the last are even. There are at most as many ranges as
    torch has threads, and as there are pairs of items.
    """
    threads = min(threads, torch.get_num_threads(), count // 2)
    if threads <= 1:
        return [(0, count)]
    bounds = [2 * round(i * count / threads / 2) for i in range(threads)] + [count]
    return list(pairwise(bounds))


def share(loop: Callable[[int, int], None], parts: list[Range]) -> None:
    """Call ``loop(first, last)`` on every range, on the threads of the team.

    The loop must not hold Python's lock (numba's ``nogil``), or the threads take turns. If it
    raises an exception on a thread, that exception is raised here.
    """
    run = _entry() if len(parts) > 1 else None
    if run is None:
        for first, last in parts:
            loop(first, last)
        return
    left = iter(parts)  # no fixed shares, since the team may be smaller than asked
    errors: list[BaseException] = []

    def part(_: int) -> None:
        try:
            for first, last in left:
                loop(first, last)
        except BaseException as error:
            errors.append(error)  # an exception raised through C would be lost

    run(_Part(part), None, len(parts), 0)
    if errors:
        raise errors[0]


@functools.cache
def _entry() -> Any:
    """Return ``GOMP_parallel`` of the OpenMP library that torch loaded, or None."""
    folder = Path(torch.__file__).parent / "lib"
    names = sorted(str(path) for path in folder.glob("lib*omp*.so*"))
    for name in [*names, "libgomp.so.1"]:
        try:
            return ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
    return None
