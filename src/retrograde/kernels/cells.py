"""The transposed Jacobians of torch's recurrent cells, in the factors that a backward pass uses.

The backward pass of a step turns the gradient of the state after it into that of the state before
it. In all of torch's cells this product has three parts. The *slopes* are numbers that depend on
the step. The hidden weights U are the same for all steps. GRU and LSTM also have a path that keeps
a part of the state:

    RNN    g ← (g ∘ s) U                     s = 1 − h_t² (tanh), 1 where h_t > 0 (ReLU)
    GRU    g ← g ∘ z + (g ∘ s_r) U_r + (g ∘ s_z) U_z + (g ∘ s_m) U_n           W20, eq. 4.4
               s_n = (1 − z)(1 − n²);  s_m = s_n r;  s_r = s_n m r (1 − r);
               s_z = (h_{t−1} − n) z (1 − z);  m = U_n h_{t−1} + b_hn;  torch's n = tanh(… + r m)
    LSTM   d = g_c + g_h ∘ e;  g_h ← (d ∘ s_i) U_i + (d ∘ s_f) U_f + (d ∘ s_g) U_g + (g_h ∘ s_o) U_o
           g_c ← d ∘ f;  e = o (1 − tanh² c);  s_i = g i (1 − i);  s_f = c_{t−1} f (1 − f);
               s_g = i (1 − g²);  s_o = tanh(c) o (1 − o)

With a = s_i U_i + s_f U_f + s_g U_g, the LSTM's Jacobian is the product of two sparse factors,
``[[I, e], [0, I]]`` and ``[[s_o U_o, 0], [a, f]]``. The dense matrix is never formed.

Slopes are functions of the states, so one matrix product computes them for many steps at once. A
backward pass therefore keeps only the hidden states, and an LSTM's c between blocks of steps. The
gradient of the gates is ``g ∘ s``. One product for many steps turns it into the gradients of inputs
and of weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from retrograde.kernels.cpu.products import linear

#: The cells, by torch's own names for them.
Kind = Literal["RNN_TANH", "RNN_RELU", "GRU", "LSTM"]


@dataclass(frozen=True)
class Formula:
    """A cell as data: K gates, S parts of a state, and V numbers of each unit.

    The weights have H rows for each gate. The last ``split`` gates reach the step in two parts:

    d = W x + b;  u = U h + b';  h, … = step(d + u of whole gates, other d, other u, h, …, *units)

    Torch's cells have no ``step`` here. If slopes follow ``from_outputs``, a backward pass needs no
    gates.
    """

    gates: int
    states: int = 1
    split: int = 0
    units: int = 0
    step: Callable[..., Any] | None = None
    from_outputs: bool = False

    @property
    def whole(self) -> int:
        """The gates that reach the step in one part."""
        return self.gates - self.split

    @property
    def row(self) -> int:
        """The gradients of gates that a unit has at each step."""
        return self.gates + self.split

    @property
    def others(self) -> int:
        """The parts of a state besides h. They are side by side in one tensor (B, others · H)."""
        return self.states - 1

    @property
    def aside(self) -> int:
        """The numbers of a unit and step that are kept beside gates: other parts, and U h."""
        return self.others + self.split

    @property
    def again(self) -> bool:
        """Whether a backward pass can compute gates again from inputs and h, step by step."""
        return self.states == 1 and not self.from_outputs

    @property
    def keeps(self) -> bool:
        """Whether a forward pass can keep the gates."""
        return self.states > 1 or self.step is not None

    def after(self, d: Tensor, u: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return the state after steps from gates (…, K, H), the state before, and the units."""
        assert self.step is not None
        whole = self.whole
        sums = (d[..., :whole, :] + u[..., :whole, :]).unbind(-2)
        apart = *d[..., whole:, :].unbind(-2), *u[..., whole:, :].unbind(-2)
        returned = self.step(*sums, *apart, *others)
        return returned if isinstance(returned, tuple) else (returned,)


#: One of torch's cells by name, or a formula.
AnyKind: TypeAlias = Kind | Formula

_FORMS: dict[Kind, Formula] = {
    "RNN_TANH": Formula(1, from_outputs=True),
    "RNN_RELU": Formula(1, from_outputs=True),
    "GRU": Formula(3, split=1),
    "LSTM": Formula(4, states=2),
}
#: The number K of gates of each cell; its weights have H rows for each gate.
GATES: dict[Kind, int] = {kind: form.gates for kind, form in _FORMS.items()}


