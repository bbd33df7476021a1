"""The backward pass across ranks: by a line, or by a scan whose result is checked.

*Exact, or by a line.* A product of many Jacobians can overflow, or cancel, where the gradient that
ranks pass on does not. So after a tree or a gather each rank sends the gradient of its own sweep to
the rank before. That rank compares it with the result of the scan. If they differ by more than
rounding, all ranks repeat the backward pass by a line.

*A rank that fails* sends ``FAILED`` instead of its results until all ranks meet. There every rank
learns which one failed, and why.
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

# How far two gradients may differ, in units of rounding of a sample's largest number.
_ROUNDINGS = 100.0


class WayBack(ABC):
    """The backward pass of one rank through pieces of the batch.

    Args:
        crossing: the forward pass.
        report: receives the counts.
        pieces: the pieces, as run; their graphs are kept until their last use.
        own: parameters whose gradients are needed.
        most_flops: the most FLOPs of a product of Jacobians; beyond, all ranks go by a line.

    Attributes:
        totals: the gradients of the parameters; None for one without a gradient.
        inputs: the gradients of each piece's inputs, where they are needed.
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
        """Return, on the last rank, the gradients that the caller gives for a piece."""

    @abstractmethod
    def through(self, j: int, ends: Any, keep: bool) -> Any:
        """Go back through a piece, add to the totals, and return the gradient to pass on."""

    @abstractmethod
    def element(self) -> Any:
        """Return the map from any gradient that reaches this rank to the one it passes on."""

    @abstractmethod
    def packed(self, begun: list[Any]) -> Tensor:
        """Return the gradients to pass on for all pieces, a row for each sample."""

    @abstractmethod
    def unpacked(self, arrived: Tensor) -> list[Any]:
        """Return the gradient for each piece, from a row for each sample."""

    @abstractmethod
    def meet(self, alike: bool) -> bool:
        """Meet the other ranks: whether the comparisons of all ranks held.

        Raises:
            RankError: a rank has failed; the same on every rank.
        """

    def forget(self) -> None:
        """Start again without results."""
        self.totals: list[Gradient] = [None] * len(self.own)
        self.inputs: list[Gradient] = []

    def add(self, shares: Sequence[Gradient]) -> None:
        """Add a piece's gradients of the parameters to the totals."""
        for i, share in enumerate(shares):
            if share is not None:
                so_far = self.totals[i]
                self.totals[i] = share if so_far is None else so_far + share

    def multiply(self, a: Any, b: Any) -> Any:
        return combine(a, b)

    def go(self, way: RankWay) -> None:
        """Run the backward pass.

        Raises:
            RankError: a rank fails, or does not answer.
        """
        alike = self._by_line() if way == "linear" else self._by_scan(way)
        if self.meet(alike):
            return
        if self.most_flops == math.inf:
            warnings.warn(
                "products of Jacobians overflowed, cancelled or are not finite, though the "
                "gradient itself may be finite: this pass goes back across the ranks by a line, "
                "which is exact but slower; clip the weights, or use way='linear'",
                RuntimeWarning,
                stacklevel=2,
            )
        self.meet(self._by_line())

    def _by_line(self) -> bool:
        """Wait for the next rank, go back, send to the rank before; piece by piece."""
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
        """Scan for this rank's gradient, and go back; return whether the next rank agrees."""
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
        """Go back through all pieces; return the gradient for the rank before."""
        keep = self.links.size > 2  # a pass by a line may follow
        begun = [self.through(j, each, keep) for j, each in enumerate(ends)]
        return self.packed(begun) if self.links.rank else None

    def _compare(self, swept: Any, arrived: Any) -> bool:
        """Send this rank's sweep to the rank before; return whether the scan fits the next
        one's."""
        links, alike = self.links, True
        if links.rank:
            links.send(swept, links.rank - 1)
        if not self.last:
            told = links.receive(links.rank + 1)
            alike = self.guard(lambda a, b: agree(a.data, b), arrived, told) is True
        links.flush()
        return alike


def agree(scanned: Tensor, swept: Tensor) -> bool:
    """Return whether two gradients (samples, n) agree, up to rounding of a sample's largest number.

    Where the sweep has NaN, the scan may have NaN too.

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
