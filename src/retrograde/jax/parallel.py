"""The backward pass of a recurrence as an associative scan (W20), a chunk of steps at a time.

Let g_k be the cotangent of the carry before step k. Let J_k be the Jacobian of step k with respect
to its carry. Let d_k be the contribution of output k to g_k. Backpropagation is then the affine
recurrence

    g_k = J_kᵀ g_{k+1} + d_k.

The forward pass keeps the carries. All J_k and d_k of a chunk are computed from them at once. An
associative scan over the pairs (Jᵀ, d) gives every g of the chunk. One vector-Jacobian product of
all steps side by side then gives the gradients of constants and inputs.

A step's Jacobian has n² numbers for a carry of n, so this is for small carries. Under ``jax.vmap``
each sample has its own Jacobians.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from retrograde.errors import CellError
from retrograde.jax.ranges import Order
from retrograde.jax.step import Step, is_real, merged, real_of, some_of, varied, zeros

__all__ = ["scan_in_parallel"]

Arrays = list[Any]


def scan_in_parallel(
    step: Step, init: Arrays, xs: Arrays, order: Order, chunk: int | None
) -> tuple[Arrays, Arrays]:
    """Return the last carry and the outputs, whose backward pass is the associative scan.

    ``chunk`` is the number of steps scanned at once, the square root of the length if None.

    Raises:
        CellError: the carry is empty, or not of real numbers.
    """
    if not all(map(is_real, step.carry)) or not step.carry:
        types = ", ".join(str(c.dtype) for c in step.carry) or "nothing"
        raise CellError(
            f"the carry holds {types}: expected real numbers under backward='scan'; use memory="
        )
    length = order.length
    size = min(length, math.isqrt(length) if chunk is None else chunk)

    def plainly(consts: Arrays, init: Arrays, xs: Arrays) -> Any:
        """Return the last carry, and the outputs with the carry before every step."""

        def one(carry: Arrays, x: Arrays) -> Any:
            after, y = step(consts, carry, x)
            return after, (y, carry)

        return lax.scan(one, init, xs, length, order.reverse, order.unroll)

    @jax.custom_vjp
    def run(consts: Arrays, init: Arrays, xs: Arrays) -> Any:
        after, (ys, _) = plainly(consts, init, xs)
        return after, ys

    def forward(consts: Arrays, init: Arrays, xs: Arrays) -> Any:
        after, (ys, carries) = plainly(consts, init, xs)
        return (after, ys), (consts, carries, xs)

    def backward(kept: Any, cotangents: Any) -> Any:
        consts, carries, xs = kept
        g_after, g_ys = cotangents
        rows = carries, xs, some_of(g_ys, map(is_real, step.y))
        if order.reverse:
            rows = jax.tree.map(lambda t: t[::-1], rows)
        first = length % size  # the first chunk may be shorter
        parts = jax.tree.map(lambda t: t[first:].reshape(-1, size, *t.shape[1:]), rows)

        def of_chunk(state: Any, part: Any) -> Any:
            g, totals = state
            g, shares, g_x = _chunk(step, consts, g, *part)
            return (g, jax.tree.map(jnp.add, totals, shares)), g_x

        g, unravel = ravel_pytree(g_after)
        state, g_xs = lax.scan(
            of_chunk, (g, jax.tree.map(zeros, real_of(consts))), parts, reverse=True
        )
        g_xs = jax.tree.map(lambda t: t.reshape(-1, *t.shape[2:]), g_xs)
        if first:
            state, early = of_chunk(state, jax.tree.map(lambda t: t[:first], rows))
            g_xs = jax.tree.map(lambda *pair: jnp.concatenate(pair), early, g_xs)
        if order.reverse:
            g_xs = jax.tree.map(lambda t: t[::-1], g_xs)
        g, totals = state
        return totals, unravel(g), g_xs

    run.defvjp(forward, backward)
    found: tuple[Arrays, Arrays] = run(step.consts, init, xs)
    return found


def _chunk(step: Step, consts: Arrays, g: Array, carries: Arrays, xs: Arrays, g_ys: Arrays) -> Any:
    """Backpropagate all steps of a chunk at once.

    The results are the cotangent before the chunk, and the gradients of constants and inputs.
    """
    unravel = ravel_pytree([c[0] for c in carries])[1]
    hs = jax.vmap(lambda carry: ravel_pytree(carry)[0])(carries)

    def run(consts: Arrays, h: Array, x: Arrays) -> Any:
        after, y = step(consts, unravel(h), x)
        return ravel_pytree(after)[0], real_of(y)

    def slopes(h: Array, x: Arrays, g_y: Arrays) -> tuple[Array, Array]:
        """Return P and d of a step, which turns a cotangent g into g·P + d."""
        (after, y), pull = jax.vjp(lambda h: run(consts, h, x), h)
        units = varied(jnp.eye(len(h), dtype=h.dtype), after)
        columns = jax.vmap(lambda e: pull((e, jax.tree.map(zeros, y)))[0])(units)
        return columns, pull((zeros(after), g_y))[0]

    def then(later: Any, earlier: Any) -> Any:
        (p, d), (q, e) = later, earlier
        return p @ q, jnp.einsum("...i,...ij->...j", d, q) + e

    products, sums = lax.associative_scan(then, jax.vmap(slopes)(hs, xs, g_ys), reverse=True)
    before = g @ products + sums
    after = jnp.concatenate([before[1:], g[None]])

    def side_by_side(some: Arrays, inputs: Arrays) -> Any:
        return jax.vmap(run, (None, 0, 0))(merged(consts, some), hs, merged(xs, inputs))

    g_consts, g_xs = jax.vjp(side_by_side, real_of(consts), real_of(xs))[1]((after, g_ys))
    return before[0], g_consts, g_xs
