"""One step of a scan as a program with all its operands in the open, and its recorded twin.

The function is traced once. What it closes over, tracers of an outer transformation included,
becomes an operand, so gradients reach it. The recorded twin returns the internal state too: the
residuals of the step's vector-Jacobian product. Residuals that are operands (weights, the input)
are not stored, but taken from where they are. Those of constants alone are found once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal, Var, jaxpr_as_fun, jaxprs_in_params

from retrograde.errors import CellError

__all__ = [
    "Recorded",
    "Step",
    "Type",
    "bytes_of",
    "is_real",
    "merged",
    "no_gradient",
    "some_of",
    "trace_step",
    "type_of",
]

Arrays = list[Any]
Mask = Sequence[bool]
Operands = tuple[Arrays, Arrays, Arrays]  # constants, carry, input


class Type(NamedTuple):
    """The type of an array; ``axes`` are those of a mesh (``shard_map``) that it varies over."""

    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]

    def zeros(self, count: int | None = None) -> Array:
        """Zeros of this type, or so many of them."""
        return self.varied(
            jnp.zeros(self.shape if count is None else (count, *self.shape), self.dtype)
        )

    def varied(self, x: Array) -> Array:
        """What is the same on all devices, as a value that varies as this type does."""
        return lax.pcast(x, tuple(sorted(self.axes)), to="varying") if self.axes else x


def type_of(x: Any) -> Type:
    """The type of an array, a tracer, or what stands for one."""
    kind = jax.typeof(x) if isinstance(x, Array) else x
    return Type(tuple(kind.shape), kind.dtype, kind.manual_axis_type.varying)


def is_real(x: Any) -> bool:
    """Whether gradients go through values of this type."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def no_gradient(x: Any) -> Any:
    """The cotangent of what has no gradient."""
    return type_of(x).zeros() if is_real(x) else np.zeros(x.shape, jax.dtypes.float0)


def bytes_of(values: Sequence[Any]) -> int:
    """What arrays take, or would take."""
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in values)  # keys have a size too


