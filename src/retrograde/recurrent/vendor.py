"""Recurrent layers by torch's kernels: the vendor's (oneDNN, cuDNN) or torch's own.

Three rules of cuDNN matter here. A call has at most 65,535 steps. So longer sequences are split
into several calls. A call can be backpropagated only if it ran in training mode. Training mode
reserves memory, so a call that nothing records runs without it. Every call copies weights that are
not in cuDNN's layout. So the weights of a part of a module are put into that layout once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.backends import cudnn

from retrograde.kernels.cells import AnyKind
from retrograde.replay.trees import Tensors
from retrograde.sizes import nominal
from retrograde.torch_private import lay_out, recurrent_calls

if TYPE_CHECKING:
    from retrograde.recurrent.bytes import Layer
    from retrograde.recurrent.spans import Sequences

#: torch's names for its recurrent layers.
Mode = Literal["RNN_TANH", "RNN_RELU", "GRU", "LSTM"]

#: The most steps of a call of cuDNN, which launches one block for each step (pytorch#133751).
MOST_STEPS = 65_535

# cuDNN's numbers for the modes, as torch passes them.
_NUMBERS: dict[Mode, int] = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}


@dataclass(frozen=True)
class Layers:
    """Layers above one another, in one direction or in both.

    ``weights`` are in torch's order, layer by layer, each direction apart: weight_ih, weight_hh,
    with biases bias_ih and bias_hh, with projections weight_hr. A formula stands in for the mode of
    a user's cell, whose units come last.
    """

    mode: AnyKind
    weights: Tensors
    count: int
    bias: bool
    both: bool = False

    def __getitem__(self, number: int) -> "Layers":
        """Return one of the layers."""
        each = len(self.weights) // self.count
        weights = self.weights[number * each : (number + 1) * each]
        return Layers(self.mode, weights, 1, self.bias, self.both)

    @cached_property
    def parts(self) -> list["Layers"]:
        """Each layer in each direction, by itself."""
        number = self.count * (2 if self.both else 1)
        apart = Layers(self.mode, self.weights, number, self.bias)
        return [apart[k] for k in range(number)]


#: ``kernel(layers, x, state, sizes) -> (outputs, state after)``. x is (L, B, I), or packed (rows,
#: I). If packed, ``sizes`` gives the number of sequences at each step. Each part of the state is
#: (count, B, H).
Kernel = Callable[[Layers, Tensor, Tensors, Tensor | None], tuple[Tensor, Tensors]]
#: ``masks(x, number, steps, sizes)``: dropout before a layer, as of ``dropout.py``.
Masks = Callable[[Tensor, int, Tensor, Tensor | None], Tensor]


def is_too_long(x: Tensor, steps: int) -> bool:
    """Return whether a sequence has more steps than one call of the vendor's kernel can run."""
    return steps > MOST_STEPS and x.device.type not in ("cpu", "meta")


def run_torch(
    net: Layers, x: Tensor, state: Tensors, sizes: Tensor | None
) -> tuple[Tensor, Tensors]:
    """Run all layers over all steps; this is a :data:`Kernel`."""
    if is_too_long(x, len(x) if sizes is None else len(sizes)):
        return _chained(net, x, state, sizes)
    call = getattr(recurrent_calls, str(net.mode).lower())
    hx: Any = tuple(state) if net.mode == "LSTM" else state[0]
    dropout, train, batch_first = 0.0, torch.is_grad_enabled(), False
    options = (net.weights, net.bias, net.count, dropout, train, net.both)
    if sizes is None:
        y, *after = call(x, hx, *options, batch_first)
    else:
        y, *after = call(x, sizes, hx, *options)
    return y, after


def _chained(
    net: Layers, x: Tensor, state: Tensors, sizes: Tensor | None
) -> tuple[Tensor, Tensors]:
    """Run several calls, each of which starts from the state where the one before ended."""
    outputs: Tensors = []
    chunks = x.split(MOST_STEPS) if sizes is None else sizes.split(MOST_STEPS)
    inputs = chunks if sizes is None else x.split([int(chunk.sum()) for chunk in chunks])
    for x_chunk, chunk in zip(inputs, chunks, strict=True):
        y, state = run_alive(run_torch, net, x_chunk, state, None if sizes is None else chunk)
        outputs.append(y)
    return torch.cat(outputs), state


