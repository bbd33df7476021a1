"""The forward pass of a layer whose whole recurrence is one launch, for a GPU.

:func:`forward` is the plain form for any device, the reference of the compiled one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retrograde.kernels.cells import Kind, Resets, Weights
from retrograde.kernels.cpu.products import linear

#: ``forward(kind, gates, hidden, bias, state, outputs)``, as :func:`forward`.
Recurrence = Callable[[Kind, Tensor, Tensor, Tensor | None, Sequence[Tensor], Tensor], None]


def forward(
    kind: Kind, gates: Tensor, hidden: Tensor, bias: Tensor | None, state: Sequence[Tensor],
    outputs: Tensor,
) -> None:  # fmt: skip
    """Run a recurrence over L steps of B samples.

    ``gates`` (L, B, K·H) are what inputs contribute, with biases. ``bias`` (H,) is added to U h of
    a GRU's new gate. ``state`` is (h,) or (h, c), each (B, H), and is overwritten by the state
    after. ``outputs`` (L, B, H) receives h after each step.
    """
    h, *c = state
    for given, y in zip(gates, outputs, strict=True):
        sums = h @ hidden.T
        if kind == "GRU":
            size = h.shape[-1]
            assert bias is not None
            sums[:, 2 * size :] += bias
            r, z = (given + sums)[:, : 2 * size].sigmoid_().chunk(2, -1)
            n = torch.addcmul(given[:, 2 * size :], r, sums[:, 2 * size :]).tanh_()
            torch.lerp(n, h, z, out=y)
        elif kind == "LSTM":
            i, f, g, o = sums.add_(given).chunk(4, -1)
            c[0].mul_(f.sigmoid_()).addcmul_(i.sigmoid_(), g.tanh_())
            torch.mul(o.sigmoid_(), c[0].tanh(), out=y)
        else:
            y.copy_(sums.add_(given).tanh_() if kind == "RNN_TANH" else sums.add_(given).relu_())
        h.copy_(y)


def biases_of(weights: Weights) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias of the inputs' part of the gates, with both biases of whole gates, and
    that of h's part of split gates."""
    inputs, hidden, u = weights.bias_inputs, weights.bias_hidden, weights.hidden
    whole = weights.form.whole * weights.size
    split = u.new_zeros(len(u) - whole) if hidden is None else hidden[whole:]
    if inputs is not None and hidden is not None:
        both = inputs + hidden
        both[whole:] = inputs[whole:]
        inputs = both
    return inputs, split if weights.form.split else None


class LaunchedForward:
    """As :class:`retrograde.kernels.cpu.layer.Forward`, by one launch of a recurrence a range. No
    gates are kept."""

    def __init__(self, recurrence: Recurrence, weights: Weights, samples: int) -> None:
        self.recurrence, self.weights, self.samples = recurrence, weights, samples
        self.hidden = weights.hidden.contiguous()
        self.bias, self.of_split = biases_of(weights)

    def room(self, steps: int) -> Tensor:
        """Return an uninitialized tensor for the gates of ``steps`` steps (L, B, K·H)."""
        return self.hidden.new_empty(steps, self.samples, len(self.hidden))

    def __call__(
        self, x: Tensor, state: Sequence[Tensor], outputs: Tensor, gates: Tensor,
        cells: Tensor | None = None, resets: Resets | None = None,
    ) -> None:  # fmt: skip
        """Run the layer on inputs x (L, B, I). ``outputs`` (L, B, H) receives h after each step.
        ``state`` is overwritten by the state after, and ``gates`` is scratch memory."""
        assert cells is None
        assert resets is None
        linear(x.flatten(0, 1), self.weights.inputs, self.bias, gates.flatten(0, 1))
        kind = self.weights.kind
        self.recurrence(kind, gates, self.hidden, self.of_split, state, outputs)  # type: ignore[arg-type]
