"""Backpropagate feed-forward layers by a scan, with a choice of levels.

The array is [∇x_n, J_nᵀ, …, J_1ᵀ]; the exclusive scan gives the gradient of every layer's output.
The gradients of all parameters then follow independently (W20, eq. 3.1). Products get denser level
by level, so FLOPs and bytes are counted beforehand, for any number of levels upward (W20, section
5.3). Where the products of all samples do not fit in memory, a few samples are taken at a time.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.scan.blelloch import blocks, hybrid
from retrograde.scan.elements import IDENTITY, UNREAD, Vector, flops
from retrograde.scan.sparse.composition import Maker, Path, apply_path, matrix_of, observe
from retrograde.scan.sparse.csr import CSR, LayerJacobian
from retrograde.scan.sparse.factor import TooManyEntriesError
from retrograde.scan.sparse.outline import Ledger, ledger_of, outlines
from retrograde.scan.sparse.weights import count_weights
from retrograde.scan.work_report import Report

_LEAST = 8  # samples that one instruction processes
_AT_ONCE = 2**24  # bytes of a product above which further samples leave the caches

_NOT_FINITE = (
    "gradients by products of Jacobians are not finite, though those without products may be: this "
    'call is scanned linearly, without products; clip the weights, or use algorithm="linear"'
)

Algorithm = Literal["auto", "linear", "blelloch", "hybrid"]


@dataclass(eq=False)
class LayerCall:
    """One layer of a chain, run on a batch. x is detached from the layers before, and y is
    differentiable in x and the parameters."""

    layer: nn.Module
    x: Tensor
    y: Tensor
    path: Path


@dataclass(frozen=True, eq=False)
class Split:
    """A scan with some levels of products, and its work and bytes."""

    levels: int  # levels upward, and as many downward; 0 is the linear scan, all of them Blelloch's
    report: Report  # its work by level, all samples; it ends where a product is too large
    fixed_bytes: int  # bytes of vectors and Jacobians, and the part of products that samples share
    sample_bytes: int  # bytes of the products of one sample
    samples: int  # samples at a time; 0 where not even one fits
    problem: str = ""  # why it is impossible; empty if it is possible

    @property
    def bytes(self) -> int:
        """The bytes of vectors, Jacobians and products, with that many samples at a time."""
        return self.fixed_bytes + max(1, self.samples) * self.sample_bytes


def observe_steps(layers: Sequence[nn.Module], x: Tensor) -> list[LayerCall]:
    """Run a sequence of layers on x, (samples, …), each detached from the one before. Raises
    ScanError if a layer has no rule or couples samples."""
    steps = []
    count_weights(layers)
    for layer in layers:
        x = x.detach().requires_grad_()
        y, path = observe(layer, x)
        steps.append(LayerCall(layer, x, y, path))
        x = y
    return steps


def split_of(
    levels: int, paths: Sequence[Path], outputs: int, samples: int, itemsize: int, room: int,
    cost: Callable[[Any, Any], int] = flops, lists: bool = False,
) -> Split:  # fmt: skip
    """Return the work and bytes of a scan with some levels of products.

    Args:
        levels: levels of products; a number above those that exist means all.
        paths: the layers whose Jacobians are multiplied, first to last.
        outputs: numbers of a sample in the last output.
        itemsize: bytes of a number.
        room: bytes for Jacobians and products.
        cost: FLOPs of a ⊙ b; by default, as computed.
        lists: whether the terms of products are listed, see :class:`Ledger`.
    """
    products = Ledger(itemsize, lists, max(1, room // 16))
    make, jacobians = outlines(samples, products), ledger_of(paths, itemsize, lists)
    elements = [
        Vector(torch.empty(outputs, device="meta")),
        *(_element(path, make) for path in reversed(paths)),
    ]
    report, problem = Report(cost), ""
    levels, _ = blocks(len(elements), levels)
    try:
        hybrid([*elements, UNREAD], levels=levels, report=report)
    except TooManyEntriesError as error:
        problem = str(error)
    vectors = itemsize * samples * (outputs + sum(path.shape[0] for path in paths))
    fixed = jacobians.bytes_for(samples) + products.shared + vectors
    each = products.each + products.largest
    fits = samples if not each else min(samples, max(0, room - fixed) // each)
    if problem or fixed > room:
        fits = 0
    at_once = min(fits, max(_LEAST, _AT_ONCE // max(1, products.largest)))
    if _LEAST < at_once < samples:
        at_once -= at_once % _LEAST
    return Split(levels, report, fixed, each, at_once, problem)


def scan_gradients(
    steps: Sequence[LayerCall], dy: Tensor, levels: int, samples: int
) -> list[Tensor]:
    """Return the gradient of each step's ``x``, first to last, and ``dy``, that of the last output.
    ``samples`` of the batch are taken at a time. If products give gradients that are not finite, it
    warns and scans linearly."""
    values = {piece: piece.csr(dy) for step in steps for piece in step.path.pieces()}
    shapes = [*(step.x.shape for step in steps), dy.shape]
    flat = dy.flatten(1)
    scans: list[list[Tensor]] = []
    for start in range(0, len(dy), samples):
        which = slice(start, min(start + samples, len(dy)))

        def make(piece: LayerJacobian, which: slice = which) -> CSR:
            return values[piece].samples(which)

        elements = [Vector(flat[which]), *(_element(step.path, make) for step in reversed(steps))]
        _, *scanned = hybrid([*elements, UNREAD], levels=levels)
        scans.append([vector.data for vector in reversed(scanned)])
    joined = scans[0] if len(scans) == 1 else [torch.cat(part) for part in zip(*scans, strict=True)]
    if levels and not bool(torch.stack([g.isfinite().all() for g in joined]).all()):
        warnings.warn(_NOT_FINITE, RuntimeWarning, stacklevel=2)
        return scan_gradients(steps, dy, 0, samples)
    return [g.reshape(shape) for g, shape in zip(joined, shapes, strict=True)]


def _element(path: Path, make: Maker) -> Any:
    if isinstance(path, LayerJacobian):
        return IDENTITY if path.values is None else make(path)
    return Route(path, make)


class Route:
    """Several layers as one element; only a product with a matrix computes their Jacobian."""

    def __init__(self, path: Path, make: Maker) -> None:
        self._path, self._make = path, make
        self.shape = path.shape

    @cached_property
    def matrix(self) -> Any:
        return matrix_of(self._path, self._make)

    def __matmul__(self, other: object) -> Any:
        if isinstance(other, Vector):
            return apply_path(self._path, self._make, other)
        return self.matrix @ (other.matrix if isinstance(other, Route) else other)

    def __rmatmul__(self, other: object) -> Any:
        return other @ self.matrix

    def flops(self, other: object) -> int:
        """Return the FLOPs of ``self @ other``, without those of computing the matrix."""
        if isinstance(other, Vector):
            pieces = (piece for piece in self._path.pieces() if piece.values is not None)
            return sum(flops(other, self._make(piece)) for piece in pieces)
        return flops(other.matrix if isinstance(other, Route) else other, self.matrix)

    def rflops(self, other: object) -> int:
        return flops(self.matrix, other)
