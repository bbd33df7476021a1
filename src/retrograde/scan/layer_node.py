"""A recurrent layer as one autograd function whose backward pass is ours."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from retrograde.errors import RetrogradeError
from retrograde.kernels.cells import Kept, Kind, Weights
from retrograde.scan.layer import Tape, Way, backpropagate, run_and_keep

__all__ = ["layer"]

State = tuple[Tensor, ...]


def layer(
    kind: Kind,
    parameters: list[Tensor],
    way: Way,
    x: Tensor,
    state: State,
    sizes: Tensor | None = None,
    totals: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, State]:
    """One layer in one direction, whose gradient is computed in a given way.

    Args:
        kind: which cell.
        parameters: weight_ih, weight_hh and, with biases, bias_ih, bias_hh.
        way: how it is to be backpropagated.
        x: inputs (T, B, I).
        state: the initial state: (h,), or (h, c), each (B, H).
        sizes: how many sequences have a step t, longest first; None where all have all.
        totals: by the parameters' ids, where their gradients are to be added, in place of being
            returned; looked up in the backward pass.

    Returns:
        The outputs (T, B, H), and the final state.

    Example:
        >>> net = torch.nn.GRU(3, 5)
        >>> x, h = torch.randn(7, 2, 3), torch.zeros(2, 5)
        >>> y, _ = layer("GRU", list(net.parameters()), Way("sequential", 64), x, (h,))
        >>> y.sum().backward()
        >>> torch.allclose(y, net(x)[0], atol=1e-6), net.weight_hh_l0.grad.shape
        (True, torch.Size([15, 5]))
    """
    results = _Layer.apply(  # type: ignore[no-untyped-call]
        kind,
        way,
        sizes,
        _Totals({} if totals is None else totals, parameters),
        len(state),
        x,
        *state,
        *parameters,
    )
    return results[0], tuple(results[1:])


class _Totals:
    """Where gradients are to be added."""

    def __init__(self, totals: Mapping[int, Tensor], parameters: list[Tensor]) -> None:
        self.totals, self.ids = totals, [id(p) for p in parameters]

    def named(self, weights: Weights) -> dict[str, Tensor]:
        """Those that there are, by the names of the weights; not in half precision, in which a
        layer's own sums would be lost."""
        if weights.hidden.dtype not in (torch.float32, torch.float64):
            return {}
        pairs = zip(weights.tensors(), self.ids, strict=True)
        return {name: self.totals[at] for name, at in pairs if at in self.totals}


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: Kind,
        way: Way,
        sizes: Tensor | None,
        totals: _Totals,
        parts: int,
        x: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        state, parameters = rest[:parts], rest[parts:]
        outputs, after, tape = run_and_keep(Weights.of(kind, parameters), way, x, state, sizes)
        ctx.kind, ctx.way, ctx.sizes, ctx.totals, ctx.parts = kind, way, sizes, totals, parts
        kept = (None, None) if tape.kept is None else (tape.kept.gates, tape.kept.cells)
        ctx.save_for_backward(outputs, tape.marks, *kept, x, *rest)
        return outputs, *after

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *after: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RetrogradeError(
                "the gradient of a layer with backward= cannot itself be differentiated: expected "
                "create_graph=False; for second derivatives use backward=None (torch's own)"
            )
        outputs, marks, gates, cells, x, *rest = ctx.saved_tensors
        first, parameters = tuple(rest[: ctx.parts]), rest[ctx.parts :]
        kept = None if gates is None else Kept(gates, cells)
        tape = Tape(ctx.way, outputs, ctx.sizes, kept, marks)
        seeds = tuple(
            torch.zeros_like(s) if g is None else g for s, g in zip(first, after, strict=True)
        )
        weights = Weights.of(ctx.kind, parameters)
        needs_x, *needs = ctx.needs_input_grad[5:]
        totals = ctx.totals.named(weights)
        found = backpropagate(weights, tape, x, first, dy, seeds, needs_x, totals)
        shares = [None if name in totals else g for name, g in found.weights.items()]
        gradients = [*found.state, *shares]
        wanted = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        return (None,) * 5 + (found.x, *wanted)
