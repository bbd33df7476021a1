"""The map of a gradient through a range of steps, in closed form: g ↦ g P + d.

P is the product of the range's transposed Jacobians, and d comes from the range's own loss terms.
One pass computes both: it takes a zero and the basis of the state space back through the steps, as
the rows of one matrix. A step's slopes are functions of its states
(:mod:`retrograde.kernels.cells`). So the range is run again, a block of steps at a time; only one
block's slopes are held.

*Layers.* Each layer has the rows of its own basis and of those above it. The gradient of a step's
inputs is added to the rows of the layer below, which takes the same step next. No gradient reaches
a layer above, so P is block triangular, and the zero blocks are not computed.

*Chunks.* As in :mod:`retrograde.kernels.sweep`, a block is cut into chunks that run together. There
is at least one chunk for each thread, and more while products are small. Then the chunks' products
are multiplied. One chunk is a plain sweep of the basis.
"""

from collections.abc import Iterator, Sequence
from math import isqrt
from typing import cast

import torch
from torch import Tensor

from retrograde.kernels import kernels
from retrograde.kernels.cells import Kind, Slopes, Weights, pull, pull_to_inputs, slopes
from retrograde.kernels.sweep import at_step, in_chunks
from retrograde.ranks.piece import Gradient, State
from retrograde.ranks.tree import joined
from retrograde.recurrent.base import BudgetedRNN
from retrograde.recurrent.forward import room_for, run
from retrograde.torch_private import flat_weights

_AT_ONCE = 2**19  # numbers of a step in all its chunks, beyond which more chunks do not pay
_BLOCK_BYTES = 2**22  # bytes of a block's slopes


def has_closed_form(rnn: BudgetedRNN, x: Tensor) -> bool:
    """Return whether :func:`rows_of` works for a module and an input, as called now. Dropout, a
    projection and autocast have no closed form."""
    drops = rnn.dropout > 0 and rnn.training and rnn.num_layers > 1
    plain = not (drops or rnn.proj_size or torch.is_autocast_enabled(x.device.type))
    return plain and x.dtype in (torch.float32, torch.float64)


def rows_of(rnn: BudgetedRNN, x: Tensor, before: State, dy: Gradient) -> Tensor:
    """Return the :func:`range_map` of a module's steps; the identity where there is no step."""
    if not len(x):
        n = sum(s.shape[0] * s.shape[-1] for s in before)
        return torch.eye(n + 1, n, dtype=x.dtype, device=x.device).repeat(x.shape[1], 1, 1)
    weights = [w.detach().contiguous() for w in flat_weights(rnn)]
    each = len(weights) // rnn.num_layers
    mode = cast(Kind, rnn.mode)
    layers = [Weights.of(mode, weights[k : k + each]) for k in range(0, len(weights), each)]
    state = tuple(s.detach().contiguous() for s in before)
    return range_map(layers, x.detach(), state, dy)


