"""The backward recurrence on a GPU, in Triton: a sweep in one launch, a scan in three.

The references are the functions of the same names in :mod:`retrograde.kernels.sweep` and
:mod:`retrograde.kernels.cells`. Numbers and sums are float32, never rounded to TF32. The same call
gives the same bits: no sizes are tuned at run time and nothing is added atomically.

The scan has the three phases of :mod:`retrograde.kernels.sweep`, except that the first chunk may be
shorter than the others. The carry measures whether the products may be trusted.

*Sizes* are fixed by P, the power of two from 16 on that holds H. A sweep keeps U in registers (of
an LSTM wider than 64, reads it at each step); a product has tiles of 32 rows, of which a thread
has 8 or 16 numbers; most loads run two steps ahead. An LSTM's registers to a thread, and bytes
spilt, as ptxas 12.8 has them for sm_90:

    P      products  carry   sweep
    16     80, 0     90, 0   82, 0
    32     127, 0    106, 0  80, 0
    64     170, 0    128, 0  127, 0
    128    128, 236  255, 0  128, 252
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from retrograde.kernels import LARGEST_SIZE, cuda_states, cuda_sweep
from retrograde.kernels import sweep as reference
from retrograde.kernels.cells import Slopes

__all__ = ["gru_slopes", "lstm_slopes", "scan", "sweep"]

# Steps that a program takes at a time of c, and how many numbers of c it has: 32 bytes, the least
# that memory delivers.
_TIME, _LANES = 128, 8
_BLOCK = 512


# Warps to a program, and stages of its pipeline, by P and by the number of gates.
_PRODUCTS = {
    16: {1: (1, 3), 3: (1, 3), 4: (1, 3)},
    32: {1: (2, 3), 3: (2, 3), 4: (2, 3)},
    64: {1: (4, 3), 3: (4, 3), 4: (8, 3)},
    128: {1: (8, 3), 3: (8, 2), 4: (16, 2)},
}
_CARRY = {
    16: {1: (1, 3), 3: (1, 3), 4: (1, 3)},
    32: {1: (1, 3), 3: (1, 3), 4: (1, 3)},
    64: {1: (4, 3), 3: (4, 3), 4: (8, 2)},
    128: {1: (8, 2), 3: (8, 2), 4: (8, 1)},
}
_SWEEP = {
    16: {1: (1, 3), 3: (1, 3), 4: (1, 3)},
    32: {1: (1, 3), 3: (4, 3), 4: (4, 3)},
    64: {1: (4, 3), 3: (8, 3), 4: (8, 3)},
    128: {1: (8, 3), 3: (16, 3), 4: (16, 1)},
}


def sweep(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor) -> Tensor:
    """As :func:`retrograde.kernels.sweep.sweep`, for float32 on a GPU, in one launch."""
    g, length = g.contiguous(), slopes.gates.shape[0]
    return _sweep_chunks(slopes, hidden, dy, g, 1, max(1, length))


def scan(
    slopes: Slopes,
    hidden: Tensor,
    dy: Tensor | None,
    g: Tensor,
    chunk: int,
    doubts: list[Tensor] | None = None,
) -> Tensor:
    """As :func:`retrograde.kernels.sweep.scan`, for float32 on a GPU, in three launches."""
    length, samples, gates, size = slopes.gates.shape
    if length // chunk < 2:
        return sweep(slopes, hidden, dy, g)
    chunks, n = -(-length // chunk), g.shape[-1]
    rows = g.new_empty(chunks, samples, n + 1, n)
    after, sizes = g.new_empty(chunks, samples, n), g.new_empty(2, samples)
    given = *_arrays(slopes, hidden, dy), rows, samples, length, chunks, chunk
    carried = rows, g.contiguous(), after, sizes, samples, chunks
    tile = 16 if n < 16 else 32
    with _device_of(g):
        cuda_sweep.products[(chunks * samples, -(-(n + 1) // tile))](
            *given,
            K=gates,
            ROWS=tile,
            LOSSES=dy is not None,
            **_constants(_PRODUCTS, gates, size),
        )
        cuda_sweep.carry[(samples,)](*carried, LSTM=gates == 4, **_constants(_CARRY, gates, size))
    if doubts is not None:
        doubts.append(sizes)
    elif not _trusted(sizes):
        reference.trusted(rows, after)  # which says so
        return sweep(slopes, hidden, dy, g)
    return _sweep_chunks(slopes, hidden, dy, after, chunks, chunk)


def gru_slopes(inputs: Tensor, hidden: Tensor, before: Tensor) -> Slopes:
    """As :func:`retrograde.kernels.cells.gru_slopes`, for float32 on a GPU, in one launch."""
    assert hidden.is_contiguous()
    size, numbers = before.shape[-1], before.numel()
    keep, inner = hidden.new_empty(before.shape), hidden.new_empty(before.shape)
    arrays = inputs.contiguous(), hidden, before.contiguous(), keep, inner
    with _device_of(hidden):
        cuda_states.gru_slopes[(-(-numbers // _BLOCK),)](
            *arrays, numbers, H=size, BLOCK=_BLOCK, num_warps=4
        )
    return Slopes(hidden.view(*before.shape[:-1], 3, size), keep, inner)


def lstm_slopes(gates: Tensor, after: Tensor, c: Tensor, known: bool = False) -> Slopes:
    """As :func:`retrograde.kernels.cells.lstm_slopes`, for float32 on a GPU, in one launch.
    ``after`` is unused; ``known`` must be false, since on a GPU no forward pass keeps the gates."""
    assert gates.is_contiguous()
    assert not known
    length, samples, size = *gates.shape[:2], c.shape[-1]
    keep, inner = (gates.new_empty(length, samples, size) for _ in range(2))
    given = gates, keep, inner, c.contiguous(), length, c.numel()
    with _device_of(gates):
        cuda_states.lstm_slopes[(-(-c.numel() // _LANES),)](
            *given, H=size, TIME=_TIME, LANES=_LANES, num_warps=8
        )
    return Slopes(gates.view(length, samples, 4, size), keep, inner)


def _sweep_chunks(
    slopes: Slopes, hidden: Tensor, dy: Tensor | None, after: Tensor, chunks: int, chunk: int
) -> Tensor:
    """Sweep each chunk from the gradient after it; return the gradient before the first."""
    length, samples, gates, size = slopes.gates.shape
    before, constants = after.new_empty(samples, after.shape[-1]), _constants(_SWEEP, gates, size)
    given = *_arrays(slopes, hidden, dy), after, before, samples, length, chunks, chunk
    with _device_of(after):
        cuda_sweep.sweep[(chunks * samples,)](
            *given,
            K=gates,
            S=1 if gates == 1 else 4,
            LOSSES=dy is not None,
            HELD=constants["STAGES"] > 1,
            **constants,
        )
    return before


def _device_of(t: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device, so let that be the tensor's; or the interpreter's."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def _constants(
    table: dict[int, dict[int, tuple[int, int]]], gates: int, size: int
) -> dict[str, int]:
    padded = max(16, 1 << (size - 1).bit_length())
    warps, stages = table[padded][gates]
    return {"H": size, "P": padded, "STAGES": stages, "num_warps": warps}


def _arrays(slopes: Slopes, hidden: Tensor, dy: Tensor | None) -> tuple[Tensor, ...]:
    """Gates, what is kept, inner slopes, weights, losses; the gates in place of those absent."""
    gates, keep, inner = slopes.gates, slopes.keep, slopes.inner
    assert gates.dtype == torch.float32
    assert gates.shape[-1] <= LARGEST_SIZE
    for overwritten in (gates, inner):
        assert overwritten is None or overwritten.is_contiguous()
    return (
        gates,
        gates if keep is None else keep.contiguous(),
        gates if inner is None else inner,
        hidden.contiguous(),
        gates if dy is None else dy.contiguous(),
    )


def _trusted(sizes: Tensor) -> bool:
    """As :func:`retrograde.kernels.sweep.trusted`, from what the carry measured."""
    terms, largest = sizes.amax(1).tolist()
    return bool(terms <= min(reference._CANCELLATION * largest, torch.finfo(sizes.dtype).max))
