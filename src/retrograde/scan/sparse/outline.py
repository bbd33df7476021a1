"""Outlines: Jacobians with sizes only, to predict the cost of a scan before it runs.

An :class:`Outline` is to a :class:`~retrograde.scan.sparse.csr.CSR` as a pattern is to a matrix.
The scan algorithms run over outlines as over matrices. So FLOPs, levels and bytes are those of the
real run, not of a model of it. The gradient is a vector without memory, on torch's "meta" device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from retrograde.scan.elements import Vector
from retrograde.scan.sparse.composition import Maker, Path
from retrograde.scan.sparse.factor import MOST_ENTRIES
from retrograde.scan.sparse.pattern import Pattern


@dataclass
class Ledger:
    """The bytes of matrices."""

    itemsize: int
    lists: bool  # whether the terms of products are listed, as they are but for compiled CPU loops
    most: int = MOST_ENTRIES  # entries that a written-out product may have
    shared: int = 0  # bytes that all samples share, indices included
    each: int = 0  # bytes of one sample
    largest: int = 0  # bytes of one sample of the largest matrix, since a copy of it may be needed
    _seen: set[Pattern] = field(default_factory=set)

    def note(self, pattern: Pattern, shared: bool, scratch: int = 0) -> None:
        """Add one more matrix, and ``scratch`` further bytes for each entry."""
        if pattern not in self._seen:
            self._seen.add(pattern)
            self.shared += pattern.index_bytes
        values = pattern.nnz * self.itemsize
        self.shared += scratch * pattern.nnz + (values if shared else 0)
        if not shared:
            self.each += values
            self.largest = max(self.largest, values)

    def bytes_for(self, samples: int) -> int:
        """Return the bytes in all, for some samples at a time."""
        return self.shared + samples * (self.each + self.largest)


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A transposed Jacobian known by its pattern only; a ledger notes its products. ``shared`` is
    whether all ``samples`` have the same values."""

    pattern: Pattern
    shared: bool
    samples: int
    ledger: Ledger

    @property
    def shape(self) -> tuple[int, ...]:
        """(inputs, outputs)."""
        return self.pattern.shape

    def __matmul__(self, other: object) -> Any:
        match other:
            case Vector(data):
                return Vector(data.new_empty(self.pattern.shape[0]))
            case Outline():
                plan = self.pattern.product(other.pattern, self.ledger.most)
                if self.ledger.lists and plan.method == "sparse":
                    plan.check_terms()
                    self.ledger.shared += 8 * (plan.terms + plan.result.nnz)
                return self._noted(plan.result, other)
        return NotImplemented

    def __add__(self, other: "Outline") -> "Outline":
        return self._noted(self.pattern.union(other.pattern)[0], other)

    def flops(self, other: object) -> int | None:
        match other:
            case Vector():
                return self.pattern.flops * self.samples
            case Outline():
                plan = self.pattern.product(other.pattern, self.ledger.most)
                return plan.flops * (1 if self.shared and other.shared else self.samples)
        return None

    def _noted(self, pattern: Pattern, other: "Outline") -> "Outline":
        outline = Outline(pattern, self.shared and other.shared, self.samples, self.ledger)
        self.ledger.note(pattern, outline.shared)
        return outline


def ledger_of(paths: Sequence[Path], itemsize: int, lists: bool) -> Ledger:
    """Return the bytes of the Jacobians of paths' single layers."""
    ledger = Ledger(itemsize, lists)
    for path in paths:
        for piece in path.pieces():
            if piece.values is not None:
                ledger.note(piece.pattern, piece.shared, piece.scratch)
    return ledger


def outlines(samples: int, ledger: Ledger) -> Maker:
    """Return a maker of outlines, whose products the ledger notes."""
    return lambda piece: Outline(piece.pattern, piece.shared, samples, ledger)
