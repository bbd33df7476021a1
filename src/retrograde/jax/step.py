"""One step of a scan as a program of all its operands, and its recorded form.

The function is traced once. Values that it closes over become operands, tracers of an outer
transformation included, so gradients reach them. The recorded form also returns the internal
state: the residuals of the step's vector-Jacobian product. It does not store weights and inputs
among these. Residuals that depend on constants alone are computed once for all steps.

Lists of gradients have None for values that have no gradient.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal, Var, jaxpr_as_fun, jaxprs_in_params

from retrograde.errors import CellError

Arrays = list[Any]


def zeros(like: Any, count: int | None = None) -> Array:
    """Return zeros of the type of an array or of a type, or ``count`` of them stacked."""
    array_type = jax.typeof(like) if isinstance(like, Array) else like
    stacked, spec = () if count is None else (count,), array_type.sharding.spec
    placed = array_type.sharding.update(spec=(*[None] * len(stacked), *spec))
    sharding = placed if any(spec) else None  # of a mesh with explicit axes
    array = jnp.zeros((*stacked, *array_type.shape), array_type.dtype, out_sharding=sharding)
    axes = tuple(sorted(array_type.manual_axis_type.varying))  # of a mesh, inside ``shard_map``
    return lax.pcast(array, axes, to="varying") if axes else array


def is_real(x: Any) -> bool:
    """Return whether values of this type have gradients."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of arrays, or of arrays of these types."""
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in values)  # keys have a size too


def some_of(values: Sequence[Any], mask: Iterable[bool]) -> Arrays:
    """Return the values where the mask is true, and None elsewhere."""
    return [v if chosen else None for v, chosen in zip(values, mask, strict=True)]


def real_of(values: Sequence[Any]) -> Arrays:
    """Return the values whose type has gradients, and None for others."""
    return some_of(values, map(is_real, values))


def filled(gradients: Sequence[Any], types: Sequence[Any], count: int | None = None) -> Arrays:
    """Return the gradients, with zeros for the real values that lack one."""
    return [
        zeros(t, count) if g is None and is_real(t) else g
        for g, t in zip(gradients, types, strict=True)
    ]


@dataclass(frozen=True)
class Step:
    """``program(*consts, *carry, *x) -> (*carry, *y)``, with constants and result types."""

    program: Callable[..., Arrays]
    consts: Arrays
    carry: Sequence[Any]
    y: Sequence[Any]
    meets: bool  # whether it has collectives

    def __call__(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        arrays = self.program(*consts, *carry, *x)
        return list(arrays[: len(self.carry)]), list(arrays[len(self.carry) :])


def trace_step(f: Callable[..., Any], init: object, x: object) -> tuple[Step, Arrays, Any]:
    """Return a scanned function as a step, the leaves of the first carry, and the structure of one
    step's output. Of ``x``, one input, only the types are used. Raises CellError."""
    carry, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, init))
    closed, result = jax.make_jaxpr(f, return_shape=True)(jax.tree.unflatten(tree, carry), x)
    if not isinstance(result, tuple) or len(result) != 2:
        raise CellError(
            f"the scanned function returned a {type(result).__name__}: expected the pair "
            "(carry, y); return None for y if there is none"
        )
    # A collective names an axis, which is an effect only to JAX's own checks.
    effects = [e for e in closed.effects if type(e).__name__ != "NamedAxisEffect"]
    if effects:
        raise CellError(
            f"the scanned function has effects ({', '.join(map(str, effects))}): expected none, "
            "since steps are run again in the backward pass; take them out of the function"
        )
    trees: list[Any] = [*map(jax.tree.structure, result)]
    after_tree, y_tree = trees
    if after_tree != tree:
        raise CellError(
            f"the carry changed its structure: expected {tree}, got {after_tree}; return a "
            "carry like the one that was given"
        )
    after, y = closed.out_avals[: len(carry)], closed.out_avals[len(carry) :]
    pairs = [*zip(carry, after, strict=True)]
    # A carry that begins as a Python number gets the type that a step returns for it.
    if any(leaf.aval.weak_type and leaf.dtype != out.dtype for leaf, out in pairs):
        settled = [leaf.astype(out.dtype) if leaf.aval.weak_type else leaf for leaf, out in pairs]
        return trace_step(f, jax.tree.unflatten(tree, settled), x)
    for leaf, out in pairs:
        if (leaf.shape, leaf.dtype) != (out.shape, out.dtype):
            raise CellError(
                f"the carry changed its type: expected {leaf.dtype}{list(leaf.shape)}, got "
                f"{out.dtype}{list(out.shape)}; return a carry like the one that was given"
            )
    jaxpr = closed.jaxpr
    opened = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    program = _program(closed.replace(jaxpr=opened, consts=[]))
    step = Step(program, [*map(jnp.asarray, closed.consts)], after, y, bool(closed.effects))
    return step, carry, y_tree


