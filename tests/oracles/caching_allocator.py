"""A model of torch's CUDA caching allocator, in its default settings, on one stream.

From c10/cuda/CUDACachingAllocator.cpp: a request is rounded up to 512 bytes. Requests of up to
1 MiB are served from segments of 2 MiB, larger ones below 10 MiB from segments of 20 MiB, larger
ones yet from segments of their own, rounded up to 2 MiB. The smallest free block that is large
enough is taken, at the lowest address among equals. What is left of it is split off if it has 512
bytes, in the large pool if it has more than 1 MiB. A block that is released merges with its free
neighbours. Segments stay, unless the cache is emptied, which gives back those that are wholly free.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
_LEAST, _SMALL, _LARGE = 512, MIB, 10 * MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment, with its neighbours there."""

    address: int
    size: int
    small: bool
    requested: int = 0  # 0 if it is free
    before: "Block | None" = None
    after: "Block | None" = None


class CachingAllocator:
    """Bytes requested, allocated (as blocks are) and reserved, now and at the peaks."""

    def __init__(self):
        self.requested = self.allocated = self.reserved = 0
        self.peaks = [0, 0, 0]
        self._free = {True: [], False: []}  # (size, address), sorted, by pool
        self._at = {}  # free blocks by address
        self._end = 0  # no segment begins where another ends

    def allocate(self, request):
        size = -(-max(request, 1) // _LEAST) * _LEAST
        small = size <= _SMALL
        block = self._taken(size, small) or self._segment(size, small)
        left = block.size - size
        if left >= _LEAST if small else left > _SMALL:
            rest = Block(block.address + size, left, small, 0, block, block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.requested = request
        self.requested += request
        self.allocated += block.size
        self._note()
        return block

    def release(self, block):
        self.requested -= block.requested
        self.allocated -= block.size
        block.requested = 0
        for other in (block.before, block.after):
            if other and other.address in self._at:
                self._take(other)
                block = self._merged(*sorted((block, other), key=lambda b: b.address))
        self._put(block)

    def empty(self):
        """As ``torch.cuda.empty_cache``."""
        for block in [b for b in self._at.values() if not b.before and not b.after]:
            self._take(block)
            self.reserved -= block.size

    def forget_peaks(self):
        self.peaks = [self.requested, self.allocated, self.reserved]

    def _note(self):
        now = self.requested, self.allocated, self.reserved
        self.peaks = [max(pair) for pair in zip(self.peaks, now, strict=True)]

    def _taken(self, size, small):
        place = bisect_left(self._free[small], (size, 0))
        if place == len(self._free[small]):
            return None
        return self._take(self._at[self._free[small][place][1]])

    def _segment(self, size, small):
        whole = 2 * MIB if small else 20 * MIB if size < _LARGE else -(-size // (2 * MIB)) * 2 * MIB
        block = Block(self._end, whole, small)
        self._end += whole + 2 * MIB
        self.reserved += whole
        return block

    def _merged(self, first, second):
        first.size += second.size
        first.after = second.after
        if second.after:
            second.after.before = first
        return first

    def _put(self, block):
        insort(self._free[block.small], (block.size, block.address))
        self._at[block.address] = block

    def _take(self, block):
        self._free[block.small].remove((block.size, block.address))
        return self._at.pop(block.address)