@torch.no_grad()
def range_map(
    layers: Sequence[Weights], x: Tensor, state: State, dy: Gradient, chunks: int | None = None
) -> Tensor:
    """Return the affine map of a range of steps for each sample: P, and d as the last row (B, n +
    1, n). Here n = layers · H, or 2 · layers · H for (h, c): first h of each layer, then c of each.

    ``layers`` has the lowest first, in float32 or float64. x is (T, B, I), at least one step.
    ``state`` is before the range: (h,), or (h, c), each (layers, B, H). ``dy`` (T, B, H) is the
    loss's gradient of the outputs, or None for zero. ``chunks`` run together; by default as many as
    are expected to be fastest.
    """
    size, per_unit, samples = layers[0].size, len(state), x.shape[1]
    n = len(layers) * per_unit * size
    if not samples:
        return x.new_zeros(0, n + 1, n)
    per_step = sum(w.hidden.shape[0] + (per_unit + 1) * size for w in layers) * samples * x.itemsize
    whole: Tensor | None = None
    for block, losses in _blocks(layers, x, state, dy, max(1, _BLOCK_BYTES // per_step)):
        length = len(block[0].gates)
        numbers = (n + 1) * samples * layers[0].hidden.shape[0]
        count = chunks or max(torch.get_num_threads(), min(_AT_ONCE // numbers, isqrt(2 * length)))
        for product in _products(layers, block, losses, min(count, length)):
            whole = product if whole is None else joined(product, whole)
    assert whole is not None
    order = torch.arange(n, device=x.device).view(len(layers), per_unit, size)
    order = order.transpose(0, 1).flatten()
    return whole[:, torch.cat([order, order.new_tensor([n])])][..., order]


def _blocks(
    layers: Sequence[Weights], x: Tensor, state: State, dy: Gradient, length: int
) -> Iterator[tuple[list[Slopes], Gradient]]:
    """Run the range again; for each block of steps, yield the layers' slopes and loss terms."""
    before = [tuple(s[k] for s in state) for k in range(len(layers))]
    use = kernels(x.device.type, x.dtype, layers[0].size)
    for start in range(0, len(x), length):
        steps = slice(start, start + length)
        y, by_layer = x[steps], []
        for k, weights in enumerate(layers):
            kept = room_for(weights, y)
            h, c = before[k][0], before[k][1] if len(state) > 1 else None
            after, before[k] = run(weights, y, before[k], kept)
            states = torch.cat([h.unsqueeze(0), after[:-1]])
            kept_gates = None if kept is None else kept.gates
            by_layer.append(slopes(weights, y, states, after, c, use.gates, kept_gates))
            y = after
        yield by_layer, None if dy is None else dy[steps]


def _products(
    layers: Sequence[Weights], block: list[Slopes], dy: Gradient, count: int
) -> Iterator[Tensor]:
    """Iterate over the maps of a block's chunks (B, n + 1, n), the earliest first."""
    rest = len(block[0].gates) % count
    if rest:
        part = [each.at(slice(0, rest)) for each in block]
        yield _back(layers, part, None if dy is None else dy[:rest], 1)[0]
    part = [each.at(slice(rest, None)) for each in block]
    yield from _back(layers, part, None if dy is None else dy[rest:], count)


def _back(layers: Sequence[Weights], block: list[Slopes], dy: Gradient, count: int) -> Tensor:
    """Return the maps of chunks that run together: (C, B, n + 1, n), the lowest layer first."""
    length = len(block[0].gates) // count
    cut = [in_chunks(each, dy, 0, length) for each in block]
    chunks, losses = [each for each, _ in cut], cut[-1][1]
    size, last = layers[0].size, len(layers) - 1
    if not last:
        hidden = layers[0].hidden
        return kernels(hidden.device.type, hidden.dtype, size).products(chunks[0], hidden, losses)
    maps = _basis(layers, chunks[0].gates)
    for t in range(length - 1, -1, -1):
        if losses is not None:
            maps[last][..., -1, :size] += losses[:, t]
        for k in range(last, 0, -1):
            maps[k], below = pull_to_inputs(at_step(chunks[k], t), layers[k], maps[k])
            maps[k - 1][..., -below.shape[-2] :, :size] += below
        maps[0] = pull(at_step(chunks[0], t), layers[0].hidden, maps[0])
    whole = torch.zeros_like(maps[0]).repeat(*(1,) * (maps[0].ndim - 1), len(maps))
    for part, columns in zip(maps, whole.chunk(len(maps), -1), strict=True):
        columns[..., -part.shape[-2] :, :] = part
    return whole


def _basis(layers: Sequence[Weights], like: Tensor) -> list[Tensor]:
    """Return, for each layer, its own basis, zeros for the layers above, and a row for the loss."""
    n = layers[0].state_size
    bases = []
    for above in range(len(layers) - 1, -1, -1):
        basis = like.new_zeros(like.shape[0], like.shape[2], (above + 1) * n + 1, n)
        basis.diagonal(dim1=-2, dim2=-1).fill_(1)
        bases.append(basis)
    return bases
