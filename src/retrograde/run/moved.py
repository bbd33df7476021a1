"""Inputs in main memory for a model on a GPU, moved as they are read or one range ahead.

Copies go through pinned memory, so the program does not wait for them. Those made ahead are on a
stream of their own, so the computation does not wait either. Two orders make that exact. A copy
waits for all that was computed before its memory was allocated. The computation waits for the copy
before it reads the range, and before the memory is released.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from retrograde.run.sources import Source

__all__ = ["Moved", "SideStream"]

Tensors = list[Tensor]


class SideStream:
    """A stream of a GPU that copies while the caller's stream computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy (into, from) pairs, once all that the caller's stream was told so far is done.

        ``into`` may be memory that this work still uses.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for into, t in pairs:
                into.copy_(t, non_blocking=True)

    def wait(self) -> None:
        """Make the caller's stream wait for the copies; the program does not wait."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


class Moved:
    """A source whose tensors in main memory are moved to a GPU as they are read.

    Within :meth:`ahead`, a read also begins to copy the range that will be read next. The copy
    waits for what was computed before the read, whose memory it may reuse. So it runs beside the
    computation of the range that was read.
    """

    def __init__(self, source: "Source", device: torch.device) -> None:
        self.source, self.device = source, device
        self.structure, self.trained = source.structure, source.trained
        self.due: deque[slice] = deque()  # the ranges that will be read
        self.coming: tuple[slice, Tensors] | None = None
        self.side: SideStream | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int | slice) -> Tensors:
        found = self._received(index)
        if found is None:
            found = [
                _pinned(t, self.device).to(self.device, non_blocking=True) if moves else t
                for t, moves in self._read(index)
            ]
        if self.side is not None and isinstance(index, slice):
            self._send_next(self.side, index)
        return found

    @property
    def step_bytes(self) -> int:
        """The bytes of one step that are moved."""
        return sum(t.nbytes for t, moves in self._read(0) if moves)

    @contextmanager
    def ahead(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Copy ahead, within the context, as long as these ranges are read in this order.

        A source whose values depend on what was computed before must not be read ahead.
        """
        self.due = deque(slice(start, stop) for start, stop in ranges)
        self.side = SideStream(self.device)
        try:
            yield
        finally:
            self.side.wait()  # before memory that is copied into can be released
            self.side, self.coming = None, None
            self.due.clear()

    def _read(self, index: int | slice) -> list[tuple[Tensor, bool]]:
        """Return the leaves as they are, and which of them are to be moved."""
        parts = zip(self.source[index], self.trained, strict=True)
        return [(t, trained is None and t.device.type == "cpu") for t, trained in parts]

    def _received(self, index: int | slice) -> Tensors | None:
        """Return the range that was copied ahead, if it is this one."""
        if self.coming is None or self.side is None:
            return None
        (known, found), self.coming = self.coming, None
        self.side.wait()
        return found if known == index else None

    def _send_next(self, side: SideStream, index: slice) -> None:
        """Begin to copy the range that is read after this one."""
        if not self.due or self.due.popleft() != index:
            self.due.clear()  # reads do not follow the ranges
        if not self.due:
            return
        leaves = self._read(self.due[0])
        there = [torch.empty_like(t, device=self.device) if moves else t for t, moves in leaves]
        self.coming = self.due[0], there
        side.copy(
            [
                (into, _pinned(t, self.device))
                for into, (t, moves) in zip(there, leaves, strict=True)
                if moves
            ]
        )


def _pinned(t: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in memory from which a GPU can copy while the program goes on."""
    return t.pin_memory() if device.type == "cuda" else t
