"""Functions for ``scan`` of JAX: gated cells with weights in the open, and a wave equation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Scanned", "gated", "wave"]

INPUTS, BATCH = 16, 16


class Scanned(NamedTuple):
    """A scanned function with weights in the open, its first carry, inputs, and their number."""

    name: str
    step: Callable[[Any], Callable[[Any, Any], tuple[Any, Any]]]
    weights: Any
    init: Any
    xs: Any
    length: int


def gated(cell: str, size: int, length: int) -> Scanned:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[cell]
    keys = jax.random.split(jax.random.key(0), 3)
    bound = size**-0.5
    weights = [
        jax.random.uniform(keys[0], (INPUTS, gates * size), minval=-bound, maxval=bound),
        jax.random.uniform(keys[1], (size, gates * size), minval=-bound, maxval=bound),
        jnp.zeros(gates * size),
    ]

    def gru(weights: Any) -> Any:
        w, u, b = weights

        def step(h: Any, x: Any) -> tuple[Any, Any]:
            a, c = x @ w + b, h @ u
            r = jax.nn.sigmoid(a[:, :size] + c[:, :size])
            z = jax.nn.sigmoid(a[:, size : 2 * size] + c[:, size : 2 * size])
            n = jnp.tanh(a[:, 2 * size :] + r * c[:, 2 * size :])
            h = (1 - z) * n + z * h
            return h, h

        return step

    def lstm(weights: Any) -> Any:
        w, u, b = weights

        def step(state: Any, x: Any) -> tuple[Any, Any]:
            h, c = state
            i, f, g, o = jnp.split(x @ w + h @ u + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return step

    h = jnp.zeros((BATCH, size))
    xs = jax.random.normal(keys[2], (length, BATCH, INPUTS))
    step, init = (lstm, (h, h)) if cell == "LSTM" else (gru, h)
    return Scanned(f"{cell} {size}, T = {length:,}", step, weights, init, xs, length)


def wave(size: int, length: int) -> Scanned:
    """The wave equation on a square whose speeds are to be found from what one point receives."""
    source = jnp.sin(jnp.arange(length) / 8.0)

    def step(speed: Any) -> Any:
        def advance(fields: Any, push: Any) -> tuple[Any, Any]:
            now, before = fields
            around = sum(jnp.roll(now, shift, axis) for shift in (-1, 1) for axis in (0, 1))
            after = 2 * now - before + speed**2 * (around - 4 * now)
            after = after.at[size // 4, size // 4].add(push)
            return (after, now), after[-size // 4, -size // 4]

        return advance

    still = jnp.zeros((size, size))
    speed = jnp.full((size, size), 0.5)
    name = f"wave {size} × {size}, T = {length:,}"
    return Scanned(name, step, speed, (still, still), source, length)
