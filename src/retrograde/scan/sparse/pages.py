"""Ask for large pages behind large results.

A product is written once, read soon and freed. In pages of 4 KiB, the system takes longer to
provide the memory than the product takes to fill it. Unlike numpy,
torch's CPU allocator does not ask for large pages.
"""

import ctypes
import functools
import mmap
from typing import Any

from torch import Tensor

_LEAST = 2**22  # bytes, numpy's threshold
_PAGE = mmap.PAGESIZE


def in_large_pages(fresh: Tensor) -> Tensor:
    """Ask for large pages behind a contiguous tensor not yet written; return the tensor."""
    advise = _advise() if fresh.nbytes >= _LEAST else None
    if advise is not None:
        start = -(-fresh.data_ptr() // _PAGE) * _PAGE
        advise(start, (fresh.data_ptr() + fresh.nbytes - start) // _PAGE * _PAGE, _HUGE)
    return fresh


_HUGE = getattr(mmap, "MADV_HUGEPAGE", 14)


@functools.cache
def _advise() -> Any:
    """Return the C library's ``madvise``, or None."""
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
