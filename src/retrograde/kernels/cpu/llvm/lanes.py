"""Vectors of numbers in numba: loads, stores, arithmetic, sigmoid and tanh.

The compiler can vectorize a loop over a layer's units by itself. But it then checks that no two
arrays overlap, and runs the last few units one by one. With a handful of arrays and 20 units, this
loses most of the gain. So the loops here use vectors explicitly:

    for j in range(0, size, LANES):
        left = size - j  # lanes that exist: the others are zero when loaded, and never stored
        x = load(array, start + j, left)
        store(array, start + j, sigmoid(x) * x, left)

LLVM maps such a vector to the vector instructions of the machine. numba would call the C library's
exp for one number at a time. Here e^x is a power of two times a short series, accurate to two
units in the last place.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils, codegen, config, event
from numba.extending import models, register_model
from numpy.typing import NDArray

from retrograde import compiler
from retrograde.kernels.cpu.llvm.kinds import Args, Builder, Kind, Signature, Target, Value, Written
from retrograde.machine import tell

# As numba itself decides for which machine it compiles.
_FEATURES = vars(config)["CPU_FEATURES"]
if _FEATURES is None:
    _FEATURES = codegen.get_host_cpu_features()

#: The numbers of a vector. Where registers have 512 bits, twice as many fill them.
LANES = 16 if "+avx512f" in _FEATURES.split(",") else 8

#: Terms may be added in any order, as in every BLAS. Infinities and NaNs keep their meaning.
MATH = {"contract", "reassoc", "nsz", "arcp"}

#: A function that numba compiled.
Compiled: TypeAlias = Any
_F = TypeVar("_F", bound=Callable[..., object])

#: The decorator of all loops. They are compiled once, cached on disk, and hold no Python lock.
compiled = cast(
    Callable[[_F], _F],
    partial(compiler.compiled, nogil=True, fastmath=MATH, error_model="numpy"),
)


class _Compiled(event.Listener):  # type: ignore[misc]
    """Tells of each of our loops that is compiled."""

    count = 0

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith("retrograde"):
            tell(f"compiling kernels, once for this machine: {self.count} are done")
            self.count += 1

    def on_end(self, _: event.Event) -> None:
        pass


event.register("numba:compile", _Compiled())

#: The decorator of functions of vectors, which become a part of the loops that call them.
inlined = cast(Callable[[_F], _F], njit(inline="always", fastmath=MATH, error_model="numpy"))

#: The type of an array of real numbers.
Reals = NDArray[np.floating[Any]]

#: A vector of lanes, in code that numba compiles.
Vector: TypeAlias = Any

#: numba's decorator of functions that generate LLVM code.
intrinsic: Callable[..., Any] = extending.intrinsic

_CONTRACT = ("contract",)


class Lanes(types.Type):  # type: ignore[misc]
    """The numba type of a vector of :data:`LANES` numbers."""

    def __init__(self, dtype: Kind) -> None:
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)  # type: ignore[untyped-decorator]
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        element = manager.lookup(lanes.dtype).get_value_type()
        super().__init__(manager, lanes, vector_of(element))  # type: ignore[no-untyped-call]


def vector_of(element: ir.Type) -> ir.VectorType:
    """Return the LLVM type of a vector whose numbers have the type ``element``."""
    return ir.VectorType(element, LANES)


def _constant(vector_type: ir.VectorType, value: float) -> Value:
    return ir.Constant(vector_type, [value] * LANES)


def broadcast(builder: Builder, number: Value) -> Value:
    """Write the code of a vector that has ``number`` in every lane."""
    place = ir.IntType(32)
    undefined = ir.Constant(vector_of(number.type), ir.Undefined)
    inserted = builder.insert_element(undefined, number, place(0))
    return builder.shuffle_vector(inserted, inserted, _constant(vector_of(place), 0))


def _at(
    context: Target, builder: Builder, array_type: Kind, array: Value, index: Value
) -> tuple[Value, int]:
    """Return a pointer to the vector at an index of a flat array, and its alignment."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = vector_of(data.type.pointee).as_pointer()
    return builder.bitcast(builder.gep(data, [index]), pointer), array_type.dtype.bitwidth // 8


def mask(builder: Builder, left: Value) -> Value:
    """Write the code of a mask that is true in the first ``left`` lanes."""
    numbers = ir.Constant(vector_of(left.type), list(range(LANES)))
    return builder.icmp_signed("<", numbers, broadcast(builder, left))


def masked(
    builder: Builder, name: str, vector_type: ir.VectorType, result: ir.Type, arguments: list[Value]
) -> Value:
    """Write a call of LLVM's masked load or store."""
    element = "f64" if isinstance(vector_type.element, ir.DoubleType) else "f32"
    return _call(builder, f"masked.{name}.v{LANES}{element}.p0", result, arguments)


