"""Measuring what a call takes: seconds, and every byte that torch's allocators hand out.

The bytes come from the memory events of torch's own profiler, which sees each allocation and each
release of the CPU and CUDA allocators, those inside kernels included, and nothing else: not
Python objects, not what an allocator keeps cached. Nothing is sampled, so a peak is the peak.

Known limits: memory that a library takes from the operating system behind torch's back is not
seen (a test holds the figures against the resident set); profilers do not nest.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    _EventType,
    _ExperimentalConfig,
)

from retrograde.errors import RetrogradeError
from retrograde.units import format_bytes

__all__ = ["Measurement", "measure", "measure_phases"]

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement(Generic[T]):
    """What one call returned and took.

    Attributes:
        value: what the call returned.
        seconds: wall-clock time, in seconds, the measuring included.
        peak_bytes: the peak growth of allocated bytes during the call.
        retained_bytes: the growth that is left at its end.
        working_bytes: the peak of the bytes allocated and released again within the call: what
            counts against a memory budget (outputs and gradients handed to the caller do not).
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
            f"of which working memory {format_bytes(self.working_bytes)}"
        )


def measure(fn: Callable[[], T], *, device: str | torch.device = "cpu") -> Measurement[T]:
    """Run a call once and tell its seconds and its bytes.

    Args:
        fn: called without arguments. What it returns stays alive, so it counts as retained.
        device: whose allocations count, such as ``"cpu"`` or ``"cuda:0"``.

    Returns:
        A :class:`Measurement`.

    Raises:
        RetrogradeError: another profiler is running.

    Example:
        >>> import torch
        >>> m = measure(lambda: torch.zeros(1024)[:8].clone())
        >>> m.peak_bytes, m.working_bytes, m.retained_bytes
        (4128, 4096, 32)
    """
    device = torch.device(device)
    value, start_ns, stop_ns, events = _observe(fn, device)
    events = [event for event in events if _is_on(event, device)]
    sizes = np.array([event.extra_fields.alloc_size for event in events], np.int64)
    moments = np.array([event.start_time_ns for event in events], np.int64)
    held, working = np.cumsum(sizes), np.cumsum(np.where(_transient(events), sizes, 0))
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


def measure_phases(
    phases: Sequence[Callable[[], object]],
    *,
    device: str | torch.device = "cpu",
    working: bool = False,
) -> list[tuple[int, int]]:
    """Run calls one after the other, and tell for each its peak and its growth.

    Args:
        phases: called in order, without arguments; what they return is dropped at once.
        device: whose allocations count.
        working: leave out what is still allocated when the last call has returned.

    Returns:
        For each call (peak growth of allocated bytes since its start, growth left at its end).

    Raises:
        RetrogradeError: another profiler is running.

    Example:
        >>> kept = []
        >>> measure_phases([lambda: kept.append(torch.zeros(256)), kept.clear])
        [(1024, 1024), (0, -1024)]
    """
    device = torch.device(device)

    def call() -> None:
        for phase in phases:
            torch.empty(_MARK, dtype=torch.uint8)  # seen among the events: here a phase begins
            phase()

    *_, events = _observe(call, device)
    counted = _transient(events) if working else np.ones(len(events), np.bool_)
    sizes: list[list[int]] = []
    for event, counts in zip(events, counted, strict=True):
        size = event.extra_fields.alloc_size
        if abs(size) == _MARK:
            if size > 0:
                sizes.append([])
        elif sizes and counts and _is_on(event, device):
            sizes[-1].append(size)
    return [(int(np.cumsum(s).max(initial=0)), sum(s)) for s in sizes]


# A number of bytes that no tensor of interest has.
_MARK = 1009


def _observe(fn: Callable[[], T], device: torch.device) -> tuple[T, int, int, list[Any]]:
    """Run a call under the profiler: its value, its start and end in ns, and its memory events."""
    if torch._C._autograd._profiler_enabled():
        raise RetrogradeError(
            "cannot measure while another profiler is running: run the first call of each new "
            "input shape before the profiler starts (later calls measure nothing)"
        )
    _synchronize(device)
    collects = gc.isenabled()
    gc.disable()  # what it released meanwhile, of whoever it was, would pass for ours
    _start_profiler()
    start_ns = time.time_ns()
    try:
        value = fn()
        _synchronize(device)
    finally:
        stop_ns = time.time_ns()
        result = torch._C._autograd._disable_profiler()
        if collects:
            gc.enable()
    events = sorted(_allocations(result), key=lambda event: event.start_time_ns)
    return value, start_ns, stop_ns, events


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _start_profiler() -> None:
    """Start torch's profiler with memory events on, and its notices on standard error off."""
    config = ProfilerConfig(
        ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig()
    )
    activities = {ProfilerActivity.CPU}
    level = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = level or "99"  # read once, when the library first starts
    try:
        torch._C._autograd._prepare_profiler(config, activities)
        torch._C._autograd._enable_profiler(config, activities)
    finally:
        if level is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _is_on(event: Any, device: torch.device) -> bool:
    place = event.extra_fields.device
    return bool(place.type == device.type and device.index in (None, place.index))


def _transient(events: Sequence[Any]) -> NDArray[np.bool_]:
    """For each event, whether its block was both allocated and released among them."""
    transient = np.zeros(len(events), np.bool_)
    live: dict[int, int] = {}
    for index, event in enumerate(events):
        fields = event.extra_fields
        if fields.alloc_size > 0:
            live[fields.ptr] = index
        elif (born := live.pop(fields.ptr, None)) is not None:
            transient[[born, index]] = True
    return transient


def _allocations(result: Any) -> Iterator[Any]:
    pending = list(reversed(result.experimental_event_tree()))
    while pending:
        event = pending.pop()
        if event.tag == _EventType.Allocation:
            yield event
        pending.extend(reversed(event.children))
