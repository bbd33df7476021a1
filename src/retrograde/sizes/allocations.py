"""Measure a call: its seconds, and every byte that torch's allocators hand out.

Every allocation and release is counted, those inside kernels included. Nothing is sampled, so the
peak is exact. On CUDA the bytes are the requests in the allocator's own history, of all threads
(:mod:`retrograde.sizes.cuda_history`). Elsewhere they are the memory events of torch's profiler.

That sees the calling thread only. The process has one such profiler, so threads take turns. If the
user already runs it, torch's older profiler serves, on a thread of its own, since the two do not
nest. It gives sizes without addresses, so releases are matched to blocks by size (:func:`_paired`).

Known limits: it does not see Python objects, memory that an allocator caches, and memory that a
library takes from the operating system. A test compares the figures with the resident set.
"""

import contextvars
import gc
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import profiler

from retrograde.machine import MEASURING, unpacked
from retrograde.replay.switches import Switches
from retrograde.sizes.cuda_history import Event, requests
from retrograde.torch_private import EventType, profile_memory, stop_profiler
from retrograde.torch_private import is_profiled as is_profiled_here
from retrograde.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """The result of one call, its seconds and its bytes.

    Attributes:
        value: the value that the call returned.
        seconds: wall-clock time, in seconds, the measuring included.
        peak_bytes: the peak growth of allocated bytes during the call.
        retained_bytes: the growth that remains at its end.
        working_bytes: the peak of the bytes that are allocated and released within the call. This
            counts against a memory budget; outputs and gradients handed to the caller do not.
        times: seconds since the start, one for each allocation or release.
        held: growth of allocated bytes right after it.
        working: the part of it that is released before the end.
    """

    value: T
    seconds: float
    peak_bytes: int
    retained_bytes: int
    working_bytes: int
    times: NDArray[np.float64]
    held: NDArray[np.int64]
    working: NDArray[np.int64]

    def __str__(self) -> str:
        return (
            f"{self.seconds:.3g} s, peak {format_bytes(self.peak_bytes)}, "
            f"of which working memory {format_bytes(self.working_bytes)}; outputs and gradients "
            "are among it, which no budget covers"
        )


def measure(fn: Callable[[], T], *, device: str | torch.device | None = None) -> Measurement[T]:
    """Run a call once and measure its seconds and its bytes.

    Args:
        fn: called without arguments. Its result stays alive, so it counts as retained.
        device: the device whose allocations count, such as ``"cpu"`` or ``"cuda:0"``. None means
            the accelerator on which the call allocates most, or the CPU if it allocates on none.

    Returns:
        A :class:`Measurement`.

    Example:
        >>> import torch
        >>> m = measure(lambda: torch.zeros(1024)[:8].clone())
        >>> m.peak_bytes, m.working_bytes, m.retained_bytes
        (4128, 4096, 32)
    """
    asked = _in_use() if device is None else torch.device(device)
    value, start_ns, stop_ns, events = _observe(fn, asked, oldest=False)
    if device is None and asked != _in_use():
        raise RuntimeError(
            "the measured call was the first to use CUDA, so its bytes there were not seen: name "
            'the device (device="cuda"), or use CUDA before'
        )
    counted = _busiest(events) if device is None else asked
    events = _on(counted, events)
    sizes = np.array([event.size for event in events], np.int64)
    moments = np.array([event.nanoseconds for event in events], np.int64)
    born, died = _blocks(events)
    transient = (born >= 0) & (died < len(events))
    held, working = np.cumsum(sizes), np.cumsum(np.where(transient, sizes, 0))
    return Measurement(
        value=value,
        seconds=(stop_ns - start_ns) / 1e9,
        peak_bytes=int(held.max(initial=0)),
        retained_bytes=int(held[-1]) if len(held) else 0,
        working_bytes=int(working.max(initial=0)),
        times=(moments - start_ns) / 1e9,
        held=held,
        working=working,
    )


@dataclass(frozen=True)
class Phase:
    """The allocations and releases of one call in a sequence. ``sizes`` is in bytes, negative for a
    release. For each, ``born`` and ``died`` are the numbers of the calls that allocated and
    released the block. If none did, they are −1 and the number of calls."""

    sizes: NDArray[np.int64]
    born: NDArray[np.int64]
    died: NDArray[np.int64]

    def peak(self, since: int = -1, before: float = math.inf) -> int:
        """Return the peak growth since the call began, of some blocks only. They are allocated by
        call ``since`` or later, and released earlier than call ``before``."""
        return int(np.cumsum(self._counted(since, before)).max(initial=0))

    def growth(self, since: int = -1, before: float = math.inf) -> int:
        """Return the growth that remains at the end of the call; arguments as for :meth:`peak`."""
        return int(self._counted(since, before).sum())

    def _counted(self, since: int, before: float) -> NDArray[np.int64]:
        return np.where((self.born >= since) & (self.died < before), self.sizes, 0)


def measure_phases(
    phases: Sequence[Callable[[], object]], *, device: str | torch.device = "cpu"
) -> list[Phase]:
    """Run calls in sequence, drop their results, and return each one's allocations and releases.

    Example:
        >>> kept = []
        >>> phases = measure_phases([lambda: kept.append(torch.zeros(256)), kept.clear])
        >>> [(phase.peak(), phase.growth()) for phase in phases]
        [(1024, 1024), (0, -1024)]
    """
    device = torch.device(device)

    def call() -> None:
        for phase in phases:
            torch.empty(_MARK, dtype=torch.uint8, device=device)  # marks where a phase begins
            phase()

    *_, events = _observe(call, device, oldest=True)
    ours: list[Event] = []
    numbers: list[int] = []
    number = -1
    for event in _on(device, events):
        if abs(event.size) == _MARK:
            number += event.size > 0
        elif number >= 0:
            ours.append(event)
            numbers.append(number)
    sizes = np.array([event.size for event in ours], np.int64)
    born, died = _blocks(ours)
    # By the number of an event; the last two entries are for len(ours) and −1.
    phase_of = np.array([*numbers, len(phases), -1], np.int64)
    table = np.stack([sizes, phase_of[born], phase_of[died]])
    return [Phase(*table[:, phase_of[:-2] == k]) for k in range(len(phases))]


