"""Layers whose Jacobian's entries are weights: linear layers and convolutions, pruned or not.

Patterns are kept while anything refers to them. Layers of the same shape share one, and so do all
iterations of a training.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from math import prod
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from retrograde.errors import ScanError
from retrograde.scan.sparse.arithmetic import sparse_kernels
from retrograde.scan.sparse.csr import LayerJacobian
from retrograde.scan.sparse.factor import Factor, Ints, band, combined, from_arrays, full, identity
from retrograde.scan.sparse.pattern import Pattern

P = TypeVar("P", bound=Pattern)
Sizes = tuple[int, ...]

_PATTERNS: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
# How many weights of a tensor are not zero, and the version that was counted.
_COUNTS: Any = WeakIdKeyDictionary()
# On a GPU, weights without a zero are counted again after so many changes. A pattern of all weights
# is exact whatever they are, and counting waits for the device.
_CHANGES = 100


def known(key: Hashable, make: Callable[[], P]) -> P:
    """Return the pattern of a key, made unless it exists."""
    pattern: P | None = _PATTERNS.get(key)
    if pattern is None:
        pattern = _PATTERNS[key] = make()
    return pattern


def count_weights(layers: Iterable[nn.Module]) -> None:
    """Count the weights of layers that are not zero, unless they need not be: the device is waited
    for once, however many layers there are."""
    candidates = (getattr(module, "weight", None) for layer in layers for module in layer.modules())
    weights = [w for w in candidates if isinstance(w, Tensor) and not _may_be_any(w)]
    if weights and len({w.device for w in weights}) == 1:
        counts = torch.stack([torch.count_nonzero(w.detach()) for w in weights]).tolist()
        for weight, count in zip(weights, counts, strict=True):
            _COUNTS[weight] = weight._version, count


def _may_be_any(weight: Tensor) -> bool:
    """Return whether weights on a GPU are taken to have no zeros, since they had none before."""
    version, count = _COUNTS.get(weight, (0, -1))
    recent = 0 <= weight._version - version < _CHANGES
    return weight.device.type != "cpu" and count == weight.numel() and recent


def linear(layer: nn.Linear, x: Tensor, y: Tensor) -> LayerJacobian:
    """The rule of a linear layer, with any leading dimensions."""
    prefix, inputs, outputs = prod(x.shape[1:-1]), layer.in_features, layer.out_features

    def make() -> Weighted:
        met, places = _all_with_all(inputs, outputs)
        sizes = 1, inputs * outputs
        return Weighted((identity(prefix), met), (np.zeros(prefix, np.int32), places), sizes)

    return _of_weights(known(("linear", prefix, inputs, outputs), make), layer.weight)


def convolution(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    """The rule of a convolution."""
    if layer.padding_mode != "zeros":
        raise ScanError(
            f"{type(layer).__name__} with padding_mode={layer.padding_mode!r} has no transposed "
            "Jacobian here: expected 'zeros'; put a padding layer of that mode before a "
            "convolution with padding=0, or use backward=None"
        )
    sizes, outputs = tuple(x.shape[2:]), tuple(y.shape[2:])
    groups = layer.groups
    channels = layer.in_channels // groups, layer.out_channels // groups
    windows = layer.kernel_size, layer.stride, _before(layer), layer.dilation

    def make() -> Weighted:
        bands = [band(*span) for span in zip(sizes, outputs, *windows, strict=True)]
        of_groups = identity(groups), np.arange(groups, dtype=np.int32)
        factors, places = zip(of_groups, _all_with_all(*channels), *bands, strict=True)
        return Weighted(factors, places, (groups, prod(channels), *layer.kernel_size))

    key = "convolution", sizes, outputs, *windows, *channels, groups
    return _of_weights(known(key, make), layer.weight)


def _before(layer: Any) -> Sizes:
    """Return the padding before the first input, in each dimension."""
    if layer.padding == "same":
        spans = zip(layer.dilation, layer.kernel_size, strict=True)
        return tuple(dilation * (kernel - 1) // 2 for dilation, kernel in spans)
    return (0,) * len(layer.kernel_size) if layer.padding == "valid" else tuple(layer.padding)


def _all_with_all(inputs: int, outputs: int) -> tuple[Factor, Ints]:
    """Return the factor of a matrix of weights (outputs, inputs), and each entry's place in it."""
    i, o = np.divmod(np.arange(inputs * outputs, dtype=np.int32), np.int32(outputs))
    met = identity(1) if inputs == outputs == 1 else full(inputs, outputs)
    return met, o * np.int32(inputs) + i


class Weighted(Pattern):
    """A pattern whose every entry is one of a layer's weights. ``places`` has, for each factor, a
    number for each of its entries, below that factor's size in ``sizes``. Together an entry's
    numbers are its weight's index in a tensor of shape ``sizes``."""

    def __init__(
        self, factors: tuple[Factor, ...], places: tuple[Ints, ...], sizes: tuple[int, ...]
    ) -> None:
        super().__init__(*factors)
        self._places, self._sizes = places, sizes
        self._pruned: WeakValueDictionary[bytes, Pruned] = WeakValueDictionary()

    @cached_property
    def sources(self) -> Ints:
        """The index of each entry's weight: (nnz,)."""
        sides = [(f.indptr, place) for f, place in zip(self.factors, self._places, strict=True)]
        joined = sides[0]
        for side, size in zip(sides[1:], self._sizes[1:], strict=True):
            joined = combined(joined, side, size)
        return joined[1]

    def pruned(self, present: np.ndarray) -> "Pruned":
        """Return the pattern of the weights that are ``present`` (flat), that is, not zero."""
        key = np.packbits(present).tobytes()
        pattern = self._pruned.get(key)
        if pattern is None:
            pattern = self._pruned[key] = Pruned(self, present)
        return pattern


class Pruned(Pattern):
    """A pattern without the entries whose weights are zero."""

    def __init__(self, whole: Weighted, present: np.ndarray) -> None:
        keep = present[whole.sources]
        sums = np.concatenate([[0], np.cumsum(keep)])
        super().__init__(from_arrays(sums[whole.indptr], whole.indices[keep], whole.shape))
        self._whole_pattern = whole  # which keeps this pattern for later calls
        self.sources = whole.sources[keep]


def _of_weights(pattern: Weighted, weight: Tensor) -> LayerJacobian:
    """Return the Jacobian whose entries are the weights that are not zero; all samples share it."""
    flat = weight.detach().reshape(-1)
    reduced: Weighted | Pruned = pattern
    version, count = _COUNTS.get(weight, (None, 0))
    if version != weight._version and not _may_be_any(weight):
        count = int(torch.count_nonzero(flat))
    if count < len(flat):
        reduced = pattern.pruned((flat != 0).cpu().numpy())

    def values() -> Tensor:
        return sparse_kernels(flat.device.type, flat.dtype).take(flat, reduced)

    return LayerJacobian(reduced, True, values, scratch=4)