def _call(
    builder: Builder, name: str, result: ir.Type, arguments: list[Value], **options: Any
) -> Value:
    """Write a call of a function of LLVM's own."""
    signature = ir.FunctionType(result, [a.type for a in arguments])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}")
    return builder.call(function, arguments, **options)


def total_of(builder: Builder, vector: Value) -> Value:
    """Write the code of the sum of a vector's numbers."""
    element = vector.type.element
    name = f"vector.reduce.fadd.v{LANES}f{64 if isinstance(element, ir.DoubleType) else 32}"
    arguments = [ir.Constant(element, -0.0), vector]
    return _call(builder, name, element, arguments, fastmath=("reassoc",))


def _read(
    context: Target, builder: Builder, array_type: Kind, array: Value, index: Value, left: Value
) -> Value:
    """Write the code of a vector's load."""
    pointer, align = _at(context, builder, array_type, array, index)
    vector = pointer.type.pointee
    whole = builder.icmp_signed(">=", left, left.type(LANES))
    with builder.if_else(whole) as (then, otherwise):
        with then:
            plain = builder.load(pointer, align=align)
            from_plain = builder.block
        with otherwise:
            rest = [pointer, ir.IntType(32)(align), mask(builder, left), _constant(vector, 0.0)]
            short = masked(builder, "load", vector, vector, rest)
            from_short = builder.block
    loaded = builder.phi(vector)
    loaded.add_incoming(plain, from_plain)
    loaded.add_incoming(short, from_short)
    return loaded


def _write(
    context: Target, builder: Builder, array_type: Kind, array: Value, index: Value, value: Value,
    left: Value,
) -> None:  # fmt: skip
    """Write the code of a vector's store."""
    pointer, align = _at(context, builder, array_type, array, index)
    whole = builder.icmp_signed(">=", left, left.type(LANES))
    with builder.if_else(whole) as (then, otherwise):
        with then:
            builder.store(value, pointer, align=align)
        with otherwise:
            rest = [value, pointer, ir.IntType(32)(align), mask(builder, left)]
            masked(builder, "store", value.type, ir.VoidType(), rest)


@intrinsic
def load(_: object, array: Kind, index: Kind, left: Kind) -> Written:
    """Return the vector at an index of a flat array; lanes from ``left`` on are zero."""
    signature = Lanes(array.dtype)(array, types.intp, types.intp)
    return signature, lambda context, b, own, args: _read(context, b, own.args[0], *args)


@intrinsic
def store(_: object, array: Kind, index: Kind, value: Kind, left: Kind) -> Written:
    """Write the first ``left`` numbers of a vector to an index of a flat array."""

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        _write(context, builder, signature.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.intp, value, types.intp), code


@compiled
def copy(source: Reals, at: int, target: Reals, to: int, count: int) -> None:
    """Copy so many numbers of a flat array to another. numba's own assignment of slices may raise
    an error, whose text takes seconds to compile."""
    for j in range(0, count, LANES):
        store(target, to + j, load(source, at + j, count - j), count - j)


def _places(builder: Builder, index: Value, apart: Value, count: int) -> list[Value]:
    return [builder.add(index, builder.mul(apart, apart.type(k))) for k in range(count)]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load_each(_: object, array: Kind, index: Kind, apart: Kind, left: Kind, count: Kind) -> Written:
    """Return a tuple of vectors, ``apart`` from one another; their number is a literal."""
    many, place = count.literal_value, types.intp
    tuple_type = types.UniTuple(Lanes(array.dtype), many) if many else types.Tuple(())

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        vectors = [
            _read(context, builder, signature.args[0], args[0], at, args[3])
            for at in _places(builder, args[1], args[2], many)
        ]
        return context.make_tuple(builder, signature.return_type, vectors)

    return tuple_type(array, place, place, place, count), code


@intrinsic
def store_each(
    _: object, array: Kind, index: Kind, apart: Kind, left: Kind, vectors: Kind
) -> Written:
    """Write the first ``left`` numbers of a tuple's vectors, ``apart`` from one another."""

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        for k, at in enumerate(_places(builder, args[1], args[2], len(vectors))):
            value = builder.extract_value(args[4], k)
            _write(context, builder, signature.args[0], args[0], at, value, args[3])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp, vectors), code


@intrinsic
def added(_: object, a: Kind, b: Kind) -> Written:
    """Return the sums of two tuples of vectors, one by one."""

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        pairs = [[builder.extract_value(t, k) for t in args] for k in range(len(a))]
        sums = [builder.fadd(*pair, flags=_CONTRACT) for pair in pairs]
        return context.make_tuple(builder, signature.return_type, sums)

    return (types.UniTuple(a.dtype, len(a)) if len(a) else types.Tuple(()))(a, b), code


