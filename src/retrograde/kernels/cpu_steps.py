"""The loops of :mod:`retrograde.kernels.cpu_lean`: one step's elements, its matrix product aside.

Arrays are named as in ``cpu_states`` and ``cpu_sweep``. Those files have the same elements inside
their own loops over steps: a call a step would take a tenth to three quarters more time.
"""

from retrograde.kernels.lanes import LANES, Reals, compiled, load, positive, sigmoid, store, tanh

__all__ = ["back_lstm", "back_state", "step_gru", "step_lstm", "step_rnn"]


@compiled  # type: ignore[untyped-decorator]
def step_rnn(sums: Reals, h: Reals, outputs: Reals, relu: bool, first: int, last: int) -> None:
    """RNN: ``sums`` (B, H) is all that enters, and may be the outputs."""
    size = h.shape[1]
    z, states, y = sums.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at = size - j, b * size + j
            total = load(z, at, left)
            state = positive(total) if relu else tanh(total)
            store(states, at, state, left)
            store(y, at, state, left)


@compiled  # type: ignore[untyped-decorator]
def step_gru(
    driven: Reals, sums: Reals, bias: Reals, h: Reals, outputs: Reals, first: int, last: int
) -> None:
    """GRU: from what the inputs bring, and ``sums`` (B, 3 H), U h without its bias."""
    size = h.shape[1]
    x, u, states, y = driven.reshape(-1), sums.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at, v = size - j, b * size + j, 3 * b * size + j
            r = load(x, v, left) + load(u, v, left) + load(bias, j, left)
            z = load(x, v + size, left) + load(u, v + size, left) + load(bias, size + j, left)
            r, z = sigmoid(r), sigmoid(z)
            m = load(u, v + 2 * size, left) + load(bias, 2 * size + j, left)
            n = tanh(load(x, v + 2 * size, left) + r * m)
            state = n + z * (load(states, at, left) - n)
            store(states, at, state, left)
            store(y, at, state, left)


@compiled  # type: ignore[untyped-decorator]
def step_lstm(
    gates: Reals, h: Reals, c: Reals, outputs: Reals, before: Reals, first: int, last: int
) -> None:
    """LSTM: ``gates`` (B, 4 H), all that enters, become i, f, g, o; ``before``, if any, takes c."""
    size = h.shape[1]
    z, states, y = gates.reshape(-1), h.reshape(-1), outputs.reshape(-1)
    cells, cells_before = c.reshape(-1), before.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at, v = size - j, b * size + j, 4 * b * size + j
            i, f = sigmoid(load(z, v, left)), sigmoid(load(z, v + size, left))
            g, o = tanh(load(z, v + 2 * size, left)), sigmoid(load(z, v + 3 * size, left))
            cell = load(cells, at, left)
            if before.shape[0]:
                store(cells_before, at, cell, left)
            cell = f * cell + i * g
            state = o * tanh(cell)
            store(z, v, i, left)
            store(z, v + size, f, left)
            store(z, v + 2 * size, g, left)
            store(z, v + 3 * size, o, left)
            store(cells, at, cell, left)
            store(states, at, state, left)
            store(y, at, state, left)


@compiled  # type: ignore[untyped-decorator]
def back_state(
    gates: Reals,
    keep: Reals,
    inner: Reals,
    losses: Reals,
    g: Reals,
    before: Reals,
    first: int,
    last: int,
) -> None:
    """RNN and GRU: gates (B, K·H) and inner become gradients, before what passes them by."""
    size, width = g.shape[1], gates.shape[1]
    s, kept, s_n = gates.reshape(-1), keep.reshape(-1), inner.reshape(-1)
    known, terms, past = g.reshape(-1), losses.reshape(-1), before.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at = size - j, b * size + j
            x = load(known, at, left)
            if losses.shape[0]:
                x = x + load(terms, at, left)
            for k in range(b * width + j, (b + 1) * width, size):
                store(s, k, x * load(s, k, left), left)
            if keep.shape[0]:
                store(past, at, x * load(kept, at, left), left)
                store(s_n, at, x * load(s_n, at, left), left)
            else:
                store(past, at, x - x, left)


@compiled  # type: ignore[untyped-decorator]
def back_lstm(
    gates: Reals, keep: Reals, inner: Reals, losses: Reals, g: Reals, first: int, last: int
) -> None:
    """LSTM: gates (B, 4 H) become gradients; of g (B, 2 H), that of c goes to before the step."""
    size = g.shape[1] // 2
    s, f, e = gates.reshape(-1), keep.reshape(-1), inner.reshape(-1)
    known, terms = g.reshape(-1), losses.reshape(-1)
    for b in range(first, last):
        for j in range(0, size, LANES):
            left, at, v = size - j, b * size + j, 4 * b * size + j
            of_h = 2 * b * size + j
            x = load(known, of_h, left)
            if losses.shape[0]:
                x = x + load(terms, at, left)
            d = load(known, of_h + size, left) + x * load(e, at, left)
            store(known, of_h + size, d * load(f, at, left), left)
            store(s, v, d * load(s, v, left), left)
            store(s, v + size, d * load(s, v + size, left), left)
            store(s, v + 2 * size, d * load(s, v + 2 * size, left), left)
            store(s, v + 3 * size, x * load(s, v + 3 * size, left), left)
