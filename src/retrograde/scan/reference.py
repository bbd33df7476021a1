"""The oracle: an exclusive scan as a plain loop, against which every other one is held."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from retrograde.scan.elements import IDENTITY, Identity

__all__ = ["reference"]

E = TypeVar("E")


def reference(elements: Sequence[E], combine: Callable[[E, E], E]) -> list[E | Identity]:
    """[I, a₀, a₀ ⊙ a₁, …] of [a₀, a₁, …], of the same length (W20, eq. 3.1).

    Example:
        >>> reference("abcd", lambda a, b: a + b)
        [IDENTITY, 'a', 'ab', 'abc']
    """
    scanned: list[E | Identity] = [IDENTITY]
    for element in elements[:-1]:
        before = scanned[-1]
        scanned.append(element if isinstance(before, Identity) else combine(before, element))
    return scanned
