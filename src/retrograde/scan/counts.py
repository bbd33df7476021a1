"""Steps and work of the scans, in closed form (W20, section 3.6, eqs. 3.3, 3.4).

The array has n + 1 elements. A *step* is a level with at least one product, or ⌈N/p⌉ of them with p
workers and N products on the level; *work* is the number of products. Moves of the symbolic
identity are neither.

Legend: m = ⌈log₂(n+1)⌉, the binary digits of n; N_d = ⌊(n + 2ᵈ)/2ᵈ⁺¹⌋, the pairs that algorithm 1
joins on level d, since its i takes the values 0, 2ᵈ⁺¹, … ≤ n − 2ᵈ; q = ⌊n/2ᵏ⌋. As
⌊(x + 1)/2⌋ = x − ⌊x/2⌋ with x = ⌊n/2ᵈ⌋, N_d = ⌊n/2ᵈ⌋ − ⌊n/2ᵈ⁺¹⌋, so that N_0 + … + N_{k−1} = n − q.

Upward every pair of a level is a product. Downward all but the first are: what precedes the first
block is the identity.

    linear      S = W = n − 1
    Blelloch    W = 2n − 1 − m           S = 2m − 3 + [2n ≥ 3·2^(m−1)], for n ≥ 2
    hybrid      W = 2n − 1 − k − q       S = 2k + q − 1 − [2n < 3·2ᵏ, k ≥ 1],  k ≤ m − 1
    chunked     W = (C−1)·(L−1) + n − L  S = L − 1 + (C − 2) + min(L, n+1−L) − 1,
                for C = ⌈(n+1)/L⌉ ≥ 2 chunks of L, products of chunks scanned linearly

So W ≤ 2n and S ≤ 2m for Blelloch, and with p workers S ≤ 4n/p + 2·log₂(p) + 2: Θ(log n) for p > n,
else Θ(n/p + log p).
"""

from retrograde.errors import ScanError

__all__ = [
    "blelloch_levels",
    "blelloch_steps",
    "blelloch_unread",
    "blelloch_work",
    "blocks",
    "check_workers",
    "chunked_steps",
    "chunked_work",
    "chunks_of",
    "hybrid_steps",
    "hybrid_work",
    "linear_steps",
    "linear_work",
    "most_levels",
    "rounds",
]


def most_levels(last: int) -> int:
    """The levels of algorithm 1's up-sweep, ⌈log₂(n+1)⌉ − 1; for one element none.

    Args:
        last: n, the last position of the array, at least 0.

    Returns:
        The most levels that ``hybrid`` can have.

    Raises:
        ScanError: n is negative.

    Example:
        >>> [most_levels(n) for n in (0, 1, 2, 3, 4, 1000)]
        [0, 0, 1, 1, 2, 9]
    """
    if last < 0:
        raise ScanError(f"the last position is {last}: expected 0 or more, for n + 1 elements")
    return max(0, last.bit_length() - 1)


def blelloch_levels(last: int) -> int:
    """The levels of algorithm 1, m − 1 up and m down, those that only move included.

    Args:
        last: n, at least 0.

    Returns:
        Levels.

    Example:
        >>> blelloch_levels(1000)
        19
    """
    return 2 * most_levels(last) + 1 if last else 0


def linear_steps(last: int) -> int:
    """Steps of the linear scan, n − 1, with any number of workers.

    Args:
        last: n, at least 0.

    Returns:
        Steps.

    Example:
        >>> linear_steps(1000)
        999
    """
    return hybrid_steps(last, 0)


def linear_work(last: int) -> int:
    """Products of the linear scan, n − 1.

    Args:
        last: n, at least 0.

    Returns:
        Products; a_0 is only moved, and a_n is in no result.

    Example:
        >>> linear_work(1000)
        999
    """
    return hybrid_work(last, 0)


