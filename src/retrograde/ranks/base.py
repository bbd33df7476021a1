"""The common base of both modules across ranks: their options, and one rank's forward pass."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import distributed, nn

from retrograde.errors import CellError, RankError
from retrograde.ranks.agreement import Guard
from retrograde.ranks.group_transport import GroupLinks
from retrograde.ranks.scan_over_ranks import RankWay
from retrograde.ranks.transport import Links

__all__ = ["Crossing", "Sharded", "links_of", "pieces_of"]


class Sharded(nn.Module):
    """A module of which each rank runs its own part."""

    def __init__(
        self,
        group: distributed.ProcessGroup | Links | None,
        way: RankWay | Literal["auto"],
        pieces: int | None,
        module: nn.Module,
    ) -> None:
        super().__init__()
        ways = get_args(RankWay)
        if way not in (*ways, "auto"):
            names = ", ".join(map(repr, ways))
            raise CellError(f"unknown way={way!r} to cross ranks: expected one of {names}")
        if pieces is not None and (type(pieces) is not int or pieces < 1):
            raise CellError(f"got pieces={pieces!r}: expected at least 1, or None")
        self.links = links_of(group, module)
        self.way = way
        self.pieces = pieces

    def batches(self, samples: int) -> list[int]:
        """Return the number of samples in each piece of a batch."""
        pieces = min(self.pieces or self.links.size, max(samples, 1))
        share, more = divmod(samples, pieces)
        return [share + (k < more) for k in range(pieces)]

    def extra_repr(self) -> str:
        return f"rank={self.links.rank}, ranks={self.links.size}, way={self.way!r}"


def links_of(group: distributed.ProcessGroup | Links | None, module: nn.Module) -> Links:
    """Return the links to the other ranks of a process group; None for all ranks. Messages go
    through the device of the module, if the group needs one."""
    return group if isinstance(group, Links) else GroupLinks(group, module=module)


@dataclass
class Crossing:
    """One forward pass of one rank, and the backward pass through it.

    Attributes:
        links: the links to the other ranks.
        gradient: whether a gradient is needed.
        batches: the number of samples in each piece.
    """

    links: Links
    gradient: bool
    batches: list[int]

    @property
    def last(self) -> bool:
        return self.links.rank == self.links.size - 1

    def hand_along(
        self,
        guard: Guard,
        given: Iterable[tuple[Any, ...]],
        run: Callable[..., Any],
        end_of: Callable[[Any], Any],
    ) -> list[Any]:
        """Run each piece, and send its final state to the next rank; the caller has to settle."""
        pieces = []
        for each in given:
            piece = guard(run, *each)
            if not self.last:
                self.links.send(guard(end_of, piece), self.links.rank + 1)
            pieces.append(piece)
        self.links.flush()
        return pieces


def pieces_of(ctx: Any) -> list[Any]:
    """Take the pieces out of an autograd node.

    Raises:
        RankError: they were taken before.
    """
    if ctx.pieces is None:
        raise RankError(
            "a backward pass across ranks has been made already: expected one for each call"
        )
    pieces: list[Any] = ctx.pieces
    ctx.pieces = None
    return pieces
