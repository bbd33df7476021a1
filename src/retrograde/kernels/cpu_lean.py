"""A recurrent layer on a CPU in hardly any memory: a matrix product a step, by BLAS.

:mod:`retrograde.kernels.cpu` copies the weights into panels. Here BLAS reads them where they are,
and only a step's elements are a compiled loop: nearly as fast for layers of many units, slower for
small ones.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from retrograde.kernels import cpu_steps
from retrograde.kernels.cells import Slopes, Weights
from retrograde.kernels.team import ranges, share

__all__ = ["Forward", "sweep"]

State = tuple[Tensor, ...]

# Elements of a step that are worth a thread of their own.
_THREAD_ELEMENTS = 2**13


class Forward:
    """A layer's forward pass, a range of steps after another.

    Args:
        weights: the layer's parameters.
        samples: B.

    Example:
        >>> net = torch.nn.GRU(3, 5)
        >>> with torch.no_grad():
        ...     forward = Forward(Weights("GRU", *net.parameters()), 2)
        ...     x, h, y = torch.randn(7, 2, 3), torch.zeros(2, 5), torch.empty(7, 2, 5)
        ...     forward(x, (h,), y, forward.room(7))
        ...     torch.allclose(y, net(x)[0], atol=1e-6), torch.equal(h, y[-1])
        (True, True)
    """

    def __init__(self, weights: Weights, samples: int) -> None:
        self.weights, self.samples = weights, samples
        self.sums = weights.hidden.new_empty(samples, weights.hidden.shape[0])

    def room(self, steps: int) -> Tensor:
        """Where the gates of some steps can be (L, B, K·H)."""
        return self.sums.new_empty(steps, *self.sums.shape)

    def __call__(
        self, x: Tensor, state: State, outputs: Tensor, gates: Tensor, cells: Tensor | None = None
    ) -> None:
        """Run some steps; as :meth:`retrograde.kernels.cpu.Forward.__call__`."""
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
                arrays = given[t], self.sums.numpy(), added, *states, y[t]
                loop = functools.partial(cpu_steps.step_gru, *arrays)
            else:
                gates[t].addmm_(h, hidden)
                if weights.kind == "LSTM":
                    kept = before[t] if len(before) else none
                    loop = functools.partial(cpu_steps.step_lstm, given[t], *states, y[t], kept)
                else:
                    relu = weights.kind == "RNN_RELU"
                    loop = functools.partial(cpu_steps.step_rnn, given[t], *states, y[t], relu)
            _share(loop, h)


def sweep(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor) -> Tensor:
    """As :func:`retrograde.kernels.sweep.sweep`, for float32 and float64 on a CPU."""
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
            _share(functools.partial(cpu_steps.back_lstm, *arrays), past)
            torch.mm(flat[t], hidden, out=past)
            g[:, :size] = past
        else:
            _share(functools.partial(cpu_steps.back_state, *arrays, past.numpy()), past)
            torch.addmm(past, flat[t], hidden, out=g)
    return g


def _share(loop: Callable[[int, int], None], like: Tensor) -> None:
    """Call a loop on ranges of samples, on as many threads as the elements pay."""
    share(loop, ranges(len(like), 1 + like.numel() // _THREAD_ELEMENTS))
