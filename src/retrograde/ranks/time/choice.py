"""Choose the fastest way for gradients to cross ranks, once for a batch and a length of steps.

A linear scan waits for every rank's sweep, a tree and a gather for one Jacobian. Each rank measures
a sweep, a Jacobian and a product. The slowest rank's numbers go into
:class:`retrograde.ranks.cost_model.RankModel`, so all ranks choose alike. A Jacobian is computed
and timed only where it could pay.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from retrograde.machine import now
from retrograde.ranks.agreement import Guard, Told
from retrograde.ranks.cost_model import RankModel
from retrograde.ranks.scan_over_ranks import RankWay, model_of_links
from retrograde.ranks.time.crossing import Crossing
from retrograde.ranks.time.piece import Piece
from retrograde.ranks.transport import Links
from retrograde.ranks.way_back import Gradient
from retrograde.scan.elements import IDENTITY, Dense, Vector, combine
from retrograde.scan.sparse.transposed import room

__all__ = ["choose"]

Seconds = tuple[float, ...]

# At best a Jacobian takes this share of a product for every step, or of a sweep for every column.
_AT_BEST = 4
_SIDE_BY_SIDE = 16
_FEW = 2**22  # numbers in matrices that are multiplied only to time it


def choose(call: Crossing, pieces: Sequence[Piece], dy: Gradient) -> RankWay:
    """Return the way that the model predicts to be fastest; every rank has to call it.

    All ranks get the same.

    Raises:
        RankError: a rank fails, or does not answer.
    """
    links = call.links
    if links.size < 3 or not sum(call.batches):
        return "linear"  # no matrix is sent, and all ways do the same
    size = sum(s.shape[0] * s.shape[-1] for s in pieces[0].after)
    like = torch.empty(0, dtype=call.x.dtype, device=call.x.device)
    vector = sum(call.batches) * size * call.x.itemsize
    model = model_of_links(links, matrix_bytes=vector * (size + 1), vector_bytes=vector)
    told = links.gather((call.steps(call.x), room(None, like.device)))
    steps, least_room = max(each[0] for each in told), min(each[1] for each in told)
    if 3 * model.matrix_bytes > least_room:
        return "linear"  # a product of two would not fit
    (sweep,) = _slowest(links, lambda: (_time(like.device, lambda: call.rehearse(pieces, dy)),))
    (product,) = _slowest(links, lambda: (_product(like, sum(call.batches), size),))
    least = steps * product / _AT_BEST if call.closed else sweep * size / _SIDE_BY_SIDE
    if _fastest(call, replace(model, sweep_seconds=sweep, jacobian_seconds=least)) == "linear":
        return "linear"
    taken, product, apply = _slowest(links, lambda: _products(call, pieces, dy))
    found = replace(
        model,
        sweep_seconds=sweep,
        jacobian_seconds=taken,
        product_seconds=product,
        apply_seconds=apply,
    )
    return _fastest(call, found)


def _slowest(links: Links, measure: Callable[[], Seconds]) -> Seconds:
    """Return the measurements of the slowest rank, each number by itself."""
    guard = Guard()
    heard = guard.settle(links, Told(own=guard(measure)))
    return tuple(max(column) for column in zip(*(each.own for each in heard), strict=True))


def _product(like: Tensor, samples: int, size: int) -> float:
    """Return the seconds of a product of two matrices for each sample, measured on some samples."""
    few = min(samples, 1 + _FEW // size**2)
    matrices = Dense(like.new_full((few, size, size), 1 / size))
    return _time(like.device, lambda: combine(matrices, matrices)) * samples / few


def _products(call: Crossing, pieces: Sequence[Piece], dy: Gradient) -> Seconds:
    """Return the seconds of a Jacobian, of a product of two, and of one with a vector."""
    made: list[Any] = []
    device = call.x.device
    taken = _time(device, lambda: made.append(call.affine(pieces, dy)))
    element = made[0]
    if element is IDENTITY:
        return taken, 0.0, 0.0
    vector = Vector(element.offset.data)
    product = _time(device, lambda: combine(element, element))
    return taken, product, _time(device, lambda: combine(vector, element))


def _fastest(call: Crossing, model: RankModel) -> RankWay:
    """Return the way that the model predicts to be fastest. The model knows no pieces, which make a
    linear scan overlap; that is added here."""
    ranks, pieces = call.links.size, len(call.batches)
    hop, compared = model.hop(model.vector_bytes / pieces), model.hop(model.vector_bytes)
    seconds: dict[RankWay, float] = {
        "linear": model.sweep_seconds * (ranks + pieces - 1) / pieces + (ranks - 1) * hop,
        "tree": float(model.seconds("tree", ranks)) + compared,
        "gather": float(model.seconds("gather", ranks)) + compared,
    }
    return min(seconds, key=lambda way: seconds[way])


def _time(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of a call; the best of two, since the first loads and compiles."""
    taken = []
    for _ in range(2):
        start = now(device)
        call()
        taken.append(now(device) - start)
    return min(taken)
