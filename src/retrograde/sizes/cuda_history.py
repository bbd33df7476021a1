"""What a call requests of torch's CUDA allocator, block by block, from the allocator's own history.

A block is the request rounded up to 512 bytes, and one that the cache had at hand may be up to
1 MiB larger. Block sizes depend on what ran before, so they can be neither planned nor promised.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from retrograde.torch_private import keeps_cuda_history


class Event(NamedTuple):
    """An allocation, or with a negative size a release."""

    size: int
    address: int
    nanoseconds: int
    place: str
    number: int | None


_SIGNS = {"alloc": 1, "free_requested": -1}


@contextmanager
def requests() -> Iterator[Callable[[], list[Event]]]:
    """Have the allocator keep its history, as long as it does not do so already for the user.
    Yields a function that returns the events of all cards and threads since the block began. It
    raises RuntimeError where the user's history is too short for them."""
    if not torch.cuda.is_initialized():
        yield list
        return
    memory = torch.cuda.memory
    kept = keeps_cuda_history()
    if not kept:
        memory._record_memory_history("all", context=None)
    before = memory._snapshot()["device_traces"]

    def found() -> list[Event]:
        events = []
        for number, history in enumerate(memory._snapshot()["device_traces"]):
            begun = len(before[number])
            if history[begun - 1 : begun] != before[number][-1:]:
                raise RuntimeError(
                    "the history of CUDA's allocator, which torch.cuda.memory."
                    "_record_memory_history was told to keep, is shorter than the measured call: "
                    "raise its max_entries, or stop it before the call"
                )
            for entry in history[begun:]:
                if sign := _SIGNS.get(entry["action"]):
                    size, moment = sign * entry["size"], 1000 * entry["time_us"]
                    events.append(Event(size, entry["addr"], moment, "cuda", number))
        return events

    try:
        yield found
    finally:
        if not kept:
            memory._record_memory_history(None)