def run_alive(
    run: Kernel, net: Layers, x: Tensor, state: Tensors, sizes: Tensor | None
) -> tuple[Tensor, Tensors]:
    """Run steps of a packed batch for the sequences that have any; the others keep their state."""
    if sizes is None:
        return run(net, x, [s.contiguous() for s in state], None)
    alive = int(sizes[0])
    y, after = run(net, x, [s[:, :alive].contiguous() for s in state], sizes)
    if alive < state[0].shape[1]:
        after = [torch.cat([a, s[:, alive:]], 1) for a, s in zip(after, state, strict=True)]
    return y, after


def one_by_one(
    run: Kernel, masks: Masks | None, steps: Tensor, net: Layers, x: Tensor, state: Tensors,
    sizes: Tensor | None,
) -> tuple[Tensor, Tensors]:  # fmt: skip
    """Run one layer after the other, with dropout before them; ``steps`` are numbers (L,)."""
    afters, ways = [], 2 if net.both else 1
    for k in range(net.count):
        if masks is not None:
            x = masks(x, k, steps, sizes)
        layer_state = [s[k * ways : (k + 1) * ways] for s in state]
        x, after = run(net[k], x, layer_state, sizes)
        afters.append(after)
    return x, [torch.cat(tensors) for tensors in zip(*afters, strict=True)]


def laid_out(net: Layers, *, apart: bool = False) -> Layers:
    """Return layers whose weights are in the vendor's layout. All weights are laid out together, or
    with ``apart`` each layer's by itself. Gradients flow back to the given weights. Weights that
    are in that layout already are returned as they are."""
    if not copied_bytes(net, apart=apart):
        return net
    weights: Tensors = []
    for layers in net.parts if apart else [net]:
        weights += _Laid.apply(layers, *layers.weights) if copied_bytes(layers) else layers.weights  # type: ignore[no-untyped-call]
    return replace(net, weights=weights)


def copied_bytes(net: Layers, *, apart: bool = False) -> int:
    """Return the bytes that :func:`laid_out` allocates."""
    if net.weights[0].device.type == "cpu":
        return 0
    if apart and len(net.parts) > 1:
        return sum(map(copied_bytes, net.parts))
    weight, memory = net.weights[0], net.weights[0].untyped_storage()
    if not cudnn.is_acceptable(weight):
        return 0
    whole = sum(w.nbytes for w in net.weights)
    alike = all(w.untyped_storage().data_ptr() == memory.data_ptr() for w in net.weights)
    return 0 if alike and memory.nbytes() == whole else whole


class _Laid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, net: Layers, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        detached, each = [w.detach() for w in weights], len(weights) // net.count
        (gate_rows, size), inputs = weights[1].shape, weights[0].shape[1]
        hidden = gate_rows // {"LSTM": 4, "GRU": 3}.get(str(net.mode), 1)
        projected, number = size if each % 2 else 0, _NUMBERS[cast(Mode, net.mode)]
        lay_out(detached, each, inputs, number, hidden, projected, net.count, False, False)
        return tuple(detached)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients


def is_faster(layers: "Sequence[Layer]", lengths: "Sequences") -> bool:
    """Return whether torch's own pass through layers is faster than ours, if there is memory for
    it."""
    layer = layers[0]
    if layer.on_gpu:
        small = layer.forward_by == "launches" and layer.tracks == len(layers) == 1
        small = small and layer.size <= nominal.SWEPT_UNITS[layer.form.gates]
        few = lengths.length < nominal.FEW_STEPS["GPU"] or layer.batch > nominal.SWEPT_SAMPLES
        return few or not small
    by_onednn = layer.kind == "LSTM" and layer.item == 4 and len(lengths.runs) == 1
    wide = by_onednn and 4 * layer.size * (layer.size + layer.width) > nominal.ONEDNN_WEIGHTS
    few = lengths.length < nominal.FEW_STEPS["oneDNN" if by_onednn else str(layer.kind)]
    return wide or (few and lengths.rows * layer.size <= nominal.FEW_STATES)
