"""The loops of :mod:`retrograde.kernels.cpu.sweep` that turn gates into slopes.

A row is one step of one sample. Other names are those of :mod:`retrograde.kernels.cells`.
"""

import numpy as np
from numpy.typing import NDArray

from retrograde.kernels.cpu import cells as cell
from retrograde.kernels.cpu.forward_loops import enter
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Reals,
    compiled,
    load,
    load_each,
    store,
    store_each,
)


@compiled
def gru_slopes(
    inputs: Reals, hidden: Reals, before: Reals, keep: Reals, inner: Reals, first: int, last: int
) -> None:
    """Compute a GRU's slopes for rows first … last − 1. ``inputs`` and ``hidden`` are the two parts
    of the sums that enter the gates. ``hidden`` is overwritten by s_r, s_z and s_m. ``inner``
    receives s_n, and ``keep`` receives z."""
    size = before.shape[1]
    x, u, h = inputs.reshape(-1), hidden.reshape(-1), before.reshape(-1)
    kept, s_n = keep.reshape(-1), inner.reshape(-1)
    for row in range(first, last):
        for j in range(0, size, LANES):
            left, at, v = size - j, row * size + j, 3 * row * size + j
            r = load(x, v, left) + load(u, v, left)
            z = load(x, v + size, left) + load(u, v + size, left)
            m = load(u, v + 2 * size, left)
            r, z, n = cell.gru_gates(r, z, load(x, v + 2 * size, left), m)
            s_r, s_z, s_m, slope = cell.gru_slopes(r, z, n, m, load(h, at, left))
            store(u, v, s_r, left)
            store(u, v + size, s_z, left)
            store(u, v + 2 * size, s_m, left)
            store(s_n, at, slope, left)
            store(kept, at, z, left)


@compiled
def lstm_slopes(
    known: bool, gates: Reals, after: Reals, c: Reals, keep: Reals, inner: Reals,
    starts: NDArray[np.bool_], entry: Reals, first: int, last: int,
) -> None:  # fmt: skip
    """Compute an LSTM's slopes for samples first … last − 1.

    ``gates`` are i, f, g, o if ``known``, and otherwise the sums that enter them. They are
    overwritten by s_i, s_f, s_g, s_o. ``inner`` receives e, and ``keep``
    receives f. ``c`` (B, H), before the first step, is overwritten by that after the last.
    ``starts`` and ``entry`` are those of ``forward_loops``.
    """
    samples, size = c.shape
    flat, h, cells = gates.reshape(-1), after.reshape(-1), c.reshape(-1)
    kept, e = keep.reshape(-1), inner.reshape(-1)
    for t in range(gates.shape[0]):
        if starts.shape[0]:
            enter(starts[t], entry, c, size, first, last)
        for b in range(first, last):
            for j in range(0, size, LANES):
                left, row = size - j, (t * samples + b) * size
                at, v, state = row + j, 4 * row + j, b * size + j
                i, f, g, o = load_each(flat, v, size, left, 4)
                if not known:
                    i, f, g, o = cell.lstm_gates(i, f, g, o)
                c_now = load(cells, state, left)
                s_i, s_f, s_g, s_o, through = cell.lstm_slopes(i, f, g, o, c_now, load(h, at, left))
                store_each(flat, v, size, left, (s_i, s_f, s_g, s_o))
                store(e, at, through, left)
                store(kept, at, f, left)
                store(cells, state, f * c_now + i * g, left)
