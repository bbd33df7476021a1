"""Predict the time of a backward pass across more ranks than are available.

Two ranks can measure a :class:`RankModel`: the latency and bandwidth of a link, and the seconds of
a rank's steps and of a product. It predicts the seconds of each way of
:class:`retrograde.TimeSharded` on any number of ranks with equally many steps.

==========  ===========================================================================
way         seconds on p ranks
==========  ===========================================================================
``linear``  p sweeps and p − 1 hops of a vector, one after the other
``tree``    a Jacobian; ⌈log₂ p⌉ rounds up, each a hop and a product, of matrices but
            for the last; ⌈log₂ p⌉ − 1 rounds down, each a hop of a vector or a product
            with one, whichever is longer; a sweep
==========  ===========================================================================

The tree's seconds are those of its critical path, message by message, for any p. Not counted are
shared processors, pieces of a batch and the sum of the parameters' gradients. Neither is the hop by
which the ranks of a tree compare their sweeps.

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020: eqs. 3.3 and
3.4 and section 3.6, here with 1 for every constant.
"""

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScanError

__all__ = ["RankModel", "pipeline_space", "scan_space", "scan_steps", "scan_work"]

Seconds = NDArray[np.float64]
Numbers = NDArray[np.int64]

_ROUNDING = 1e-9  # a smaller lead is rounding: on two ranks all ways do the same
_SEARCHED = 4096  # numbers of ranks that are searched together


@dataclass(frozen=True)
class RankModel:
    """Measured seconds and bytes, and the predictions from them for any number of ranks.

    Attributes:
        latency_seconds: of a message.
        bytes_per_second: of a link.
        sweep_seconds: one rank's backward sweep through its own steps.
        jacobian_seconds: until a rank has computed the Jacobian of its steps.
        matrix_bytes: of that Jacobian.
        vector_bytes: of a gradient of the state.
        product_seconds: of two such matrices.
        apply_seconds: of a matrix and a vector.

    Raises:
        ScanError: a value is negative or not a number, or a link has no bandwidth.

    Example:
        >>> from math import inf
        >>> model = RankModel(1.0, inf, 0.0, 0.0, 0, 0, 0.0, 0.0)  # only latency counts
        >>> model.seconds("linear", [2, 4, 5, 100]).tolist()
        [1.0, 3.0, 4.0, 99.0]
        >>> model.seconds("tree", [2, 4, 5, 100]).tolist()
        [1.0, 3.0, 3.0, 13.0]
        >>> model.first_ranks_where("tree", beats="linear")
        5
    """

    latency_seconds: float
    bytes_per_second: float
    sweep_seconds: float
    jacobian_seconds: float
    matrix_bytes: int
    vector_bytes: int
    product_seconds: float
    apply_seconds: float

    def __post_init__(self) -> None:
        if not all(value >= 0 for value in astuple(self)) or not self.bytes_per_second > 0:
            raise ScanError(
                f"got {self}: expected seconds and bytes of at least 0, and more than 0 bytes a "
                "second"
            )

    def seconds(self, way: str, ranks: ArrayLike) -> Seconds:
        """Return the seconds until the last rank ends its backward pass, for each of ``ranks``.

        Raises:
            ScanError: the way is unknown, or there is no rank.
        """
        numbers = _positive(ranks, "ranks")
        ways = {"linear": self._linear, "tree": self._tree}
        if way not in ways:
            names = ", ".join(map(repr, ways))
            raise ScanError(f"unknown way {way!r} across ranks: expected one of {names}")
        several = np.maximum(numbers, 2)
        return np.where(numbers == 1, self.sweep_seconds, ways[way](several))

    def first_ranks_where(self, way: str, *, beats: str, most: int = 10**6) -> int | None:
        """Return the least number of ranks, up to ``most``, at which a way is faster, or None.

        Raises:
            ScanError: a way is unknown.
        """
        for start in range(1, most + 1, _SEARCHED):
            numbers = np.arange(start, min(start + _SEARCHED, most + 1))
            faster = self.seconds(way, numbers) < (1 - _ROUNDING) * self.seconds(beats, numbers)
            if faster.any():
                return int(numbers[faster.argmax()])
        return None

    def hop(self, size: float) -> float:
        """Return the seconds of a message of some bytes."""
        return self.latency_seconds + size / self.bytes_per_second

    def _linear(self, p: Numbers) -> Seconds:
        return p * self.sweep_seconds + (p - 1) * self.hop(self.vector_bytes)

    def _tree(self, p: Numbers) -> Seconds:
        """Return the seconds of the longest path through the tree's messages.

        The last rank only waits, since no rank reads its element. Only the blocks that it ends may
        be shorter than 2ᵈ⁺¹; all others take equally long.
        """
        last = p - 1
        rounds = np.frexp(last)[1]  # the bits of ``last``
        matrices, vectors = self._up(int(rounds.max()))
        levels = range(int(rounds.max()) - 1)
        sent = [((last >> d) & 1 == 1) & (d < rounds - 1) for d in levels]  # by the last rank
        away, apply = self.hop(self.vector_bytes), self.apply_seconds
        down = max(away, apply)  # one round: a hop to the left half, or a product in the right one
        arrived = vectors[rounds - 1] + away
        for d in levels:
            there = matrices[d] + self.hop(self.matrix_bytes)
            arrived = np.where(sent[d], np.maximum(arrived, there), arrived)
        end = np.where(rounds > 1, vectors[rounds - 1] + (rounds - 2) * down, 0.0)
        for d in reversed(levels):
            end = np.where(sent[d], np.maximum(end, arrived + away + d * down), end)
            arrived = arrived + sent[d] * apply
        longest: Seconds = np.maximum(end, arrived)
        return longest + self.sweep_seconds

    def _up(self, rounds: int) -> tuple[Seconds, Seconds]:
        """Return when blocks of 2ᵈ ranks have their product, of matrices and with a vector."""
        step = self.hop(self.matrix_bytes) + self.product_seconds
        matrices: Seconds = self.jacobian_seconds + step * np.arange(rounds, dtype=np.float64)
        vectors = [self.sweep_seconds]
        for d in range(rounds - 1):
            there = max(vectors[-1] + self.hop(self.vector_bytes), float(matrices[d]))
            vectors.append(there + self.apply_seconds)
        return matrices, np.array(vectors, dtype=np.float64)


