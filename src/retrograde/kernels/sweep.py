"""The backward recurrence over a block of steps, step by step or by a chunked scan.

:func:`sweep` and :func:`scan` turn the slopes of a block (:mod:`retrograde.kernels.cells`) into the
gradients of the gates, in place. They return the gradient of the state before the block.

:func:`sweep` goes step by step. :func:`scan` is W20's scan in three phases. The block is cut into
chunks of L steps:

1. *products*: the unit vectors of the state space and a zero vector are backpropagated through
   every chunk at once. This gives the product P of a chunk's Jacobians, and the gradient d of the
   chunk's own losses;
2. *carry*: g ← g P + d, from the last chunk to the first;
3. *local sweeps*: every chunk is swept at once, from the gradient after it.

The latency falls from T steps to 2 L + T / L, for n + 1 times the arithmetic. Only the products P
are stored, one for each chunk, never the Jacobian of a step.

*Exact or refused.* A product of Jacobians can overflow, cancel or contain a NaN even if the
gradient itself does not. That block is then swept step by step, with a warning. :func:`safe_chunk`
keeps chunks short, so that this is rare. On a GPU the caller skips it, because it would wait for
the device.

These are the plain forms for any device and dtype. They are the reference of the compiled forms.
"""

import math
import warnings

import torch
from torch import Tensor

from retrograde.kernels.cells import Resets, Slopes, pull

#: How much larger than every gradient the terms of a product may be. Larger terms would leave
#: rounding errors that show in the gradient.
CANCELLATION = 100.0


def sweep(
    slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor, resets: Resets | None = None
) -> Tensor:
    """Backpropagate a block step by step; return the gradient of the state before it. ``g`` (B, n)
    is the gradient of the state after the block, n = H, or 2 H for (h, c). ``dy`` (L, B, H) is the
    loss's gradient of the outputs, None for zero. The gradients of the gates overwrite ``slopes``.
    """
    size = hidden.shape[1]
    for t in range(slopes.gates.shape[0] - 1, -1, -1):
        if dy is not None:
            g = torch.cat([g[..., :size] + dy[t], g[..., size:]], -1)
        g = _step(slopes.at(t), hidden, g)
        if resets is not None:
            resets.leave(t, g)
    return g


def scan(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor, chunk: int) -> Tensor:
    """Do the same as :func:`sweep`, by a scan over chunks of ``chunk`` steps.

    The first steps, if they fill no chunk, are swept. So is a block whose products cannot be
    trusted.
    """
    length = slopes.gates.shape[0]
    rest = length % chunk
    if length // chunk < 2:
        return sweep(slopes, hidden, dy, g)
    whole, losses = in_chunks(slopes.at(slice(rest, None)), dy, rest, chunk)
    maps = products(whole, hidden, losses)
    after, before = carry(maps, g)
    if not trusted(maps, after):
        return sweep(slopes, hidden, dy, g)
    for t in range(chunk - 1, -1, -1):
        if losses is not None:
            after[..., : hidden.shape[1]] += losses[:, t]
        after = _step(at_step(whole, t), hidden, after)
    return sweep(slopes.at(slice(0, rest)), hidden, None if dy is None else dy[:rest], before)


def products(chunks: Slopes, hidden: Tensor, losses: Tensor | None) -> Tensor:
    """Return the maps of the first phase, (C, B, n + 1, n). It has for each chunk the product of
    Jacobians P, and d as the last row. A gradient g after a chunk is g P + d before it. The slopes
    are (C, L, B, …), ``losses`` (C, L, B, H) or None."""
    count, length, samples, _, size = chunks.gates.shape
    n = size * (2 if chunks.gates.shape[-2] == 4 else 1)
    like = chunks.gates
    maps = torch.zeros(count, samples, n + 1, n, dtype=like.dtype, device=like.device)
    maps.diagonal(dim1=-2, dim2=-1).fill_(1)
    for t in range(length - 1, -1, -1):
        if losses is not None:
            maps[..., n, :size] += losses[:, t]
        maps = pull(at_step(chunks, t), hidden, maps)
    return maps


