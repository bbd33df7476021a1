"""The loops of :mod:`retrograde.kernels.cpu.layer` that run a layer forward.

:func:`run` and :func:`recall` are compiled for each cell (:mod:`retrograde.kernels.cpu.loops`). In
each copy the names in capitals are the numbers of its cell, and ``_run`` is what it computes.
"""

# ruff: noqa: RUF005 (numba adds tuples, but does not unpack them)

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cpu.llvm.barrier import Counts, meet
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Compiled,
    Reals,
    added,
    compiled,
    copy,
    load,
    load_each,
    store,
    store_each,
)
from retrograde.kernels.cpu.llvm.tiles import dots, product


class ForwardArrays(NamedTuple):
    """What a layer's forward pass reads and writes. What a cell does not need is empty."""

    driven: Reals  # (L, B, K·H), x W and biases, overwritten by ``gates`` of ``Kept``
    outputs: Reals  # (L, B, H), receives h after each step
    aside: Reals  # (L, B, N H), receives ``cells`` of ``Kept``
    bias: Reals  # of split gates, the biases of h's part
    own: Reals  # (V, H), the numbers of each unit
    # The transposed hidden weights (H, K·H) in panels for each part of the units, or (1, K·H, 1, H)
    # as they lie.
    hidden: Reals
    h: Reals  # (B, H), the state before the first step, overwritten by that after the last
    c: Reals  # (B, N H), likewise the other parts of the state
    starts: NDArray[np.bool_]  # (L, B), true before a step at which a sample begins anew
    entry: Reals  # (B, n), the states with which they do
    sums: Reals  # scratch memory, a row of whole vectors for each part and sample
    keeps: bool  # whether what a backward pass needs is kept


GATES = WHOLE = SPLIT = OTHERS = ASIDE = UNITS = 0
_run: Compiled = None


@compiled
def extent(
    by_units: bool, units: Counts, samples: int, first: int, last: int
) -> tuple[int, int, int, int]:
    """Return the parts of the units, and the samples, that a thread runs."""
    return (first, last, 0, samples) if by_units else (0, len(units) - 1, first, last)


@compiled
def _multiply(
    gates: int, h: Reals, at: int, size: int, batch: int, weights: Reals, left: int, right: int,
    out: Reals, width: int,
) -> None:  # fmt: skip
    """Write U h to ``out`` for all gates of the units left … right − 1. ``h`` is flat, and the
    state of the first sample begins ``at`` a place."""
    out[:] = 0
    if weights.shape[1] == 1 and weights.shape[2] == size:  # as they lie
        for k in range(gates):
            lying, into = weights[k * size + left : k * size + right], out[k * (right - left) :]
            dots(h, at, batch, lying, width, into)
    else:
        product(h, at, size, 1, batch, weights, gates * (right - left), out, width)


def run(
    of: ForwardArrays, units: Counts, by_units: bool, meeting: Counts, first: int, last: int
) -> None:
    """Run samples, or parts of the units, first … last − 1."""
    driven, outputs, aside, bias, unit_numbers, hidden, h, c, starts, entry, sums, keeps = of
    (samples, size), p = h.shape, unit_numbers.reshape(-1)
    x, y, states, numbers = driven.reshape(-1), outputs.reshape(-1), h.reshape(-1), samples * size
    others, kept_aside, width = c.reshape(-1), aside.reshape(-1), sums.shape[2]
    begin, end, low, high = extent(by_units, units, samples, first, last)
    # Weights as they lie are all in one part.
    u, weights, batch = sums[begin, low:high].reshape(-1), hidden[begin % len(hidden)], high - low
    for t in range(driven.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, h, 0, first, last)
            if OTHERS:
                enter(starts[t], entry, c, size, first, last)
        for part in range(begin, end):
            left, right = units[part], units[part + 1]
            each = right - left
            if end - begin > 1:
                u, weights = sums[part, low:high].reshape(-1), hidden[part % len(hidden)]
            if by_units and t:  # other threads may still read h after this step
                at = (t - 1) * numbers
                _multiply(GATES, y, at, size, batch, weights, left, right, u, width)
            else:
                at = low * size
                _multiply(GATES, states, at, size, batch, weights, left, right, u, width)
            for b in range(low, high):
                row, place = b * size, (b - low) * width - left
                at = t * numbers + row
                for j in range(left, right, LANES):
                    rest, v, w = right - j, GATES * at + j, place + j
                    whole = load_each(x, v, size, rest, WHOLE)
                    whole = added(whole, load_each(u, w, each, rest, WHOLE))
                    apart = load_each(u, w + WHOLE * each, each, rest, SPLIT)
                    apart = added(apart, load_each(bias, j, size, rest, SPLIT))
                    if by_units and t:
                        now = load(y, at - numbers + j, rest)
                    else:
                        now = load(states, row + j, rest)
                    more = load_each(others, OTHERS * row + j, size, rest, OTHERS)
                    gates = whole + load_each(x, v + WHOLE * size, size, rest, SPLIT) + apart
                    after, kept = _run(gates, (now,) + more, load_each(p, j, size, rest, UNITS))
                    if keeps:
                        store_each(kept_aside, ASIDE * at + j, size, rest, more + apart)
                        store_each(x, v, size, rest, kept)
                    store_each(others, OTHERS * row + j, size, rest, after[1:])
                    store(y, at + j, after[0], rest)
        if by_units and last - first < len(units) - 1:
            meet(meeting, t + 1)
        elif not by_units:
            for j in range(low * size, high * size, LANES):
                rest = high * size - j
                store(states, j, load(y, t * numbers + j, rest), rest)
    if by_units:
        left, right, at = units[first], units[last], (outputs.shape[0] - 1) * numbers
        for row in range(0, numbers, size):
            copy(y, at + row + left, states, row + left, right - left)


def recall(
    gates: Reals, aside: Reals, before: Reals, c: Reals, unit_numbers: Reals,
    starts: NDArray[np.bool_], entry: Reals, first: int, last: int,
) -> None:  # fmt: skip
    """Run the other parts of the state alone, given h ``before`` each step. ``gates`` are all that
    enters the gates, overwritten by what is kept of them. ``aside`` has h's part of split gates,
    and receives the other parts before each step."""
    samples, size = before.shape[1:]
    flat, h, p = gates.reshape(-1), before.reshape(-1), unit_numbers.reshape(-1)
    others, kept_aside = c.reshape(-1), aside.reshape(-1)
    for t in range(gates.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, c, size, first, last)
        for b in range(first, last):
            for j in range(0, size, LANES):
                left, at, row = size - j, (t * samples + b) * size, OTHERS * b * size + j
                v, w = GATES * at + j, ASIDE * at + j
                sums = load_each(flat, v, size, left, GATES)
                sums = sums + load_each(kept_aside, w + OTHERS * size, size, left, SPLIT)
                more = load_each(others, row, size, left, OTHERS)
                state = (load(h, at + j, left),) + more
                after, kept = _run(sums, state, load_each(p, j, size, left, UNITS))
                store_each(kept_aside, w, size, left, more)
                store_each(flat, v, size, left, kept)
                store_each(others, row, size, left, after[1:])


@compiled
def enter(
    starts: NDArray[np.bool_], entry: Reals, state: Reals, column: int, first: int, last: int
) -> None:
    """Overwrite the rows of ``state`` (B, H) that begin anew by ``entry``, from a column on."""
    flat, into, width = entry.reshape(-1), state.reshape(-1), state.shape[1]
    for b in range(first, last):
        if starts[b]:
            copy(flat, b * entry.shape[1] + column, into, b * width, width)
