"""A recurrent layer on a CPU with little extra memory: one BLAS matrix product for each step.

:mod:`retrograde.kernels.cpu` copies the weights into panels. Here BLAS reads the weights in place,
and only the elementwise part of a step is a compiled loop. This is nearly as fast for layers of
many units, and slower for small layers.

Arrays are named as in ``cpu_states`` and ``cpu_sweep``, but have one step. Those files repeat the
elementwise part inside their loops over steps. A call for each step would take a tenth to three
quarters more time there.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from retrograde.kernels.cells import Slopes, Weights
from retrograde.kernels.lanes import LANES, Reals, compiled, load, positive, sigmoid, store, tanh
from retrograde.kernels.team import ranges, share

__all__ = ["Forward", "sweep"]

State = tuple[Tensor, ...]

# The elements of a step for which one more thread pays.
_THREAD_ELEMENTS = 2**13


class Forward:
    """As :class:`retrograde.kernels.cpu.Forward`, but without a copy of the weights."""

    def __init__(self, weights: Weights, samples: int) -> None:
        self.weights = weights
        self.sums = weights.hidden.new_empty(samples, weights.hidden.shape[0])

    def room(self, steps: int) -> Tensor:
        """Return an uninitialized tensor for the gates of ``steps`` steps (L, B, K·H)."""
        return self.sums.new_empty(steps, *self.sums.shape)

    def __call__(
        self, x: Tensor, state: State, outputs: Tensor, gates: Tensor, cells: Tensor | None = None
    ) -> None:
        """Do the same as :meth:`retrograde.kernels.cpu.Forward.__call__`."""
        weights, hidden = self.weights, self.weights.hidden.t()
        into = torch.mm(x.flatten(0, 1), weights.inputs.t(), out=gates.flatten(0, 1))
        gru = weights.kind == "GRU"
        for bias in (weights.bias_inputs, None if gru else weights.bias_hidden):
            if bias is not None:
                into += bias
        h, states, none = state[0], [s.numpy() for s in state], outputs[:0].numpy()
        given, y = gates.numpy(), outputs.numpy()
        own = weights.bias_hidden
        added = (h.new_zeros(hidden.shape[1]) if own is None else own).numpy() if gru else none
        before = none if cells is None else cells.numpy()
        for t in range(len(x)):
            if gru:
                torch.mm(h, hidden, out=self.sums)
                sums = self.sums.numpy()
                loop = functools.partial(_step_gru, given[t], sums, added, *states, y[t])
            else:
                gates[t].addmm_(h, hidden)
                if weights.kind == "LSTM":
                    kept = before[t] if len(before) else none
                    loop = functools.partial(_step_lstm, given[t], *states, y[t], kept)
                else:
                    relu = weights.kind == "RNN_RELU"
                    loop = functools.partial(_step_rnn, given[t], *states, y[t], relu)
            _share(loop, h)


def sweep(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.sweep`, for float32 and float64 on a CPU."""
    length, samples, _, size = slopes.gates.shape
    g = g.clone(memory_format=torch.contiguous_format)
    lstm, flat = g.shape[-1] == 2 * size, slopes.gates.flatten(-2)
    none = np.empty((0, 0), flat.numpy().dtype)
    gates, past, known = flat.numpy(), g.new_empty(samples, size), g.numpy()
    parts = [None if t is None else t.numpy() for t in (slopes.keep, slopes.inner, dy)]
    for t in range(length - 1, -1, -1):
        keep, inner, losses = (none if part is None else part[t] for part in parts)
        arrays = gates[t], keep, inner, losses, known
        if lstm:
            _share(functools.partial(_back_lstm, *arrays), past)
            torch.mm(flat[t], hidden, out=past)
            g[:, :size] = past
        else:
            _share(functools.partial(_back_state, *arrays, past.numpy()), past)
            torch.addmm(past, flat[t], hidden, out=g)
    return g


