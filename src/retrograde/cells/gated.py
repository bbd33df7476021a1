"""``GatedCell``: a cell of one's own as gates and one elementwise function, run by compiled loops.

Only the outputs, which the caller holds anyway, and the other parts of each state are kept. The
backward pass computes the gates of some steps again by one product, their slopes by autograd, and
sweeps over them (:mod:`retrograde.kernels.cpu.formulas`). Gradients of weights are one product for
all these steps.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from retrograde.errors import BudgetError, CellError
from retrograde.kernels.cpu.formulas import (
    FUNCTIONS,
    Formula,
    FormulaLoops,
    check_elementwise,
    loops_of,
)
from retrograde.kernels.cpu.llvm.threads import paced
from retrograde.kernels.cpu.products import add_outer, linear, sum_of_rows, times
from retrograde.plan.fit import Curve, Fit, Highest
from retrograde.recurrent.fastest import fit_measured
from retrograde.replay.surroundings import Surroundings
from retrograde.replay.trees import Tensors
from retrograde.run.core import Core, Emit, Gradients, Tape, discard
from retrograde.run.layout import InMemory, Inputs, Straight
from retrograde.run.transforms import besides_forward
from retrograde.sizes.footprint import footprint
from retrograde.units import Memory, as_bytes

# The bytes of the arrays of a block of steps, which should stay in the last cache.
_BLOCK_BYTES = 4 * 2**20

# Nominal costs of calls, in forward steps: of one that advances, of one that records and is
# backpropagated, and of a block. A block takes some 110 µs, and a step of a small layer 6 µs.
_CALL_STEPS, _RECORD_STEPS, _BLOCK_STEPS = 15.0, 40.0, 20.0
# The parts of a budget that a block may take. The first is a single step, and so the least.
_SHARES = 0.0, 0.2, 0.45, 0.7

_WEIGHTS = "weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_units"


class GatedCell(nn.Module):
    """A recurrent cell as data: how many gates it has, and what it computes from them.

    A subclass sets the numbers and defines :meth:`step`. It is a module ``cell(x, state) -> (h,
    state)`` for x (B, I), and its state is h (B, H), or a tuple of ``states`` such tensors. In
    :func:`retrograde.unroll` and :class:`retrograde.Recurrent` with ``memory=``, compiled loops run
    all steps, and the gradient is that of the plain loop up to rounding. Without a budget, in other
    precisions than float32 and float64, under autocast, or with sequences of several lengths, the
    plain loop runs.

    Attributes:
        gates: K, the rows of H numbers that W x + b + U h + b' has.
        states: the parts of the state; the first, h, is the output and enters the gates.
        split: how many of the last gates reach ``step`` in two parts, as a GRU's third.
        units: how many numbers of its own each unit has, such as peepholes or time constants.

    Args:
        input_size: I.
        hidden_size: H.
        bias: whether there are b and b'.
        device, dtype: of the parameters, which are ``weight_ih`` (K·H, I), ``weight_hh`` (K·H, H),
            ``bias_ih`` and ``bias_hh`` (K·H,), and ``weight_units`` (units, H). All begin as
            torch's cells do, uniformly within 1/√H.

    Raises:
        CellError: ``step`` is not a static method, or no elementwise function of its arguments.

    Example:
        >>> import retrograde as rg
        >>> class PeepholeLSTM(rg.GatedCell):
        ...     gates, states, units = 4, 2, 3
        ...
        ...     @staticmethod
        ...     def step(i, f, g, o, h, c, p_i, p_f, p_o):
        ...         i, f = torch.sigmoid(i + p_i * c), torch.sigmoid(f + p_f * c)
        ...         c = f * c + i * torch.tanh(g)
        ...         return torch.sigmoid(o + p_o * c) * torch.tanh(c), c
        >>> x = torch.randn(50, 8, 3)
        >>> y, (h, c) = rg.Recurrent(PeepholeLSTM(3, 5), memory="10%")(x)
        >>> y.sum().backward()
        >>> y.shape, bool((y[-1] == h).all())
        (torch.Size([50, 8, 5]), True)
    """

    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1
    split: ClassVar[int] = 0
    units: ClassVar[int] = 0
    #: ``step(*gates, *state, *units)`` returns the new state, h first. The gates are K − ``split``
    #: whole ones, then the others' parts from x, and then their parts from h. All arguments are
    #: tensors (…, H), or can be broadcast to that.
    step: ClassVar[Callable[..., Any]]
    weight_ih: Tensor
    weight_hh: Tensor

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(inspect.getattr_static(type(self), "step", None), staticmethod):
            raise CellError(
                f"{type(self).__name__} has no static method step: expected @staticmethod def "
                "step(*gates, *state, *units), which returns the new state"
            )
        self.input_size, self.hidden_size = input_size, hidden_size
        wide = self.gates * hidden_size
        shapes: list[tuple[int, ...]] = [(wide, input_size), (wide, hidden_size), (wide,), (wide,)]
        for name, shape in zip(_WEIGHTS, [*shapes, (self.units, hidden_size)], strict=True):
            absent = (name.startswith("bias") and not bias) or not shape[0]
            value = None if absent else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, value)
        self.reset_parameters()
        does = check_elementwise(self.formula, hidden_size)
        if does is not None:
            raise CellError(
                f"{type(self).__name__}.step {does}: expected {self.states} results, each an "
                "elementwise function of its arguments"
            )

    @property
    def formula(self) -> Formula:
        """The cell as data."""
        return Formula(type(self).step, self.gates, self.states, self.split, self.units)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.hidden_size**-0.5), self.hidden_size**-0.5)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Run one step; a state of None is zeros."""
        state = self.zeros(x) if state is None else state
        before = state if isinstance(state, tuple | list) else (state,)
        shape = *x.shape[:-1], self.gates, self.hidden_size
        w_ih, w_hh, b_ih, b_hh, units = self._weights().values()
        d = nn.functional.linear(x, cast(Tensor, w_ih), b_ih).view(shape)
        u = nn.functional.linear(before[0], cast(Tensor, w_hh), b_hh).view(shape)
        after = self.formula.after(d, u, *before, *(() if units is None else units))
        return after[0], after if self.states > 1 else after[0]

    def _weights(self) -> dict[str, Tensor | None]:
        """Return the weights by name. Each is read only once, since it may be computed."""
        return {name: getattr(self, name) for name in _WEIGHTS}

    def zeros(self, x: Tensor) -> Any:
        """Return the state before the first of steps x (…, I)."""
        zeros = tuple(x.new_zeros(*x.shape[:-1], self.hidden_size) for _ in range(self.states))
        return zeros if self.states > 1 else zeros[0]

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


