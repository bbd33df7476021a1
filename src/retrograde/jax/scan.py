"""``scan``: ``jax.lax.scan`` whose gradient keeps to a memory budget."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from retrograde.errors import CellError
from retrograde.jax.budget import Asked, find_table, fit_scan
from retrograde.jax.parallel import scan_in_parallel
from retrograde.jax.ranges import Order, sweep_backward, sweep_forward
from retrograde.jax.step import (
    Recorded,
    Step,
    Type,
    is_real,
    merged,
    no_gradient,
    some_of,
    trace_step,
)
from retrograde.jax.table import Table
from retrograde.plan.fit import Fit
from retrograde.schedule import Schedule
from retrograde.units import Memory

__all__ = ["fit", "scan"]

Carry = TypeVar("Carry")
Arrays = list[Any]


def scan(
    f: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    *,
    memory: Memory | None = None,
    schedule: Schedule | None = None,
    backward: Literal["scan"] | None = None,
    chunk: int | None = None,
) -> tuple[Carry, Any]:
    """``jax.lax.scan`` with an exact gradient that takes no more than ``memory``.

    Outputs and gradients are those of ``jax.lax.scan``. Steps are run again in the backward pass,
    by the schedule that costs least within the budget (G16). The compiled program is as large as a
    few steps, whatever the length. Without a gradient it is ``jax.lax.scan`` itself.

    Args:
        f: ``f(carry, x) -> (carry, y)``; what it closes over gets its gradient too.
        init: the first carry, any pytree of arrays, whose structure and types every step keeps.
        xs: inputs, a pytree of arrays with time as their first dimension (T, …); or None.
        length: the number of steps; needed where ``xs`` is None.
        reverse: whether to begin with the last input.
        unroll: how many steps a compiled loop runs at once.
        memory: the budget of the backward pass, beside constants, inputs, outputs and gradients:
            bytes (``67108864``), a size (``"64MiB"``), or a fraction of what ``jax.lax.scan`` holds
            of the steps (``0.05``, ``"5%"``). None: as ``jax.lax.scan``.
        schedule: the schedule to follow, in place of a budget.
        backward: ``"scan"``: by an associative scan over the Jacobians of the carry (W20), for
            carries of few numbers; all carries are held. ``chunk`` steps are scanned at once.
        chunk: as above; the square root of the length by default.

    Returns:
        The last carry, and the outputs stacked along a new first dimension (T, …).

    Raises:
        BudgetError: at tracing, the budget is too small; the message names the least.
        CellError: the function has effects, or changes the structure or a type of its carry.
        ScheduleError: the schedule is for another length, or is not legal.
        UnitError: the memory cannot be read.

    Forward-mode derivatives go through ``memory=None`` only, for this is a ``jax.custom_vjp``.
    Second derivatives hold what ``jax.lax.scan`` holds, and say so in a warning.

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
    asked, count = Asked(memory, schedule), _length(xs, length)
    asked.check(count)
    if backward not in (None, "scan"):
        raise CellError(f"unknown backward={backward!r}: expected 'scan', or None for one by one")
    if backward is not None and asked != Asked():
        raise CellError(
            "got backward='scan' together with memory= or schedule=: expected one of them, since "
            "the scan over Jacobians holds all carries; leave the other out"
        )
    if chunk is not None and (backward is None or chunk < 1):
        raise CellError(
            f"got chunk={chunk} with backward={backward!r}: expected a chunk of at least one step, "
            "and backward='scan' with it"
        )
    if unroll < 0:
        raise CellError(f"got unroll={unroll}: expected how many steps a loop runs at once")
    if backward is None and asked == Asked():
        return lax.scan(f, init, xs, length, reverse, unroll)
    leaves, tree = jax.tree.flatten(xs)
    leaves = [jnp.asarray(x) for x in leaves]
    one = [x[0] for x in leaves]
    step, carry, y_tree = trace_step(f, init, jax.tree.unflatten(tree, one))
    order = Order(count, reverse, unroll)
    if backward is not None:
        after, ys = scan_in_parallel(step, carry, leaves, order, chunk)
    else:
        after, ys = _Scan(step, order, asked)(step.consts, carry, leaves)
    return jax.tree.unflatten(jax.tree.structure(init), after), jax.tree.unflatten(y_tree, ys)


def fit(f: Callable[..., Any], init: Any, xs: Any = None, length: int | None = None, *,
        memory: Memory) -> Fit:  # fmt: skip
    """What a budget buys for a scan whose constants and inputs all want a gradient: its peak, the
    least budget, forward steps. Nothing is run; arguments, and errors, are those of :func:`scan`.

    Example:
        >>> found = fit(lambda h, x: (jnp.tanh(h + x), None), jnp.zeros(64), jnp.ones((100, 64)),
        ...             memory="20%")
        >>> found.peak_bytes <= found.budget_bytes, 100 < found.forward_steps < 300
        (True, True)
    """
    count = _length(xs, length)
    Asked(memory).check(count)
    found: list[Fit] = []

    def ask(init: Any, xs: Any) -> None:
        one = jax.tree.map(lambda x: x[0], xs)
        step, carry, _ = trace_step(f, init, one)
        wanted = [is_real(c) for c in step.consts], [is_real(x) for x in step.x]
        operands = step.consts, carry, jax.tree.leaves(one)
        found.append(fit_scan(Recorded.of(step, operands, *wanted), count, memory)[0])

    jax.eval_shape(ask, init, xs)
    return found[0]


@dataclass(frozen=True)
class _Way:
    """How a scan is differentiated: found when it is known what wants a gradient."""

    recorded: Recorded
    table: Table


jax.tree_util.register_static(_Way)