def form_of(cell: AnyKind) -> Formula:
    """Return the numbers of one of torch's cells, or of a formula."""
    return cell if isinstance(cell, Formula) else _FORMS[cell]


#: The functions that turn gates into slopes: a GRU's and an LSTM's.
GateSlopes = tuple[Callable[[Tensor, Tensor, Tensor], "Slopes"], Callable[..., "Slopes"]]


@dataclass(frozen=True)
class Weights:
    """A layer's parameters in one direction, for K gates. They are torch's weight_ih (K·H, I),
    weight_hh (K·H, H), and bias_ih and bias_hh (K·H,), or None. A formula may have ``units`` (V, H)
    too."""

    kind: AnyKind
    inputs: Tensor
    hidden: Tensor
    bias_inputs: Tensor | None
    bias_hidden: Tensor | None
    units: Tensor | None = None

    @classmethod
    def of(cls, cell: AnyKind, parameters: Sequence[Tensor]) -> "Weights":
        """Return the weights from a layer's parameters in torch's order, with or without biases.
        Units come last."""
        *of_gates, units = parameters if len(parameters) % 2 else (*parameters, None)
        inputs, hidden, bias_inputs, bias_hidden = (*of_gates, None, None)[:4]
        assert inputs is not None
        assert hidden is not None
        return cls(cell, inputs, hidden, bias_inputs, bias_hidden, units)

    @property
    def form(self) -> Formula:
        """The numbers of the cell."""
        return form_of(self.kind)

    @property
    def size(self) -> int:
        """H, the number of hidden units."""
        return self.hidden.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, without absent ones."""
        return {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}

    def cast(self, dtype: torch.dtype) -> "Weights":
        """Return the weights in another dtype."""
        tensors: Any = {name: t.to(dtype) for name, t in self.tensors().items()}
        return replace(self, **tensors)

    @property
    def state_size(self) -> int:
        """Return the length of a state: H, or 2 H for (h, c)."""
        return self.form.states * self.size


@dataclass(frozen=True)
class Kept:
    """What a forward pass may keep. ``gates`` are an LSTM's i, f, g, o (L, B, 4 H), or the sums
    that enter a formula's gates. ``cells`` is c before each step (L, B, H); a formula has all other
    parts, and then U h of split gates."""

    gates: Tensor
    cells: Tensor

    def at(self, steps: slice) -> "Kept":
        """Return views of some steps."""
        return Kept(self.gates[steps], self.cells[steps])


@dataclass(frozen=True)
class Resets:
    """Where the samples of a layer begin anew, before some of its steps. ``starts`` (L, B) is true
    before such a step. ``entry`` (B, n) is the state that it begins with, and ``gradient`` (B, n)
    receives the sum of that state's gradients."""

    starts: Tensor
    entry: Tensor
    gradient: Tensor

    def at(self, steps: slice) -> "Resets":
        """Return views of some steps."""
        return replace(self, starts=self.starts[steps])

    def enter(self, t: int | slice, h: Tensor | None = None, c: Tensor | None = None) -> None:
        """Overwrite the states of those samples that begin anew before step t. States are (B, H),
        or (L, B, H) for a slice of L steps."""
        starts = self.starts[t].unsqueeze(-1)
        if h is not None:
            torch.where(starts, self.entry[:, : h.shape[-1]], h, out=h)
        if c is not None:
            torch.where(starts, self.entry[:, -c.shape[-1] :], c, out=c)

    def leave(self, t: int, g: Tensor) -> None:
        """Move the gradients (B, n) of the states before step t to those of the entries."""
        starts = self.starts[t].unsqueeze(-1)
        self.gradient.add_(torch.where(starts, g, 0.0))
        g.masked_fill_(starts, 0)


@dataclass(frozen=True)
class Block:
    """A block of a layer's steps for its backward pass. It has x (L, B, I), and h before and after
    each step (L, B, H). For an LSTM it has c before the first step (B, H), and the kept gates and
    cells if there are any."""

    x: Tensor
    before: Tensor
    after: Tensor
    c: Tensor | None = None
    kept: Kept | None = None
    resets: Resets | None = None

    def at(self, steps: slice) -> "Block":
        """Return views of some steps; c stays that before the whole block."""
        fields: Any = {name: getattr(self, name)[steps] for name in ("x", "before", "after")}
        optional = {"kept": self.kept, "resets": self.resets}
        fields |= {name: part.at(steps) for name, part in optional.items() if part is not None}
        return replace(self, **fields)

    def cast(self, dtype: torch.dtype) -> "Block":
        """Return the block in another dtype."""
        fields: Any = {name: getattr(self, name).to(dtype) for name in ("x", "before", "after")}
        return replace(self, **fields, c=None if self.c is None else self.c.to(dtype))


