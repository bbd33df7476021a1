"""An LSTM layer over a range of steps that holds six numbers a unit and step.

oneDNN's kernel holds sixteen, and copies the weights besides. This one holds the four gates, the
cell and the output, and turns the gates into their gradients in place, so a small budget takes
longer ranges. All that does not follow the recurrence is one operation over the whole range: the
inputs' part of the gates, the derivatives of the nonlinearities, the gradients of inputs and
weights. What is left in the loop is one matrix product and a few products of elements a step:

    z = W x_t + U h_{t−1} + b;  i, f, o = σ(z_i), σ(z_f), σ(z_o);  g = tanh(z_g)
    c_t = f c_{t−1} + i g;  h_t = o tanh c_t

    dc += dh · o (1 − tanh² c_t);  dz_o = dh · tanh c_t · o (1 − o)
    dz_i, dz_f, dz_g = dc · (g i (1 − i), c_{t−1} f (1 − f), i (1 − g²));  dc ← f dc;  dh ← Uᵀ dz

Its reference is ``torch.lstm``. A graph recorded by it can be used once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["lean_lstm"]


def lean_lstm(
    x: Tensor, state: tuple[Tensor, Tensor], weights: list[Tensor], layers: int, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the layers of an LSTM over a range.

    Args:
        x: inputs (L, B, I).
        state: h and c before the range, each (layers, B, H).
        weights: as torch orders them, layer by layer, without projections.
        layers: how many layers.
        bias: whether there are biases.

    Returns:
        The outputs (L, B, H), and h and c after the range, each (layers, B, H).

    Example:
        >>> net = torch.nn.LSTM(3, 5)
        >>> x, h, c = torch.randn(7, 2, 3), torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)
        >>> y, _, _ = lean_lstm(x, (h, c), net._flat_weights, 1, True)
        >>> torch.allclose(y, net(x)[0], atol=1e-6)
        True
    """
    each = len(weights) // layers
    finals = []
    for layer in range(layers):
        w, u, *biases = weights[layer * each : (layer + 1) * each]
        b = biases[0] + biases[1] if bias else None
        x, h, c = _Range.apply(x, state[0][layer], state[1][layer], w, u, b)  # type: ignore[no-untyped-call]
        finals.append((h, c))
    h, c = (torch.stack(part) for part in zip(*finals, strict=True))
    return x, h, c


class _Range(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = h.shape[-1]
        gates = functional.linear(x, w, b)
        hs, cs = (h.new_empty((len(x), *h.shape)) for _ in range(2))
        ctx.save_for_backward(x, h, c, w, u, hs)
        for z, h_next, c_next in zip(gates, hs, cs, strict=True):
            z.addmm_(h, u.t())
            z[:, : 2 * size].sigmoid_()
            z[:, 2 * size : 3 * size].tanh_()
            z[:, 3 * size :].sigmoid_()
            i, f, g, o = z.chunk(4, 1)
            torch.mul(f, c, out=c_next).addcmul_(i, g)
            torch.tanh(c_next, out=h_next).mul_(o)
            h, c = h_next, c_next
        ctx.gates, ctx.cs = gates, cs
        return hs, h.clone(), c.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gy: Tensor, gh: Tensor, gc: Tensor) -> tuple[Tensor | None, ...]:
        x, h, c, w, u, hs = ctx.saved_tensors
        gates, cs = ctx.gates, ctx.cs
        if gates is None:
            raise RuntimeError("a graph recorded by lean_lstm can be used once")
        ctx.gates = ctx.cs = None  # the gates become their gradients
        forget, through_tanh = _derivatives(gates, cs, c)
        del cs
        parts = gates.unflatten(-1, (4, -1))
        dh, dc = gh + gy[-1], gc.clone()
        for k in range(len(gates) - 1, -1, -1):
            dc.addcmul_(dh, through_tanh[k])
            parts[k, :, 3].mul_(dh)
            parts[k, :, :3].mul_(dc.unsqueeze(1))
            dc.mul_(forget[k])
            torch.mm(gates[k], u, out=dh)
            if k:
                dh.add_(gy[k - 1])
        del forget, through_tanh
        need_x, _, _, need_w, need_u, need_b = ctx.needs_input_grad
        flat = gates.flatten(0, 1)
        gu = None
        if need_u:
            gu = torch.mm(gates[0].t(), h)
            gu.addmm_(gates[1:].flatten(0, 1).t(), hs[:-1].flatten(0, 1))
        return (
            (flat @ w).view(x.shape) if need_x else None,
            dh,
            dc,
            flat.t() @ x.flatten(0, 1) if need_w else None,
            gu,
            flat.sum(0) if need_b else None,
        )


def _derivatives(gates: Tensor, cs: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the gates, in place, into what dh and dc are to be multiplied by.

    Returns:
        The forget gates, and o (1 − tanh² c).
    """
    i, f, g, o = gates.chunk(4, -1)
    tanh_c = cs.tanh()
    through_tanh = torch.ops.aten.tanh_backward(o, tanh_c)
    torch.ops.aten.sigmoid_backward(tanh_c, o, grad_input=o)
    through_input = torch.ops.aten.sigmoid_backward.grad_input(g, i, grad_input=tanh_c)
    torch.ops.aten.tanh_backward(i, g, grad_input=g)
    i.copy_(through_input)
    forget = tanh_c.copy_(f)
    torch.ops.aten.sigmoid_backward(cs[:-1], f[1:], grad_input=f[1:])
    torch.ops.aten.sigmoid_backward(c, f[0], grad_input=f[0])
    return forget, through_tanh
