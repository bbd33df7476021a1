"""The exclusive scan across ranks: each rank holds one element and gets the product before it.

Rank r holds a_r of [a_0, …, a_{p−1}] and gets a_0 ⊙ … ⊙ a_{r−1}; the first rank gets ``IDENTITY``.
The operator ⊙ must be associative; it need not commute.

==========  =====================  =======================================================
way         rounds                 how
==========  =====================  =======================================================
``linear``  p − 1                  each rank sends the product so far to the next
``tree``    ⌈log₂ p⌉ up and down   W20, algorithm 1, for any p: products of blocks twice as
                                   long in each round, then the prefix of each block
``gather``  1                      each rank sends its element to all, and multiplies itself
==========  =====================  =======================================================

*The tree.* In round d the ranks are in blocks of 2ᵈ⁺¹; the last one may be shorter. The last rank
of a block's first half sends its product to the last rank of the block. On the way down that rank
knows the prefix of the block. It sends the prefix back, and multiplies it by the product that it
got. The prefix of the first block is ``IDENTITY`` and is not sent, so the first round down sends
nothing. No result reads the last rank's element: it is never multiplied, and may be ``UNREAD``.

*Payload.* In backpropagation a_0 is a gradient, a vector, and so is every prefix. Matrices are sent
only on the way up, at most one by each rank. On the way down each round sends at most one vector.
:func:`messages` lists them.

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020, algorithm 1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

from retrograde.errors import ScanError
from retrograde.ranks.cost_model import LinkSpeed, RankModel, measure_links
from retrograde.ranks.transport import Links, Parcel
from retrograde.scan.elements import IDENTITY, combine

__all__ = [
    "Message",
    "RankReport",
    "RankWay",
    "cheapest_way",
    "messages",
    "model_of_links",
    "rounds",
    "scan_ranks",
]

RankWay = Literal["linear", "tree", "gather"]
Phase = Literal["up", "down", "on", "all"]

_SPEEDS: WeakKeyDictionary[Links, LinkSpeed] = WeakKeyDictionary()


@dataclass
class RankReport:
    """Counts of one rank's work in a scan.

    Attributes:
        way: how the scan was done.
        up: rounds up that this rank took part in.
        down: rounds down that it took part in.
        products: products that it made.
        messages: messages that it sent.
        sent_bytes: bytes of the tensors in them.
    """

    way: str = ""
    up: int = 0
    down: int = 0
    products: int = 0
    messages: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class Message:
    """One message of a scan.

    Attributes:
        phase: ``"up"`` and ``"down"`` in a tree, ``"on"`` in a linear scan, ``"all"`` in a gather.
        round: from 0 on, within the phase.
        source: the rank that sends.
        target: the rank that receives.
        first: the rank whose element is the first in the product that is sent.
    """

    phase: Phase
    round: int
    source: int
    target: int
    first: int


def rounds(size: int) -> int:
    """Return ⌈log₂ p⌉.

    Example:
        >>> [rounds(p) for p in (1, 2, 3, 4, 5, 8, 9)]
        [0, 1, 2, 2, 3, 3, 4]
    """
    return (size - 1).bit_length()


def messages(size: int, way: RankWay = "tree") -> list[Message]:
    """Return every message of a scan, in an order in which they may be sent.

    Args:
        size: ranks.
        way: how the scan is done.

    Returns:
        The messages.

    Raises:
        ScanError: there is no rank, or the way is unknown.

    Example:
        >>> [(m.phase, m.source, m.target) for m in messages(4)]
        [('up', 0, 1), ('up', 2, 3), ('up', 1, 3), ('down', 3, 2)]
    """
    _check(size, way)
    if way == "linear":
        return [Message("on", r, r, r + 1, 0) for r in range(size - 1)]
    if way == "gather":
        pairs = ((a, b) for a in range(size) for b in range(size) if a != b)
        return [Message("all", 0, a, b, a) for a, b in pairs]
    up = [
        Message("up", d, half - 1, stop - 1, start)
        for d in range(rounds(size))
        for start, half, stop in _blocks(size, d)
    ]
    down = [
        Message("down", i, stop - 1, half - 1, 0)
        for i, d in enumerate(reversed(range(rounds(size))))
        for start, half, stop in _blocks(size, d)
        if start
    ]
    return up + down


def _blocks(size: int, d: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the blocks of round d that have two halves: their start, middle and end."""
    for start in range(0, size, 2 << d):
        half = start + (1 << d)
        if half < size:
            yield start, half, min(start + (2 << d), size)


