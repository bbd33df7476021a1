"""Sizes in bytes as small integers, so that a dynamic program over them stays small.

A hidden state of s bytes is cut into k units, and internal states and memory are counted in those:
α and β rounded up, memory down, so whatever fits the units fits the bytes. k is the least number
with which no more than :data:`WASTE` of the memory is lost: everything that fits 1 − WASTE of
the bytes fits the units. With ε the relative error of β, the larger one, and M units of memory,

    (1 − WASTE) · (1 + ε) + 1/M  ≤  1.

Where the common divisor of the sizes gives no more units than that, nothing is rounded. What fits
the bytes fits (1 + ε) times as many units, so a bound for those is a bound for the bytes.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from retrograde.plan.steps.hull import MOST_LEVELS
from retrograde.schedule import Units

__all__ = ["WASTE", "Coarse", "coarsen"]

WASTE = Fraction(1, 100)


@dataclass(frozen=True, slots=True)
class Coarse:
    """Sizes in common units. What fits ``memory``, which is rounded down, fits the bytes; what fits
    the bytes fits ``most``, which is enlarged by the relative error of the sizes."""

    memory: int
    most: int
    state: int
    alpha: int
    beta: int


def coarsen(memory: int, units: Units) -> Coarse:
    """The sizes in the fewest units that waste at most :data:`WASTE` of ``memory``, which is in the
    unit of ``units``."""
    state, alpha, beta = units.state, units.alpha, units.beta
    common = gcd(state, alpha, beta)
    exact = state // common
    part, whole = WASTE.numerator, WASTE.denominator
    for k in range(1, min(exact, MOST_LEVELS * state // memory + 1)):
        more_alpha, more_beta = -(-alpha * k // state), -(-beta * k // state)
        room = memory * k // state
        # The condition above, for both sizes, in integers.
        if all(
            (whole - part) * more * state * room + whole * size * k <= whole * size * k * room
            for more, size in ((more_alpha, alpha), (more_beta, beta))
        ):
            error = max(
                Fraction(more_alpha * state, alpha * k), Fraction(more_beta * state, beta * k)
            )
            return Coarse(room, int(error * memory * k / state), k, more_alpha, more_beta)
    room = memory // common
    return Coarse(room, room, exact, alpha // common, beta // common)