def runs_by_loops(cell: GatedCell, x: Sequence[Tensor], state: Tensors) -> bool:
    """Return whether compiled loops can run a cell: one without hooks, on inputs (T, B, I), with
    all tensors in one precision."""
    if type(cell).forward is not GatedCell.forward or besides_forward(cell) is not None:
        return False
    own, size, samples = cell._weights(), cell.hidden_size, x[0].shape[1] if x[0].dim() == 3 else 0
    shapes = [(cell.gates * size, n) for n in (cell.input_size, size)]
    shapes += [(cell.gates * size,), (cell.gates * size,), (cell.units, size)]  # type: ignore[list-item]
    tensors = [t for t in (*x, *state, *own.values()) if t is not None]
    kinds = {(t.dtype, t.device.type, type(t) in (Tensor, nn.Parameter)) for t in tensors}
    if (
        samples < 1
        or x[0].shape[2] != cell.input_size
        or [s.shape for s in state] != [(samples, size)] * cell.states
        or any(t is not None and t.shape != n for t, n in zip(own.values(), shapes, strict=True))
        or kinds not in ({(torch.float32, "cpu", True)}, {(torch.float64, "cpu", True)})
        or torch.is_autocast_enabled("cpu")
    ):
        return False
    found = loops_of(cell.formula, x[0].dtype)
    if isinstance(found, str):
        _warn(type(cell).__qualname__, found)
    return not isinstance(found, str)


@functools.cache
def _warn(name: str, reason: str) -> None:
    known = ", ".join(f"torch.{f.__name__}" for f in FUNCTIONS)
    warnings.warn(
        f"{name}.step cannot be compiled ({reason}): it runs as any cell does, with the same "
        f"results up to rounding, and slower; use numbers, + - * / and {known}",
        RuntimeWarning,
        stacklevel=2,
    )