def blelloch_steps(last: int, workers: int | None = None) -> int:
    """Steps of the Blelloch scan (W20, eq. 3.3).

    Upward there are m − 1 levels, none empty. Downward the topmost only moves, and of the m − 1
    others level d has a product if N_d ≥ 2, that is n ≥ 3·2ᵈ: always for d ≤ m − 3, since
    n ≥ 2^(m−1), and for d = m − 2 if the second binary digit of n is set.

    Args:
        last: n, at least 0.
        workers: p; None: unbounded.

    Returns:
        Steps: 2m − 3, and one more if 2n ≥ 3·2^(m−1). With p workers ⌈N_d/p⌉ + ⌈(N_d − 1)/p⌉ over
        the m − 1 levels.

    Raises:
        ScanError: n is negative, or there are no workers.

    Example:
        >>> blelloch_steps(1000), blelloch_steps(1000, workers=10)
        (18, 207)
    """
    return hybrid_steps(last, most_levels(last), workers)


def blelloch_work(last: int) -> int:
    """Products of the Blelloch scan (W20, eq. 3.4).

    Upward n − 1: the pairs of all levels are n, and the topmost level, one pair, is left out.
    Downward n − m: all n pairs, less one on each of m levels.

    Args:
        last: n, at least 0.

    Returns:
        Products: 2n − 1 − m.

    Example:
        >>> blelloch_work(1000)
        1989
    """
    return hybrid_work(last, most_levels(last))


def blelloch_unread(last: int) -> int:
    """The products of algorithm 1's up-sweep that line 7 overwrites before anyone reads them.

    They are those into position n. Level d has one if n − i is 2ᵈ to 2ᵈ⁺¹ − 1 for a multiple i of
    2ᵈ⁺¹, that is if binary digit d of n is set; the topmost digit's level is not swept upward. With
    ``IDENTITY`` for a_n the first of them is a move.

    Args:
        last: n, at least 0.

    Returns:
        Products: the binary digits of n that are set, less one.

    Example:
        >>> blelloch_unread(1000)
        5
    """
    most_levels(last)
    return max(0, last.bit_count() - 1)


