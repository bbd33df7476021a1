"""Levels, blocks and chunks of the scans; the array has n + 1 elements (``last`` is n, at least 0).

Every function raises ``ScanError`` if n or k is negative, a chunk is empty, or p is 0 or less.
"""

from retrograde.errors import ScanError

__all__ = ["blocks", "check_workers", "chunks_of", "most_levels", "rounds"]


def most_levels(last: int) -> int:
    """Return the levels of algorithm 1's up-sweep, ⌈log₂(n+1)⌉ − 1; none for one element.

    Example:
        >>> [most_levels(n) for n in (0, 1, 2, 3, 4, 1000)]
        [0, 0, 1, 1, 2, 9]
    """
    if last < 0:
        raise ScanError(f"the last position is {last}: expected 0 or more, for n + 1 elements")
    return max(0, last.bit_length() - 1)


def blocks(last: int, levels: int) -> tuple[int, int]:
    """Return k, at most the number of levels, and q: a hybrid scan leaves q + 1 blocks.

    Example:
        >>> blocks(1000, 3), blocks(1000, 99)
        ((3, 125), (9, 1))
    """
    if levels < 0:
        raise ScanError(f"{levels} levels were given: expected 0 (linear) or more")
    k = min(levels, most_levels(last))
    return k, last >> k


def chunks_of(last: int, chunk: int) -> tuple[int, int]:
    """Return C, the number of chunks, and the length of the last one.

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
    """Refuse less than one worker."""
    if workers is not None and workers < 1:
        raise ScanError(f"{workers} workers were given: expected at least 1, or None for any")


def rounds(products: int, workers: int | None) -> int:
    """Return the steps, ⌈products/p⌉, of products that are independent of one another."""
    return min(1, products) if workers is None else -(-products // workers)
