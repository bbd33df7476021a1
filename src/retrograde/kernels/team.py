"""Share a loop among torch's own threads.

Between two parallel operations, torch's OpenMP threads spin for milliseconds. Threads of any other
kind would wait for a processor longer than the loops here take. So the loops run on torch's own
team of threads. They enter it by ``GOMP_parallel`` in the OpenMP library that torch loaded. It is
the entry point for compilers in libgomp, libiomp5 and, on Linux, libomp. If it is not found, one
thread runs the whole loop.
"""

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not on Linux
    getrusage = None  # type: ignore[assignment]

_Part = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

Range = tuple[int, int]
Run = TypeVar("Run", bound=Callable[..., Any])

#: The multiplications for which one more thread pays; they take about a tenth of a millisecond.
THREAD_WORK = 2_000_000
_LONG = 1e-3  # seconds of a call that is long enough to tell
_RAN = 0.75  # the least share of its time for which a thread runs that has a processor of its own
_PAUSES = 0.1, 5.0  # seconds on one thread: the first time, and the most


class _Crew(threading.local):
    """The number of threads that torch has otherwise, while this thread runs on one."""

    size = 0


_crew = _Crew()
_alone = [0.0, _PAUSES[0]]  # until when calls run on one thread, and for how long the next time


def paced(run: Run) -> Run:
    """Let a core's method run on one thread for a while, where others want its processors.

    A parallel region ends when its last thread has had a processor. Beside other busy processes
    that takes milliseconds, whatever the region's own work takes. They are noticed by the calling
    thread: it was ready to run, and did not for a good part of the time. Work is cut into the same
    parts on one thread, and so results have the same bits.
    """
    if getrusage is None:
        return run

    @functools.wraps(run)
    def within(self: Any, *args: Any, **options: Any) -> Any:
        threads = torch.get_num_threads()
        if threads == 1 or self.ambient.device.type != "cpu":
            return run(self, *args, **options)
        start, ran, switched = _clocks()
        is_alone = start < _alone[0]
        if is_alone:
            _crew.size = threads
            torch.set_num_threads(1)
        try:
            return run(self, *args, **options)
        finally:
            if is_alone:
                torch.set_num_threads(threads)
                _crew.size = 0
            now, *spent = _clocks()
            if now - start > _LONG:
                is_crowded = spent[0] - ran < _RAN * (now - start) and spent[1] > switched
                if is_crowded:
                    _alone[:] = now + _alone[1], min(2 * _alone[1], _PAUSES[1])
                elif not is_alone:
                    _alone[:] = 0.0, _PAUSES[0]

    return within  # type: ignore[return-value]


def _clocks() -> tuple[float, float, int]:
    """Return the time, that for which this thread ran, and how often it was made to stop."""
    return time.perf_counter(), time.thread_time(), getrusage(RUSAGE_THREAD).ru_nivcsw


def ranges(count: int, threads: int) -> list[Range]:
    """Cut 0 … count − 1 into about equal ranges (first, last), one for each thread.

    ``last`` is excluded. All lengths but the last are even. There are at most as many ranges as
    torch has threads, and as there are pairs of items.
    """
    threads = min(threads, team_size(), count // 2)
    if threads <= 1:
        return [(0, count)]
    bounds = [2 * round(i * count / threads / 2) for i in range(threads)] + [count]
    return list(pairwise(bounds))


def parts_for(count: int, work: int) -> list[Range]:
    """Return ranges of items, for as many threads as pay for the multiplications."""
    return ranges(count, 1 + work // THREAD_WORK)


def team_size() -> int:
    """Return how many threads parallel loops have."""
    return _crew.size or torch.get_num_threads()


def share(loop: Callable[[int, int], None], parts: list[Range]) -> None:
    """Call ``loop(first, last)`` on every range, on the threads of the team.

    The loop must not hold Python's lock (numba's ``nogil``), or the threads take turns. If it
    raises an exception on a thread, that exception is raised here.
    """
    left = iter(parts)  # no fixed shares, since the team may be smaller than asked

    def part(_: int, __: int) -> None:
        for first, last in left:
            loop(first, last)

    enter_team(part, len(parts))


def share_with_room(loop: Callable[..., None], room: Tensor, parts: list[Range]) -> None:
    """Call ``loop(room, first, last)``, with scratch memory of its own for each range.

    torch allocates that memory, so that measurements count it.
    """

    rooms = room.numpy()

    def own(first: int, last: int) -> None:
        loop(rooms[parts.index((first, last))], first, last)

    share(own, parts)


def enter_team(call: Callable[[int, int], None], threads: int) -> None:
    """Let the threads of the team make a call each, with their number and that of all of them.

    There are at most ``threads``. If a call raises an exception, that is raised here.
    """
    run = _entry() if threads > 1 and not _crew.size else None
    if run is None:
        call(0, 1)
        return
    start, number, members = run
    errors: list[BaseException] = []

    def own(_: int) -> None:
        try:
            call(number(), members())
        except BaseException as error:
            errors.append(error)  # an exception raised through C would be lost

    start(_Part(own), None, threads, 0)
    if errors:
        raise errors[0]


@functools.cache
def _entry() -> Any:
    """Return ``GOMP_parallel`` of the OpenMP library that torch loaded, and its inquiries.

    These are a thread's number and that of all. Return None if there is no such library.
    """
    folder = Path(torch.__file__).parent / "lib"
    names = sorted(str(path) for path in folder.glob("lib*omp*.so*"))
    for name in [*names, "libgomp.so.1"]:
        try:
            library = ctypes.PyDLL(name)
            start = ctypes.CDLL(name).GOMP_parallel
            return start, library.omp_get_thread_num, library.omp_get_num_threads
        except (OSError, AttributeError):
            continue
    return None
