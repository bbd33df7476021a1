"""Sizes in bytes as small integers, so that a dynamic program over them stays small.

A hidden state of s bytes is k units. Units round α and β up and the memory down, so a plan that
fits the units fits the bytes. The number k is the least that wastes at most
:data:`WASTE` of the memory. All plans that fit 1 − WASTE of the bytes then fit the units. With ε
the relative error of β, which is the larger error, and M units of memory,

    (1 − WASTE) · (1 + ε) + 1/M  ≤  1.

If the common divisor of the sizes gives at most that many units, nothing is rounded. A plan that
fits the bytes fits (1 + ε) times as many units, so a bound for those is a bound for the bytes.
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
    """Sizes in common units. ``memory`` is rounded down: a plan that fits it fits the bytes.
    ``most`` is enlarged by the relative error of the sizes: a plan that fits the bytes fits it."""

    memory: int
    most: int
    state: int
    alpha: int
    beta: int


def coarsen(memory: int, units: Units) -> Coarse:
    """Return the sizes in the fewest units that waste at most :data:`WASTE` of ``memory``.
    ``memory`` is in the unit of ``units``."""
    state, alpha, beta = units.state, units.alpha, units.beta
    common = gcd(state, alpha, beta)
    exact = state // common
    part, whole = WASTE.numerator, WASTE.denominator
    for k in range(1, min(exact, MOST_LEVELS * state // memory + 1)):
        more_alpha, more_beta = -(-alpha * k // state), -(-beta * k // state)
        room = memory * k // state
        # The condition of the module's docstring, for both sizes, in integers.
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
