"""What the recipes for JAX share: two ways to the same gradient, compiled, side by side.

It is for ``retrograde.jax``. The bytes are those that XLA allocates beside operands and results.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from retrograde.units import format_bytes

Way = tuple[str, Callable[..., Any]]


def compare(before: Way, after: Way, arguments: tuple[Any, ...], rounds: int) -> dict[str, float]:
    """Compile both ways, run them in turns, print bytes and times, and return what was found.

    Args:
        before: what the first way is called, and a function from the arguments to gradients.
        after: the same for the second way.
        arguments: what both are given.
        rounds: how often each is timed.
    """
    programs = [jax.jit(way).lower(*arguments).compile() for _, way in (before, after)]
    peaks = [program.memory_analysis().temp_size_in_bytes for program in programs]
    theirs, ours = (jax.tree.leaves(program(*arguments)) for program in programs)
    pairs = zip(ours, theirs, strict=True)
    difference = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for program, taken in zip(programs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            taken.append(1e3 * (time.perf_counter() - start))
    usual, mine = map(statistics.median, times)
    for (name, _), peak, ms in zip((before, after), peaks, (usual, mine), strict=True):
        print(f"{name:24s} {format_bytes(peak):>9s} {ms:8.1f} ms")
    print(f"{1 - peaks[1] / peaks[0]:.0%} of the memory is saved, in {mine / usual:.2f} the time;")
    print(f"gradients differ by {difference:.1e} at most")
    return {
        "before_bytes": peaks[0],
        "after_bytes": peaks[1],
        "before_ms": usual,
        "after_ms": mine,
        "difference": difference,
    }
