"""The loops of :mod:`retrograde.kernels.cpu.formulas`, compiled anew for each formula.

A copy of a loop has the formula's numbers, and its step, as global names. On disk its name has the
formula's key.
"""

from types import FunctionType
from typing import TYPE_CHECKING

import torch
from numba import njit, types
from numba.extending import overload

from retrograde.kernels.cpu.llvm import lanes
from retrograde.kernels.cpu.llvm.duals import Dual, pulled, seeded
from retrograde.kernels.cpu.llvm.kinds import Args, Builder, Kind, Signature, Target, Value, Written
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Compiled,
    Lanes,
    Reals,
    compiled,
    intrinsic,
    load,
    load_each,
    store_each,
)
from retrograde.kernels.cpu.llvm.tiles import product

if TYPE_CHECKING:
    from retrograde.kernels.cpu.formulas import Formula, Loops

# Of each copy: the numbers of its formula, and how many gates are whole.
GATES = STATES = SPLIT = UNITS = WHOLE = ALL = 0
_step: Compiled = None


def _forward(
    driven: Reals, outputs: Reals, rest: Reals, bias: Reals, hidden: Reals, state: Reals,
    units: Reals, sums: Reals, first: int, last: int,
) -> None:  # fmt: skip
    """Run samples first … last − 1 forward; ``sums`` (B, W) is scratch memory of whole vectors."""
    (_, samples, size), width, rows = state.shape, sums.shape[1], last - first
    x, y, kept, s = driven.reshape(-1), outputs.reshape(-1), rest.reshape(-1), state.reshape(-1)
    p, u, numbers = units.reshape(-1), sums[first:last].reshape(-1), samples * size
    wide = GATES * size
    for t in range(driven.shape[0]):
        for b in range(rows):
            u[b * width : b * width + wide] = bias
        product(s, first * size, size, 1, rows, hidden, wide, u, width)
        for b in range(first, last):
            for j in range(0, size, LANES):
                left, at, v = size - j, b * size + j, (t * samples + b) * wide + j
                whole = load_each(x, v, size, left, WHOLE)
                u_whole = load_each(u, (b - first) * width + j, size, left, WHOLE)
                apart = load_each(x, v + WHOLE * size, size, left, SPLIT)
                w = (b - first) * width + WHOLE * size + j
                u_apart = load_each(u, w, size, left, SPLIT)
                before = load_each(s, at, numbers, left, STATES)
                own = load_each(p, j, size, left, UNITS)
                if rest.shape[1]:
                    store_each(kept, t * numbers + at, rest.shape[1] * numbers, left, before[1:])
                gates = _added(whole, u_whole) + apart + u_apart
                after = _as_states(_step(*(gates + before + own)))
                store_each(s, at, numbers, left, after)
                store_each(y, t * numbers + at, 0, left, after[:1])


def _sweep(
    gates: Reals, inputs: Reals, before: Reals, losses: Reals, hidden: Reals, units: Reals,
    g: Reals, to_units: Reals, sums: Reals, number: int, first: int, last: int,
) -> None:  # fmt: skip
    """Backpropagate samples first … last − 1, from the last step to the first.

    ``gates`` (L, B, K·H) are the whole gates, and the parts of the others from h; ``inputs``
    (L, B, split·H) their parts from x. Their gradients overwrite them. ``before`` (S, L, B, H) are
    the states before each step, and ``to_units`` (threads, V, H) receives their gradients.
    """
    (_, samples, size), length, rows = g.shape, gates.shape[0], last - first
    a, d, s, terms = gates.reshape(-1), inputs.reshape(-1), before.reshape(-1), losses.reshape(-1)
    known, p, total = g.reshape(-1), units.reshape(-1), to_units[number].reshape(-1)
    numbers, width, u = samples * size, sums.shape[1], sums[first:last].reshape(-1)
    whole, wide = length * numbers, GATES * size
    for t in range(length - 1, -1, -1):
        for b in range(first, last):
            for j in range(0, size, LANES):
                left, at, row = size - j, b * size + j, t * samples + b
                v, w, place = row * wide + j, row * SPLIT * size + j, t * numbers + at
                given = load_each(a, v, size, left, WHOLE) + load_each(d, w, size, left, SPLIT)
                given = given + load_each(a, v + WHOLE * size, size, left, SPLIT)
                given = given + load_each(s, place, whole, left, STATES)
                given = given + load_each(p, j, size, left, UNITS)
                after = load_each(known, at, numbers, left, STATES)
                if losses.shape[0]:
                    after = (after[0] + load(terms, place, left),) + after[1:]  # noqa: RUF005
                slopes = pulled(_as_states(_step(*seeded(given))), after, ALL)
                store_each(a, v, size, left, slopes[:WHOLE])
                rest = slopes[WHOLE:]
                store_each(d, w, size, left, rest[:SPLIT])
                rest = rest[SPLIT:]
                store_each(a, v + WHOLE * size, size, left, rest[:SPLIT])
                rest = rest[SPLIT:]
                store_each(u, (b - first) * width + j, 0, left, rest[:1])
                store_each(known, numbers + at, numbers, left, rest[1:STATES])
                if UNITS:
                    own = load_each(total, j, size, left, UNITS)
                    store_each(total, j, size, left, _added(own, rest[STATES:]))
        product(a, (t * samples + first) * wide, wide, 1, rows, hidden, size, u, width)
        for b in range(rows):
            g[0, first + b] = u[b * width : b * width + size]


def compile_formula(key: str, formula: "Formula", dtype: torch.dtype) -> "Loops":
    """Return the loops of a formula. Raises numba's error if its step cannot be compiled."""
    whole, element = (
        formula.gates - formula.split,
        getattr(types, str(dtype).removeprefix("torch.")),
    )
    every = formula.gates + formula.split + formula.states + formula.units
    own, code = formula.step.__globals__, formula.step.__code__
    # Where numba finds a loop on disk, it imports the module of its step: this one, not the user's.
    used = {name: own[name] for name in code.co_names if name in own} | {"__name__": __name__}
    copy = FunctionType(code, used, key, None, formula.step.__closure__)
    step = njit(fastmath=lanes.MATH, error_model="numpy")(copy)
    step.compile((Lanes(element),) * every)
    step.compile(tuple(Dual(element, (k,)) for k in range(every)))
    names: dict[str, object] = {
        "GATES": formula.gates,
        "STATES": formula.states,
        "SPLIT": formula.split,
        "UNITS": formula.units,
    }
    names |= {"WHOLE": whole, "ALL": every, "_step": step}
    return _copy(_forward, key, names), _copy(_sweep, key, names)


def _copy(loop: Compiled, key: str, names: dict[str, object]) -> Compiled:
    name = f"{loop.__name__}_{key}"
    copy = FunctionType(loop.__code__, {**globals(), **names}, name)
    copy.__qualname__ = name
    return compiled(copy)


@intrinsic
def _added(_: object, a: Kind, b: Kind) -> Written:
    """Return the sums of two tuples of vectors, one by one."""

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        pairs = [[builder.extract_value(t, k) for t in args] for k in range(len(a))]
        found = [builder.fadd(*pair) for pair in pairs]
        return context.make_tuple(builder, signature.return_type, found)

    return (types.UniTuple(a.dtype, len(a)) if len(a) else types.Tuple(()))(a, b), code


def _as_states(found: Kind) -> Kind:
    """Return what a step returned as a tuple."""


@overload(_as_states)
def _as_tuple(found):  # type: ignore[no-untyped-def] # numba compares argument names
    if isinstance(found, types.BaseTuple):
        return lambda found: found
    return lambda found: (found,)