def trusted(maps: Tensor, after: Tensor) -> bool:
    """Return whether the gradients of :func:`carry` are exact up to rounding; warn if not. Rounding
    errors grow with the terms |g| |P|. So the terms must be finite, and not far larger than the
    largest gradient."""
    worst = (after.abs().unsqueeze(-2) @ maps[..., :-1, :].abs()).amax()
    sizes = torch.maximum(after.abs().amax(), maps[..., -1, :].abs().amax())
    terms, largest = torch.stack([worst, sizes]).tolist()
    if terms <= min(CANCELLATION * largest, torch.finfo(maps.dtype).max):
        return True  # a NaN fails every comparison
    warn_of_sweep()
    return False


def warn_of_sweep() -> None:
    """Warn that a block was swept, since its products could not be trusted."""
    warnings.warn(
        "products of Jacobians overflowed, cancelled or are not finite, though the gradient itself "
        "may well be: this call is swept step by step, which is exact but slower; clip the "
        "weights, or use backward=None",
        RuntimeWarning,
        stacklevel=3,
    )


def carry(maps: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Do the second phase: return the gradient after each chunk (C, B, n), and before the first."""
    after = g.new_empty((maps.shape[0], *g.shape))
    for c in range(maps.shape[0] - 1, -1, -1):
        after[c] = g
        g = (g.unsqueeze(-2) @ maps[c, :, :-1]).squeeze(-2) + maps[c, :, -1]
    return after, g


def safe_chunk(hidden: Tensor, chunk: int) -> int:
    """Return the longest chunk, from 1 to ``chunk``, whose products should not overflow. The norm
    of a step's Jacobian is estimated as 1 + ‖U‖₂, with ‖U‖₂ ≤ √(‖U‖₁ ‖U‖_∞). Typical products grow
    far less. So the limit is the range of the dtype, not the smaller growth at which
    :func:`trusted` refuses."""
    magnitudes = hidden.abs()
    norm = math.sqrt(float(magnitudes.sum(0).amax() * magnitudes.sum(1).amax()))
    if not math.isfinite(norm):
        return 1
    if norm <= 1:
        return chunk
    limit = math.log(torch.finfo(hidden.dtype).max)
    return max(1, min(chunk, int(limit / math.log(1 + norm))))


def _step(step: Slopes, hidden: Tensor, g: Tensor) -> Tensor:
    """Backpropagate one step; the gradients of the gates overwrite its slopes."""
    size = hidden.shape[1]
    if step.gates.shape[-2] < 4:
        step.gates.mul_(g.unsqueeze(-2))
        before = step.gates.flatten(-2) @ hidden
        if step.keep is not None:
            assert step.inner is not None
            before.addcmul_(step.keep, g)
            step.inner.mul_(g)
        return before
    assert step.keep is not None
    assert step.inner is not None
    g_h, g_c = g[..., :size], g[..., size:]
    d = torch.addcmul(g_c, g_h, step.inner)
    step.gates[..., :3, :].mul_(d.unsqueeze(-2))
    step.gates[..., 3, :].mul_(g_h)
    return torch.cat([step.gates.flatten(-2) @ hidden, d * step.keep], -1)


def in_chunks(
    slopes: Slopes, dy: Tensor | None, rest: int, chunk: int
) -> tuple[Slopes, Tensor | None]:
    """Return views of slopes and losses with chunks as the first dimension. ``dy`` has ``rest``
    more steps at its beginning, which are skipped."""

    def cut(t: Tensor) -> Tensor:
        view: Tensor = t.unflatten(0, (-1, chunk))
        return view

    return slopes.map(cut), None if dy is None else cut(dy[rest:])


def at_step(chunks: Slopes, t: int) -> Slopes:
    """Return views of the slopes of step t of every chunk."""
    return chunks.map(lambda part: part[:, t])
