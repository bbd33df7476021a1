"""Launches that are recorded once, as a CUDA graph, and then replayed by one call of the driver.

A launch costs the processor several microseconds, and a small kernel takes less on the card. A
graph is worth its recording if the same launches are made many times. It keeps their arguments, so
what changes must be read from memory.
"""

import functools
import warnings
from collections.abc import Callable

import torch


def recorded(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that makes the launches of ``launch`` again. ``launch`` is called once, or
    at each call where no graph can be recorded. It must allocate nothing on the card and must have
    been launched before, so that its kernels are compiled. If the caller records a graph, the
    launches become a part of it."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return launch
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            # Other threads may allocate meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        _warn(str(error).splitlines()[0])
        return launch
    return graph.replay  # type: ignore[no-any-return]


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"launches cannot be recorded as a CUDA graph here ({reason}): they are made one by one, "
        "with the same results and slower",
        RuntimeWarning,
        stacklevel=4,
    )