@dataclass(frozen=True)
class _Scan:
    """A scan over a traced step, whose derivative follows a schedule."""

    step: Step
    order: Order
    asked: Asked

    def __call__(self, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        run = jax.custom_vjp(self.plainly)
        run.defvjp(self._forward, self._backward, symbolic_zeros=True)
        return run(consts, init, xs)

    def plainly(self, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """As ``jax.lax.scan`` runs it."""
        order = self.order
        return lax.scan(
            lambda carry, x: self.step(consts, carry, x),
            init, xs, order.length, order.reverse, order.unroll,
        )  # fmt: skip

    def _forward(self, consts: Any, init: Any, xs: Any) -> Any:
        wanted_consts, wanted_xs = ([bool(p.perturbed) for p in part] for part in (consts, xs))
        consts, init, xs = ([p.value for p in part] for part in (consts, init, xs))
        operands = consts, init, [x[0] for x in xs]
        recorded = Recorded.of(self.step, operands, wanted_consts, wanted_xs)
        table = find_table(recorded, self.order.length, self.asked)
        if table is None:
            found, pullback = jax.vjp(self.plainly, consts, init, xs)
            return found, pullback
        way = _Way(recorded, table)
        rows = jnp.asarray(way.table.rows)
        after, ys, held = self._sweep(way)(rows, consts, init, xs)
        return (after, ys), (way, rows, consts, init, xs, held)

    def _backward(self, kept: Any, cotangents: Any) -> Any:
        after, ys = cotangents
        after = [*map(_made, after, self.step.carry)]
        if not isinstance(kept, tuple):
            count = self.order.length
            pairs = zip(ys, self.step.y, strict=True)
            return kept((after, [_made(g, y, count) for g, y in pairs]))
        way, rows, consts, init, xs, held = kept
        real = [g for g in after if is_real(g)]
        outputs = [
            None if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
            for g, y in zip(ys, self.step.y, strict=True)
            if is_real(y)
        ]
        back = self._sweep_back(way)(rows, consts, init, xs, held, real, outputs)
        g_consts, g_init, g_xs = map(iter, back)
        wanted_consts, wanted_xs = way.recorded.wanted
        return (
            [
                next(g_consts) if w else no_gradient(c)
                for c, w in zip(consts, wanted_consts, strict=True)
            ],
            [next(g_init) if is_real(c) else no_gradient(c) for c in init],
            [next(g_xs) if w else no_gradient(x) for x, w in zip(xs, wanted_xs, strict=True)],
        )

    def _sweep(self, way: _Way) -> Callable[..., Any]:
        """The forward sweep, which is itself differentiated as ``jax.lax.scan`` is."""

        @jax.custom_jvp
        def sweep(rows: Array, consts: Arrays, init: Arrays, xs: Arrays) -> Any:
            return sweep_forward(way.recorded, way.table, rows, self.order, consts, init, xs)

        @sweep.defjvp
        def derivative(primals: Any, tangents: Any) -> Any:
            operands = primals[1:]
            found = sweep(*primals)
            _, (after, ys) = jax.jvp(self.plainly, tuple(operands), tuple(tangents[1:]))
            return found, (after, ys, jax.tree.map(no_gradient, found[2]))

        return sweep

    def _sweep_back(self, way: _Way) -> Callable[..., Any]:
        """The backward sweep, which is differentiated as the gradient of ``jax.lax.scan`` is."""
        recorded = way.recorded

        @jax.custom_jvp
        def sweep(rows: Array, consts: Arrays, init: Arrays, xs: Arrays, held: Any, after: Arrays,
                  ys: Sequence[Array | None]) -> Any:  # fmt: skip
            order, table = self.order, way.table
            return sweep_backward(recorded, table, rows, order, consts, xs, held, after, ys)

        @sweep.defjvp
        def derivative(primals: Any, tangents: Any) -> Any:
            warnings.warn(_BEYOND, stacklevel=2)
            _, *operands, _, after, ys = primals
            _, *moved, _, g_after, g_ys = tangents

            def gradient(operands: Any, after: Arrays, ys: Any) -> Any:
                return self._gradient(recorded, operands, after, ys)

            _, found = jax.jvp(gradient, (operands, after, ys), (moved, g_after, g_ys))
            return sweep(*primals), found

        return sweep

    def _gradient(
        self, recorded: Recorded, operands: Sequence[Arrays], after: Arrays, ys: Sequence[Any]
    ) -> Any:
        """The same gradient, by ``jax.lax.scan``."""
        masks = recorded.wanted[0], recorded.real, recorded.wanted[1]
        parts = [*zip(operands, masks, strict=True)]

        def of(*chosen: Arrays) -> Any:
            whole = [merged(*part, some) for part, some in zip(parts, chosen, strict=True)]
            last, out = self.plainly(*whole)
            seen = zip(some_of(out, [is_real(y) for y in out]), ys, strict=True)
            return some_of(last, recorded.real), [y for y, g in seen if g is not None]

        pull = jax.vjp(of, *(some_of(*part) for part in parts))[1]
        return pull((after, [g for g in ys if g is not None]))


_BEYOND = (
    "a second derivative goes through a scan with a budget: all steps are held for it, as "
    "jax.lax.scan holds them; the budget does not cover these"
)


def _length(xs: Any, length: int | None) -> int:
    """The number of steps; CellError if it is not told, told twice, or none."""
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
    if count < 1:
        raise CellError(f"the scan has {count} steps: expected at least one")
    return count


def _made(g: Any, like: Type, count: int | None = None) -> Any:
    """A cotangent, also where it is zero."""
    if not isinstance(g, jax.custom_derivatives.SymbolicZero):
        return g
    if is_real(like):
        return like.zeros(count)
    return np.zeros(g.shape, jax.dtypes.float0)