# A number of bytes that no other tensor has.
_MARK = 1009


def apart(fn: Callable[[], T], device: torch.device) -> T:
    """Run a call as a measured one: in turn, and unseen by hooks and by a profiler that runs."""
    with MEASURING, _uncollected(), unpacked():
        return _beside(fn, device, oldest=False)[0] if is_profiled() else fn()


def is_profiled() -> bool:
    """Return whether torch's profiler runs, in this thread or by the context manager."""
    return is_profiled_here() or bool(getattr(profiler, "_is_profiler_enabled", False))


def _observe(
    fn: Callable[[], T], device: torch.device, *, oldest: bool
) -> tuple[T, int, int, list[Event]]:
    """Run a call and return its value, its start and end in ns, and its memory events."""
    with MEASURING, _uncollected(), unpacked():
        _synchronize(device)
        with requests() as requested:
            watched = _beside(fn, device, oldest) if is_profiled() else _alone(fn, device)
            value, start_ns, stop_ns, events = watched
            events = [event for event in events if event.place != "cuda"]
            events.sort(key=lambda event: event.nanoseconds)  # a card's are in the order they had
            return value, start_ns, stop_ns, events + requested()


def _alone(fn: Callable[[], T], device: torch.device) -> tuple[T, int, int, list[Event]]:
    """Measure by torch's profiler, limited to memory events. The profiler is stopped after an
    error or Ctrl-C too: one that was left running would fail when the process ends."""
    try:
        _start_profiler()
        start_ns = time.time_ns()
        value = fn()
        _synchronize(device)
    finally:
        stop_ns = time.time_ns()
        result = stop_profiler()
    return value, start_ns, stop_ns, _allocations(result)


def _beside(
    fn: Callable[[], T], device: torch.device, oldest: bool
) -> tuple[T, int, int, list[Event]]:
    """Measure by torch's older profiler, on a new thread that the running one does not watch, under
    this thread's switches and modes."""
    then, grad = Switches(device), torch.is_grad_enabled()
    place = torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def call() -> tuple[T, int, int, list[Event]]:
        with then.as_then(), torch.set_grad_enabled(grad), place:
            profile_memory(legacy=True)
            start_ns = time.time_ns()
            try:
                value = fn()
                _synchronize(device)
            finally:
                stop_ns = time.time_ns()
                threads = stop_profiler(legacy=True)
        events = [event for thread in threads for event in _paired(thread, start_ns, oldest)]
        return value, start_ns, stop_ns, events

    with ThreadPoolExecutor(1, "retrograde-measure") as thread:
        return thread.submit(contextvars.copy_context().run, call).result()


def _paired(events: Sequence[Any], start_ns: int, oldest: bool) -> Iterator[Event]:
    """Iterate over the older profiler's events; each release is matched to a live block of equal
    size. Matching the oldest gives the most that the call may have worked with, the newest the
    least."""
    live: dict[int, deque[int]] = defaultdict(deque)
    for number, event in enumerate(events, 1):
        size, address = event.cpu_memory_usage(), -number
        if event.kind() != "memory_alloc" or not size:
            continue
        if size > 0:
            live[size].append(address)
        elif blocks := live[-size]:
            address = blocks.popleft() if oldest else blocks.pop()
        yield Event(size, address, start_ns + number, "cpu", None)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Stop the garbage collector: memory that it released would be counted as the call's own."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_use() -> torch.device:
    """Return CUDA's current device if CUDA is in use, else the CPU."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _busiest(events: Sequence[Event]) -> torch.device:
    """Return the accelerator with the most allocated bytes; the CPU if there is none."""
    sums: Counter[tuple[str, int | None]] = Counter()
    for event in events:
        if event.place != "cpu":
            sums[event.place, event.number] += max(0, event.size)
    (place, number), _ = max(sums.items(), key=lambda item: item[1], default=(("cpu", None), 0))
    return torch.device(place) if number is None else torch.device(place, number)


def _start_profiler() -> None:
    """Start torch's profiler, without its lines on the terminal."""
    level = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = level or "99"  # read once, at the library's first start
    try:
        profile_memory()
    finally:
        if level is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _on(device: torch.device, events: Sequence[Event]) -> list[Event]:
    """Return the events on a device, or on all devices of its type if it has no number."""
    place, number = device.type, device.index
    return [event for event in events if event.place == place and number in (None, event.number)]


def _blocks(events: Sequence[Event]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the events that allocated and released each event's block. −1 and the number of events
    stand for none."""
    born, died = [-1] * len(events), [len(events)] * len(events)
    live: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.size > 0:
            live[event.address] = born[index] = index
        else:
            died[index] = index
            if (allocated := live.pop(event.address, None)) is not None:
                born[index], died[allocated] = allocated, index
    return np.array(born, np.int64), np.array(died, np.int64)


def _allocations(result: Any) -> list[Event]:
    allocation, tree = EventType.Allocation, result.experimental_event_tree()
    # Operations, which have children, are not noted.
    pairs = ((node.start_time_ns, node.extra_fields) for node in tree if node.tag == allocation)
    return [Event(x.alloc_size, x.ptr, t, x.device.type, x.device.index) for t, x in pairs]
