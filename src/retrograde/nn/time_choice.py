"""Which way gradients cross ranks fastest: measured once, for a batch and a length of steps.

A linear hand-over waits for every rank's sweep, a tree and a gather for one Jacobian. What a sweep,
a Jacobian, a product and a message take is measured where they run, told to all ranks, and the
slowest's put into :class:`retrograde.scan.rank_model.RankModel`; so all choose alike. A Jacobian is
only formed to be timed where it could pay.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retrograde.nn.time_crossing import Crossing, Gradient, Piece
from retrograde.scan.elements import IDENTITY, Vector, combine
from retrograde.scan.rank_model import LinkSpeed, RankModel, measure_links
from retrograde.scan.ranks import RankWay

__all__ = ["choose"]

_AT_BEST = 16  # times as fast as one after another that a Jacobian's columns may be swept


def choose(call: Crossing, pieces: Sequence[Piece], seeds: Sequence[Gradient]) -> RankWay:
    """The way that the model expects to be fastest; every rank has to call it, and finds the same.

    Args:
        call: a pass that has been made forward.
        pieces: as it was run.
        seeds: the gradients of each one's outputs.

    Returns:
        ``"linear"``, ``"tree"`` or ``"gather"``.

    Raises:
        RankError: a rank does not answer.
    """
    links = call.links
    if links.size < 3:
        return "linear"  # no matrix crosses, and all ways do the same
    speed = measure_links(links, rounds=6, size=1 << 20)
    sweep = _time(lambda: call.rehearse(pieces, seeds))
    size = sum(s.shape[0] * s.shape[-1] for s in pieces[0].after)
    sweep = max(links.gather(sweep))
    model = _model(call, speed, sweep, sweep * size / _AT_BEST, size)
    if _fastest(call, model) == "linear":
        return "linear"
    taken, product, apply = _products(call, pieces, seeds)
    told = links.gather((taken, product, apply))
    taken, product, apply = (max(column) for column in zip(*told, strict=True))
    return _fastest(call, _model(call, speed, sweep, taken, size, product, apply))


def _products(
    call: Crossing, pieces: Sequence[Piece], seeds: Sequence[Gradient]
) -> tuple[float, float, float]:
    """The seconds of a Jacobian, of a product of two, and of one with a vector."""
    made: list[Any] = []
    taken = _time(lambda: made.append(call.affine(list(pieces), list(seeds))))
    element = made[0]
    if element is IDENTITY:
        return taken, 0.0, 0.0
    vector = Vector(element.offset.data)
    return taken, _time(lambda: combine(element, element)), _time(lambda: combine(vector, element))


def _model(
    call: Crossing, speed: LinkSpeed, sweep: float, jacobian: float, size: int,
    product: float = 0.0, apply: float = 0.0,
) -> RankModel:  # fmt: skip
    vector = torch.empty(sum(call.batches), size, dtype=call.x.dtype, device="meta").nbytes
    return RankModel(
        latency_seconds=speed.latency_seconds,
        bytes_per_second=speed.bytes_per_second,
        sweep_seconds=sweep,
        jacobian_seconds=jacobian,
        matrix_bytes=vector * (size + 1),
        vector_bytes=vector,
        product_seconds=product,
        apply_seconds=apply,
    )


def _fastest(call: Crossing, model: RankModel) -> RankWay:
    """By the model; which knows of no pieces, by which a linear hand-over overlaps."""
    ranks, pieces = call.links.size, len(call.batches)
    hop = model.hop(model.vector_bytes / pieces)
    seconds: dict[RankWay, float] = {
        "linear": model.sweep_seconds * (ranks + pieces - 1) / pieces + (ranks - 1) * hop,
        "tree": float(model.seconds("tree", ranks)),
        "gather": float(model.seconds("gather", ranks)),
    }
    return min(seconds, key=lambda way: seconds[way])


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
