"""How ranks agree before a pass, and how all hear of one that fails on the way.

Each rank tells the others what it was called with, or why it cannot run. A rank that fails later
sends ``FAILED`` in place of its results, and says why at the end. So no rank waits for another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from retrograde.errors import RankError
from retrograde.ranks.transport import Links

__all__ = ["FAILED", "Guard", "Told"]


class Failed(Enum):
    """The type of ``FAILED``; an enumeration, so that it stays one object when pickled."""

    FAILED = "failed"


FAILED: Final = Failed.FAILED


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


@dataclass
class Guard:
    """Carries this rank through to where all meet again, whatever fails on the way.

    Attributes:
        cause: what failed first, if anything did.

    Example:
        >>> guard = Guard()
        >>> guard(lambda a, b: a / b, 1, 2), guard(lambda a, b: a / b, 1, 0)
        (0.5, <Failed.FAILED: 'failed'>)
        >>> guard.cause
        ZeroDivisionError('division by zero')
    """

    cause: Exception | None = None

    def __call__(self, work: Callable[..., Any], *given: Any) -> Any:
        """The result of some work; ``FAILED`` once any work failed, or if that was given.

        Raises:
            RankError: a rank does not answer, so there is no later meeting.
        """
        if self.cause is not None or any(each is FAILED for each in given):
            return FAILED
        try:
            return work(*given)
        except RankError:
            raise
        except Exception as error:
            self.cause = error
            return FAILED

    def settle(self, links: Links, told: Any = None) -> list[Told]:
        """What each rank tells; every rank has to call it.

        Raises:
            RankError: one cannot run, or they do not agree: the same on every rank.
        """
        cause = self.cause
        mine = Told() if told is None else told
        if cause is not None:
            mine = Told(str(cause) or type(cause).__name__)
        heard: list[Told] = links.gather(mine)
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
