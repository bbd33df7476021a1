"""The way back across ranks: by a line, or by a scan that is compared with what it led to.

*Exact, or by a line.* A product of many Jacobians can overflow, or cancel, where the gradient that
is handed from rank to rank does not. So after a tree or a gather each rank sends the gradient that
its own sweep found to the rank before, which compares it with the result of the scan. If they
differ by more than rounding, all go back once more, by a line.

*A rank that fails* sends ``FAILED`` in place of its results until all ranks meet. There every rank
hears which one failed, and why.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrograde.ranks.agreement import FAILED, Guard
from retrograde.ranks.base import Crossing
from retrograde.ranks.scan_over_ranks import RankReport, RankWay, scan_ranks
from retrograde.scan.elements import UNREAD, Vector, combine, flops

__all__ = ["Gradient", "WayBack", "agree"]

Gradient = Tensor | None

# How far two gradients may lie apart, in units of rounding of a sample's largest.
_ROUNDINGS = 100.0


class WayBack(ABC):
    """The way back of one rank through pieces of the batch.

    Args:
        crossing: the forward pass.
        report: filled with what is done.
        pieces: as they were run; their graphs are kept until the last use of them.
        own: parameters whose gradients are wanted.
        most_flops: of a product of Jacobians; where one takes more, all go by a line.

    Attributes:
        totals: the gradients of the parameters; None for what has none.
        inputs: those of each piece's inputs, where they are wanted.
    """

    def __init__(
        self,
        crossing: Crossing,
        report: RankReport,
        pieces: list[Any],
        own: list[Tensor],
        most_flops: float = math.inf,
    ) -> None:
        self.links, self.last, self.batches = crossing.links, crossing.last, crossing.batches
        self.report, self.pieces, self.own, self.most_flops = report, pieces, own, most_flops
        self.guard = Guard()

    @abstractmethod
    def ends(self, j: int) -> Any:
        """On the last rank, the gradients that the caller gives for a piece."""

    @abstractmethod
    def through(self, j: int, ends: Any, keep: bool) -> Any:
        """Go back through a piece, add to what is found, and give what is handed on."""

    @abstractmethod
    def element(self) -> Any:
        """What this rank does to any gradient that reaches it, for all pieces."""

    @abstractmethod
    def packed(self, begun: list[Any]) -> Tensor:
        """What is handed on for all pieces, a row for each sample."""

    @abstractmethod
    def unpacked(self, arrived: Tensor) -> list[Any]:
        """What arrives for each piece, from a row for each sample."""

    @abstractmethod
    def meet(self, alike: bool) -> bool:
        """Meet the others: whether all ranks' sweeps were alike.

        Raises:
            RankError: a rank has failed; the same on every rank.
        """

    def forget(self) -> None:
        """Begin anew: nothing has been found."""
        self.totals: list[Gradient] = [None] * len(self.own)
        self.inputs: list[Gradient] = []

    def add(self, shares: Sequence[Gradient]) -> None:
        """Add a piece's gradients of the parameters to the totals, where it has any."""
        for i, share in enumerate(shares):
            if share is not None:
                so_far = self.totals[i]
                self.totals[i] = share if so_far is None else so_far + share

    def multiply(self, a: Any, b: Any) -> Any:
        """a ⊙ b."""
        return combine(a, b)

    def go(self, way: RankWay) -> None:
        """Go back.

        Raises:
            RankError: a rank fails, or does not answer.
        """
        alike = self._by_line() if way == "linear" else self._by_scan(way)
        if self.meet(alike):
            return
        if self.most_flops == math.inf:
            warnings.warn(
                "products of Jacobians overflowed, cancelled or are not finite, though the "
                "gradient itself may well be: this pass goes back across the ranks by a line, "
                "which is exact but slower; clip the weights, or use way='linear'",
                RuntimeWarning,
                stacklevel=2,
            )
        self.meet(self._by_line())

    def _by_line(self) -> bool:
        """Wait for the next rank, go back, hand on to the one before; piece by piece."""
        links, report = self.links, self.report
        report.way = "linear"
        sent = links.traffic.messages, links.traffic.sent_bytes
        self.forget()
        for j in range(len(self.pieces)):
            ends = self.ends(j) if self.last else links.receive(links.rank + 1)
            before = self.guard(self.through, j, ends, False)
            if links.rank:
                links.send(before, links.rank - 1)
        links.flush()
        report.up, report.down, report.products = links.size - 1, 0, 0
        report.messages = links.traffic.messages - sent[0]
        report.sent_bytes = links.traffic.sent_bytes - sent[1]
        return True

    def _by_scan(self, way: RankWay) -> bool:
        """Learn from all what reaches this rank, and go back; whether the next one found that."""
        links, guard = self.links, self.guard
        self.forget()
        if self.last:
            swept = guard(self._sweep, [self.ends(j) for j in range(len(self.pieces))])
            arrived = self._scan(guard(Vector, swept) if links.rank else UNREAD, way)
        else:
            arrived = self._scan(guard(self.element) if links.rank else UNREAD, way)
            swept = guard(lambda found: self._sweep(self.unpacked(found.data)), arrived)
        return links.size < 3 or self._compare(swept, arrived)

    def _scan(self, element: Any, way: RankWay) -> Any:
        def product(a: Any, b: Any) -> Any:
            dear = self.most_flops < math.inf and flops(a, b) > self.most_flops
            return FAILED if dear else self.multiply(a, b)

        def operator(a: Any, b: Any) -> Any:
            return self.guard(product, a, b)

        return scan_ranks(element, self.links, operator, way=way, backward=True, report=self.report)

    def _sweep(self, ends: list[Any]) -> Gradient:
        """Go back through all pieces; what the rank before is to be told."""
        keep = self.links.size > 2  # for another time, by a line
        begun = [self.through(j, each, keep) for j, each in enumerate(ends)]
        return self.packed(begun) if self.links.rank else None

    def _compare(self, swept: Any, arrived: Any) -> bool:
        """Tell the rank before what was swept here, and hear whether the next one swept alike."""
        links, alike = self.links, True
        if links.rank:
            links.send(swept, links.rank - 1)
        if not self.last:
            told = links.receive(links.rank + 1)
            alike = self.guard(lambda a, b: agree(a.data, b), arrived, told) is True
        links.flush()
        return alike


def agree(scanned: Tensor, swept: Tensor) -> bool:
    """Whether two gradients (samples, n) are the same up to rounding of each sample's largest.

    Where the sweep found no number, the scan may have found none either.

    Example:
        >>> g = torch.tensor([[1.0, 2.0]])
        >>> agree(g, g + 1e-6), agree(g, g + 1e-3), agree(g * torch.nan, g)
        (True, False, False)
    """
    if not swept.numel():
        return True
    largest = torch.maximum(scanned.abs(), swept.abs()).amax(-1, keepdim=True)
    near = (scanned - swept).abs() <= _ROUNDINGS * torch.finfo(swept.dtype).eps * largest
    same = (scanned == swept) | (scanned.isnan() & swept.isnan())
    return bool((near & largest.isfinite() | same).all())
