"""``scan``: ``jax.lax.scan`` whose backward pass stays within a memory budget; ``while_loop``."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import Partial

from retrograde.errors import CellError
from retrograde.jax.budget import Asked, fit_scan
from retrograde.jax.ranges import Order, Sweeps
from retrograde.jax.step import (
    Arrays,
    Recorded,
    Step,
    filled,
    is_real,
    real_of,
    some_of,
    trace_step,
    zeros,
)
from retrograde.plan.fit import Fit
from retrograde.schedule import Schedule
from retrograde.units import Memory

Carry = TypeVar("Carry")


def scan(
    f: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    xs: object = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    _split_transpose: bool = False,
    *,
    memory: Memory | None = None,
    schedule: Schedule | None = None,
) -> tuple[Carry, Any]:
    """Scan as ``jax.lax.scan`` does, with an exact gradient that takes no more than ``memory``.

    Outputs and gradients are those of ``jax.lax.scan``. The backward pass recomputes steps by the
    cheapest schedule within the budget (G16). The size of the compiled program is that of a few
    steps, whatever the length. Without a gradient, ``jax.lax.scan`` itself runs.

    Args:
        f: ``f(carry, x) -> (carry, y)``; values that it closes over get their gradients too.
        init: the first carry, any pytree of arrays, whose structure and types every step keeps.
        xs: inputs, a pytree of arrays with time as their first dimension (T, …); or None.
        length: the number of steps; needed where ``xs`` is None.
        reverse: whether to begin with the last input.
        unroll: how many steps a compiled loop runs at once.
        _split_transpose: has no effect, as in ``jax.lax.scan`` since JAX 0.10.
        memory: the budget of the backward pass, besides constants, inputs, outputs and gradients.
            It is bytes (``67108864``), a size (``"64MiB"``), or a fraction (``0.05``, ``"5%"``) of
            the bytes that ``jax.lax.scan`` holds of the steps. None: as ``jax.lax.scan``.
        schedule: the schedule to follow, instead of a budget.

    Returns:
        The last carry, and the outputs stacked along a new first dimension (T, …).

    Raises:
        BudgetError: the budget is too small, which is found at tracing. The message names the
            least.
        CellError: the function has effects, or changes the structure or a type of its carry.
        ScheduleError: the schedule is for another length, or is not legal.
        UnitError: the memory cannot be read.

    With a budget or a schedule, forward-mode derivatives raise an error, since this
    is a ``jax.custom_vjp``. Second derivatives with a budget hold as much as ``jax.lax.scan`` does,
    and warn about it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(scan, w, **asked):
        ...     xs = jnp.ones((100, 64))
        ...     last, ys = scan(lambda h, x: (jnp.tanh(w * h + x),) * 2, xs[0], xs, **asked)
        ...     return ys.sum()
        >>> theirs = jax.grad(lambda w: loss(jax.lax.scan, w))(0.5)
        >>> bool(jax.grad(lambda w: loss(scan, w, memory="25%"))(0.5) == theirs)
        True
    """
    asked, count = Asked(memory, schedule), _length(xs, length, least=0)
    asked.check(count)
    if unroll < 0:
        raise CellError(f"got unroll={unroll}: expected how many steps a loop runs at once")
    if not count or asked == Asked():
        return lax.scan(f, init, xs, length, reverse, unroll)
    xs = jax.tree.map(jnp.asarray, xs)
    step, carry, y_tree = trace_step(f, init, jax.tree.map(lambda x: x[0], xs))
    leaves, order = jax.tree.leaves(xs), Order(count, reverse, unroll)
    after, ys = _Scan(step, order, asked)(step.consts, carry, leaves)
    return jax.tree.unflatten(jax.tree.structure(init), after), jax.tree.unflatten(y_tree, ys)


def fit(f: Callable[..., Any], init: object, xs: object = None, length: int | None = None, *,
        memory: Memory) -> Fit:  # fmt: skip
    """Return the fit for a scan and a budget: its peak memory, the least budget, forward steps.

    All constants and inputs count as having gradients. Nothing is run. Arguments and errors are
    those of :func:`scan`.

    Example:
        >>> found = fit(lambda h, x: (jnp.tanh(h + x), None), jnp.zeros(64), jnp.ones((100, 64)),
        ...             memory="20%")
        >>> found.peak_bytes <= found.budget_bytes, 100 < found.forward_steps < 300
        (True, True)
    """
    count = _length(xs, length, least=1)
    Asked(memory).check(count)
    fits: list[Fit] = []

    def ask(init: object, xs: object) -> None:
        first_input = jax.tree.map(lambda x: x[0], xs)
        step, carry, _ = trace_step(f, init, first_input)
        operands = step.consts, carry, jax.tree.leaves(first_input)
        wanted = ([*map(is_real, operands[i])] for i in (0, 2))
        fits.append(fit_scan(Recorded.of(step, operands, *wanted), count, memory)[0])

    jax.eval_shape(ask, init, xs)
    return fits[0]


def while_loop(
    cond_fun: Callable[[Carry], Any], body_fun: Callable[[Carry], Carry], init_val: Carry, *,
    max_steps: int, memory: Memory | None = None,
) -> Carry:  # fmt: skip
    """Loop as ``jax.lax.while_loop`` does, with an exact gradient within ``memory``.

    This is a :func:`scan` of ``max_steps`` steps. Those after the end of the loop only hand the
    value on. Under ``jax.vmap`` they run, as in ``jax.lax.while_loop``.

    Args:
        cond_fun, body_fun, init_val: as for ``jax.lax.while_loop``.
        max_steps: the most steps. If the condition still holds after them, all real results and
            gradients are NaN, since no error can be raised there.
        memory: the budget of the backward pass for ``max_steps`` steps, as for ``scan``.

    Returns:
        The first value of which the condition does not hold.

    Raises:
        BudgetError, CellError, UnitError: as in ``scan``.

    Example:
        >>> def root(a):  # by Newton's method, as many steps as it takes
        ...     is_far = lambda x: jnp.abs(x * x - a).max() > 1e-4
        ...     return while_loop(is_far, lambda x: (x + a / x) / 2, a, max_steps=50, memory="50%")
        >>> bool(jnp.allclose(jax.grad(lambda a: root(a).sum())(jnp.full(64, 9.0)), 1 / 6))
        True
    """

    def step(value: Carry, _: None) -> tuple[Carry, None]:
        return lax.cond(cond_fun(value), body_fun, lambda value: value, value), None

    init_val = jax.tree.map(jnp.asarray, init_val)
    last, _ = scan(step, init_val, None, max_steps, memory=memory)
    factor = jnp.where(cond_fun(last), jnp.nan, 1.0)  # by which gradients are multiplied too
    ended: Carry = jax.tree.map(lambda v: v * factor if is_real(v) else v, last)
    return ended


@dataclass(frozen=True)
class _Scan:
    """A scan over a traced step, whose backward pass follows a schedule."""

    step: Step
    order: Order
    asked: Asked

    def __call__(self, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        run = jax.custom_vjp(self.plainly)
        run.defvjp(self._forward, self._backward, symbolic_zeros=True)
        return run(consts, init, xs)

    def plainly(self, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """Run the scan by ``jax.lax.scan``."""
        order = self.order
        return lax.scan(
            lambda carry, x: self.step(consts, carry, x),
            init, xs, order.length, order.reverse, order.unroll,
        )  # fmt: skip

    def _vjp(self, *operands: Arrays) -> Any:
        """Return the results and a function from cotangents to gradients, by ``jax.lax.scan``."""

        def run(*operands: Arrays) -> Any:
            after, ys = self.plainly(*operands)
            return (real_of(after), real_of(ys)), (after, ys)

        def back(pull: Any, after: Arrays, g_ys: Arrays) -> Any:
            return pull((after, filled(g_ys, self.step.y, self.order.length)))

        _, pull, (after, ys) = jax.vjp(run, *operands, has_aux=True)
        return (after, ys), Partial(back, pull)

    def _forward(self, *primals: Any) -> Any:
        """Return the results, and a function from cotangents to gradients, by the schedule."""
        wanted = [[p.perturbed and is_real(p.value) for p in part] for part in primals]
        consts, init, xs = operands = [[p.value for p in part] for part in primals]
        one_step = consts, init, [x[0] for x in xs]
        recorded = Recorded.of(self.step, one_step, wanted[0], wanted[2])
        table = self.asked.table(recorded, self.order.length)
        if table is None:
            return self._vjp(*operands)
        sweeps = Sweeps(recorded, table, self.order)

        def plain_back(consts: Arrays, xs: Arrays, _: Any, init: Arrays, *cotangents: Any) -> Any:
            warnings.warn(_BEYOND, stacklevel=2)
            gradients = self._vjp(consts, init, xs)[1](*cotangents)
            return tuple(map(some_of, gradients, (wanted[0], map(is_real, init), wanted[2])))

        def back(consts: Arrays, xs: Arrays, holding: Any, init: Arrays, *cotangents: Any) -> Any:
            return sweeps.backward(consts, xs, holding, *cotangents)

        after, ys, holding = _differentiated_as(self.plainly, sweeps.forward)(*operands)
        pull = _differentiated_as(plain_back, back)
        if self.step.meets:  # traced here, since ``vmap`` names its axis only within the call
            g_ys = filled([None] * len(ys), self.step.y, self.order.length)
            arguments = consts, xs, holding, init, real_of(self.step.carry), g_ys
            closed, like = jax.make_jaxpr(pull, return_shape=True)(*arguments)
            tree = jax.tree.structure(like)

            def pull(*inputs: Any) -> Any:
                leaves = jaxpr_as_fun(closed)(*jax.tree.leaves(inputs))
                return jax.tree.unflatten(tree, leaves)

        return (after, ys), Partial(pull, consts, xs, holding, init)

    def _backward(self, back: Any, cotangents: Any) -> Any:
        """Return the gradients. Symbolic zeros, and cotangents of integers, become None first."""
        after, g_ys = (
            [
                g if is_real(t) and not isinstance(g, jax.custom_derivatives.SymbolicZero) else None
                for g, t in zip(part, types, strict=True)
            ]
            for part, types in zip(cotangents, (self.step.carry, self.step.y), strict=True)
        )
        if self.step.meets:
            g_ys = filled(g_ys, self.step.y, self.order.length)
        return back(filled(after, self.step.carry), g_ys)


def _differentiated_as(plain: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` with the derivative of ``plain``. The results of ``plain`` are the first
    results of ``run``; derivatives of the others are zero."""

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return run(*operands)

    def still(v: Any) -> Any:
        return zeros(v) if is_real(v) else np.zeros(v.shape, jax.dtypes.float0)

    @call.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        outputs, moved = call(*primals), jax.jvp(plain, primals, tangents)[1]
        return outputs, (*moved, *jax.tree.map(still, outputs[len(moved) :]))

    return call


_BEYOND = (
    "a second derivative goes through a scan with a budget: all steps are held for it, as "
    "jax.lax.scan holds them; the budget does not cover these"
)


def _length(xs: object, length: int | None, least: int) -> int:
    """Return the number of steps; raises CellError if it is missing, contradictory or too small."""
    lengths = {int(x.shape[0]) if getattr(x, "ndim", 0) else -1 for x in jax.tree.leaves(xs)}
    if length is not None:
        lengths.add(int(length))
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(str(getattr(x, "shape", ())) for x in jax.tree.leaves(xs)) or "none"
        raise CellError(
            f"the inputs have the shapes {shapes} and length={length}: expected one number of "
            "steps, the first dimension of each input, or length= where there is none"
        )
    (count,) = lengths
    if count < least:
        raise CellError(f"the scan has {count} steps: expected at least {least}")
    return count
