"""Patterns whose entries are weights: which weight stands where, and what pruning leaves of them.

Patterns are kept as long as anything refers to them: two layers of the same shape share one, and
so do all iterations of a training.
"""

from collections.abc import Callable, Hashable
from functools import cached_property
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from retrograde.jacobians.arithmetic import sparse_kernels
from retrograde.jacobians.factor import Factor, Ints, combined
from retrograde.jacobians.pattern import Pattern
from retrograde.jacobians.rule_result import Local

__all__ = ["Weighted", "known", "weighted"]

_PATTERNS: WeakValueDictionary[Hashable, Pattern] = WeakValueDictionary()


def known(key: Hashable, make: Callable[[], Pattern]) -> Pattern:
    """A pattern that depends on nothing but a key.

    Args:
        key: all that decides it.
        make: how it is made.

    Returns:
        The one that there is already, or a new one.
    """
    found = _PATTERNS.get(key)
    if found is None:
        found = _PATTERNS[key] = make()
    return found


class Weighted(Pattern):
    """A pattern each of whose entries is one of a layer's weights.

    Args:
        factors: whose Kronecker product it is.
        places: for each factor, a number for each of its entries; the numbers of a factor are
            below ``sizes``, and together they are an index of the weights.
        sizes: see there.
    """

    def __init__(
        self, factors: tuple[Factor, ...], places: tuple[Ints, ...], sizes: tuple[int, ...]
    ) -> None:
        super().__init__(*factors)
        self._places, self._sizes = places, sizes
        self._pruned: WeakValueDictionary[bytes, Pruned] = WeakValueDictionary()

    @cached_property
    def sources(self) -> Ints:
        """The weight that each entry is: (nnz,)."""
        (first, *rest), (found, *places) = self.factors, self._places
        indptr = first.indptr
        for factor, place, size in zip(rest, places, self._sizes[1:], strict=True):
            found = combined((indptr, found), (factor.indptr, place), size)
            counts = np.outer(np.diff(indptr), factor.row_counts).ravel()
            indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return found

    def pruned(self, present: np.ndarray) -> "Pruned":
        """What is left where some weights are zero.

        Args:
            present: which weights are not, flat.

        Returns:
            The pattern.
        """
        key = np.packbits(present).tobytes()
        found = self._pruned.get(key)
        if found is None:
            found = self._pruned[key] = Pruned(self, present)
        return found


class Pruned(Pattern):
    """A pattern without the entries whose weights are zero.

    Args:
        whole: with them.
        present: which weights are not zero.
    """

    def __init__(self, whole: Weighted, present: np.ndarray) -> None:
        keep = present[whole.sources]
        super().__init__(*whole.restricted(keep).factors)
        self.keeps = (whole,)  # which remembers this one
        self.sources = whole.sources[keep]


def weighted(pattern: Weighted, weight: Tensor) -> Local:
    """The Jacobian whose entries are weights; without those that are zero.

    Args:
        pattern: of the layer's shape.
        weight: its weights, flattened to what ``sources`` refer to.

    Returns:
        The Jacobian, shared by all samples.
    """
    flat = weight.detach().reshape(-1)
    found: Weighted | Pruned = pattern
    if int(torch.count_nonzero(flat)) < len(flat):
        found = pattern.pruned((flat != 0).cpu().numpy())

    def values() -> Tensor:
        return sparse_kernels(flat.device.type, flat.dtype).take(flat, found)

    return Local(found, True, values, scratch=4)
