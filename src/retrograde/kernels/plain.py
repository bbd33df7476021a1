"""A recurrent layer run forward by torch's operations, step by step, in hardly any memory.

The compiled loops (:mod:`retrograde.kernels.cpu`) have the weights once more, in panels; here they
are read where they are. It is the reference of :class:`retrograde.kernels.cpu.Forward`, and what
runs where a budget has no room for more.
"""

import torch
from torch import Tensor

from retrograde.kernels.cells import Weights

__all__ = ["Forward"]


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

    def room(self, steps: int) -> Tensor:
        """Where the gates of some steps can be (L, B, K·H)."""
        return self.weights.hidden.new_empty(steps, self.samples, self.weights.hidden.shape[0])

    def __call__(
        self,
        x: Tensor,
        state: tuple[Tensor, ...],
        outputs: Tensor,
        gates: Tensor,
        cells: Tensor | None = None,
    ) -> None:
        """Run some steps; as :meth:`retrograde.kernels.cpu.Forward.__call__`."""
        weights, (h, *more) = self.weights, state
        flat, into = x.flatten(0, 1), gates.flatten(0, 1)
        torch.mm(flat, weights.inputs.t(), out=into)
        if weights.bias_inputs is not None:
            into += weights.bias_inputs
        if weights.bias_hidden is not None and weights.kind != "GRU":
            into += weights.bias_hidden
        for t in range(len(x)):
            match weights.kind:
                case "LSTM":
                    (c,) = more
                    if cells is not None:
                        cells[t] = c
                    _lstm(weights, gates[t], h, c)
                case "GRU":
                    _gru(weights, gates[t], h)
                case kind:
                    z = gates[t].addmm_(h, weights.hidden.t())
                    h.copy_(z.relu_() if kind == "RNN_RELU" else z.tanh_())
            outputs[t] = h


def _gru(weights: Weights, driven: Tensor, h: Tensor) -> None:
    size, u = weights.size, h @ weights.hidden.t()
    if weights.bias_hidden is not None:
        u += weights.bias_hidden
    r, z = driven[:, : 2 * size].add_(u[:, : 2 * size]).sigmoid_().chunk(2, 1)
    n = driven[:, 2 * size :].addcmul_(r, u[:, 2 * size :]).tanh_()
    torch.lerp(n, h, z, out=h)


def _lstm(weights: Weights, gates: Tensor, h: Tensor, c: Tensor) -> None:
    size = weights.size
    gates.addmm_(h, weights.hidden.t())
    i, f, g, o = gates.chunk(4, 1)
    gates[:, : 2 * size].sigmoid_()
    g.tanh_()
    o.sigmoid_()
    c.mul_(f).addcmul_(i, g)
    torch.tanh(c, out=h).mul_(o)
