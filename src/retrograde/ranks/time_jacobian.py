"""What one rank's steps and losses do to the gradient that reaches them: g ↦ b + J·g.

Layers whose slopes are known have it in closed form (:mod:`retrograde.ranks.range_map`): all
columns at once, from the states alone. Where something is in between that only autograd knows,
dropout, a projection, autocast, it is found by sweeps through what has been recorded: one for b,
and one for each column of J, side by side where steps are operations of autograd's own.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from retrograde.kernels.cells import Kind, Weights
from retrograde.nn.recurrent import Recurrent
from retrograde.ranks.range_map import section
from retrograde.ranks.time_piece import Gradient, Piece, State
from retrograde.scan.elements import IDENTITY, Affine, Dense, Vector

__all__ = ["by_slopes", "by_sweeps", "has_closed_form"]

_SIDE_BY_SIDE = 64  # gradients that go back at once


def has_closed_form(rnn: Recurrent, x: Tensor) -> bool:
    """Whether there is one for a module, as it is called now.

    Args:
        rnn: any.
        x: its input.

    Returns:
        Whether :func:`by_slopes` can be used for the steps that are run now.

    Example:
        >>> import retrograde as rg
        >>> x = torch.ones(2, 1, 3)
        >>> [has_closed_form(rg.LSTM(3, 4, 2, **more), x) for more in ({}, {"proj_size": 2})]
        [True, False]
    """
    drops = rnn.dropout > 0 and rnn.training and rnn.num_layers > 1
    plain = not (drops or rnn.proj_size or torch.is_autocast_enabled(x.device.type))
    return plain and x.dtype in (torch.float32, torch.float64)


def by_slopes(rnn: Recurrent, x: Tensor, before: State, dy: Gradient) -> Any:
    """In closed form.

    Args:
        rnn: for which :func:`has_closed_form`.
        x: inputs (T, B, I).
        before: the state before these steps, each (layers, B, H).
        dy: the loss's gradient of each output (T, B, H), or None for zero.

    Returns:
        ``IDENTITY`` where there is no step, and else an ``Affine``.
    """
    if not len(x):
        return IDENTITY
    weights = [w.detach().contiguous() for w in cast(list[Tensor], rnn._flat_weights)]
    each = len(weights) // rnn.num_layers
    kind = cast(Kind, rnn.mode)
    layers = [Weights.of(kind, weights[k : k + each]) for k in range(0, len(weights), each)]
    state = tuple(s.detach().contiguous() for s in before)
    return section(layers, x.detach(), state, dy)


def by_sweeps(pieces: Sequence[Piece], seeds: Sequence[Gradient], *, apart: bool) -> Any:
    """By going back through what was recorded, all samples of a piece at once: they do not meet.

    Args:
        pieces: of the batch; their graphs are kept.
        seeds: the gradients of each one's outputs.
        apart: whether autograd goes back for one gradient at a time, as through kernels of whole
            layers.

    Returns:
        ``IDENTITY`` where there is no step, and else an ``Affine``.
    """
    if pieces[0].empty:
        return IDENTITY
    columns, offsets = [], []
    for piece, seed in zip(pieces, seeds, strict=True):
        zero = tuple(torch.zeros_like(s) for s in piece.after)
        offset = piece.flat(piece.back(seed, zero, keep=True)[1])
        samples, size = offset.shape
        basis = torch.eye(size, dtype=offset.dtype, device=offset.device)
        ends = [piece.unflat(row.expand(samples, size)) for row in basis]
        found = (_in_turn if apart else _side_by_side)(piece, ends)
        columns.append(torch.stack(found, -1))
        offsets.append(offset)
    return Affine(Dense(torch.cat(columns)), Vector(torch.cat(offsets)))


def _in_turn(piece: Piece, ends: list[State]) -> list[Tensor]:
    return [piece.flat(piece.back(None, end, keep=True)[1]) for end in ends]


def _side_by_side(piece: Piece, ends: list[State]) -> list[Tensor]:
    found = []
    for start in range(0, len(ends), _SIDE_BY_SIDE):
        rows = ends[start : start + _SIDE_BY_SIDE]
        some = [torch.stack(parts) for parts in zip(*rows, strict=True)]
        before = torch.autograd.grad(
            piece.after, piece.before, some, retain_graph=True, is_grads_batched=True
        )
        found += [piece.flat(state) for state in zip(*before, strict=True)]
    return found