def hybrid_steps(last: int, levels: int, workers: int | None = None) -> int:
    """Steps of the hybrid scan: k up, q − 1 between the q + 1 blocks, k down.

    Downward level d is empty if N_d < 2, that is n < 3·2ᵈ. With n ≥ 2ᵏ only d = k − 1 can be.

    Args:
        last: n, at least 0.
        levels: k, at least 0; more than there are means all.
        workers: p; None: unbounded.

    Returns:
        Steps: 2k + q − 1, less one if k ≥ 1 and 2n < 3·2ᵏ.

    Raises:
        ScanError: n or k is negative, or there are no workers.

    Example:
        >>> hybrid_steps(1000, 3), hybrid_steps(1000, 3, workers=10)
        (130, 300)
    """
    k, q = blocks(last, levels)
    check_workers(workers)
    if not last:
        return 0
    if workers is None:
        return 2 * k + q - 1 - (k > 0 and 2 * last < 3 * 2**k)
    joined = [(last + 2**d) // 2 ** (d + 1) for d in range(k)]
    return q - 1 + sum(rounds(pairs, workers) + rounds(pairs - 1, workers) for pairs in joined)


def hybrid_work(last: int, levels: int) -> int:
    """Products of the hybrid scan: n − q up, q − 1 between the blocks, n − q − k down.

    Args:
        last: n, at least 0.
        levels: k, at least 0; more than there are means all.

    Returns:
        Products: 2n − 1 − k − q.

    Raises:
        ScanError: n or k is negative.

    Example:
        >>> hybrid_work(1000, 3)
        1871
    """
    k, q = blocks(last, levels)
    return 2 * last - 1 - k - q if last else 0


def chunked_steps(last: int, chunk: int, workers: int | None = None) -> int:
    """Steps of the chunked scan, its C products of chunks scanned linearly.

    L − 1 inside the C − 1 chunks whose product is needed, C − 2 between them, and one less than
    their length inside the C − 1 chunks after the first, of which the last may be the only one.

    Args:
        last: n, at least 0.
        chunk: L, at least 1.
        workers: p; None: unbounded.

    Returns:
        Steps: L − 1 + (C − 2) + min(L, n + 1 − L) − 1, and n − 1 for one chunk.

    Raises:
        ScanError: n is negative, the chunk is empty, or there are no workers.

    Example:
        >>> chunked_steps(1000, 22), chunked_steps(1000, 22, workers=10)
        (86, 254)
    """
    chunks, in_last = chunks_of(last, chunk)
    check_workers(workers)
    if chunks == 1:
        return max(0, last - 1)
    all_but_one, all_but_two = rounds(chunks - 1, workers), rounds(chunks - 2, workers)
    swept = (in_last - 1) * all_but_one + (chunk - in_last) * all_but_two
    return (chunk - 1) * all_but_one + chunks - 2 + swept


def chunked_work(last: int, chunk: int) -> int:
    """Products of the chunked scan, its C products of chunks scanned linearly.

    (C − 1)·(L − 1) inside chunks, C − 2 between them, and n + 1 − L − (C − 1) in the sweeps: one
    less than its length for each chunk but the first.

    Args:
        last: n, at least 0.
        chunk: L, at least 1.

    Returns:
        Products: (C − 1)·(L − 1) + n − L, and n − 1 for one chunk.

    Raises:
        ScanError: n is negative, or the chunk is empty.

    Example:
        >>> chunked_work(1000, 22)
        1923
    """
    chunks, _ = chunks_of(last, chunk)
    return max(0, last - 1) if chunks == 1 else (chunks - 1) * (chunk - 1) + last - chunk


def blocks(last: int, levels: int) -> tuple[int, int]:
    """What is left in the middle of a hybrid scan.

    Args:
        last: n, at least 0.
        levels: k, at least 0.

    Returns:
        k, cut to the levels that there are, and q: q + 1 blocks are left.

    Raises:
        ScanError: n or k is negative.

    Example:
        >>> blocks(1000, 3), blocks(1000, 99)
        ((3, 125), (9, 1))
    """
    if levels < 0:
        raise ScanError(f"{levels} levels were given: expected 0 (linear) or more")
    k = min(levels, most_levels(last))
    return k, last >> k


def chunks_of(last: int, chunk: int) -> tuple[int, int]:
    """How many chunks there are, and the length of the last.

    Args:
        last: n, at least 0.
        chunk: L, at least 1.

    Returns:
        C, and 1 to L.

    Raises:
        ScanError: n is negative, or the chunk is empty.

    Example:
        >>> chunks_of(1000, 22)
        (46, 11)
    """
    most_levels(last)
    if chunk < 1:
        raise ScanError(f"a chunk of {chunk} elements was given: expected at least 1")
    chunks = -(-(last + 1) // chunk)
    return chunks, last + 1 - (chunks - 1) * chunk


def check_workers(workers: int | None) -> None:
    """Refuse less than one worker.

    Args:
        workers: p; None: unbounded.

    Raises:
        ScanError: there are none.

    Example:
        >>> check_workers(0)
        Traceback (most recent call last):
        ...
        retrograde.errors.ScanError: 0 workers were given: expected at least 1, or None for any
    """
    if workers is not None and workers < 1:
        raise ScanError(f"{workers} workers were given: expected at least 1, or None for any")


def rounds(products: int, workers: int | None) -> int:
    """The steps that products need which do not wait for one another.

    Args:
        products: how many, at least 0.
        workers: p, each with one product at a time; None: unbounded.

    Returns:
        ⌈products/p⌉.

    Example:
        >>> rounds(7, 3), rounds(7, None), rounds(0, None)
        (3, 1, 0)
    """
    return min(1, products) if workers is None else -(-products // workers)
