"""The ways that a recipe offers to the same gradients: their bytes, their times, their difference.

The first way is the usual one, the last one ours. ``rg.measure`` counts the bytes that torch
allocates: the peak of a whole iteration, with data made on the way, outputs, loss and gradients.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

import retrograde as rg
from retrograde.units import format_bytes

__all__ = ["compare", "compare_programs"]


def compare(ways: Mapping[str, Callable[[], Sequence[Tensor]]], rounds: int) -> dict[str, float]:
    """Run all ways, print their bytes and times, and return those of the first and the last.

    Returns:
        ``before_bytes``, ``after_bytes``, ``before_ms``, ``after_ms``, and ``difference``: the
        largest of any gradient, relative to that gradient's largest entry.
    """
    theirs, *_, ours = [way() for way in ways.values()]
    difference = max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )
    del theirs, ours
    peaks = {name: rg.measure(way).peak_bytes for name, way in ways.items()}
    return _timed(ways, peaks, difference, rounds)


def compare_programs(
    ways: Mapping[str, Callable[..., Any]], arguments: tuple[Any, ...], rounds: int
) -> dict[str, float]:
    """The same for functions of JAX. The bytes are XLA's, beside operands and results."""
    import jax
    import jax.numpy as jnp

    programs = {name: jax.jit(way).lower(*arguments).compile() for name, way in ways.items()}
    peaks = {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()}
    theirs, *_, ours = (jax.tree.leaves(program(*arguments)) for program in programs.values())
    pairs = zip(ours, theirs, strict=True)
    difference = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)

    def run(program: Callable[..., Any]) -> None:
        jax.block_until_ready(program(*arguments))

    runs = {name: partial(run, program) for name, program in programs.items()}
    return _timed(runs, peaks, difference, rounds)


def _timed(
    runs: Mapping[str, Callable[[], object]], peaks: Mapping[str, int], difference: float,
    rounds: int,
) -> dict[str, float]:  # fmt: skip
    """Time all in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    taken = {name: statistics.median(each) for name, each in times.items()}
    for name, ms in taken.items():
        print(f"{name:28s} {format_bytes(peaks[name]):>9s} {ms:8.1f} ms")
    (usual, *_, ours), (before, *_, after) = taken.values(), peaks.values()
    print(f"{1 - after / before:.0%} of the memory is saved, in {ours / usual:.2f} the time;")
    print(f"gradients differ by {difference:.1e} at most")
    return {
        "before_bytes": before, "after_bytes": after, "before_ms": usual, "after_ms": ours,
        "difference": difference,
    }  # fmt: skip
