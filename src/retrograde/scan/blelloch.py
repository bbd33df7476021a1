"""Exclusive scans over any associative operator: linear, Blelloch, hybrid, chunked; gradients.

A scan of [a_0, …, a_n] gives [I, a_0, a_0 ⊙ a_1, …, a_0 ⊙ … ⊙ a_{n−1}]. For the gradient and the
transposed Jacobians [∇x_n, J_nᵀ, …, J_1ᵀ] and A ⊙ B = B·A that is [I, ∇x_n, …, ∇x_1]
(W20, eqs. 3.1, 3.2). The operator ⊙ must be associative; it need not commute.

=============  =================  =============================================================
algorithm      steps              how
=============  =================  =============================================================
``linear``     n − 1              one after another, as ordinary backpropagation does
``blelloch``   about 2·log₂(n)    W20, algorithm 1: products of ever longer blocks upward, then
                                  the prefix of each block downward
``hybrid``     2·k + n/2ᵏ         k levels up, linear between the blocks, k levels down
                                  (W20, section 5.3)
``chunked``    2·L + n/L          products inside chunks of L, a scan of those, a sweep in each
=============  =================  =============================================================

A :class:`Report` counts a run; W20, section 3.6, has closed forms.

*The identity* is symbolic and never reaches ``combine``, whichever position it has. The last
element of an exclusive scan is in no result, though algorithm 1 multiplies by it and by its
products on the way up. ``UNREAD`` in its place saves these products.

Elements may be of any type: the algorithms know no tensors. One function runs all products of a
level, which are independent of one another.

*Limits.* A product of Jacobians may overflow where the gradient does not, and one entry that is not
finite spoils a whole product. Only ``linear`` multiplies nothing but vectors.

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020, chapter 3;
Blelloch, *Prefix Sums and Their Applications*, 1990.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from retrograde.errors import ScanError
from retrograde.scan.elements import IDENTITY, UNREAD, Affine, Identity, Vector, combine
from retrograde.scan.work_report import Report

if TYPE_CHECKING:
    from torch import Tensor

E = TypeVar("E")
#: An exclusive scan, such as ``blelloch`` or ``partial(chunked, chunk=8)``.
Algorithm = Callable[..., list[Any]]


def reference(elements: Sequence[E], combine: Callable[[E, E], E]) -> list[E | Identity]:
    """Scan by a plain loop, [I, a_0, a_0 ⊙ a_1, …] (W20, eq. 3.1): the oracle of all the others.

    Example:
        >>> reference("abcd", lambda a, b: a + b)
        [IDENTITY, 'a', 'ab', 'abc']
    """
    scanned: list[E | Identity] = [IDENTITY]
    for element in elements[:-1]:
        before = scanned[-1]
        scanned.append(element if before is IDENTITY else combine(before, element))
    return scanned


def linear(
    elements: Sequence[E], combine: Callable[[E, E], E] = combine, *, report: Report | None = None
) -> list[E | Identity]:
    """Scan one after another: n − 1 products, each of which needs the one before.

    Args:
        elements: [a_0, …, a_n], at least one; a_n is in no result.
        combine: ⊙, associative.
        report: receives the counts of the run.

    Returns:
        [I, a_0, a_0 ⊙ a_1, …], of the same length.

    Raises:
        ScanError: there are no elements.

    Example:
        >>> linear("abcd", lambda a, b: a + b)
        [IDENTITY, 'a', 'ab', 'abc']
    """
    return _sweep_levels(elements, _Levels(combine, report), 0, "linear")


def blelloch(
    elements: Sequence[E], combine: Callable[[E, E], E] = combine, *, report: Report | None = None
) -> list[E | Identity]:
    """Scan as W20 algorithm 1 does: ⌈log₂(n+1)⌉ − 1 levels up, ⌈log₂(n+1)⌉ down, any length.

    Arguments, result and errors are those of :func:`linear`.

    Example:
        >>> blelloch("abcd", lambda a, b: a + b)
        [IDENTITY, 'a', 'ab', 'abc']
    """
    # All levels leave two blocks. The step between them is the top of the way down.
    return _sweep_levels(elements, _Levels(combine, report), len(elements), "down-sweep")


def hybrid(
    elements: Sequence[E],
    combine: Callable[[E, E], E] = combine,
    *,
    levels: int,
    report: Report | None = None,
) -> list[E | Identity]:
    """Scan k levels up, linearly over the remaining blocks of 2ᵏ elements, and k levels down.

    It serves products that get more expensive level by level, as those of sparse Jacobians do (W20,
    section 5.3). With no levels it is ``linear``; with all of them it is ``blelloch``.

    Args:
        elements, combine, report: as for :func:`linear`, and so is the result.
        levels: k, at least 0; a k above the number of levels means all.

    Raises:
        ScanError: there are no elements, or k is negative.

    Example:
        >>> hybrid("abcdefg", lambda a, b: a + b, levels=1)
        [IDENTITY, 'a', 'ab', 'abc', 'abcd', 'abcde', 'abcdef']
    """
    return _sweep_levels(elements, _Levels(combine, report), levels, "middle")


def chunked(
    elements: Sequence[E],
    combine: Callable[[E, E], E] = combine,
    *,
    chunk: int,
    algorithm: Algorithm = linear,
    report: Report | None = None,
) -> list[E | Identity]:
    """Scan in three phases: products inside chunks, a scan of those, a sweep inside each chunk.

    All chunks are processed together. The first chunk's products are already its scan, so it needs
    no sweep; the last chunk's product is not needed.

    Args:
        elements, combine, report: as for :func:`linear`, and so is the result.
        chunk: L, elements a chunk, at least 1; the last may be shorter.
        algorithm: scans the products of the chunks.

    Raises:
        ScanError: there are no elements, or a chunk is empty.

    Example:
        >>> chunked("abcdefg", lambda a, b: a + b, chunk=3)
        [IDENTITY, 'a', 'ab', 'abc', 'abcd', 'abcde', 'abcdef']
    """
    _check_elements(elements)
    count, _ = chunks_of(len(elements) - 1, chunk)
    *needed, last = [list(elements[i * chunk : (i + 1) * chunk]) for i in range(count)]
    levels = _Levels(combine, report)
    if not needed:
        return _in_turn(last, levels, "chunks")
    products: list[E | Identity] = [each[0] for each in needed]
    scanned: list[E | Identity] = [IDENTITY]
    for i in range(1, chunk):
        scanned.append(products[0])
        operands = [(product, each[i]) for product, each in zip(products, needed, strict=True)]
        products = levels.carry_out("chunks", operands)
    part = None if report is None else report.part("summaries")
    _, *before = algorithm([*products, IDENTITY], combine, report=part)
    for swept in _sweep([*needed[1:], last], before, levels):
        scanned += swept
    return scanned


def gradients(
    jacobians: Sequence[Any],
    losses: Sequence["Tensor | None"],
    combine: Callable[[Any, Any], Any] = combine,
    *,
    algorithm: Algorithm = linear,
    report: Report | None = None,
) -> list["Tensor"]:
    """Return all gradients g_t = d_t + J_{t+1}ᵀ·g_{t+1} of a loss with terms at any step.

    g_T is d_T. The scan is over [d_T, (J_Tᵀ, d_{T−1}), …, (J_1ᵀ, d_0), I]; W20 has d_T only.

    Args:
        jacobians: [J_Tᵀ, …, J_1ᵀ], linear elements, each (…, inputs, outputs) of its step.
        losses: [d_T, …, d_0], tensors (…, n_t), one more than Jacobians; None where a step has no
            term of its own, except at T.
        combine: ⊙ of vectors, Jacobians and ``Affine`` pairs of them.
        algorithm: scans the elements.
        report: receives the counts of the run.

    Returns:
        [g_T, …, g_0], tensors (…, n_t).

    Raises:
        ScanError: the numbers of Jacobians and loss terms, or their shapes, do not fit; or there
            is no d_T.

    Example:
        >>> import torch
        >>> from retrograde.scan.elements import Diagonal
        >>> half, one = Diagonal(torch.tensor([0.5])), torch.tensor([1.0])
        >>> [g.item() for g in gradients([half, half, half], [one, one, None, one])]
        [1.0, 1.5, 0.75, 1.375]
    """
    if len(losses) != len(jacobians) + 1:
        raise ScanError(
            f"{len(jacobians)} Jacobians and {len(losses)} loss terms were given: expected one "
            "term more than Jacobians, from the last state to the first; give None for no term"
        )
    last, *others = losses
    if last is None:
        raise ScanError(
            "the last state has no loss term: expected the tensor d_T first; give zeros, or leave "
            "out the steps that no loss depends on"
        )
    steps = [
        jacobian if loss is None else Affine(jacobian, Vector(loss))
        for jacobian, loss in zip(jacobians, others, strict=True)
    ]
    _, *scanned = algorithm([Vector(last), *steps, IDENTITY], combine, report=report)
    return [gradient.data for gradient in scanned]


def pairs(last: int, level: int) -> Iterator[tuple[int, int]]:
    """Return the positions (l, r) that algorithm 1 joins on a level, up and down (lines 3, 10).

    They are the ends of adjacent blocks, no position twice; ``last`` is n, and the last block may
    be short.

    Example:
        >>> list(pairs(6, 0)), list(pairs(6, 1)), list(pairs(6, 2))
        ([(0, 1), (2, 3), (4, 5)], [(1, 3), (5, 6)], [(3, 6)])
    """
    block = 2**level
    for i in range(0, last - block + 1, 2 * block):
        yield i + block - 1, min(i + 2 * block - 1, last)


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


class _Levels:
    """Runs a level of products at a time, and adds it to the report."""

    def __init__(self, combine: Callable[[Any, Any], Any], report: Report | None) -> None:
        self._combine = combine
        self._report = report

    def carry_out(self, phase: str, operands: list[tuple[Any, Any]]) -> list[Any]:
        """Return a ⊙ b of every pair."""
        if self._report is not None:
            self._report.add(phase, operands)
        return [self._product(a, b) for a, b in operands]

    def _product(self, a: object, b: object) -> Any:
        if a is IDENTITY or b is UNREAD:
            return b
        return a if b is IDENTITY else self._combine(a, b)


def _sweep_levels(elements: Sequence[Any], levels: _Levels, most: int, between: str) -> list[Any]:
    """Scan some levels up, linearly over the blocks, and as many levels down."""
    _check_elements(elements)
    array, last = list(elements), len(elements) - 1
    up, _ = blocks(last, most)
    for level in range(up):
        joined = list(pairs(last, level))
        operands = [(array[left], array[right]) for left, right in joined]
        for (_, right), product in zip(joined, levels.carry_out("up-sweep", operands), strict=True):
            array[right] = product
    ends = [min(start + 2**up - 1, last) for start in range(0, last + 1, 2**up)]
    before = _in_turn([array[end] for end in ends], levels, between)
    for end, prefix in zip(ends, before, strict=True):
        array[end] = prefix
    for level in reversed(range(up)):
        joined = list(pairs(last, level))
        # The prefix of the right block is that of the left block, then the left block. On the way
        # up a[l] is the first operand; here it is the second, since a[r] has the common prefix.
        operands = [(array[right], array[left]) for left, right in joined]
        products = levels.carry_out("down-sweep", operands)
        for (left, right), product in zip(joined, products, strict=True):
            array[left], array[right] = array[right], product
    return array


def _in_turn(elements: Sequence[Any], levels: _Levels, phase: str) -> list[Any]:
    scanned: list[Any] = [IDENTITY]
    for element in elements[:-1]:
        scanned += levels.carry_out(phase, [(scanned[-1], element)])
    return scanned


def _sweep(chunks: list[list[Any]], before: list[Any], levels: _Levels) -> list[list[Any]]:
    """Return the scan of each chunk, given its prefix."""
    swept = [[prefix] for prefix in before]
    for i in range(1, len(chunks[0])):
        longer = [c for c, chunk in enumerate(chunks) if len(chunk) > i]
        operands = [(swept[c][-1], chunks[c][i - 1]) for c in longer]
        for c, product in zip(longer, levels.carry_out("sweep", operands), strict=True):
            swept[c].append(product)
    return swept


def _check_elements(elements: Sequence[Any]) -> None:
    if not len(elements):
        raise ScanError("no elements were given: expected at least one, the gradient")