def scan_steps(elements: ArrayLike, ranks: ArrayLike) -> Seconds:
    """Return the steps of a scan in sequence, W20 eq. 3.3: log₂ n for p > n, else n/p + log₂ p.

    Raises:
        ScanError: there is no element, or no rank.

    Example:
        >>> scan_steps(1024, [1, 32, 1024, 4096]).tolist()
        [1024.0, 37.0, 11.0, 10.0]
    """
    n, p = _positive(elements, "elements"), _positive(ranks, "ranks")
    return np.where(p > n, np.log2(n), n / p + np.log2(p))


def scan_work(elements: ArrayLike) -> Seconds:
    """Return the steps of a scan in all, W20 eq. 3.4: n, as in a linear one.

    Raises:
        ScanError: there is no element.

    Example:
        >>> scan_work(1024).item()
        1024.0
    """
    return _positive(elements, "elements").astype(np.float64)


def scan_space(elements: ArrayLike, ranks: ArrayLike, matrix_bytes: float) -> Seconds:
    """Return the bytes that each rank needs for a scan, W20 section 3.6: max(n/p, 1) Jacobians.

    Raises:
        ScanError: there is no element, or no rank.

    Example:
        >>> scan_space(1024, [1, 32, 1024, 4096], 10).tolist()
        [10240.0, 320.0, 10.0, 10.0]
    """
    n, p = _positive(elements, "elements"), _positive(ranks, "ranks")
    return np.maximum(n / p, 1.0) * matrix_bytes


def pipeline_space(elements: ArrayLike, ranks: ArrayLike, vector_bytes: float) -> Seconds:
    """Return the bytes that each rank needs in pipeline parallelism: n/p + p activations.

    Raises:
        ScanError: there is no element, or no rank.

    Example:
        >>> pipeline_space(1024, [1, 32, 1024, 4096], 10).tolist()
        [10250.0, 640.0, 10250.0, 40962.5]
    """
    n, p = _positive(elements, "elements"), _positive(ranks, "ranks")
    return (n / p + p) * vector_bytes


def _positive(values: ArrayLike, what: str) -> Numbers:
    numbers = np.asarray(values).astype(np.int64)
    if (numbers < 1).any():
        raise ScanError(f"got {numbers.min()} {what}: expected at least one")
    return numbers
