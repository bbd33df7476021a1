"""Warnings about what a GPU decided by itself, given without waiting for it.

A scan on a GPU checks its own products, and sweeps step by step those samples whose products cannot
be trusted. Its result is exact either way, so the program need not wait for the verdict. The
verdict is copied to main memory, and read by a later call that finds it there.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Verdicts:
    """Verdicts that are under way. After the first bad one, ``warn`` is called, and none is read. A
    verdict is a tensor of one number, which is 0 if all is well."""

    def __init__(self, warn: Callable[[], None]) -> None:
        self.warn, self.told = warn, False
        self.coming: deque[tuple[Tensor, Any]] = deque()

    def add(self, verdict: Tensor) -> None:
        """Take a verdict, and look at those that have arrived."""
        if self.told:
            return
        if not verdict.is_cuda:
            self._read(verdict)
            return
        if torch.cuda.is_current_stream_capturing():
            return  # a caller's graph will be replayed without us
        with torch.cuda.device(verdict.device):
            here = torch.empty(verdict.shape, dtype=verdict.dtype, device="cpu", pin_memory=True)
            here.copy_(verdict, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.coming.append((here, event))
        while self.coming and self.coming[0][1].query():
            self._read(self.coming.popleft()[0])

    def _read(self, verdict: Tensor) -> None:
        if bool(verdict) and not self.told:
            self.told = True
            self.coming.clear()
            self.warn()
