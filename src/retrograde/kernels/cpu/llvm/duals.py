"""Vectors of lanes with their derivatives, so that a compiled function is differentiated forward.

A *dual* is a vector and its derivatives by some of a function's arguments. Its numba type names
these arguments. So a derivative that is zero for every input takes no code. Arithmetic of duals,
vectors and numbers, and a few of torch's functions, are written here as LLVM code. A step of a
:class:`retrograde.GatedCell` is compiled twice from them: for vectors and for duals.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import models, overload, overload_method, register_model

from retrograde.kernels.cpu.llvm import lanes
from retrograde.kernels.cpu.llvm.kinds import Args, Builder, Kind, Signature, Target, Value, Written
from retrograde.kernels.cpu.llvm.lanes import Lanes, broadcast, intrinsic, vector_of

#: The derivatives of a value, by the number of an argument.
Slopes = dict[int, Value]
#: A result, and its derivatives by two operands; None for one.
Differentiated = tuple[Value, tuple[Value | None, Value | None]]
Rule = Callable[[Builder, Value, Value], Differentiated]

_CONTRACT = ("contract",)


class Dual(types.Type):  # type: ignore[misc]
    """The numba type of a vector with derivatives by the arguments ``by``, in ascending order."""

    def __init__(self, dtype: Kind, by: tuple[int, ...]) -> None:
        self.dtype, self.by = dtype, by
        super().__init__(name=f"Dual({dtype}, {by})")


@register_model(Dual)  # type: ignore[untyped-decorator]
class _DualModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, dual: Dual) -> None:
        vector = vector_of(manager.lookup(dual.dtype).get_value_type())
        layout = ir.LiteralStructType([vector] * (1 + len(dual.by)))
        super().__init__(manager, dual, layout)  # type: ignore[no-untyped-call]


def _made(dtype: Kind, by: tuple[int, ...]) -> Kind:
    return Dual(dtype, by) if by else Lanes(dtype)


def _open(
    context: Target, builder: Builder, kind: Kind, value: Value, dtype: Kind
) -> tuple[Value, Slopes]:
    """Return the vector of a dual, a vector or a number, and its derivatives."""
    if isinstance(kind, Lanes):
        return value, {}
    if isinstance(kind, Dual):
        vectors = [builder.extract_value(value, k) for k in range(1 + len(kind.by))]
        return vectors[0], dict(zip(kind.by, vectors[1:], strict=True))
    return broadcast(builder, context.cast(builder, value, kind, dtype)), {}


def _close(builder: Builder, kind: Kind, vector: Value, slopes: Slopes) -> Value:
    if isinstance(kind, Lanes):
        return vector
    packed = ir.Constant(ir.LiteralStructType([vector.type] * (1 + len(slopes))), ir.Undefined)
    for k, part in enumerate([vector, *(slopes[by] for by in kind.by)]):
        packed = builder.insert_value(packed, part, k)
    return packed


def _operator(of: Callable[..., object], rule: Rule) -> None:
    """Let numba compile a binary operator on vectors and duals, and numbers with them.
    ``rule(builder, a, b)`` returns the result, and its derivatives by a and by b; None for one."""

    @intrinsic
    def operation(_: object, a: Kind, b: Kind) -> Written:
        dtype = next(t.dtype for t in (a, b) if isinstance(t, Lanes | Dual))
        by = tuple(sorted({*getattr(a, "by", ()), *getattr(b, "by", ())}))
        outcome = _made(dtype, by)

        def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            opened = [
                _open(context, builder, t, v, dtype) for t, v in zip((a, b), args, strict=True)
            ]
            vector, factors = rule(builder, opened[0][0], opened[1][0])
            slopes: Slopes = {}
            for (_, derivatives), factor in zip(opened, factors, strict=True):
                for k, slope in derivatives.items():
                    term = slope if factor is None else _times(builder, factor, slope)
                    slopes[k] = _plus(builder, slopes[k], term) if k in slopes else term
            return _close(builder, outcome, vector, slopes)

        return outcome(a, b), code

    def choose(a, b):  # type: ignore[no-untyped-def] # numba compares argument names
        supported = all(isinstance(t, Lanes | Dual | types.Number) for t in (a, b))
        plain = all(isinstance(t, types.Number) for t in (a, b))
        return None if plain or not supported else lambda a, b: operation(a, b)

    overload(of)(choose)


def _times(builder: Builder, a: Value, b: Value) -> Value:
    return builder.fmul(a, b, flags=_CONTRACT)


def _plus(builder: Builder, a: Value, b: Value) -> Value:
    return builder.fadd(a, b, flags=_CONTRACT)


def _divided(builder: Builder, a: Value, b: Value) -> Differentiated:
    ratio, part = builder.fdiv(a, b), builder.fdiv(ir.Constant(b.type, [1.0] * lanes.LANES), b)
    return ratio, (part, builder.fneg(_times(builder, ratio, part)))


def _subtracted(builder: Builder, a: Value, b: Value) -> Differentiated:
    less = ir.Constant(b.type, [-1.0] * lanes.LANES)
    return builder.fsub(a, b, flags=_CONTRACT), (None, less)


_operator(operator.add, lambda builder, a, b: (_plus(builder, a, b), (None, None)))
_operator(operator.sub, _subtracted)
_operator(operator.mul, lambda builder, a, b: (_times(builder, a, b), (b, a)))
_operator(operator.truediv, _divided)


def _function(
    of: Callable[..., object], write: Callable[..., Value], slope: Callable[..., Value]
) -> None:
    """Let numba compile a function of a vector or a dual. ``slope(builder, x, y, ones)`` returns
    the derivative of the result y."""

    @intrinsic
    def operation(_: object, x: Kind) -> Written:
        def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            vector, slopes = _open(context, builder, x, args[0], x.dtype)
            zeros, ones = (ir.Constant(vector.type, [n] * lanes.LANES) for n in (0.0, 1.0))
            mapped = write(builder, vector, zeros, ones)
            if slopes:
                factor = slope(builder, vector, mapped, ones)
                slopes = {k: _times(builder, factor, part) for k, part in slopes.items()}
            return _close(builder, x, mapped, slopes)

        return x(x), code

    def choose(x):  # type: ignore[no-untyped-def]
        return (lambda x: operation(x)) if isinstance(x, Lanes | Dual) else None

    overload(of)(choose)


def _of_tanh(b: Builder, x: Value, y: Value, ones: Value) -> Value:
    return b.fsub(ones, _times(b, y, y), flags=_CONTRACT)


def _of_relu(b: Builder, x: Value, y: Value, ones: Value) -> Value:
    return lanes.one_above.write(b, x, ir.Constant(x.type, [0.0] * lanes.LANES), ones)


_function(torch.sigmoid, lanes.sigmoid.write, lambda b, x, y, ones: _times(b, y, b.fsub(ones, y)))
_function(torch.tanh, lanes.tanh.write, _of_tanh)
_function(torch.relu, lanes.positive.write, _of_relu)
_function(operator.neg, lambda b, x, zeros, ones: b.fneg(x), lambda b, x, y, ones: b.fneg(ones))


@intrinsic
def _heaviside(_: object, x: Kind, at_zero: Kind) -> Written:
    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        zeros, ones = (ir.Constant(args[0].type, [n] * lanes.LANES) for n in (0.0, 1.0))
        step = builder.select(builder.fcmp_ordered(">", args[0], zeros), ones, zeros)
        return builder.select(builder.fcmp_ordered("==", args[0], zeros), args[1], step)

    return x(x, at_zero), code


@overload(torch.heaviside)
def _of_torch(x, at_zero):  # type: ignore[no-untyped-def] # of no duals: torch has no derivative
    both = isinstance(x, Lanes) and isinstance(at_zero, Lanes)
    return (lambda x, at_zero: _heaviside(x, at_zero)) if both else None


@intrinsic
def _vector(_: object, x: Kind) -> Written:
    signature = Lanes(x.dtype)(x)
    return signature, lambda context, b, _, args: _open(context, b, x, args[0], x.dtype)[0]


def _detach(x):  # type: ignore[no-untyped-def]
    return lambda x: _vector(x)


for _kind in (Lanes, Dual):
    overload_method(_kind, "detach")(_detach)


@intrinsic
def seeded(_: object, vectors: Kind) -> Written:
    """Return a tuple of vectors as duals: the derivative of the k-th by itself is one."""
    kinds = [Dual(vector.dtype, (k,)) for k, vector in enumerate(vectors)]

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        duals = []
        for k, dual in enumerate(kinds):
            vector = builder.extract_value(args[0], k)
            ones = ir.Constant(vector.type, [1.0] * lanes.LANES)
            duals.append(_close(builder, dual, vector, {k: ones}))
        return context.make_tuple(builder, signature.return_type, duals)

    return types.Tuple(kinds)(vectors), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def pulled(_: object, results: Kind, by: Kind, count: Kind) -> Written:
    """Return Σ of the products of a tuple of vectors with the derivatives of as many results, by
    each of a literal number of arguments."""
    many, dtype = count.literal_value, by.dtype.dtype

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        vector = vector_of(context.get_value_type(dtype))
        totals = [ir.Constant(vector, [0.0] * lanes.LANES)] * many
        seen: set[int] = set()
        for s, kind in enumerate(results):
            factor = builder.extract_value(args[1], s)
            result = builder.extract_value(args[0], s)
            for k, slope in _open(context, builder, kind, result, dtype)[1].items():
                term = _times(builder, factor, slope)
                totals[k] = _plus(builder, totals[k], term) if k in seen else term
                seen.add(k)
        return context.make_tuple(builder, signature.return_type, totals)

    return types.UniTuple(Lanes(dtype), many)(results, by, count), code
