"""What the recipes for JAX share: two ways to the same gradient, compiled, side by side.

It is for ``retrograde.jax``. The bytes are those that XLA allocates beside operands and results.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from side_by_side import side_by_side

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

    def run(program: Callable[..., Any]) -> None:
        jax.block_until_ready(program(*arguments))

    runs = [partial(run, program) for program in programs]
    return side_by_side((before[0], after[0]), runs, peaks, difference, rounds)