@dataclass
class _GatedTape(Tape):
    """A recorded range: the state before it (S, B, H), and the other parts of the state before each
    step (S − 1, L, B, H)."""

    first: Tensor
    rest: Tensor


class GatedCore(Core):
    """A gated cell over ranges of steps. The backward pass runs in blocks of at most ``rows`` rows,
    where a row is one step of one sample."""

    def __init__(self, cell: GatedCell, rows: int = 1) -> None:
        self.cell, self.formula, self.rows = cell, cell.formula, rows
        self.surroundings = Surroundings(cell.weight_ih.device)
        self.weights, self.size = cell._weights(), cell.hidden_size
        self.compiled = loops_of(self.formula, cell.weight_hh.dtype)

    @property
    def parameters(self) -> Tensors:
        return [w for w in self.weights.values() if w is not None and w.requires_grad]

    def totals(self) -> list[Tensor | None]:
        return [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in self.parameters]

    def room(self, inputs: Inputs) -> Tensors:
        """Return the outputs of all steps, which are h after each."""
        (x,) = cast(InMemory, inputs).tensors
        return [x.new_empty(*x.shape[:-1], self.size)]

    def held(self, tensors: Tensors) -> InMemory:
        """Return the inputs, with memory for the outputs."""
        layout = Straight(len(tensors[0]), fused=True)
        return layout.read(tensors, self.room(layout.read(tensors)))

    @paced
    @torch.no_grad()
    def advance(
        self, inputs: Inputs, start: int, stops: Sequence[int], state: Tensors, emit: Emit | None
    ) -> list[Tensors]:
        now, found, loops = torch.stack(state), [], self._loops()
        rest = now.new_empty(self.formula.states - 1, 0, *now.shape[1:])
        for a, b in pairwise([start, *stops]):
            self._run(loops, inputs, a, b, now, rest, emit)
            found.append([*now.clone()])
        return found

    @paced
    @torch.no_grad()
    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> Tape:
        first = torch.stack(state)
        now = first.clone()
        rest = first.new_empty(self.formula.states - 1, stop - start, *first.shape[1:])
        self._run(self._loops(), inputs, start, stop, now, rest, emit)
        wanted, passes = [*inputs.differentiable], [True] * len(state)
        x = inputs[slice(start, stop)]
        return _GatedTape(start, stop, x, wanted, passes, [*now], (), first, rest)

    def _loops(self) -> FormulaLoops:
        units = self.weights["weight_units"]
        hidden = cast(Tensor, self.weights["weight_hh"])
        given = hidden[:0] if units is None else units
        return FormulaLoops(self.formula, self.compiled, hidden, self.weights["bias_hh"], given)

    def _run(
        self, loops: FormulaLoops, inputs: Inputs, start: int, stop: int, now: Tensor, rest: Tensor,
        emit: Emit | None,
    ) -> None:  # fmt: skip
        """Run a range forward; ``now`` (S, B, H) goes from before it to after it."""
        held = cast(InMemory, inputs).outputs
        if held and emit is None and self.formula.states == 1:  # the states exist already
            now[0].copy_(held[0][stop - 1])
            return
        steps = max(1, self.rows // now.shape[1])
        for a in range(start, stop, steps):
            b = min(a + steps, stop)
            (x,) = inputs[slice(a, b)]
            writes = bool(held) and emit not in (None, discard)
            y = held[0][a:b] if writes else x.new_empty(b - a, *now.shape[1:])
            into = rest[:, a - start : b - start] if rest.numel() else rest
            own = into if into.is_contiguous() else torch.empty_like(into)
            loops.forward(self._driven(x), now, y, own)
            if own is not into:
                into.copy_(own)
            if emit is not None:
                emit(a, b, [y])

    def _driven(self, x: Tensor) -> Tensor:
        """Return the inputs' part of the gates (L, B, K·H), with all biases of whole gates."""
        bias, other = self.weights["bias_ih"], self.weights["bias_hh"]
        if other is not None and bias is not None:
            whole = (self.formula.gates - self.formula.split) * self.size
            bias = bias.detach().clone()
            bias[:whole] += other.detach()[:whole]
        found = x.new_empty(*x.shape[:2], self.formula.gates * self.size)
        weights = cast(Tensor, self.weights["weight_ih"]).detach()
        linear(x.detach().contiguous().flatten(0, 1), weights, bias, found.flatten(0, 1))
        return found

    @paced
    @torch.no_grad()
    def backpropagate(self, tape: Any, gradients: Gradients) -> None:
        given = zip(tape.state_after, gradients.states, strict=True)
        g = torch.stack([torch.zeros_like(t) if s is None else s for t, s in given])
        names = [n for n, w in self.weights.items() if w is not None and w.requires_grad]
        totals = dict(zip(names, cast(Tensors, gradients.parameters), strict=True))
        (held,), loops = cast(InMemory, gradients.read).outputs, self._loops()
        (dy,), (total,) = gradients.of_outputs(slice(tape.start, tape.stop)), gradients.inputs
        steps = max(1, self.rows // g.shape[1])
        for a in reversed(range(tape.start, tape.stop, steps)):
            b = min(a + steps, tape.stop)
            part = slice(a - tape.start, b - tape.start)
            before = g.new_empty(len(g), b - a, *g.shape[1:])
            before[0, 0] = held[a - 1] if part.start else tape.first[0]
            before[0, 1:] = held[a : b - 1]
            before[1:] = tape.rest[:, part]
            own = None if dy is None else dy[part].contiguous()
            dx = None if total is None else total[a:b]
            self._block(tape.inputs[0][part], before, own, g, loops, totals, dx)
            del own, before  # BUDGET: before the next ones are made
        gradients.states = [*g]

    def _block(
        self, x: Tensor, before: Tensor, dy: Tensor | None, g: Tensor, loops: FormulaLoops,
        totals: dict[str, Tensor], dx: Tensor | None,
    ) -> None:  # fmt: skip
        """Backpropagate some steps; ``dx`` receives the gradient of their inputs."""
        x, d = x.detach().contiguous(), self._driven(x)
        to_units = totals.get("weight_units", torch.empty_like(loops.units))
        apart = loops.backward(d, before, dy, g, to_units)
        gates = d.flatten(0, 1)
        self._add(totals, "hh", gates, before[0].flatten(0, 1))
        gates[:, loops.whole :] = apart.flatten(0, 1)
        self._add(totals, "ih", gates, x.flatten(0, 1))
        if dx is not None:
            found = dx if dx.is_contiguous() else torch.empty_like(x)
            weights = cast(Tensor, self.weights["weight_ih"]).detach()
            times(gates, weights.contiguous(), found.flatten(0, 1))
            if found is not dx:
                dx.copy_(found)

    def _add(self, totals: dict[str, Tensor], name: str, gates: Tensor, by: Tensor) -> None:
        if f"weight_{name}" in totals:
            add_outer(gates, by, totals[f"weight_{name}"])
        if f"bias_{name}" in totals:
            totals[f"bias_{name}"] += sum_of_rows(gates)


def fit_gated(
    cell: GatedCell, tensors: Tensors, state: Tensors, memory: Memory, usual: Curve | Highest, *,
    extra: int,
) -> tuple[Fit, int]:  # fmt: skip
    """Return the fastest plan of a cell within a budget, and the rows of a block. ``usual`` has the
    bytes of ordinary backpropagation, and ``extra`` is held besides. Raises BudgetError."""
    length, samples = tensors[0].shape[:2]
    budget = as_bytes(memory, usual(length))
    numbers = 2 * cell.gates + cell.split + 3 * cell.states
    each = numbers * cell.hidden_size * tensors[0].element_size()
    costs: Any = {"call_steps": _CALL_STEPS, "record_steps": _RECORD_STEPS, "scheduled": True}
    best: tuple[float, Fit, int] | None = None
    for share in _SHARES:
        rows = max(samples, int(min(share * budget, _BLOCK_BYTES)) // each)
        core = GatedCore(cell, rows)
        read = core.held(tensors)
        sizes = footprint(core, read, state, ordinary=usual, memory=budget)
        sizes = replace(sizes, extra_bytes=sizes.extra_bytes + extra, **costs)
        try:
            found, _ = fit_measured(core, read, state, memory, sizes)
        except BudgetError:
            if best is None:
                raise
            break
        time = found.time + length * samples / rows * _BLOCK_STEPS
        if best is None or time < best[0]:
            least = found.minimum_bytes if best is None else best[1].minimum_bytes
            best = time, replace(found, minimum_bytes=least), rows
    assert best is not None
    return best[1:]
