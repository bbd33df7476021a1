"""Steps and work of the scans, in closed form (W20, section 3.6, eqs. 3.3, 3.4).

The array has n + 1 elements (``last`` is n, at least 0). A *step* is a level with at least one
product. For a level of N products, p workers need ⌈N/p⌉ steps; ``workers=None`` is any number.
The *work* is the number of products. Moves of the symbolic identity count as neither.

Legend: m = ⌈log₂(n+1)⌉, the binary digits of n; q = ⌊n/2ᵏ⌋. N_d = ⌊(n + 2ᵈ)/2ᵈ⁺¹⌋ is the number of
pairs that algorithm 1 joins on level d, since its i takes the values 0, 2ᵈ⁺¹, … ≤ n − 2ᵈ. As
⌊(x + 1)/2⌋ = x − ⌊x/2⌋ with x = ⌊n/2ᵈ⌋, N_d = ⌊n/2ᵈ⌋ − ⌊n/2ᵈ⁺¹⌋, so that N_0 + … + N_{k−1} = n − q.

Upward every pair of a level is a product. Downward all but the first are, since the prefix of the
first block is the identity.

    linear      S = W = n − 1
    Blelloch    W = 2n − 1 − m           S = 2m − 3 + [2n ≥ 3·2^(m−1)], for n ≥ 2
    hybrid      W = 2n − 1 − k − q       S = 2k + q − 1 − [2n < 3·2ᵏ, k ≥ 1],  k ≤ m − 1
    chunked     W = (C−1)·(L−1) + n − L  S = L − 1 + (C − 2) + min(L, n+1−L) − 1,
                for C = ⌈(n+1)/L⌉ ≥ 2 chunks of L, products of chunks scanned linearly

So W ≤ 2n and S ≤ 2m for Blelloch, and with p workers S ≤ 4n/p + 2·log₂(p) + 2: Θ(log n) for p > n,
else Θ(n/p + log p). The linear scan is the hybrid one without levels; Blelloch's has all of them.

Every function raises ``ScanError`` if n or k is negative, a chunk is empty, or p is 0 or less.
"""

from retrograde.errors import ScanError
from retrograde.scan.blelloch import blocks, chunks_of, most_levels

__all__ = [
    "blelloch_steps", "blelloch_work", "chunked_steps", "chunked_work", "hybrid_steps",
    "hybrid_work", "linear_steps", "linear_work", "rounds",
]  # fmt: skip


def linear_steps(last: int) -> int:
    """Return the steps of the linear scan, n − 1, with any number of workers.

    Example:
        >>> linear_steps(1000)
        999
    """
    return hybrid_steps(last, 0)


def linear_work(last: int) -> int:
    """Return the products of the linear scan, n − 1: a_0 is only moved, and a_n is in no result.

    Example:
        >>> linear_work(1000)
        999
    """
    return hybrid_work(last, 0)


def blelloch_steps(last: int, workers: int | None = None) -> int:
    """Return the steps of the Blelloch scan (W20, eq. 3.3): 2m − 3, one more if 2n ≥ 3·2^(m−1).

    With p workers they are ⌈N_d/p⌉ + ⌈(N_d − 1)/p⌉ over the m − 1 levels.

    Example:
        >>> blelloch_steps(1000), blelloch_steps(1000, workers=10)
        (18, 207)
    """
    return hybrid_steps(last, most_levels(last), workers)


def blelloch_work(last: int) -> int:
    """Return the products of the Blelloch scan (W20, eq. 3.4): n − 1 upward and n − m downward.

    All levels have n pairs. Upward the top level, one pair, is left out; downward each of the m
    levels has one move.

    Example:
        >>> blelloch_work(1000)
        1989
    """
    return hybrid_work(last, most_levels(last))


def hybrid_steps(last: int, levels: int, workers: int | None = None) -> int:
    """Return the steps of the hybrid scan: k up, q − 1 between the q + 1 blocks, k down.

    Downward, level d has no product if N_d < 2, that is n < 3·2ᵈ. As n ≥ 2ᵏ, this can only be the
    case for d = k − 1. A k above the number of levels means all.

    Example:
        >>> hybrid_steps(1000, 3), hybrid_steps(1000, 3, workers=10)
        (130, 300)
    """
    k, q = blocks(last, levels)
    _check_workers(workers)
    if not last:
        return 0
    if workers is None:
        return 2 * k + q - 1 - (k > 0 and 2 * last < 3 * 2**k)
    joined = [(last + 2**d) // 2 ** (d + 1) for d in range(k)]
    return q - 1 + sum(rounds(pairs, workers) + rounds(pairs - 1, workers) for pairs in joined)


def hybrid_work(last: int, levels: int) -> int:
    """Return the products of the hybrid scan: n − q up, q − 1 between blocks, n − q − k down.

    Example:
        >>> hybrid_work(1000, 3)
        1871
    """
    k, q = blocks(last, levels)
    return 2 * last - 1 - k - q if last else 0


def chunked_steps(last: int, chunk: int, workers: int | None = None) -> int:
    """Return the steps of the chunked scan with chunks of L elements; n − 1 for one chunk.

    L − 1 steps are inside the C − 1 chunks whose product is needed, and C − 2 between them. The
    sweeps of the C − 1 chunks after the first take one step less than the longest has elements.

    Example:
        >>> chunked_steps(1000, 22), chunked_steps(1000, 22, workers=10)
        (86, 254)
    """
    chunks, in_last = chunks_of(last, chunk)
    _check_workers(workers)
    if chunks == 1:
        return max(0, last - 1)
    all_but_one, all_but_two = rounds(chunks - 1, workers), rounds(chunks - 2, workers)
    swept = (in_last - 1) * all_but_one + (chunk - in_last) * all_but_two
    return (chunk - 1) * all_but_one + chunks - 2 + swept


def chunked_work(last: int, chunk: int) -> int:
    """Return the products of the chunked scan with chunks of L elements; n − 1 for one chunk.

    (C − 1)·(L − 1) are inside chunks and C − 2 between them. The sweeps take, for each chunk but
    the first, one less than its length.

    Example:
        >>> chunked_work(1000, 22)
        1923
    """
    chunks, _ = chunks_of(last, chunk)
    return max(0, last - 1) if chunks == 1 else (chunks - 1) * (chunk - 1) + last - chunk


def rounds(products: int, workers: int | None) -> int:
    """Return the steps, ⌈products/p⌉, of products that are independent of one another.

    Example:
        >>> rounds(7, 3), rounds(7, None), rounds(0, None)
        (3, 1, 0)
    """
    return min(1, products) if workers is None else -(-products // workers)


def _check_workers(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise ScanError(f"{workers} workers were given: expected at least 1, or None for any")