@intrinsic
def spread(_: object, array: Kind, index: Kind) -> Written:
    """Return a vector with the number at an index of a flat array in every lane."""
    vector = Lanes(array.dtype)

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return broadcast(builder, builder.load(builder.gep(data, [args[1]])))

    return vector(array, types.intp), code


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def like(_: object, x: Kind, value: Kind) -> Written:
    """Return a vector of the type of ``x`` with a literal integer in every lane."""
    number = float(value.literal_value)
    return x(x, value), lambda context, b, signature, args: _constant(args[0].type, number)


@intrinsic
def quotient(_: object, a: Kind, b: Kind) -> Written:
    """Return a / b, and 0 where b is 0."""

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        zeros = _constant(args[0].type, 0.0)
        ratio = builder.fdiv(*args)
        return builder.select(builder.fcmp_ordered("==", args[1], zeros), zeros, ratio)

    return a(a, b), code


def _of_a_vector(write: Callable[[Builder, Value, Value, Value], Value]) -> Any:
    """Return a function of a vector x, whose code ``write(builder, x, zeros, ones)`` writes."""

    @intrinsic
    def operation(_: object, x: Kind) -> Written:
        def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
            vector_type = args[0].type
            return write(builder, args[0], _constant(vector_type, 0.0), _constant(vector_type, 1.0))

        return x(x), code

    operation.write = write
    return operation


@_of_a_vector
def positive(builder: Builder, x: Value, zeros: Value, ones: Value) -> Value:
    """Write the code of max(x, 0); a NaN stays a NaN."""
    return builder.select(builder.fcmp_ordered("<=", x, zeros), zeros, x)


@_of_a_vector
def one_above(builder: Builder, x: Value, zeros: Value, ones: Value) -> Value:
    """Write the code of the slope of :func:`positive`: 1 where x > 0 or x is NaN, else 0."""
    return builder.select(builder.fcmp_ordered("<=", x, zeros), zeros, ones)


@_of_a_vector
def sigmoid(builder: Builder, x: Value, zeros: Value, ones: Value) -> Value:
    """Write the code of 1 / (1 + e^{−x}), as 1 or e^{−|x|} over 1 + e^{−|x|}."""
    less = builder.fcmp_ordered("<", x, zeros)
    _, e = _exponential(builder, builder.select(less, x, builder.fneg(x)))
    return builder.fdiv(builder.select(less, e, ones), builder.fadd(ones, e))


@_of_a_vector
def tanh(builder: Builder, x: Value, zeros: Value, ones: Value) -> Value:
    """Write the code of (1 − e^{−2|x|}) / (1 + e^{−2|x|}), with the sign of x."""
    less = builder.fcmp_ordered("<", x, zeros)
    twice = builder.fadd(x, x)
    less_one, e = _exponential(builder, builder.select(less, twice, builder.fneg(twice)))
    negative = builder.fdiv(less_one, builder.fadd(ones, e))  # tanh of −|x|
    return builder.select(less, negative, builder.fneg(negative))


def _exponential(builder: Builder, x: Value) -> tuple[Value, Value]:
    """Write the code of e^x − 1 and e^x for a vector x ≤ 0. Since x = k ln 2 + r with
    |r| ≤ ln 2 / 2, e^x = 2^k e^r, and e^r − 1 is a series. The number ln 2 is subtracted in two
    parts, of which k times the first is exact (Cody and Waite, 1980). Results are constant for x
    below the least normal exponent."""
    single = isinstance(x.type.element, ir.FloatType)
    high, terms, least = (0.693359375, 7, -87.0) if single else (0.693147180369123816, 13, -708.0)
    low = -2.12194440054690583e-4 if single else 1.90821492927058770e-10
    size, mantissa, bias = (32, 23, 127) if single else (64, 52, 1023)

    def number(value: float) -> Value:
        return _constant(x.type, value)

    def add_product(a: Value, b: Value, c: Value) -> Value:
        return builder.fadd(builder.fmul(a, b, flags=_CONTRACT), c, flags=_CONTRACT)

    small = builder.fcmp_ordered("<", x, number(least))  # a NaN stays a NaN
    y = builder.select(small, number(least), x)
    turns = builder.fmul(y, number(1 / math.log(2)))
    k = _call(builder, f"rint.v{LANES}f{size}", x.type, [turns])
    r = add_product(k, number(-low), add_product(k, number(-high), y))
    series = number(1 / math.factorial(terms))
    for n in range(terms - 1, 0, -1):
        series = add_product(series, r, number(1 / math.factorial(n)))
    series = builder.fmul(series, r)
    bits = vector_of(ir.IntType(size))
    exponent = builder.add(builder.fptosi(k, bits), _constant(bits, bias))
    power = builder.bitcast(builder.shl(exponent, _constant(bits, mantissa)), x.type)
    less_one = add_product(power, series, builder.fsub(power, number(1.0)))
    return less_one, add_product(power, series, power)
