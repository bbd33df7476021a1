"""Cells of the user's own as formulas: gates, and one elementwise function of them.

With K gates, of which the last ``split`` stay in two parts, and S parts of a state, h first:

    d = W x + b;  u = U h + b'                           (L, B, K, H)
    h, … = step(d + u of the whole gates, the other d, the other u, h, …, *units)

A CPU's loops compile ``step`` twice, for vectors and for duals
(:mod:`retrograde.kernels.cpu.llvm.duals`). The forward pass keeps no gates. The backward pass
computes those of many steps by products. Its sweep runs ``step`` with derivatives, and multiplies
them by the gradient g of the state at once:

    a = Σ_s g_s ∂step_s/∂(d, u);  g ← Σ_s g_s ∂step_s/∂(h, …), and h's part + a U
"""

import functools
import hashlib
import inspect
import math
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from retrograde.kernels.cpu.llvm.lanes import Compiled
from retrograde.kernels.cpu.llvm.threads import numbered, parts_for, share
from retrograde.kernels.cpu.llvm.tiles import panels, whole_vectors
from retrograde.kernels.cpu.products import linear
from retrograde.kernels.cpu.sweep import ELEMENT_WORK

#: A formula's loops: forward, and the sweep backward.
Loops = tuple[Compiled, Compiled]

#: What a ``step`` may consist of, besides ``+ − * /``, numbers and ``detach``.
FUNCTIONS = torch.sigmoid, torch.tanh, torch.relu, torch.heaviside