def _share(loop: Callable[[int, int], None], like: Tensor) -> None:
    """Call a loop on ranges of samples, on as many threads as pay for the elements."""
    share(loop, ranges(len(like), 1 + like.numel() // _THREAD_ELEMENTS))


@compiled  # type: ignore[untyped-decorator]
def _step_rnn(sums: Reals, h: Reals, outputs: Reals, relu: bool, first: int, last: int) -> None:
    """Run a step of an RNN on ``sums`` (B, H), which may be the outputs' memory."""
    size = h.shape[1]
    z, states, y = sums.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at = size - j, b * size + j
            total = load(z, at, left)
            state = positive(total) if relu else tanh(total)
            store(states, at, state, left)
            store(y, at, state, left)


@compiled  # type: ignore[untyped-decorator]
def _step_gru(
    driven: Reals, sums: Reals, bias: Reals, h: Reals, outputs: Reals, first: int, last: int
) -> None:
    """Run a step of a GRU.

    ``driven`` is the inputs' part of the gates, ``sums`` (B, 3 H) is U h without its ``bias``.
    """
    size = h.shape[1]
    x, u, states, y = driven.reshape(-1), sums.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at, v = size - j, b * size + j, 3 * b * size + j
            r = load(x, v, left) + load(u, v, left) + load(bias, j, left)
            z = load(x, v + size, left) + load(u, v + size, left) + load(bias, size + j, left)
            r, z = sigmoid(r), sigmoid(z)
            m = load(u, v + 2 * size, left) + load(bias, 2 * size + j, left)
            n = tanh(load(x, v + 2 * size, left) + r * m)
            state = n + z * (load(states, at, left) - n)
            store(states, at, state, left)
            store(y, at, state, left)


@compiled  # type: ignore[untyped-decorator]
def _step_lstm(
    gates: Reals, h: Reals, c: Reals, outputs: Reals, before: Reals, first: int, last: int
) -> None:
    """Run a step of an LSTM.

    ``gates`` (B, 4 H) are the sums that enter the gates, overwritten by i, f, g, o. ``before``
    receives c before the step, unless it is empty.
    """
    size = h.shape[1]
    z, states, y = gates.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    cells, cells_before = c.reshape(-1), before.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at, v = size - j, b * size + j, 4 * b * size + j
            i, f = sigmoid(load(z, v, left)), sigmoid(load(z, v + size, left))
            g, o = tanh(load(z, v + 2 * size, left)), sigmoid(load(z, v + 3 * size, left))
            cell = load(cells, at, left)
            if before.shape[0]:
                store(cells_before, at, cell, left)
            cell = f * cell + i * g
            state = o * tanh(cell)
            store(z, v, i, left)
            store(z, v + size, f, left)
            store(z, v + 2 * size, g, left)
            store(z, v + 3 * size, o, left)
            store(cells, at, cell, left)
            store(states, at, state, left)
            store(y, at, state, left)


@compiled  # type: ignore[untyped-decorator]
def _back_state(
    gates: Reals,
    keep: Reals,
    inner: Reals,
    losses: Reals,
    g: Reals,
    before: Reals,
    first: int,
    last: int,
) -> None:
    """Backpropagate the elementwise part of a step of an RNN or GRU.

    Gradients overwrite the slopes ``gates`` (B, K·H) and ``inner``. ``before`` receives the part of
    the gradient that bypasses the gates.
    """
    size, width = g.shape[1], gates.shape[1]
    s, kept, s_n = gates.reshape(-1), keep.reshape(-1), inner.reshape(-1)
    known, terms, past = g.reshape(-1), losses.reshape(-1), before.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at = size - j, b * size + j
            x = load(known, at, left)
            if losses.shape[0]:
                x = x + load(terms, at, left)
            for k in range(b * width + j, (b + 1) * width, size):
                store(s, k, x * load(s, k, left), left)
            if keep.shape[0]:
                store(past, at, x * load(kept, at, left), left)
                store(s_n, at, x * load(s_n, at, left), left)
            else:
                store(past, at, x - x, left)


@compiled  # type: ignore[untyped-decorator]
def _back_lstm(
    gates: Reals, keep: Reals, inner: Reals, losses: Reals, g: Reals, first: int, last: int
) -> None:
    """Backpropagate the elementwise part of a step of an LSTM.

    Gradients overwrite the slopes ``gates`` (B, 4 H). In ``g`` (B, 2 H), the gradient of c after
    the step is overwritten by that of c before it.
    """
    size = g.shape[1] // 2
    s, f, e = gates.reshape(-1), keep.reshape(-1), inner.reshape(-1)
    known, terms = g.reshape(-1), losses.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at, v = size - j, b * size + j, 4 * b * size + j
            of_h = 2 * b * size + j
            x = load(known, of_h, left)
            if losses.shape[0]:
                x = x + load(terms, at, left)
            d = load(known, of_h + size, left) + x * load(e, at, left)
            store(known, of_h + size, d * load(f, at, left), left)
            store(s, v, d * load(s, v, left), left)
            store(s, v + size, d * load(s, v + size, left), left)
            store(s, v + 2 * size, d * load(s, v + 2 * size, left), left)
            store(s, v + 3 * size, x * load(s, v + 3 * size, left), left)