@dataclass(frozen=True)
class Step:
    """``program(*consts, *carry, *x) -> (*carry, *y)``, and the shapes of these."""

    program: Callable[..., Arrays]
    consts: Arrays
    carry: tuple[Type, ...]
    x: tuple[Type, ...]
    y: tuple[Type, ...]

    def __call__(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        found = self.program(*consts, *carry, *x)
        return list(found[: len(self.carry)]), list(found[len(self.carry) :])


def trace_step(f: Callable[..., Any], init: Any, x: Any) -> tuple[Step, Arrays, Any]:
    """The step that a scanned function is, the leaves of the first carry, and the structure of an
    output. ``x`` is one input, of which only the types are looked at. Raises CellError if the carry
    does not keep its structure and types, or if the function has effects."""
    carry, carry_tree = jax.tree.flatten(init)
    inputs, x_tree = jax.tree.flatten(x)
    carry = [jnp.asarray(leaf) for leaf in carry]
    trees: list[Any] = []

    def flat(*leaves: Any) -> Arrays:
        state = jax.tree.unflatten(carry_tree, leaves[: len(carry)])
        result = f(state, jax.tree.unflatten(x_tree, leaves[len(carry) :]))
        if not isinstance(result, tuple) or len(result) != 2:
            raise CellError(
                f"the scanned function returned a {type(result).__name__}: expected the pair "
                "(carry, y); return None for y if there is none"
            )
        trees[:] = [jax.tree.structure(result[0]), jax.tree.structure(result[1])]
        return [*jax.tree.leaves(result[0]), *jax.tree.leaves(result[1])]

    closed = jax.make_jaxpr(flat)(*carry, *inputs)
    if closed.effects:
        raise CellError(
            f"the scanned function has effects ({', '.join(map(str, closed.effects))}): expected "
            "none, since steps are run again in the backward pass; take them out of the function"
        )
    after_tree, y_tree = trees
    if after_tree != carry_tree:
        raise CellError(
            f"the carry changed its structure: expected {carry_tree}, got {after_tree}; return a "
            "carry like the one that was given"
        )
    found = [type_of(v) for v in closed.out_avals]
    after, y = found[: len(carry)], found[len(carry) :]
    # A carry that begins as a Python number takes the type that a step gives it.
    settled = [
        leaf.astype(out.dtype) if leaf.aval.weak_type and leaf.dtype != out.dtype else leaf
        for leaf, out in zip(carry, after, strict=True)
    ]
    if any(a is not b for a, b in zip(settled, carry, strict=True)):
        return trace_step(f, jax.tree.unflatten(carry_tree, settled), x)
    for leaf, out in zip(carry, after, strict=True):
        if (leaf.shape, leaf.dtype) != (out.shape, out.dtype):
            raise CellError(
                f"the carry changed its type: expected {leaf.dtype}{list(leaf.shape)}, got "
                f"{out.dtype}{list(out.shape)}; return a carry like the one that was given"
            )
    program, consts = jaxpr_as_fun(_without_consts(closed)), [*map(jnp.asarray, closed.consts)]
    shapes = [type_of(v) for v in inputs]
    return Step(program, consts, tuple(after), tuple(shapes), tuple(y)), carry, y_tree


def _without_consts(closed: Any) -> Any:
    """The same program with its constants as the first arguments."""
    jaxpr = closed.jaxpr
    opened = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return closed.replace(jaxpr=opened, consts=[])


@dataclass(frozen=True)
class Recorded:
    """A step that returns its internal state as well.

    Attributes:
        program: ``program(*consts, *carry, *x) -> (*carry, *y, *own)``.
        wanted: which constants, and which inputs, have a gradient.
        own: shapes of the residuals that are stored.
        fixed: ``fixed(consts)``, the residuals that are the same for all steps.
        sources: where each residual is: an operand's group and number, an own or a fixed one's.
        pull: from residuals, and cotangents of the carry after and of the outputs, those of the
            wanted constants, of the real parts of the carry, and of the wanted inputs.
        work: the most bytes that a recorded step, or its way back, holds for itself, and what the
            fixed residuals take.
    """

    step: Step
    wanted: tuple[tuple[bool, ...], tuple[bool, ...]]
    program: Callable[..., Arrays]
    own: tuple[Type, ...]
    fixed: Callable[..., Arrays]
    sources: tuple[tuple[str, int], ...]
    pull: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]]
    work: int

    @classmethod
    def of(cls, step: Step, operands: Operands, wanted_consts: Mask, wanted_x: Mask) -> "Recorded":
        """The recorded twin of a step, with gradients for the constants and inputs that want one.
        Of the operands (constants, a carry, an input) only the types are looked at."""
        real = [is_real(leaf) for leaf in step.carry]
        real_y = [is_real(leaf) for leaf in step.y]
        trees: list[Any] = []

        def run(consts: Arrays, carry: Arrays, x: Arrays) -> Arrays:
            def of(some: Arrays, reals: Arrays, inputs: Arrays) -> tuple[Any, Any]:
                after, y = step(
                    merged(consts, wanted_consts, some),
                    merged(carry, real, reals),
                    merged(x, wanted_x, inputs),
                )
                return (some_of(after, real), some_of(y, real_y)), (after, y)

            given = some_of(consts, wanted_consts), some_of(carry, real), some_of(x, wanted_x)
            _, pullback, (after, y) = jax.vjp(of, *given, has_aux=True)
            residuals, tree = jax.tree.flatten(pullback)
            trees[:] = [tree]
            return [*after, *y, *residuals]

        closed = jax.make_jaxpr(run)(*operands)
        groups = zip(("const", "carry", "x"), operands, strict=True)
        places = [(name, i) for name, group in groups for i in range(len(group))]
        known = dict(zip(map(id, closed.jaxpr.invars), places, strict=True))
        first = len(step.carry) + len(step.y)
        alone, same = _fixed_part(closed, len(operands[0]))
        kept: list[int] = []  # outputs that are stored
        steady: list[Any] = []  # those that are the same for all steps
        sources: list[tuple[str, int]] = []
        for number, out in enumerate(closed.jaxpr.outvars[first:], first):
            if not isinstance(out, Literal) and id(out) in known:
                sources.append(known[id(out)])
                continue
            if isinstance(out, Literal) or out in same:
                sources.append(("fixed", len(steady)))
                steady.append(out)
            else:
                sources.append(("own", len(kept)))
                kept.append(number)
            known[id(out)] = sources[-1]
        outputs = [*range(first), *kept]
        chosen = closed.jaxpr.replace(outvars=[closed.jaxpr.outvars[i] for i in outputs])
        fixed = jaxpr_as_fun(alone.replace(jaxpr=alone.jaxpr.replace(outvars=steady)))
        program = jaxpr_as_fun(_without_consts(closed.replace(jaxpr=chosen)))
        baked = list(closed.consts)

        def pull(residuals: Arrays, after: Arrays, y: Arrays) -> tuple[Arrays, Arrays, Arrays]:
            found = jax.tree.unflatten(trees[0], residuals)((after, y))
            return list(found[0]), list(found[1]), list(found[2])

        types = [closed.out_avals[i] for i in kept]
        own = tuple(type_of(v) for v in types)
        wanted = tuple(wanted_consts), tuple(wanted_x)
        way_back = jax.make_jaxpr(pull)(
            list(closed.out_avals[first:]),
            some_of(operands[1], real),
            some_of(closed.out_avals[len(real) : first], real_y),
        )
        work = max(_peak(closed.jaxpr), _peak(way_back.jaxpr))
        work += bytes_of([v.aval for v in steady])
        runs = lambda *args: program(*baked, *args)  # noqa: E731
        found = lambda consts: fixed(*baked, *consts)  # noqa: E731
        return cls(step, wanted, runs, own, found, tuple(sources), pull, work)

    @property
    def real(self) -> list[bool]:
        """Which parts of the carry have a gradient."""
        return [is_real(leaf) for leaf in self.step.carry]

    @property
    def held(self) -> tuple[Type, ...]:
        """What the tape holds of a step: own residuals, and parts of the carry before it."""
        return *self.own, *(self.step.carry[i] for i in self.carried)

    @property
    def carried(self) -> list[int]:
        """The parts of the carry that are residuals."""
        return sorted({i for group, i in self.sources if group == "carry"})

    def __call__(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """The carry after, the outputs, and what the tape holds."""
        found = list(self.program(*consts, *carry, *x))
        n, m = len(self.step.carry), len(self.step.y)
        return found[:n], found[n : n + m], [*found[n + m :], *(carry[i] for i in self.carried)]

    def residuals(self, held: Arrays, fixed: Arrays, consts: Arrays, x: Arrays) -> Arrays:
        """What the pullback needs, from what the tape holds, fixed residuals, and operands."""
        carried = dict(zip(self.carried, held[len(self.own) :], strict=True))
        groups: dict[str, Any] = {
            "own": held,
            "fixed": fixed,
            "const": consts,
            "x": x,
            "carry": carried,
        }
        return [groups[group][i] for group, i in self.sources]


def _fixed_part(closed: Any, consts: int) -> tuple[Any, set[Any]]:
    """The operations of a program that depend on its first operands alone, as a program of these,
    and what they result in."""
    jaxpr = closed.jaxpr
    given = [*jaxpr.constvars, *jaxpr.invars[:consts]]
    same, chosen = set(given), []
    for eqn in jaxpr.eqns:
        if all(isinstance(v, Literal) or v in same for v in eqn.invars):
            same.update(eqn.outvars)
            chosen.append(eqn)
    alone = jaxpr.replace(constvars=[], invars=given, eqns=chosen)
    return closed.replace(jaxpr=alone, consts=[]), same


def _peak(jaxpr: Any) -> int:
    """The most bytes that a program holds, besides its operands, run operation by operation."""
    last = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)}
    ends: dict[int, int] = {}
    live = peak = 0
    for n, eqn in enumerate(jaxpr.eqns):
        inner = max(map(_peak, jaxprs_in_params(eqn.params)), default=0)
        live += bytes_of([v.aval for v in eqn.outvars])
        for v in eqn.outvars:
            end = last.get(v, n)
            ends[end] = ends.get(end, 0) + bytes_of([v.aval])
        peak = max(peak, live + inner)
        live -= ends.pop(n, 0)
    return peak


def some_of(values: Sequence[Any], mask: Mask) -> Arrays:
    """The values under the mask."""
    return [v for v, chosen in zip(values, mask, strict=True) if chosen]


def merged(values: Sequence[Any], mask: Mask, some: Sequence[Any]) -> Arrays:
    """The values, those under the mask replaced."""
    rest = iter(some)
    return [next(rest) if chosen else v for v, chosen in zip(values, mask, strict=True)]