@dataclass(frozen=True)
class Formula:
    """A cell as data: K gates, S parts of a state, and V numbers of each unit; see the legend."""

    step: Callable[..., Any]
    gates: int
    states: int = 1
    split: int = 0
    units: int = 0

    def after(self, d: Tensor, u: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return the state after steps from gates (…, K, H), the state before, and the units."""
        whole = self.gates - self.split
        sums = (d[..., :whole, :] + u[..., :whole, :]).unbind(-2)
        apart = *d[..., whole:, :].unbind(-2), *u[..., whole:, :].unbind(-2)
        found = self.step(*sums, *apart, *others)
        return found if isinstance(found, tuple) else (found,)


class FormulaLoops:
    """The sequential parts of a formula's passes, with its weights.

    ``loops`` are those of :func:`loops_of`. ``hidden`` is U (K·H, H), ``bias`` b' (K·H,) or None,
    and ``units`` (V, H).
    """

    def __init__(
        self, formula: Formula, loops: Loops, hidden: Tensor, bias: Tensor | None, units: Tensor
    ) -> None:
        self.formula, self.loops, self.hidden = formula, loops, hidden.detach().contiguous()
        self.units, self.whole = units.detach(), (formula.gates - formula.split) * hidden.shape[1]
        self.bias = hidden.new_zeros(len(hidden))
        if bias is not None:  # the whole gates have theirs already
            self.bias[self.whole :] = bias.detach()[self.whole :]

    @functools.cached_property
    def _onward(self) -> Tensor:
        return panels(self.hidden.t())[0]

    @functools.cached_property
    def _back(self) -> Tensor:
        return panels(self.hidden)[0]

    def forward(self, d: Tensor, state: Tensor, outputs: Tensor, rest: Tensor) -> None:
        """Run L steps.

        Args:
            d: the inputs' part of the gates (L, B, K·H), which has b' of the whole gates too.
            state: (S, B, H), overwritten by that after the steps.
            outputs: receives h after each step (L, B, H).
            rest: receives the other parts before each step (S − 1, L, B, H), unless it is empty.
        """
        arrays = d, outputs, rest, self.bias, self._onward, state, self.units
        parts = self._parts(d)
        share(self.loops[0], parts, *(t.numpy() for t in arrays), self._sums(state).numpy())

    def backward(
        self, d: Tensor, before: Tensor, dy: Tensor | None, g: Tensor, to_units: Tensor
    ) -> Tensor:
        """Backpropagate L steps, and return the gradient of d's split gates (L, B, split·H).

        Args:
            d: as above; overwritten by the gradients of the whole gates, and of the split u.
            before: the states before each step (S, L, B, H).
            dy: the gradient of h after each step (L, B, H), or None for zero.
            g: the gradient of the state after the steps (S, B, H), overwritten by that before them.
            to_units: (V, H), to which the gradient of the units is added.
        """
        apart = d[..., self.whole :].clone()
        d[..., self.whole :] = self.bias[self.whole :]
        linear(before[0].flatten(0, 1), self.hidden, None, d.flatten(0, 1), add=True)
        losses, parts = d[:0] if dy is None else dy, numbered(self._parts(d))
        own = to_units.new_zeros(len(parts), *to_units.shape)
        arrays = d, apart, before, losses, self._back, self.units, g, own, self._sums(g)
        share(self.loops[1], parts, *(t.numpy() for t in arrays))
        to_units += own.sum(0)
        return apart

    def _parts(self, d: Tensor) -> list[tuple[int, int]]:
        return parts_for(d.shape[1], d.numel() * (self.hidden.shape[1] + ELEMENT_WORK))

    def _sums(self, state: Tensor) -> Tensor:
        return state.new_empty(state.shape[1], int(whole_vectors(len(self.hidden))))


def loops_of(formula: Formula, dtype: torch.dtype) -> Any:
    """Return the compiled loops of a formula, or the reason why its step cannot be compiled.

    The step's code and the numbers that it reads decide which loops these are.
    """
    step = formula.step
    if not isinstance(step, types.FunctionType) or step.__defaults__ or step.__kwdefaults__:
        return "it is no function of Python's, or has default arguments"
    names, code = inspect.getclosurevars(step), step.__code__
    read = {**names.globals, **names.nonlocals}
    numbers = {name: value for name, value in read.items() if isinstance(value, int | float)}
    for name in sorted(read.keys() - numbers.keys()):
        if read[name] is not torch and read[name] is not math:
            return f"it reads {name}, which is neither a number nor torch or math"
    if any(isinstance(value, types.CodeType) for value in code.co_consts):
        return "it defines a function"
    of = code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_freevars
    shape = formula.gates, formula.states, formula.split, formula.units
    key = hashlib.sha256(repr((of, sorted(numbers.items()), shape)).encode()).hexdigest()[:24]
    if _FIRST.setdefault(step, key) != key:
        return (
            "a number that it reads has changed, and each would take seconds; make it one of units"
        )
    return _compiled(key, formula, dtype)


_FIRST: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by step, the key of its first numbers


@functools.lru_cache(maxsize=64)
def _compiled(key: str, formula: Formula, dtype: torch.dtype) -> Any:
    from numba.core.errors import NumbaError

    from retrograde.kernels.cpu.formula_loops import compile_formula

    try:
        return compile_formula(key, formula, dtype)
    except NumbaError as error:
        lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
        return next((line for line in lines if line and not line.startswith("Failed")), "")


def check_elementwise(formula: Formula, size: int) -> str | None:
    """Return what a formula's step does beyond an elementwise function, or None.

    The step runs on random numbers: on all at once, and on some units and samples by themselves.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)

    d, u = (numbers(3, formula.gates, size) for _ in range(2))
    state, units = numbers(formula.states, 3, size), numbers(formula.units, size)

    def run(samples: slice, of: slice) -> Sequence[Any]:
        return formula.after(
            d[samples, :, of], u[samples, :, of], *state[:, samples, of], *units[:, of]
        )

    every = slice(None)
    whole = run(every, every)
    if len(whole) != formula.states:
        return f"returns {len(whole)} tensors"
    if any(not isinstance(t, Tensor) or t.shape != (3, size) for t in whole):
        return "returns something of another shape"
    for part in ((slice(1), every), (every, slice(1)), (slice(1, 3), slice(size // 2, size))):
        for t, alone in zip(whole, run(*part), strict=True):
            if not torch.allclose(t[part], alone, rtol=1e-12, atol=0, equal_nan=True):
                return "mixes units or samples, or draws random numbers"
    return None
