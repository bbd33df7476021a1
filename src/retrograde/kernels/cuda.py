"""The backward recurrence on a GPU, in Triton: a sweep in one launch, a scan in three.

The references are the functions of the same names in :mod:`retrograde.kernels.sweep` and
:mod:`retrograde.kernels.cells`. The same call gives the same bits: no sizes are tuned at run time
and nothing is added atomically.

The scan has the three phases of :mod:`retrograde.kernels.sweep`, except that the first chunk may be
shorter than the others. The carry measures whether the products may be trusted. Where a card has
no room for the scan (sm_75 from 65 units on), the sweep takes its place.

*TF32*: sums are float32. Where ``torch.backends.cudnn`` lets torch's own recurrent kernels round to
TF32, up to 64 units are multiplied on the tensor cores, each product in three of TF32, whose sum is
exact to about 2⁻²¹; else none is.

*Sizes* (:mod:`retrograde.kernels.cuda_limits`) are fixed by the card and P, the power of two from
16 on that holds H. A sweep keeps U in registers; of an LSTM of more than 64 units it reads U at
each step. A product has tiles of 32 rows, of which a thread has 8 or 16 numbers. Most loads run two
steps ahead.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from retrograde.kernels import LARGEST_SIZE, cuda_states, cuda_sweep
from retrograde.kernels import sweep as reference
from retrograde.kernels.cells import Slopes
from retrograde.kernels.cuda_limits import Launch, launch

__all__ = ["gru_slopes", "lstm_slopes", "scan", "sweep"]

# Steps that a program takes at a time of c, and how many numbers of c it has: 32 bytes, the least
# that memory delivers.
_TIME, _LANES = 128, 8
_BLOCK = 512
# Bytes of shared memory that the interpreter is taken to have: sm_90's.
_INTERPRETED = 232_448


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
    form = launch("products", gates, size, _limit(g), _tf32())
    carry = launch("carry", gates, size, _limit(g))
    if length // chunk < 2 or form is None or carry is None:
        return sweep(slopes, hidden, dy, g)
    chunks, n = -(-length // chunk), g.shape[-1]
    rows = g.new_empty(chunks, samples, n + 1, n)
    after, sizes = g.new_empty(chunks, samples, n), g.new_empty(2, samples)
    given = *_arrays(slopes, hidden, dy), rows, samples, length, chunks, chunk
    carried = rows, g.contiguous(), after, sizes, samples, chunks
    with _device_of(g):
        cuda_sweep.products[(chunks * samples, -(-(n + 1) // form.rows))](
            *given,
            K=gates,
            ROWS=form.rows,
            LOSSES=dy is not None,
            TF32=form.tf32,
            **_constants(form, size),
        )
        cuda_sweep.carry[(samples,)](*carried, LSTM=gates == 4, **_constants(carry, size))
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
    before = after.new_empty(samples, after.shape[-1])
    form = launch("sweep", gates, size, _limit(after))
    assert form is not None  # it fits every card
    given = *_arrays(slopes, hidden, dy), after, before, samples, length, chunks, chunk
    with _device_of(after):
        cuda_sweep.sweep[(chunks * samples,)](
            *given,
            K=gates,
            S=1 if gates == 1 else 4,
            LOSSES=dy is not None,
            HELD=gates < 4 or size <= 64,
            **_constants(form, size),
        )
    return before


def _device_of(t: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device, so let that be the tensor's; or the interpreter's."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def _limit(t: Tensor) -> int:
    """The bytes of shared memory that a program may have on a tensor's card."""
    if not t.is_cuda:
        return _INTERPRETED
    return _shared_memory(t.device.index)


@functools.cache
def _shared_memory(card: int) -> int:
    found = triton.runtime.driver.active.utils.get_device_properties(card)
    return int(found["max_shared_mem"])


def _tf32() -> bool:
    """Whether torch lets its own recurrent kernels round to TF32."""
    cudnn: Any = torch.backends.cudnn
    if hasattr(cudnn, "rnn"):
        return bool(cudnn.rnn.fp32_precision == "tf32")
    return bool(cudnn.allow_tf32)  # torch before 2.9


def _constants(form: Launch, size: int) -> dict[str, int]:
    found = {"H": size, "P": form.padded, "STAGES": form.stages, "num_warps": form.warps}
    # Left to itself, ptxas gives 16 warps 64 registers a thread, and spills twice as much.
    return found | ({"maxnreg": 128} if form.warps == 16 else {})


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
