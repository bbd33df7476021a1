"""Sizes in bytes as small integers, so that a dynamic program over them stays small.

A hidden state of s bytes is cut into k units, and internal states and memory are counted in those:
α and β rounded up, memory down, so whatever fits the units fits the bytes. k is the least number
with which no more than :data:`WASTE` of the memory is lost: everything that fits 1 − WASTE of
the bytes fits the units. With ε the relative error of β, the larger one, and M units of memory,

    (1 − WASTE) · (1 + ε) + 1/M  ≤  1.

Where the common divisor of the sizes gives no more units than that, nothing is rounded.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from math import gcd

from retrograde.schedule import Units

__all__ = ["WASTE", "Coarse", "coarsen"]

WASTE = Fraction(1, 100)


@dataclass(frozen=True, slots=True)
class Coarse:
    """Sizes in common units.

    Attributes:
        memory: room.
        state: a hidden state.
        alpha: an internal state whose input is not in memory.
        beta: one whose input is.
        exact: whether nothing was rounded but the memory, and that for nothing.
    """

    memory: int
    state: int
    alpha: int
    beta: int
    exact: bool

    def optimistic(self) -> "Coarse":
        """Sizes rounded down and memory up instead: what fits the bytes fits these.

        Returns:
            The same units; a bound for these is one for the bytes.

        Example:
            >>> Coarse(10, 2, 7, 5, exact=False).optimistic()
            Coarse(memory=11, state=2, alpha=6, beta=4, exact=False)
        """
        if self.exact:
            return self
        beta = max(1, self.beta - 1)
        return Coarse(self.memory + 1, self.state, max(beta, self.alpha - 1), beta, exact=False)


def coarsen(memory: int, units: Units) -> Coarse:
    """The fewest units that waste at most :data:`WASTE` of a memory.

    Args:
        memory: bytes, or any unit.
        units: the sizes of states, in the same unit.

    Returns:
        Sizes in common units.

    Example:
        >>> from retrograde.plan.arguments import units_of
        >>> coarsen(2**26, units_of(430_080, None, 65_536))
        Coarse(memory=5120, state=5, alpha=33, beta=28, exact=False)
        >>> coarsen(2**26, units_of(5 * 65_536, None, 65_536))
        Coarse(memory=1024, state=1, alpha=5, beta=4, exact=True)
    """
    state, alpha, beta = units.state, units.alpha, units.beta
    common = gcd(state, alpha, beta)
    for k in count(1):
        if state <= k * common:
            return Coarse(
                memory // common, state // common, alpha // common, beta // common, exact=True
            )
        more_alpha, more_beta = -(-alpha * k // state), -(-beta * k // state)
        error = max(Fraction(more_alpha * state, alpha * k), Fraction(more_beta * state, beta * k))
        room = memory * k // state
        if room and (1 - WASTE) * error + Fraction(1, room) <= 1:
            return Coarse(room, k, more_alpha, more_beta, exact=False)
    raise AssertionError
