"""How ranks agree before a pass, and how all of them learn of a failure.

Each rank tells the others the arguments of its call, or why it cannot run. A rank that fails later
sends ``FAILED`` instead of its results, and gives the reason at the end. So no rank waits in vain.
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
    """The message of one rank to the others.

    Attributes:
        trouble: why it cannot run, or "".
        alike: values that must be the same on every rank, by their names in a message.
        own: whatever else the others need to know.
    """

    trouble: str = ""
    alike: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None


@dataclass
class Guard:
    """Runs this rank's work so that it reaches the next meeting of all ranks, even after a failure.

    Attributes:
        cause: the first failure, if there was one.

    Example:
        >>> guard = Guard()
        >>> guard(lambda a, b: a / b, 1, 2), guard(lambda a, b: a / b, 1, 0)
        (0.5, <Failed.FAILED: 'failed'>)
        >>> guard.cause
        ZeroDivisionError('division by zero')
    """

    cause: Exception | None = None

    def __call__(self, work: Callable[..., Any], *given: Any) -> Any:
        """Return the result of some work; ``FAILED`` after a failure, or if that was given.

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
        """Exchange messages and return those of all ranks; every rank has to call it.

        Raises:
            RankError: a rank cannot run, or the ranks do not agree: the same on every rank.
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
