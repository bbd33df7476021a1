"""The loops of a layer, compiled for each cell.

A copy of a loop has the cell's numbers, and what it computes, as global names. On disk its name has
the formula's key. A formula's ``step`` is compiled twice, for vectors and for duals
(:mod:`retrograde.kernels.cpu.llvm.duals`). The backward pass runs it with derivatives, and
multiplies them by the gradient g of the state at once:

    a = Σ_s g_s ∂step_s/∂(d, u);  g ← Σ_s g_s ∂step_s/∂(h, …), and h's part + a U
"""

import functools
import hashlib
import inspect
import math
import re
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from numba import njit, types
from numba.core.errors import NumbaError
from numba.extending import overload

from retrograde.kernels.cells import AnyKind, Formula, Kind, form_of
from retrograde.kernels.cpu import backward_loops, cells, forward_loops
from retrograde.kernels.cpu.llvm import lanes
from retrograde.kernels.cpu.llvm.duals import Dual, pulled, seeded
from retrograde.kernels.cpu.llvm.lanes import Compiled, Lanes, compiled, inlined

_CELLS: dict[Kind, tuple[Compiled, Compiled]] = {
    "RNN_TANH": (cells.run_tanh, cells.pull_tanh),
    "RNN_RELU": (cells.run_relu, cells.pull_relu),
    "GRU": (cells.run_gru, cells.pull_gru),
    "LSTM": (cells.run_lstm, cells.pull_lstm),
}
GATES = WHOLE = SPLIT = OTHERS = ALL = 0
_step: Compiled = None


class Loops(NamedTuple):
    """The loops of one cell."""

    run: Compiled
    recall: Compiled
    backward: Compiled


#: What a ``step`` may consist of, besides ``+ − * /``, numbers and ``detach``.
FUNCTIONS = torch.sigmoid, torch.tanh, torch.relu, torch.heaviside


def loops_of(cell: AnyKind, dtype: torch.dtype) -> Any:
    """Return the compiled loops of a cell, or the reason why a formula's step cannot be compiled.
    The step's code and the numbers that it reads decide which loops these are."""
    if not isinstance(cell, Formula):
        return _loops_of_torch(cell)
    step = cell.step
    if not isinstance(step, FunctionType) or step.__defaults__ or step.__kwdefaults__:
        return "it is no function of Python's, or has default arguments"
    names, code = inspect.getclosurevars(step), step.__code__
    read = {**names.globals, **names.nonlocals}
    numbers = {name: value for name, value in read.items() if isinstance(value, int | float)}
    for name in sorted(read.keys() - numbers.keys()):
        if read[name] is not torch and read[name] is not math:
            return f"it reads {name}, which is neither a number nor torch or math"
    if any(isinstance(value, CodeType) for value in code.co_consts):
        return "it defines a function"
    of = code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_freevars
    shape = cell.gates, cell.states, cell.split, cell.units
    key = hashlib.sha256(repr((of, sorted(numbers.items()), shape)).encode()).hexdigest()[:24]
    if _FIRST.setdefault(step, key) != key:
        return (
            "a number that it reads has changed, and each would take seconds; make it one of units"
        )
    return _compiled(key, cell, dtype)


_FIRST: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by step, the key of its first numbers


@functools.lru_cache(maxsize=64)
def _compiled(key: str, formula: Formula, dtype: torch.dtype) -> Any:
    try:
        return _compile(key, formula, dtype)
    except NumbaError as error:
        lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
        return next((line for line in lines if line and not line.startswith("Failed")), "")


@functools.cache
def _loops_of_torch(cell: Kind) -> Loops:
    """Return the loops of one of torch's cells."""
    return _loops(cell.lower(), form_of(cell), *_CELLS[cell])


def _compile(key: str, formula: Formula, dtype: torch.dtype) -> Loops:
    """Return the loops of a formula. Raises numba's error if its step cannot be compiled."""
    element = getattr(types, str(dtype).removeprefix("torch."))
    every = formula.row + formula.states + formula.units
    function: Any = formula.step
    scope, code = function.__globals__, function.__code__
    # Where numba finds a loop on disk, it imports the module of its step: this one, not the user's.
    used = {name: scope[name] for name in code.co_names if name in scope} | {"__name__": __name__}
    copy = FunctionType(code, used, key, None, function.__closure__)
    step = njit(fastmath=lanes.MATH, error_model="numpy")(copy)
    step.compile((Lanes(element),) * every)
    step.compile(tuple(Dual(element, (k,)) for k in range(every)))
    names = _names(formula) | {"ALL": every, "_step": step}
    return _loops(key, formula, inlined(_copy(_run, names)), inlined(_copy(_pull, names)))


def _names(form: Formula) -> dict[str, object]:
    """Return the numbers of a cell, under the names that the loops have for them."""
    return {
        "GATES": form.gates,
        "WHOLE": form.whole,
        "SPLIT": form.split,
        "OTHERS": form.others,
        "ASIDE": form.aside,
        "UNITS": form.units,
        "AGAIN": form.again,
        "KEEPS": form.keeps,
    }


def _loops(key: str, form: Formula, run: Compiled, pull: Compiled) -> Loops:
    names = {**_names(form), "_run": run, "_pull": pull}
    loops = forward_loops.run, forward_loops.recall, backward_loops.backward
    return Loops(*(compiled(_copy(loop, names, key)) for loop in loops))


def _copy(loop: Compiled, names: dict[str, object], key: str = "") -> Compiled:
    name = f"{loop.__name__}_{key}"
    copy = FunctionType(loop.__code__, {**loop.__globals__, **names}, name)
    copy.__qualname__ = name
    return copy


def _run(gates, state, units):  # type: ignore[no-untyped-def]
    after = _as_states(_step(*(gates + state + units)))  # type: ignore[no-untyped-call]
    return after, gates[:GATES]


def _pull(gates, state, _, units, g):  # type: ignore[no-untyped-def]
    after = _as_states(_step(*seeded(gates + state + units)))  # type: ignore[no-untyped-call]
    gradients = pulled(after, g, ALL)
    whole, rest = gradients[:WHOLE], gradients[WHOLE:]
    driven, rest = rest[:SPLIT], rest[SPLIT:]
    recurrent, rest = rest[:SPLIT], rest[SPLIT:]
    others = rest[1:]
    return whole + recurrent + driven, rest[:1], others[:OTHERS], others[OTHERS:]


def _as_states(returned):  # type: ignore[no-untyped-def]
    """Return what a step returned as a tuple."""


@overload(_as_states)
def _as_tuple(returned):  # type: ignore[no-untyped-def] # numba compares argument names
    if isinstance(returned, types.BaseTuple):
        return lambda returned: returned
    return lambda returned: (returned,)
