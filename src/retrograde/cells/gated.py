"""``GatedCell``: a cell of one's own as gates and one elementwise function, run by compiled loops.

Such a cell is a layer (:mod:`retrograde.recurrent.core`): its outputs, which the caller holds
anyway, are one part of its states. It has the loops and the plans of torch's cells, and a step that
is compiled with its derivatives (:mod:`retrograde.kernels.cpu.loops`).
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from retrograde.errors import CellError
from retrograde.kernels.cells import Formula
from retrograde.kernels.cpu.loops import FUNCTIONS, loops_of
from retrograde.plan.fit import Fit
from retrograde.recurrent.bytes import Layer, sums_at_once
from retrograde.recurrent.fused import held_plan
from retrograde.recurrent.plan import HeldPlan, Planner
from retrograde.recurrent.spans import Sequences
from retrograde.recurrent.vendor import Layers
from retrograde.replay.trees import Tensors
from retrograde.run.transforms import besides_forward
from retrograde.units import Memory

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
        does = _beyond_elementwise(self.formula, hidden_size)
        if does is not None:
            raise CellError(
                f"{type(self).__name__}.step {does}: expected {self.states} results, each an "
                "elementwise function of its arguments"
            )

    @property
    def formula(self) -> Formula:
        """The cell as data."""
        class_ = type(self)
        return Formula(class_.gates, class_.states, class_.split, class_.units, class_.step)

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
    weights, size = cell._weights(), cell.hidden_size
    gates, samples = cell.gates * size, x[0].shape[1] if x[0].dim() == 3 else 0
    shapes = [(gates, cell.input_size), (gates, size), (gates,), (gates,), (cell.units, size)]
    tensors = [t for t in (*x, *state, *weights.values()) if t is not None]
    kinds = {(t.dtype, t.device.type, type(t) in (Tensor, nn.Parameter)) for t in tensors}
    if (
        samples < 1
        or x[0].shape[2] != cell.input_size
        or [s.shape for s in state] != [(samples, size)] * cell.states
        or any(t.shape != n for t, n in zip(weights.values(), shapes, strict=True) if t is not None)
        or (weights["bias_ih"] is None) != (weights["bias_hh"] is None)
        or kinds not in ({(torch.float32, "cpu", True)}, {(torch.float64, "cpu", True)})
        or torch.is_autocast_enabled("cpu")
    ):
        return False
    loops = loops_of(cell.formula, x[0].dtype)
    if isinstance(loops, str):
        _warn(type(cell).__qualname__, loops)
    return not isinstance(loops, str)


@functools.cache
def _warn(name: str, reason: str) -> None:
    functions = ", ".join(f"torch.{f.__name__}" for f in FUNCTIONS)
    warnings.warn(
        f"{name}.step cannot be compiled ({reason}): it runs as any cell does, with the same "
        f"results up to rounding, and slower; use numbers, + - * / and {functions}",
        RuntimeWarning,
        stacklevel=2,
    )


def net_of(cell: GatedCell) -> Layers:
    """Return a cell as a layer that held layers can run. Its weights are contiguous."""
    weights = [w.contiguous() for w in cell._weights().values() if w is not None]
    return Layers(cell.formula, weights, 1, len(weights) > 3)


def joined(state: Tensors) -> Tensors:
    """Return the parts of a state (B, H) as a layer has them: h, and all others side by side."""
    others = state[1:] if len(state) < 3 else [torch.cat(state[1:], -1)]
    return [t.unsqueeze(0) for t in (state[0], *others)]


def parted(state: Tensors) -> Tensors:
    """Return the parts of a state from those that a layer has."""
    h, *others = (t.squeeze(0) for t in state)
    return [h, *(part for t in others for part in t.split(h.shape[-1], -1))]


def fit_gated(
    cell: GatedCell, x: Tensor, memory: Memory, usual: int, extra: int
) -> tuple[HeldPlan, Fit]:
    """Return the fastest plan of a cell within a budget. ``usual`` are the bytes of ordinary
    backpropagation, and ``extra`` is held besides. Raises BudgetError."""
    net, (length, samples, width) = net_of(cell), x.shape
    layer = Layer(
        kind=cell.formula,
        batch=samples,
        width=width,
        size=cell.hidden_size,
        item=x.element_size(),
        threads=torch.get_num_threads(),
        needs_x=x.requires_grad,
        straight=x.is_contiguous(),
        views=True,
        at_once=sums_at_once(length, samples),
    )
    copied = sum(w.nbytes for w in net.weights if not w.requires_grad)
    copied += sum(2 * w.nbytes for w in cell.parameters() if not w.is_contiguous())
    most = held_plan(net, length, samples).block
    planner = Planner((layer,), most, extra=extra, copied=copied, torchs=False)
    plan, fit = planner.fit(Sequences(length, samples), memory, usual)
    assert plan is not None
    return plan, fit


def _beyond_elementwise(formula: Formula, size: int) -> str | None:
    """Return what a formula's step does beyond an elementwise function, or None. The step runs on
    random numbers: on all at once, and on some units and samples by themselves."""
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
