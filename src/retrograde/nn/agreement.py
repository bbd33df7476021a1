"""What ranks tell one another before they exchange anything else.

Each says what it was called with, or why it cannot run. So one that is called wrongly makes every
other say so, and none waits for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from retrograde.errors import CellError, RankError
from retrograde.scan.links import Links
from retrograde.scan.ranks import RankWay

__all__ = ["Told", "check_crossing", "reason", "settle"]


@dataclass(frozen=True)
class Told:
    """What one rank tells the others.

    Attributes:
        trouble: why it cannot run, or nothing.
        alike: what must be the same on every rank, by what a message calls it.
        own: what the others need to know besides.
    """

    trouble: str = ""
    alike: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None


def reason(error: Exception) -> str:
    """Why a rank cannot run: what the error says, or its kind.

    Args:
        error: what it ran into.

    Returns:
        At least a word.

    Example:
        >>> reason(KeyError())
        'KeyError'
    """
    return str(error) or type(error).__name__


def settle(links: Links, told: Told, cause: Exception | None = None) -> list[Told]:
    """Tell the others, and hear them; every rank has to call it.

    Args:
        links: to the others.
        told: by this rank.
        cause: of its trouble, if there is one.

    Returns:
        What each rank told.

    Raises:
        RankError: one cannot run, or they do not agree: the same on every rank.

    Example:
        >>> from retrograde.scan.links import simulate
        >>> found = simulate(2, lambda links: settle(links, Told(own=links.rank)))
        >>> [told.own for told in found[0]]
        [0, 1]
    """
    heard: list[Told] = links.gather(told)
    for rank, other in enumerate(heard):
        if other.trouble:
            raise RankError(f"rank {rank} cannot run: {other.trouble}") from cause
    for rank, other in enumerate(heard[1:], 1):
        for name, first in heard[0].alike.items():
            theirs = other.alike.get(name)
            if first != theirs:
                raise RankError(
                    f"the ranks do not agree: {name} is {theirs} on rank {rank} and {first} on "
                    "rank 0; expected the same on every rank"
                )
    return heard


def check_crossing(way: Any, pieces: Any) -> None:
    """Refuse options of what crosses ranks that make no sense.

    Args:
        way: how gradients cross.
        pieces: of the batch; None for as many as there are ranks.

    Raises:
        CellError: the way is unknown, or there is no piece.
    """
    if way not in get_args(RankWay):
        names = ", ".join(map(repr, get_args(RankWay)))
        raise CellError(f"unknown way={way!r} to cross ranks: expected one of {names}")
    if pieces is not None and (type(pieces) is not int or pieces < 1):
        raise CellError(f"got pieces={pieces!r}: expected at least 1, or None")
