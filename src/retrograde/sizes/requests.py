"""What a call requests of torch's CUDA allocator, block by block.

The profiler reports the size of a block, which is the request rounded up to 512 bytes. A block that
the cache had at hand may be up to 1 MiB larger. Block sizes depend on what ran before, so they can
be neither planned nor promised. The allocator's own history has the requests.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Event(NamedTuple):
    """An allocation, or with a negative size a release."""

    size: int
    address: int
    nanoseconds: int
    place: str
    number: int | None


@contextmanager
def requests(device: torch.device) -> Iterator[Callable[[Sequence[Event]], list[Event]]]:
    """Have the allocator keep its history, as long as it does not do so already for the user.
    Yields what makes requests of the events of a call that has just ended: :func:`requested`."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        yield list
        return
    card = torch.cuda.current_device() if device.index is None else device.index
    history = torch.cuda.memory
    kept = torch._C._cuda_isHistoryEnabled()
    if not kept:
        history._record_memory_history("all", context=None)

    def sizes_replaced(events: Sequence[Event]) -> list[Event]:
        return requested(events, history._snapshot()["device_traces"][card])

    try:
        yield sizes_replaced
    finally:
        if not kept:
            history._record_memory_history(None)


def requested(events: Sequence[Event], history: Iterable[dict[str, Any]]) -> list[Event]:
    """CUDA's events with the sizes that were asked for. The history ends with the events; where it
    lacks one, for it holds so many, the block's size stays."""
    sizes: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for entry in history:
        if entry["action"] in ("alloc", "free_requested"):
            sizes[entry["addr"], entry["action"] == "alloc"].append(entry["size"])
    found = []
    for event in reversed(events):
        asked = sizes[event.address, event.size > 0]
        if event.place == "cuda" and asked:
            size = asked.pop()
            event = event._replace(size=size if event.size > 0 else -size)
        found.append(event)
    return found[::-1]
