"""The forward pass of one layer in one direction; it records at most an LSTM's gates."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from retrograde.kernels import kernels
from retrograde.kernels.cells import Kept, Resets, Weights
from retrograde.plan.footprint import Curve
from retrograde.recurrent.bytes import FORWARD_BYTES
from retrograde.recurrent.vendor import Layers, run_torch
from retrograde.replay.trees import Tensors
from retrograde.sizes.allocations import measure
from retrograde.sizes.ordinary import FEW_BYTES, FEW_STEPS
from retrograde.units import Memory

if TYPE_CHECKING:
    from retrograde.kernels.cpu.layer import Forward
    from retrograde.kernels.launched import LaunchedForward

    AnyForward = Forward | LaunchedForward


def room_for(weights: Weights, x: Tensor) -> Kept | None:
    """Return buffers for what a forward pass keeps, as an LSTM's gates and cells, if it can."""
    make, form = kernels(x.device.type, x.dtype, weights.size).forward, weights.form
    if not form.keeps or make is None:
        return None
    return Kept(*(x.new_empty(*x.shape[:2], n * weights.size) for n in (form.gates, form.aside)))


@torch.no_grad()
def run(
    weights: Weights, x: Tensor, state: tuple[Tensor, ...], kept: Kept | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run inputs x (L, B, I) by the fastest kernel. Return outputs (L, B, H) and the state after. A
    state is (h,) or (h, c), each (B, H). ``kept``, from :func:`room_for`, receives an LSTM's gates
    and cells."""
    make = kernels(x.device.type, x.dtype, weights.size).forward
    after = [s.clone(memory_format=torch.contiguous_format) for s in state]
    y = x.new_empty(*x.shape[:2], weights.size)
    LayerForward(make, weights, len(x) * x.shape[1])(x, after, y, kept)
    return y, tuple(after)


class LayerForward:
    """The forward pass of a layer, in spans of at most ``block`` rows. Torch's own kernel runs it
    if ``make`` is None, at most ``calls`` rows at a time, if that is not 0."""

    def __init__(
        self, make: "Callable[[Weights, int], AnyForward] | None", weights: Weights, block: int,
        calls: int = 0,
    ) -> None:  # fmt: skip
        self.weights, wide = weights, weights.inputs.shape[0] * weights.inputs.itemsize
        self.make, self.on_cpu = make, make is not None and weights.inputs.is_cpu
        most = FORWARD_BYTES // wide if self.on_cpu else calls or block
        self.rows = max(1, min(most, block))
        self.forward: AnyForward | None = None
        self.samples = -1

    def __call__(
        self, x: Tensor, state: Tensors, y: Tensor, kept: Kept | None = None,
        resets: Resets | None = None,
    ) -> None:  # fmt: skip
        """Run inputs x (L, n, I) and write the outputs to y (L, n, H). The state is (h,) or (h, c),
        each (n, H), and is overwritten. ``kept`` receives an LSTM's gates and cells."""
        if resets is not None and not self.on_cpu:
            anew = resets.starts.any(-1).nonzero().flatten().tolist()
            for a, b in pairwise(sorted({0, *anew, len(x)})):
                resets.enter(a, *state)
                self(x[a:b], state, y[a:b])
            return
        steps = max(1, self.rows // x.shape[1])
        if self.make is None:
            for a in range(0, len(x), steps):
                run_by_torch(self.weights, x[a : a + steps], state, y[a : a + steps])
            return
        if self.samples != x.shape[1]:
            self.samples, self.forward = x.shape[1], None  # release the old one first
            self.forward = self.make(self.weights, self.samples)
        assert self.forward is not None
        at_hand = kept is not None or self.weights.form.gates == self.weights.form.states == 1
        at_hand &= self.on_cpu  # else outputs may not be written over what is read
        room = None if at_hand else self.forward.room(min(steps, len(x)))
        for a in range(0, len(x), steps):
            part = slice(a, min(a + steps, len(x)))
            gates = y[part] if room is None else room[: part.stop - a]
            cells = None
            if kept is not None:
                gates, cells = kept.gates[part], kept.cells[part]
            part_resets = None if resets is None else resets.at(part)
            self.forward(x[part].contiguous(), tuple(state), y[part], gates, cells, part_resets)


@torch.no_grad()
def run_by_torch(weights: Weights, x: Tensor, state: Tensors, y: Tensor) -> None:
    """Run steps by torch's own kernel, which records nothing."""
    biases = [b for b in (weights.bias_inputs, weights.bias_hidden) if b is not None]
    net = Layers(weights.kind, [weights.inputs, weights.hidden, *biases], 1, bool(biases))
    before = [s.unsqueeze(0).contiguous() for s in state]
    outputs, after = run_torch(net, x, before, None)
    y.copy_(outputs)
    for s, new in zip(state, after, strict=True):
        s.copy_(new.squeeze(0))


def forward_curve(length: int, memory: Memory | None, weights: Weights, state: Tensors) -> Curve:
    """Measure the peak bytes of :func:`run_by_torch` by number of steps, on zeros. Ranges of more
    than a few steps are measured only as far as a budget in bytes allows."""
    most = memory if isinstance(memory, int) else inf
    points: dict[int, int] = {}
    for steps in sorted({min(length, n) for n in (1, 4, 16, 64, 256)}):
        if steps > FEW_STEPS and 4 * max(points.values()) > max(most, FEW_BYTES):
            break
        x = state[0].new_zeros(steps, len(state[0]), weights.inputs.shape[1])
        y = state[0].new_zeros(steps, *state[0].shape)
        call = partial(run_by_torch, weights, x, state, y)
        call()  # a first call's permanent allocations do not count
        points[steps] = measure(call, device=x.device).peak_bytes
    return Curve(tuple(points.items()))
