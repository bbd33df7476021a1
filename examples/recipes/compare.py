"""What the recipes share: two ways to the same gradient, side by side.

``rg.measure`` counts the bytes that torch allocates. The figure told is the peak of a whole
iteration: data made on the way, outputs, loss, gradients, and what backpropagation holds.
"""

import statistics
import time
from collections.abc import Callable, Sequence

from torch import Tensor

import retrograde as rg
from retrograde.units import format_bytes

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
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for way, taken in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            taken.append(1e3 * (time.perf_counter() - start))
    usual, ours = map(statistics.median, times)
    for name, peak, ms in zip(names, peaks, (usual, ours), strict=True):
        print(f"{name:24s} {format_bytes(peak):>9s} {ms:8.1f} ms")
    print(f"{1 - peaks[1] / peaks[0]:.0%} of the memory is saved, in {ours / usual:.2f} the time;")
    print(f"gradients differ by {difference:.1e} at most")
    return {
        "before_bytes": peaks[0],
        "after_bytes": peaks[1],
        "before_ms": usual,
        "after_ms": ours,
        "difference": difference,
    }
