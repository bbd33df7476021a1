"""What the recipes share: two ways to the same gradient, side by side.

``rg.measure`` counts the bytes that torch allocates. The figure told is the peak of a whole
iteration: data made on the way, outputs, loss, gradients, and what backpropagation holds.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

import retrograde as rg
from side_by_side import side_by_side

Way = Callable[[], Sequence[Tensor]]  # runs an iteration and returns its gradients


def compare(before: tuple[str, Way], after: tuple[str, Way], rounds: int = 5) -> dict[str, float]:
    """Run both ways, print their bytes and times, and return what was found.

    Args:
        before: what the first way is called, and how to run it.
        after: the same for the second way.
        rounds: how often each is timed, in turns, after a first call that is not.

    Returns:
        ``before_bytes``, ``after_bytes``, ``before_ms``, ``after_ms``, and ``difference``: the
        largest of any gradient, relative to that gradient's largest entry.
    """
    names, ways = (before[0], after[0]), (before[1], after[1])
    gradients = [way() for way in ways]
    difference = max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
        for theirs, ours in zip(*gradients, strict=True)
    )
    del gradients
    peaks = [rg.measure(way).peak_bytes for way in ways]
    return side_by_side(names, ways, peaks, difference, rounds)