def scan_ranks(
    element: Any,
    links: Links,
    combine: Callable[[Any, Any], Any] = combine,
    *,
    way: RankWay | Literal["auto"] = "tree",
    backward: bool = False,
    report: RankReport | None = None,
) -> Any:
    """Return the product of the elements before this rank's; every rank has to call it.

    Args:
        element: this rank's element; the last rank's is not read.
        links: the links to the other ranks.
        combine: ⊙, associative.
        way: the algorithm; the same on every rank. ``"auto"`` chooses by the speed of the links,
            measured once, and by the sizes of the messages.
        backward: whether the last rank's element is a_0, as in backpropagation.
        report: receives the counts of this rank's work.

    Returns:
        The product; ``IDENTITY`` for the first.

    Raises:
        ScanError: the way is unknown.
        RankError: another rank does not answer.

    Example:
        >>> from retrograde.ranks.transport import simulate
        >>> simulate(5, lambda links: scan_ranks("abcde"[links.rank], links, lambda a, b: a + b))
        [IDENTITY, 'a', 'ab', 'abc', 'abcd']
    """
    if way == "auto":
        way = cheapest_way(element, links, backward=backward)
    _check(links.size, way)
    report = RankReport() if report is None else report
    report.way = way
    before = links.traffic.messages, links.traffic.sent_bytes
    place = _Place(links, combine, report, backward)
    scan = {"linear": _linear, "tree": _tree, "gather": _gather}[way]
    found = scan(element, place)
    links.flush()
    report.messages += links.traffic.messages - before[0]
    report.sent_bytes += links.traffic.sent_bytes - before[1]
    return found


@dataclass
class _Place:
    """The position of a rank in the scan."""

    links: Links
    operator: Callable[[Any, Any], Any]
    report: RankReport
    backward: bool

    @property
    def size(self) -> int:
        return self.links.size

    @property
    def index(self) -> int:
        return self._rank(self.links.rank)

    def send(self, element: Any, to: int) -> None:
        self.links.send(element, self._rank(to))

    def receive(self, source: int) -> Any:
        return self.links.receive(self._rank(source))

    def gather(self, element: Any) -> list[Any]:
        found = self.links.gather(element)
        return found[::-1] if self.backward else found

    def product(self, a: Any, b: Any) -> Any:
        if a is IDENTITY:
            return b
        self.report.products += 1
        return self.operator(a, b)

    def _rank(self, index: int) -> int:
        return self.size - 1 - index if self.backward else index


def _linear(element: Any, place: _Place) -> Any:
    prefix = place.receive(place.index - 1) if place.index else IDENTITY
    if place.index < place.size - 1:
        place.send(place.product(prefix, element), place.index + 1)
    place.report.up += place.size - 1
    return prefix


def _gather(element: Any, place: _Place) -> Any:
    prefix: Any = IDENTITY
    last = place.index == place.size - 1
    for other in place.gather(IDENTITY if last else element)[: place.index]:
        prefix = place.product(prefix, other)
    place.report.up += int(place.size > 1)
    return prefix


def _tree(element: Any, place: _Place) -> Any:
    size, index, levels = place.size, place.index, rounds(place.size)
    lefts: dict[int, Any] = {}  # the product of a block's first half, by round
    for d in range(levels):
        for _, half, stop in _blocks(size, d):
            if index == half - 1:
                place.send(element, stop - 1)
            elif index == stop - 1:
                lefts[d] = place.receive(half - 1)
                if stop < size:  # else no result reads it
                    element = place.product(lefts[d], element)
        place.report.up += 1
    prefix: Any = IDENTITY
    for d in reversed(range(levels)):
        for start, half, stop in _blocks(size, d):
            if index == stop - 1:
                if start:
                    place.send(prefix, half - 1)
                prefix = place.product(prefix, lefts.pop(d))
            elif index == half - 1 and start:
                prefix = place.receive(stop - 1)
        place.report.down += 1
    return prefix


def cheapest_way(element: Any, links: Links, *, backward: bool = False) -> RankWay:
    """Return the way by which the last rank ends first; every rank has to call it.

    The model counts messages and their bytes: of the largest element and of the first one. It does
    not count products: the tree makes ⌈log₂ p⌉ of them in sequence, the others p − 2.

    Example:
        >>> from retrograde.ranks.transport import simulate
        >>> simulate(3, lambda links: cheapest_way("ab", links, backward=True), latency=0.01)
        ['gather', 'gather', 'gather']
    """
    if links.size < 3:
        return "linear"  # there are no products, and all ways do the same
    told = links.gather(Parcel.of(element).nbytes)
    model = model_of_links(links, matrix_bytes=max(told), vector_bytes=told[-1 if backward else 0])
    ways: tuple[RankWay, ...] = ("gather", "linear", "tree")
    return min(ways, key=lambda way: float(model.seconds(way, links.size)))


def model_of_links(links: Links, matrix_bytes: int, vector_bytes: int) -> RankModel:
    """Return a model in which work takes no time; every rank has to call it, and gets the same.

    The links are measured at the first call.
    """
    if links not in _SPEEDS:
        _SPEEDS[links] = measure_links(links, rounds=6, size=1 << 20)
    speed = _SPEEDS[links]
    return RankModel(
        latency_seconds=speed.latency_seconds,
        bytes_per_second=speed.bytes_per_second,
        sweep_seconds=0.0,
        jacobian_seconds=0.0,
        matrix_bytes=matrix_bytes,
        vector_bytes=vector_bytes,
        product_seconds=0.0,
        apply_seconds=0.0,
    )


def _check(size: int, way: str) -> None:
    if size < 1:
        raise ScanError(f"got {size} ranks: expected at least one")
    if way not in get_args(RankWay):
        names = ", ".join(map(repr, get_args(RankWay)))
        raise ScanError(f"unknown way {way!r} to scan across ranks: expected one of {names}")
