"""FLOPs of a scan over VGG-11's convolutional part, by static analysis: Wang (2020), 4.3, 5.3.

The patterns follow from shapes and masks, so one sample tells all; nothing is multiplied. As in the
paper all matrices count as sparse: two FLOPs a term, one where a diagonal scales, also where the
library would rather call BLAS.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.scan.blelloch import most_levels
from retrograde.scan.elements import flops
from retrograde.scan.sparse.feedforward import LayerCall, Split, observe_steps, split_of
from retrograde.scan.sparse.outline import Outline
from retrograde.scan.work_report import Product
from wang2020.flops import Counted, Point

__all__ = ["count_scans", "counted", "ordinary_points", "points_of", "run_layers"]

_ROOM = 2**34  # bytes, which bound only what is written out


def run_layers(layers: Sequence[nn.Module], image: Tensor) -> list[LayerCall]:
    """The steps of layers on one image ``(1, …)``."""
    with torch.enable_grad():
        return observe_steps(layers, image)


def count_scans(steps: Sequence[LayerCall], most: int | None = None) -> list[Split]:
    """Scans with 0, 1, … levels, all or ``most``, the input's own gradient left out.

    Example:
        >>> steps = run_layers([nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)], torch.ones(1, 3))
        >>> [split.report.critical_flops for split in count_scans(steps)]
        [20, 20]
    """
    paths = [step.path for step in steps[1:]]
    y = steps[-1].y
    last = most_levels(len(paths) + 1)
    return [
        split_of(levels, paths, prod(y.shape[1:]), 1, y.dtype.itemsize, _ROOM, _sparse_flops)
        for levels in range(min(last, last if most is None else most) + 1)
    ]


def _sparse_flops(a: Any, b: Any) -> int:
    if not (isinstance(a, Outline) and isinstance(b, Outline)):
        return flops(a, b)
    plan = b.pattern.product(a.pattern)
    return plan.terms * (1 if plan.method == "diagonal" else 2)


def counted(split: Split) -> Counted:
    """A scan's figures as plain numbers."""
    report = split.report
    return Counted(
        split.levels,
        report.steps(),
        report.flops,
        report.critical_flops,
        max(product.flops for level in report.levels for product in level.products),
    )


def points_of(split: Split) -> list[Point]:
    """The products of a scan, as figure 5.5 shows them."""
    return [
        _point(product, number, product.flops == level.critical_flops)
        for number, level in enumerate(split.report.levels)
        for product in level.products
    ]


def ordinary_points(steps: Sequence[LayerCall]) -> list[Point]:
    """Of each layer but the first, its input's gradient as torch computes it: zeros are multiplied.

    Example:
        >>> steps = run_layers([nn.ReLU(), nn.Linear(3, 2)], torch.ones(1, 3))
        >>> [point.flops for point in ordinary_points(steps)]
        [12]
    """
    found = []
    for number, step in enumerate(steps[1:]):
        (piece,) = step.path.pieces()
        pattern = piece.pattern
        once = 1 if pattern.kind == "diagonal" else 2
        what = f"{type(step.layer).__name__} {pattern}"
        found.append(
            Point("ordinary", number, what, prod(pattern.shape), once * pattern.nnz, critical=True)
        )
    return found


def _point(product: Product, level: int, critical: bool) -> Point:
    rows, inner = product.b.shape
    columns = product.a.shape[1] if len(product.a.shape) == 2 else 1
    kind = "vector" if columns == 1 else "matrix"
    what = f"{rows}×{inner} · " + (f"{inner}×{columns}" if kind == "matrix" else f"{inner}")
    return Point(kind, level, what, rows * inner * columns, product.flops, critical)
