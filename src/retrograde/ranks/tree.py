"""W20's scan across ranks: the gradient that reaches each rank, in ⌈log₂ p⌉ rounds up and down.

A rank's steps take the gradient g of the state after them to g P + d before them. P is the product
of their transposed Jacobians, and d comes from their own losses. One tensor *rows* (B, n + 1, n)
holds P, and d as the last row. A gradient is (B, 1, n), the last row alone. Two ranges in sequence
are one range (:func:`joined`), and this product is associative.

In the order of the scan the last rank is first: its element is a gradient. In round d the ranks
are in blocks of 2ᵈ⁺¹; the last block may be shorter. The last rank of a block's first half sends
its product to the last rank of the block (:func:`retrograde.scan.blelloch.pairs`). On the way down
that rank knows the gradient that reaches the block. It sends this to the first half's last rank,
and takes it through the product that it got. Each rank sends one matrix at most, and only on the
way up.

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020, algorithm 1,
here for any number of ranks.
"""

from torch import Tensor

from retrograde.ranks.peers import Peers
from retrograde.scan.blelloch import pairs


def joined(later: Tensor, earlier: Tensor) -> Tensor:
    """Return two ranges as one, of the shape of ``later``: (B, n + 1, n), or a gradient (B, 1, n),
    which goes through the later steps, then through the ``earlier`` ones (B, n + 1, n)."""
    product = later @ earlier[:, :-1]
    product[:, -1] += earlier[:, -1]
    return product


def scan(steps: Tensor, peers: Peers) -> Tensor | None:
    """Return the gradient that reaches this rank (B, 1, n); every rank has to call it.

    Args:
        steps: those of this rank (B, n + 1, n); on the last rank, the gradient of the state before
            its steps (B, 1, n). The first rank's are not multiplied, only their shape is read.
        peers: the other ranks; RankError where one does not answer.

    Returns:
        The gradient; None on the last rank, where the caller gives it.
    """
    end, index = peers.size - 1, peers.size - 1 - peers.rank
    levels = end.bit_length()  # ⌈log₂ p⌉
    matrix = steps.new_empty(len(steps), steps.shape[-1] + 1, steps.shape[-1])
    firsts: dict[int, Tensor] = {}  # the product of a block's first half, by round
    for d in range(levels):
        for half, last in pairs(end, d):
            if index == half:
                peers.send(steps, end - last)
            elif index == last:
                like = matrix if half >= 2**d else matrix[:, :1]
                firsts[d] = peers.receive(like, end - half)
                if last < end:  # else no rank reads it
                    steps = joined(firsts[d], steps)
    reached: Tensor | None = None
    for d in reversed(range(levels)):
        for half, last in pairs(end, d):
            if index == last:
                product = firsts.pop(d)
                if reached is None:  # the block begins with the last rank
                    reached = product
                else:
                    peers.send(reached, end - half)
                    reached = joined(reached, product)
            elif index == half and half >= 2**d:
                reached = peers.receive(matrix[:, :1], end - last)
    peers.flush()
    return reached