@dataclass(frozen=True)
class Recorded:
    """A step that also returns its internal state."""

    step: Step
    # Which constants have a gradient, and which inputs.
    wanted: tuple[Sequence[bool], Sequence[bool]]
    program: Callable[..., Arrays]  # ``program(*consts, *carry, *x) -> (*carry, *y, *held)``
    held: Sequence[Any]  # types of the residuals that are stored; the carry may be among them
    # ``fixed(*consts)`` returns the residuals that are the same for all steps.
    fixed: Callable[..., Arrays]
    # For each residual, its group (held, fixed, consts or x) and its number there.
    sources: Sequence[tuple[str, int]]
    # Maps residuals, and cotangents of the carry after and of the outputs, to cotangents. These are
    # of the constants, of the carry before and of the inputs.
    pull: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]]
    # Bytes of temporary arrays. They are the peak of a recorded step or of its backward pass,
    # whichever is larger, plus the fixed residuals.
    work: int

    @classmethod
    def of(cls, step: Step, operands: Sequence[Arrays], wanted_consts: Sequence[bool],
           wanted_x: Sequence[bool]) -> "Recorded":  # fmt: skip
        """Return the recorded form of a step, with gradients of the wanted constants and inputs.
        Of the operands (constants, a carry, an input) only the types are used."""
        trees: list[Any] = []

        def run(consts: Arrays, carry: Arrays, x: Arrays) -> Arrays:
            def of(*some: Arrays) -> tuple[Any, Any]:
                after, y = step(*map(_merged, (consts, carry, x), some))
                return (real_of(after), real_of(y)), (after, y)

            primals = some_of(consts, wanted_consts), real_of(carry), some_of(x, wanted_x)
            _, pullback, (after, y) = jax.vjp(of, *primals, has_aux=True)
            residuals, tree = jax.tree.flatten(pullback)
            trees[:] = [tree]
            return [*after, *y, *residuals]

        def pull(residuals: Arrays, after: Arrays, y: Arrays) -> Any:
            return jax.tree.unflatten(trees[0], residuals)((after, y))

        closed = jax.make_jaxpr(run)(*operands)
        jaxpr, n, m = closed.jaxpr, len(operands[0]), len(operands[1])
        same = _same(jaxpr, n)
        stored: dict[str, list[Any]] = {"held": [], "fixed": []}
        places = {v: ("consts", i) for i, v in enumerate(jaxpr.invars[:n])}
        places |= {v: ("x", i) for i, v in enumerate(jaxpr.invars[n + m :])}
        first_residual = m + len(step.y)
        sources = []
        for out in jaxpr.outvars[first_residual:]:
            group = "fixed" if isinstance(out, Literal) or out in same else "held"
            place = group, len(stored[group])
            if not isinstance(out, Literal):
                place = places.setdefault(out, place)
            if place == (group, len(stored[group])):
                stored[group].append(out)
            sources.append(place)
        held, fixed = stored.values()
        whole = jaxpr.replace(outvars=[*jaxpr.outvars[:first_residual], *held])
        alone = jaxpr.replace(
            invars=jaxpr.invars[:n],
            outvars=fixed,
            eqns=[eqn for eqn in jaxpr.eqns if same.issuperset(eqn.outvars)],
        )
        after, y = closed.out_avals[:m], closed.out_avals[m:first_residual]
        back = jax.make_jaxpr(pull)(closed.out_avals[first_residual:], real_of(after), real_of(y))
        return cls(
            step,
            (wanted_consts, wanted_x),
            _program(closed.replace(jaxpr=whole)),
            [v.aval for v in held],
            _program(closed.replace(jaxpr=alone)),
            sources,
            pull,
            max(_peak(jaxpr), _peak(back.jaxpr)) + bytes_of(v.aval for v in fixed),
        )

    def __call__(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Run the step; return the carry after it, the outputs, and the residuals to store."""
        arrays = list(self.program(*consts, *carry, *x))
        n, m = len(self.step.carry), len(self.step.carry) + len(self.step.y)
        return arrays[:n], arrays[n:m], arrays[m:]

    def residuals(self, **groups: Arrays) -> Arrays:
        """Return all residuals in order, from those held, the fixed ones, and the operands."""
        return [groups[group][i] for group, i in self.sources]


def _program(closed: object) -> Callable[..., Arrays]:
    """Return a program as a function of arrays; a result may be a Python bool of the program's."""
    run = jaxpr_as_fun(closed)
    return lambda *operands: [*map(jnp.asarray, run(*operands))]


def _merged(values: Sequence[Any], some: Sequence[Any]) -> Arrays:
    """Return the values, each replaced by its counterpart unless that is None."""
    return [v if new is None else new for v, new in zip(values, some, strict=True)]


def _same(jaxpr: Any, consts: int) -> set[Any]:
    """Return the variables of a program that depend on its first ``consts`` operands alone."""
    same = {*jaxpr.constvars, *jaxpr.invars[:consts]}
    for eqn in jaxpr.eqns:
        if all(isinstance(v, Literal) or v in same for v in eqn.invars):
            same.update(eqn.outvars)
    return same


def _peak(jaxpr: Any) -> int:
    """Return the peak memory of a program run operation by operation, without its operands."""
    last = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)}
    ends: dict[int, int] = {}
    live = peak = 0
    for n, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            size, end = bytes_of([v.aval]), last.get(v, n)
            ends[end] = ends.get(end, 0) + size
            live += size
        peak = max(peak, live + max(map(_peak, jaxprs_in_params(eqn.params)), default=0))
        live -= ends.pop(n, 0)
    return peak
