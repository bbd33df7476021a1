"""What a layer's rule gives: a pattern at once, and values when they are wanted."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from retrograde.jacobians.csr import CSR
from retrograde.jacobians.pattern import Pattern

__all__ = ["Local"]


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """The transposed Jacobian of one layer at one input, its values not computed yet.

    Args:
        pattern: of its guaranteed zeros.
        shared: whether all samples have the same values.
        values: computes them, (nnz,) where shared, else (samples, nnz); None of a layer that
            changes nothing but shapes.
        scratch: bytes for each entry that computing them takes besides.
    """

    pattern: Pattern
    shared: bool
    values: Callable[[], Tensor] | None
    scratch: int = 0

    def csr(self, like: Tensor) -> CSR:
        """With its values.

        Args:
            like: a tensor of their type and device.

        Returns:
            The Jacobian.
        """
        if self.values is None:
            return CSR(self.pattern, like.new_ones(self.pattern.nnz))
        return CSR(self.pattern, self.values())
