"""Which way a scan across ranks is fastest, from what links take and what is to be sent."""

from typing import Any
from weakref import WeakKeyDictionary

from retrograde.ranks.cost_model import LinkSpeed, RankModel, measure_links
from retrograde.ranks.transport import Links, Parcel

__all__ = ["cheapest_way", "speed_of"]

_SPEEDS: WeakKeyDictionary[Links, LinkSpeed] = WeakKeyDictionary()


def speed_of(links: Links) -> LinkSpeed:
    """What the links take, measured once; every rank has to call it.

    Args:
        links: two ranks' or more.

    Returns:
        Latency and bandwidth; the same on every rank.

    Raises:
        RankError: there is one rank only, or another one does not answer.

    Example:
        >>> from retrograde.ranks.transport import simulate
        >>> a, b = simulate(2, lambda links: (speed_of(links), speed_of(links)), latency=0.01)
        >>> a == b and a[0] is a[1]
        True
    """
    if links not in _SPEEDS:
        _SPEEDS[links] = measure_links(links, rounds=6, size=1 << 20)
    return _SPEEDS[links]


def cheapest_way(element: Any, links: Links, *, backward: bool = False) -> Any:
    """The way of a scan by which the last rank is through first; every rank has to call it.

    Counted are messages and their bytes: of the largest element, and of what comes first, which in
    backpropagation is a vector. Of products, which take a machine's time and not a link's, the tree
    makes ⌈log₂ p⌉ one after another, a gather and a line p − 2.

    Args:
        element: this rank's.
        links: to the others.
        backward: whether the last rank's is the first of the scan.

    Returns:
        ``"linear"``, ``"tree"`` or ``"gather"``; the same on every rank.

    Raises:
        RankError: a rank does not answer.

    Example:
        >>> from retrograde.ranks.transport import simulate
        >>> simulate(3, lambda links: cheapest_way("ab", links, backward=True), latency=0.01)
        ['gather', 'gather', 'gather']
    """
    if links.size < 3:
        return "linear"  # no product is made, and all ways do the same
    speed = speed_of(links)
    told = links.gather(Parcel.of(element).nbytes)
    first = told[-1 if backward else 0]
    model = RankModel(
        latency_seconds=speed.latency_seconds,
        bytes_per_second=speed.bytes_per_second,
        sweep_seconds=0.0,
        jacobian_seconds=0.0,
        matrix_bytes=max(told),
        vector_bytes=first,
        product_seconds=0.0,
        apply_seconds=0.0,
    )
    return min(("gather", "linear", "tree"), key=lambda way: float(model.seconds(way, links.size)))