@dataclass
class Slopes:
    """The factors of the gradients of L steps of B samples; see the module's legend."""

    gates: Tensor  # (L, B, K, H): s of every gate, for products with the hidden weights
    keep: Tensor | None  # (L, B, H): the GRU's z, the LSTM's f; None for an RNN
    # (L, B, H): the GRU's s_n, which replaces s_m in products with the input weights. The LSTM's e,
    # from h to c. None for an RNN.
    inner: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Slopes":
        """Return the slopes with a function applied to each tensor."""
        keep = None if self.keep is None else change(self.keep)
        inner = None if self.inner is None else change(self.inner)
        return Slopes(change(self.gates), keep, inner)

    def at(self, index: int | slice) -> "Slopes":
        """Return views of some steps."""
        return self.map(lambda t: t[index])


def slopes(
    weights: Weights, x: Tensor, before: Tensor, after: Tensor, c: Tensor | None = None,
    gates: GateSlopes | None = None, kept_gates: Tensor | None = None, resets: Resets | None = None,
) -> Slopes:  # fmt: skip
    """Return the slopes of all L steps, computed at once. ``x`` is (L, B, I), ``before`` and
    ``after`` are h before and after each step (L, B, H). An LSTM needs c before the first step
    (B, H). If its gates were kept, ``kept_gates`` (L, B, 4 H), they are overwritten. ``gates`` may
    be faster forms of :func:`gru_slopes` and :func:`lstm_slopes`."""
    assert not isinstance(weights.kind, Formula)
    by_gru, by_lstm = gates or (gru_slopes, lstm_slopes)
    with torch.no_grad():
        match weights.kind:
            case "RNN_TANH":
                ones = torch.ones((), dtype=after.dtype, device=after.device)
                return Slopes(torch.addcmul(ones, after, after, value=-1).unsqueeze(2), None, None)
            case "RNN_RELU":
                # As in torch, a state that is NaN passes the gradient on.
                return Slopes((~(after <= 0)).to(after.dtype).unsqueeze(2), None, None)
            case "GRU":
                inputs = _linear(x, weights.inputs, weights.bias_inputs)
                hidden = _linear(before, weights.hidden, weights.bias_hidden)
                return by_gru(inputs, hidden, before)
            case "LSTM":
                assert c is not None
                anew = () if resets is None else (resets,)
                if kept_gates is not None:
                    return by_lstm(kept_gates, after, c, True, *anew)
                bias = weights.bias_hidden
                if bias is not None and weights.bias_inputs is not None:
                    bias = bias + weights.bias_inputs
                total = _linear(x, weights.inputs, bias)
                linear(before.flatten(0, 1), weights.hidden, None, total.flatten(0, 1), add=True)
                return by_lstm(total, after, c, False, *anew)


def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    sums = x.new_empty(*x.shape[:2], w.shape[0])
    linear(x.flatten(0, 1), w, bias, sums.flatten(0, 1))
    return sums


def gru_slopes(inputs: Tensor, hidden: Tensor, before: Tensor) -> Slopes:
    """Return a GRU's slopes. ``inputs`` and ``hidden`` (L, B, 3 H) are what inputs and states
    contribute to the gates, biases included. ``inputs`` may be overwritten, and the result
    overwrites ``hidden``. ``before`` is h before each step (L, B, H)."""
    size = before.shape[-1]
    rz, n, m = inputs[..., : 2 * size], inputs[..., 2 * size :], hidden[..., 2 * size :]
    rz.add_(hidden[..., : 2 * size]).sigmoid_()
    r, z = rz.chunk(2, -1)
    n.addcmul_(r, m).tanh_()
    keep = z.clone(memory_format=torch.contiguous_format)
    inner = torch.ops.aten.tanh_backward(1 - keep, n)
    s_r, s_z, _ = hidden.chunk(3, -1)
    torch.ops.aten.sigmoid_backward.grad_input(inner * m, r, grad_input=s_r)
    torch.ops.aten.sigmoid_backward.grad_input(before - n, z, grad_input=s_z)
    torch.mul(inner, r, out=m)
    return Slopes(hidden.unflatten(-1, (3, size)), keep, inner)


