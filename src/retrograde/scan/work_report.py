"""A report of a scan, level by level: products, shapes, FLOPs, the critical path.

A *level* is a set of independent products. With unbounded workers it takes as long as its longest
product, so the critical path is the sum of those. Steps and work are W20's
(section 3.6). A product with ``IDENTITY`` counts as a move; one
with ``UNREAD`` is not counted.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from retrograde.scan.elements import IDENTITY, UNREAD, Operand, flops
from retrograde.units import aligned


@dataclass(frozen=True, slots=True)
class Product:
    """One use of the operator, a ⊙ b = b·a, and its floating-point operations."""

    a: Operand
    b: Operand
    flops: int

    def __str__(self) -> str:
        return f"{self.b} · {self.a}"


@dataclass(frozen=True, slots=True)
class Level:
    """A set of independent products, in a phase of the algorithm such as ``"up-sweep"``. ``moves``
    counts the operands that met ``IDENTITY`` and were only moved."""

    phase: str
    products: tuple[Product, ...]
    moves: int = 0

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    @property
    def critical_flops(self) -> int:
        """FLOPs of the longest product."""
        return max((product.flops for product in self.products), default=0)


class Report:
    """Counts the work of a scan: ``report = Report(); blelloch(elements, report=report)``.

    Args:
        cost: returns the FLOPs of a ⊙ b, for elements without ``flops``.

    Example:
        >>> from retrograde.scan.blelloch import blelloch
        >>> report = Report(cost=lambda a, b: len(a) + len(b))
        >>> _ = blelloch("abcd", lambda a, b: a + b, report=report)
        >>> report.work, report.steps(), report.flops, report.critical_flops
        (3, 2, 7, 5)
        >>> print(report)
        phase       levels  products  moves  FLOPs  critical  what
        up-sweep         1         2      0      4         2  2 × str · str
        down-sweep       1         0      1      0         0
        down-sweep       1         1      1      3         3  1 × str · str
        all              3         3      2      7         5
    """

    def __init__(self, cost: Callable[[Any, Any], int] = flops) -> None:
        self.levels: list[Level] = []
        self._cost, self._within = cost, ""

    def add(self, phase: str, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Add one level: the operands (a, b) of every a ⊙ b, before they are combined."""
        read = [(a, b) for a, b in pairs if b is not UNREAD]
        real = [(a, b) for a, b in read if a is not IDENTITY and b is not IDENTITY]
        products = tuple(Product(Operand.of(a), Operand.of(b), self._cost(a, b)) for a, b in real)
        self.levels.append(Level(self._within + phase, products, len(read) - len(real)))

    def part(self, phase: str) -> "Report":
        """Return a report of a scan inside a scan: its levels are listed here, after ``phase``."""
        part = Report(self._cost)
        part.levels, part._within = self.levels, f"{self._within}{phase}, "
        return part

    @property
    def work(self) -> int:
        """Products in all, W of W20 eq. 3.4."""
        return sum(len(level.products) for level in self.levels)

    @property
    def flops(self) -> int:
        return sum(level.flops for level in self.levels)

    @property
    def critical_flops(self) -> int:
        """FLOPs on the critical path, with unbounded workers."""
        return sum(level.critical_flops for level in self.levels)

    def steps(self) -> int:
        """Return the levels with products, S of W20 eq. 3.3 for unbounded workers."""
        return sum(bool(level.products) for level in self.levels)

    def __str__(self) -> str:
        """Format one line for each run of equal levels, and their sum."""
        table: list[tuple[str, ...]] = [
            ("phase", "levels", "products", "moves", "FLOPs", "critical", "what")
        ]
        for level, same in groupby(self.levels):
            counts = Counter(map(str, level.products))
            what = ", ".join(f"{count} × {product}" for product, count in counts.items())
            table.append(_row(level.phase, list(same), what))
        table.append(_row("all", self.levels, ""))
        return aligned(table, left=(0, 6))


def _row(phase: str, levels: Sequence[Level], what: str) -> tuple[str, ...]:
    numbers = (
        len(levels),
        sum(len(level.products) for level in levels),
        sum(level.moves for level in levels),
        sum(level.flops for level in levels),
        sum(level.critical_flops for level in levels),
    )
    return (phase, *map(str, numbers), what)
