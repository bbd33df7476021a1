"""What a call requests of torch's CUDA allocator, block by block, from the allocator's own history.

A block is the request rounded up to 512 bytes, and one that the cache had at hand may be up to
1 MiB larger. Block sizes depend on what ran before, so they can be neither planned nor promised.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Event(NamedTuple):
    """An allocation, or with a negative size a release."""

    size: int
    address: int
    nanoseconds: int
    place: str
    number: int | None


_SIGNS = {"alloc": 1, "free_requested": -1}


@contextmanager
def requests(device: torch.device) -> Iterator[Callable[[int], list[Event]]]:
    """Have the allocator keep its history, as long as it does not do so already for the user.

    Yields a function that returns the events of all cards and threads since a time in nanoseconds.
    It raises RuntimeError where the user's history is too short for them.
    """
    if not torch.cuda.is_initialized():
        yield lambda since: []
        return
    memory = torch.cuda.memory
    card = torch.cuda.current_device() if device.index is None else device.index
    kept = torch._C._cuda_isHistoryEnabled()
    if not kept:
        memory._record_memory_history("all", context=None)
    torch.empty(1, dtype=torch.uint8, device=f"cuda:{card}")  # the history's first entry

    def found(since: int) -> list[Event]:
        histories = memory._snapshot()["device_traces"]
        if not histories[card] or histories[card][0]["time_us"] * 1000 > since:
            raise RuntimeError(
                "the history of CUDA's allocator, which torch.cuda.memory._record_memory_history "
                "was told to keep, is shorter than the measured call: raise its max_entries, or "
                "stop it before the call"
            )
        return [
            Event(sign * entry["size"], entry["addr"], 1000 * entry["time_us"], "cuda", number)
            for number, history in enumerate(histories)
            for entry in history
            if entry["time_us"] * 1000 >= since and (sign := _SIGNS.get(entry["action"]))
        ]

    try:
        yield found
    finally:
        if not kept:
            memory._record_memory_history(None)
