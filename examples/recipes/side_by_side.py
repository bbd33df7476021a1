"""What all comparisons share: two ways timed in turns, and what was found printed. It loads neither
torch nor JAX."""

import statistics
import time
from collections.abc import Callable, Sequence

from retrograde.units import format_bytes


def side_by_side(
    names: Sequence[str],
    runs: Sequence[Callable[[], object]],
    peaks: Sequence[int],
    difference: float,
    rounds: int,
) -> dict[str, float]:
    """Time two ways in turns, print their bytes and times, and return what was found.

    Args:
        names: what the ways are called, the usual one first.
        runs: an iteration of each, to its end.
        peaks: the bytes of each.
        difference: the largest of any gradient, relative to that gradient's largest entry.
        rounds: how often each is timed.
    """
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
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
