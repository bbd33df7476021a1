"""The backward pass of a recurrence as an associative scan (W20), a chunk of steps at a time.

With the cotangent g_k of the carry before step k, J_k the Jacobian of step k in its carry, and d_k
what output k alone brings to g_k, backpropagation is the affine recurrence

    g_k = J_kᵀ g_{k+1} + d_k.

All J_k and d_k of a chunk are found at once from the carries, which the forward pass keeps. An
associative scan over pairs (Jᵀ, d) composes them, and gives every g of the chunk. Then one
vector-Jacobian product of all steps side by side gives the gradients of constants and inputs. A
carry of n numbers costs n² of them a step: this is for small carries. Under ``jax.vmap`` each
sample has Jacobians of its own.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from retrograde.errors import CellError
from retrograde.jax.ranges import Order
from retrograde.jax.step import Step, is_real, merged, no_gradient, type_of

__all__ = ["scan_in_parallel"]

Arrays = list[Any]


def scan_in_parallel(
    step: Step, init: Arrays, xs: Arrays, order: Order, chunk: int | None
) -> tuple[Arrays, Arrays]:
    """The last carry and the outputs, to be differentiated by the scan. Raises CellError for a
    carry that is not of real numbers."""
    if not all(map(is_real, step.carry)) or not step.carry:
        types = ", ".join(str(c.dtype) for c in step.carry) or "nothing"
        raise CellError(
            f"the carry holds {types}: expected real numbers under backward='scan'; use memory="
        )
    length = order.length
    size = min(length, math.isqrt(length) if chunk is None else chunk)

    def plainly(consts: Arrays, init: Arrays, xs: Arrays) -> Any:
        """Outputs, and the carry before every step."""

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
        g_ys = [g for g, y in zip(g_ys, step.y, strict=True) if is_real(y)]
        rows = carries, xs, g_ys
        if order.reverse:
            rows = jax.tree.map(lambda t: t[::-1], rows)
        first = length % size  # the shorter chunk comes first
        parts = jax.tree.map(lambda t: t[first:].reshape(-1, size, *t.shape[1:]), rows)

        def of_chunk(state: Any, part: Any) -> Any:
            g, totals = state
            g, shares, g_x = _chunk(step, consts, g, *part)
            return (g, [a + b for a, b in zip(totals, shares, strict=True)]), g_x

        state = ravel_pytree(g_after)[0], [type_of(c).zeros() for c in consts if is_real(c)]
        state, g_xs = lax.scan(of_chunk, state, parts, reverse=True)
        g_xs = [t.reshape(-1, *t.shape[2:]) for t in g_xs]
        if first:
            state, early = of_chunk(state, jax.tree.map(lambda t: t[:first], rows))
            g_xs = [jnp.concatenate(pair) for pair in zip(early, g_xs, strict=True)]
        if order.reverse:
            g_xs = [t[::-1] for t in g_xs]
        g, totals = state
        return _filled(consts, totals), ravel_pytree(g_after)[1](g), _filled(xs, g_xs)

    run.defvjp(forward, backward)
    found: tuple[Arrays, Arrays] = run(step.consts, init, xs)
    return found


def _chunk(step: Step, consts: Arrays, g: Array, carries: Arrays, xs: Arrays, g_ys: Arrays) -> Any:
    """Backpropagate a chunk of steps, all at once: the cotangent before it, the gradients of real
    constants, and of real inputs."""
    one_carry = [c[0] for c in carries]
    unravel = ravel_pytree(one_carry)[1]
    hs = jax.vmap(lambda carry: ravel_pytree(carry)[0])(carries)

    def run(consts: Arrays, h: Array, x: Arrays) -> Any:
        after, y = step(consts, unravel(h), x)
        return ravel_pytree(after)[0], [out for out in y if is_real(out)]

    def slopes(h: Array, x: Arrays, g_y: Arrays) -> tuple[Array, Array]:
        """What a step does to any cotangent g, which becomes g·P + d."""
        (after, y), pull = jax.vjp(lambda h: run(consts, h, x), h)
        silent = [type_of(out).zeros() for out in y]
        units = type_of(after).varied(jnp.eye(len(h), dtype=h.dtype))
        columns = jax.vmap(lambda e: pull((e, silent))[0])(units)
        return columns, pull((type_of(after).zeros(), g_y))[0]

    def then(later: Any, earlier: Any) -> Any:
        (p, d), (q, e) = later, earlier
        return p @ q, jnp.einsum("...i,...ij->...j", d, q) + e

    products, sums = lax.associative_scan(then, jax.vmap(slopes)(hs, xs, g_ys), reverse=True)
    before = g @ products + sums
    after = jnp.concatenate([before[1:], g[None]])

    def side_by_side(some: Arrays, inputs: Arrays) -> Any:
        whole = merged(consts, [*map(is_real, consts)], some)
        rows = merged(xs, [*map(is_real, xs)], inputs)
        return jax.vmap(run, (None, 0, 0))(whole, hs, rows)

    real = [[v for v in part if is_real(v)] for part in (consts, xs)]
    g_consts, g_xs = jax.vjp(side_by_side, *real)[1]((after, g_ys))
    return before[0], g_consts, g_xs


def _filled(values: Arrays, gradients: Arrays) -> Arrays:
    """The gradients of real values, and what stands for those of others."""
    return merged([*map(no_gradient, values)], [*map(is_real, values)], gradients)
