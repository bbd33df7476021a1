"""A recurrent network of Equinox: from ``jax.lax.scan`` to ``retrograde.jax.scan``.

The model is a pytree, so its arrays are operands of the scan like any that it closes over. One name
and one argument change. ``jax.vmap`` takes the model over a batch, as everywhere in Equinox: each
sample's states are counted, so the budget here is of one sample.

    pip install '.[jax]' equinox
    python examples/recipes/with_equinox.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

import retrograde.jax as rj


class Network(eqx.Module):
    """A GRU over a sequence (T, 8), and a layer that reads its last state."""

    cell: eqx.nn.GRUCell
    reader: eqx.nn.Linear

    def __init__(self, size: int, key: Array) -> None:
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, size, key=first)
        self.reader = eqx.nn.Linear(size, 1, key=second)

    def __call__(self, xs: Array, scan: Callable[..., Any]) -> Array:
        h, _ = scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(self.cell.hidden_size), xs)
        return self.reader(h)


def ways(steps: int = 2000) -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]:
    """The gradient of a batch by both scans, and its arguments; ours is within 5 percent."""
    model_key, data_key = jax.random.split(jax.random.key(0))
    model, xs = Network(32, model_key), jax.random.normal(data_key, (16, steps, 8))
    arrays, rest = eqx.partition(model, eqx.is_array)

    def gradient(scan: Callable[..., Any], arrays: Network, xs: Array) -> Network:
        def loss(arrays: Network) -> Array:
            network = eqx.combine(arrays, rest)
            return jnp.mean(jax.vmap(lambda x: network(x, scan))(xs) ** 2)

        return jax.grad(loss)(arrays)

    ours = partial(gradient, partial(rj.scan, memory="5%"))
    return {"jax.lax.scan": partial(gradient, jax.lax.scan), "5%": ours}, (arrays, xs)


if __name__ == "__main__":
    functions, arguments = ways()
    for name, way in functions.items():
        program = jax.jit(way).lower(*arguments).compile()
        print(f"{name}: {program.memory_analysis().temp_size_in_bytes:,} bytes")
