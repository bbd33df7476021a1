"""A recurrent network of Flax: from ``jax.lax.scan`` to ``retrograde.jax.scan``.

``nnx.split`` takes a model apart into what it is and what it holds. The scanned function puts it
together again from arrays that it closes over; these get their gradient.

    pip install '.[jax]' flax
    python examples/recipes/with_flax.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import retrograde.jax as rj


class Network(nnx.Module):
    """An LSTM over a batch of sequences (T, B, 8), and a layer that reads its outputs."""

    def __init__(self, size: int, rngs: nnx.Rngs) -> None:
        self.cell = nnx.OptimizedLSTMCell(8, size, rngs=rngs)
        self.reader = nnx.Linear(size, 1, rngs=rngs)

    def step(self, carry: Any, x: Array) -> tuple[Any, Array]:
        carry, y = self.cell(carry, x)
        return carry, self.reader(y)


def ways(steps: int = 2000) -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]:
    """The gradient of a batch by both scans, and its arguments; ours is within 5 percent."""
    structure, arrays = nnx.split(Network(32, nnx.Rngs(0)))
    xs = jax.random.normal(jax.random.key(0), (steps, 16, 8))
    still = jnp.zeros((16, 32))

    def gradient(scan: Callable[..., Any], arrays: Any, xs: Array) -> Any:
        def loss(arrays: Any) -> Array:
            def step(carry: Any, x: Array) -> tuple[Any, Array]:
                return nnx.merge(structure, arrays).step(carry, x)

            _, ys = scan(step, (still, still), xs)
            return jnp.mean(ys**2)

        return jax.grad(loss)(arrays)

    ours = partial(gradient, partial(rj.scan, memory="5%"))
    return {"jax.lax.scan": partial(gradient, jax.lax.scan), "5%": ours}, (arrays, xs)


if __name__ == "__main__":
    functions, arguments = ways()
    for name, way in functions.items():
        program = jax.jit(way).lower(*arguments).compile()
        print(f"{name}: {program.memory_analysis().temp_size_in_bytes:,} bytes")
