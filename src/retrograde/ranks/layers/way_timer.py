"""Choose the fastest way for gradients to cross the ranks of a chain, by trying each.

The cost of a tree depends on the patterns of neighbouring Jacobians, so ways are measured, not
predicted. A line comes first. Its seconds are the limit for a Jacobian, or a product of two. If the
operations alone must take longer, that pass and every later one goes by a line. Every pass is
exact, whichever way it goes.
"""

from dataclasses import dataclass, field

from retrograde.ranks.scan_over_ranks import RankWay

__all__ = ["WayTimer"]


@dataclass
class WayTimer:
    """The passes of one kind, and their seconds; the same on every rank.

    Each way is tried twice, since the first pass makes plans that the second finds.

    Args:
        ranks: the number of ranks. Up to two, no product is made, and all ways do the same.

    Attributes:
        seconds: the slowest rank's seconds of the passes by each way.

    Example:
        >>> timer = WayTimer(4)
        >>> for seconds in (9, 5, 7, 2, 8, 3):
        ...     timer.done(timer.way, seconds, by=timer.way)
        >>> timer.over, timer.way
        (True, 'tree')
    """

    ranks: int
    seconds: dict[RankWay, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ways: list[RankWay] = ["linear", "linear", "tree", "tree", "gather", "gather"]
        self._next = ways if self.ranks > 2 else []

    @property
    def over(self) -> bool:
        """Whether all trials are done."""
        return not self._next

    @property
    def way(self) -> RankWay:
        """The way of the next pass."""
        if self._next:
            return self._next[0]
        return min(self.seconds, key=lambda way: self.seconds[way][-1], default="linear")

    @property
    def patience(self) -> float | None:
        """The seconds of a line while another way is tried; else None."""
        return None if self.over or self.way == "linear" else self.seconds["linear"][-1]

    def done(self, way: RankWay, seconds: float, *, by: str) -> None:
        """Note the slowest rank's seconds of a pass; ``by`` is the way that it took in the end."""
        if self.over or way != self._next[0]:
            return
        self.seconds.setdefault(way, []).append(seconds)
        del self._next[0]
        if by != way:  # a Jacobian was impossible, or would have taken too long
            del self.seconds[way]
            self._next.clear()