def lstm_slopes(
    gates: Tensor, after: Tensor, c: Tensor, activated: bool = False, resets: Resets | None = None
) -> Slopes:
    """Return an LSTM's slopes. ``gates`` (L, B, 4 H) are the sums that enter the gates, or i, f, g,
    o themselves if ``activated``. The result overwrites them. ``c`` is that before the first step
    (B, H). Faster forms compute tanh c = h / o from ``after``, h after each step (L, B, H)."""
    size = c.shape[-1]
    i, f, g, o = gates.chunk(4, -1)
    if not activated:
        gates[..., : 2 * size].sigmoid_()
        g.tanh_()
        o.sigmoid_()
    keep = f.clone(memory_format=torch.contiguous_format)
    before_c, after_c = _cell_states(keep, i * g, c, resets)
    tanh_c = after_c.tanh_()
    inner = torch.ops.aten.tanh_backward(o, tanh_c)
    torch.ops.aten.sigmoid_backward.grad_input(tanh_c, o, grad_input=o)
    torch.ops.aten.sigmoid_backward.grad_input(before_c, f, grad_input=f)
    s_i = torch.ops.aten.sigmoid_backward(g, i)
    torch.ops.aten.tanh_backward.grad_input(i, g, grad_input=g)
    i.copy_(s_i)
    return Slopes(gates.unflatten(-1, (4, size)), keep, inner)


def _cell_states(
    keep: Tensor, gain: Tensor, c: Tensor, resets: Resets | None
) -> tuple[Tensor, Tensor]:
    """Return an LSTM's c before and after each step: c_t = f_t c_{t−1} + (i g)_t."""
    after, now = c.new_empty(keep.shape), c
    for t in range(len(keep)):
        if resets is not None:
            now = now.clone()
            resets.enter(t, c=now)
        now = torch.addcmul(gain[t], keep[t], now, out=after[t])
    before = torch.cat([c.unsqueeze(0), after[:-1]])
    if resets is not None:
        resets.enter(slice(None), c=before)
    return before, after


def pull(step: Slopes, hidden: Tensor, gradients: Tensor) -> Tensor:
    """Multiply ``gradients`` (B, R, n) by the Jacobian of one step. B is any batch shape, R the
    rows of a sample. n is H, or 2 H for (h, c). The slopes are (B, K, H) and (B, H)."""
    gates, kept = _gates(step, gradients)
    return _joined(gates.flatten(-2) @ hidden, kept, gradients)


def pull_to_inputs(step: Slopes, weights: Weights, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`pull`, and the gradients of the step's inputs (B, R, I)."""
    gates, kept = _gates(step, gradients)
    before = _joined(gates.flatten(-2) @ weights.hidden, kept, gradients)
    if weights.kind == "GRU":  # the third gate's slope differs for the input weights
        assert step.inner is not None
        torch.mul(gradients, step.inner.unsqueeze(-2), out=gates[..., 2, :])
    return before, gates.flatten(-2) @ weights.inputs


def _gates(step: Slopes, gradients: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the gates (B, R, K, H), and those that bypass the gates (B, R, H).
    The latter go to a GRU's h or an LSTM's c before the step. An RNN has none."""
    keep, size = step.keep, step.gates.shape[-1]
    if step.gates.shape[-2] < 4:
        gates = gradients.unsqueeze(-2) * step.gates.unsqueeze(-3)
        return gates, None if keep is None else gradients * keep.unsqueeze(-2)
    assert keep is not None
    assert step.inner is not None
    g_h, g_c = gradients[..., :size], gradients[..., size:]
    d = torch.addcmul(g_c, g_h, step.inner.unsqueeze(-2))
    gates = torch.stack([d, d, d, g_h], -2).mul_(step.gates.unsqueeze(-3))
    return gates, d.mul_(keep.unsqueeze(-2))


def _joined(before: Tensor, kept: Tensor | None, gradients: Tensor) -> Tensor:
    if kept is None:
        return before
    return before.add_(kept) if before.shape == gradients.shape else torch.cat([before, kept], -1)
