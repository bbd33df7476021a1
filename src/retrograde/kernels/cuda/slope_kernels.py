"""Triton kernels of the slopes, and of an LSTM's c, which the backward recurrence needs.

:mod:`retrograde.kernels.cuda.launch` launches them. The references have the same names in
:mod:`retrograde.kernels.cells`. Arrays are contiguous and float32. One launch replaces about a
dozen of torch's. At a thousand steps of a small layer, those would take most of the time.

Results overwrite inputs, and several threads may read a number that one of them overwrites. So a
barrier separates the reads from the writes.

c_t = f_t c_{t−1} + i_t g_t is itself a scan, of numbers. A program has a few of the B·H sequences
of c. It takes TIME steps of them at a time, and carries c from one such block to the next.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants of a compilation are in capitals, as everywhere in Triton)

from typing import Any

import triton
import triton.language as tl

_compiled: Any = triton.jit(do_not_specialize=["steps", "width", "numbers"])
_inlined: Any = triton.jit


@_inlined
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@_inlined
def _tanh(x):
    """Return tanh x to the accuracy of float32. A series is used near zero, where 1 − e^{−2|x|}
    would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    series = 1.0 + y * (
        -1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * 1382 / 155925)))
    )
    return tl.where(tl.abs(x) < 0.3, x * series, tl.where(x < 0, -far, far))


@_inlined
def _then(f, c, next_f, next_c):
    """Compose two steps of the form c → f c + gain."""
    return f * next_f, c * next_f + next_c


@_inlined
def _last(c, row, TIME: tl.constexpr):
    """Return the last row of a block, (1, LANES)."""
    return tl.sum(tl.where(row == TIME - 1, c, 0.0), 0)[None, :]


@_compiled
def lstm_slopes(
    gates, keep, inner, c, steps, width, H: tl.constexpr, TIME: tl.constexpr, LANES: tl.constexpr
):
    """Compute an LSTM's slopes. Program p takes all steps of LANES numbers of c, from number
    p·LANES on. There are B·H = width numbers in all. ``gates`` (L, B, 4 H) are sums that enter the
    gates, overwritten by slopes."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)[None, :]
    row = tl.arange(0, TIME)[:, None]
    carried = tl.load(c + lane, mask=lane < width, other=0.0)
    column = lane // H * (4 * H) + lane % H
    for start in tl.range(0, steps, TIME):
        t = (start + row).to(tl.int64)
        real = (t < steps) & (lane < width)
        at = gates + t * (4 * width) + column
        i = _sigmoid(tl.load(at, mask=real, other=0.0))
        f = _sigmoid(tl.load(at + H, mask=real, other=0.0))
        g = _tanh(tl.load(at + 2 * H, mask=real, other=0.0))
        o = _sigmoid(tl.load(at + 3 * H, mask=real, other=0.0))
        inside = real & (row > 0)
        above = at - 4 * width
        i_before = _sigmoid(tl.load(above, mask=inside, other=0.0))
        f_before = _sigmoid(tl.load(above + H, mask=inside, other=0.0))
        g_before = _tanh(tl.load(above + 2 * H, mask=inside, other=0.0))
        more_before = tl.where(row > 0, i_before * g_before, carried)
        _, before = tl.associative_scan((f_before, more_before), 0, _then)
        after = f * before + i * g
        carried = _last(after, row, TIME)
        squashed = _tanh(after)
        tl.debug_barrier()
        tl.store(keep + t * width + lane, f, mask=real)
        tl.store(inner + t * width + lane, o * (1.0 - squashed * squashed), mask=real)
        tl.store(at, g * i * (1.0 - i), mask=real)
        tl.store(at + H, before * f * (1.0 - f), mask=real)
        tl.store(at + 2 * H, i * (1.0 - g * g), mask=real)
        tl.store(at + 3 * H, squashed * o * (1.0 - o), mask=real)


@_compiled
def gru_slopes(gates, hidden, before, keep, inner, numbers, H: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a GRU's slopes. Program p takes BLOCK of the L·B·H numbers, from number p·BLOCK on.
    ``hidden`` (L, B, 3 H) are the states' part of the sums that enter the gates, overwritten by
    slopes."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = e < numbers
    at = e // H * (3 * H) + e % H
    m = tl.load(hidden + at + 2 * H, mask=real, other=0.0)
    r = _sigmoid(
        tl.load(gates + at, mask=real, other=0.0) + tl.load(hidden + at, mask=real, other=0.0)
    )
    z = tl.load(gates + at + H, mask=real, other=0.0)
    z = _sigmoid(z + tl.load(hidden + at + H, mask=real, other=0.0))
    n = _tanh(tl.load(gates + at + 2 * H, mask=real, other=0.0) + r * m)
    state = tl.load(before + e, mask=real, other=0.0)
    s = (1.0 - z) * (1.0 - n * n)
    tl.debug_barrier()
    tl.store(keep + e, z, mask=real)
    tl.store(inner + e, s, mask=real)
    tl.store(hidden + at, s * m * r * (1.0 - r), mask=real)
    tl.store(hidden + at + H, (state - n) * z * (1.0 - z), mask=real)
    tl.store(hidden + at + 2 * H, s * r, mask=real)
