"""The recurrence on a GPU, in Triton: forward and swept in one launch each, scanned in three.

A layer of more than 128 units does not fit one program. Its sweep is one launch a step
(``wide_sweep``), and it has no scan here.

The references are the functions of the same names in :mod:`retrograde.kernels.sweep` and
:mod:`retrograde.kernels.cells`. The same call gives the same bits, since no sizes are tuned at run
time and nothing is added atomically.

The scan has the three phases of :mod:`retrograde.kernels.sweep`, but here the first chunk may be
shorter than the others. The carry also measures, for each sample, whether the products can be
trusted. A sample for which they cannot is swept step by step within the last launch, so the program
need not wait. If a card has too little shared memory for the scan (sm_75 from 65 units on), the
block is swept instead.

*TF32*: sums are float32. If ``torch.backends.cudnn`` allows torch's own recurrent kernels to round
to TF32, products of up to 64 units use the tensor cores (sm_80 and later). Each is then the sum of
three products in TF32, exact to about 2⁻²¹. A wide layer's are one each, as cuDNN's. Otherwise the
tensor cores are not used.

*Sizes* (:mod:`retrograde.kernels.cuda.limits`) depend only on the card, the cell and P, the least
power of two from 16 on that is no less than H. A sweep and a forward pass keep U in registers. A
product has tiles of 16 or 32 rows, of which a thread has 8 or 16 numbers. Most loads are issued two
steps ahead.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from retrograde.kernels import sweep as reference
from retrograde.kernels.cells import Kind, Slopes
from retrograde.kernels.cuda import (
    forward_kernels,
    slope_kernels,
    step_kernels,
    sweep_kernels,
)
from retrograde.kernels.cuda.graph import recorded
from retrograde.kernels.cuda.limits import LARGEST_SIZE, Launch, launch, step_launch
from retrograde.kernels.verdicts import Verdicts

# A program computes c for this many steps at a time, and for this many numbers of c. Eight numbers
# are 32 bytes, the smallest transfer of the memory.
_TIME, _LANES = 128, 8
_BLOCK = 512
# The most launches of a wide sweep that are recorded together. Recording pays for twice as many.
_RECORDED = 32
# The shared memory in bytes that is assumed for Triton's interpreter, which is that of sm_90.
_INTERPRETED = 232_448


def sweep(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.sweep`, for float32. It is one launch for up
    to 128 units, and a :class:`WideSweep` beyond."""
    length, _, _, size = slopes.gates.shape
    if size > LARGEST_SIZE:
        return wide_sweep(hidden)(slopes, dy, g)
    return _sweep_chunks(slopes, hidden, dy, g.contiguous(), 1, max(1, length))


class WideSweep:
    """Sweeps of one layer's blocks, for any number of units, in one launch a step. If there are
    many steps, launches are recorded as a CUDA graph and replayed. The graph has the address of the
    weights; :func:`wide_sweep` keeps a sweep as long as they live."""

    def __init__(self, hidden: Tensor) -> None:
        self.table = torch.empty(7, dtype=torch.int64, device=hidden.device)
        self.steps, self.alike, self.recorded = 0, (0, 0, 0), 0
        self.replay: Callable[[], None] | None = None

    def sweep(self, hidden: Tensor, slopes: Slopes, dy: Tensor | None, g: Tensor) -> Tensor:
        """Do the same as :func:`retrograde.kernels.sweep.sweep` for a block."""
        length, samples, gates, size = slopes.gates.shape
        state = g.clone(memory_format=torch.contiguous_format)
        slopes_of, keep, inner, _, losses = _arrays(slopes, hidden, dy)
        arrays = slopes_of, keep, inner, losses, state
        with _device_of(g):
            step_kernels.begin[(1,)](self.table, *arrays, length, num_warps=1)
            form = {"K": gates, "H": size, "LOSSES": dy is not None}
            self._run(hidden, length + 1, samples, form)
        return state

    def _run(self, hidden: Tensor, count: int, samples: int, form: dict[str, int]) -> None:
        options = step_launch(samples, form["K"], form["H"], _limit(hidden), _tf32())
        tile = options["TILE"]
        grid = -(-samples // tile), -(-form["H"] // tile)

        def launch(back: int) -> None:
            step_kernels.step[grid](self.table, hidden, samples, back, **form, **options)

        def launch_many() -> None:
            for back in range(self.recorded):
                launch(back)
            self.table[6:].sub_(self.recorded)

        if self.alike != (alike := (samples, form["LOSSES"], options["TF32"])):
            self.steps, self.alike, self.replay = 0, alike, None
        self.steps += count
        is_recorded = hidden.is_cuda and torch.cuda.is_current_stream_capturing()  # by the caller
        if self.replay is None and self.steps >= 2 * _RECORDED and not is_recorded:
            launch(count)  # does nothing, but is compiled
            self.recorded = -(-count // -(-count // _RECORDED))  # blocks mostly have one length
            self.replay = recorded(launch_many, hidden.device)
            if self.replay is launch_many:  # no graph can be recorded, and this holds the weights
                self.replay, self.steps = None, -(2**62)
        if self.replay is None or is_recorded:
            for back in range(count):
                launch(back)
        else:
            for _ in range(-(-count // self.recorded)):
                self.replay()


def wide_sweep(hidden: Tensor) -> Callable[..., Tensor]:
    """Return the sweep of a wide layer with these weights. Later calls go on with what an earlier
    one recorded, on the same stream, as long as the weights' memory lives."""
    hidden = hidden.contiguous()
    stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else 0
    key = hidden.data_ptr(), hidden.shape, hidden.device, stream, threading.get_ident()
    memory, wide = _WIDE.get(key, (None, None))
    if memory is None or wide is None or memory.expired():
        memory, wide = StorageWeakRef(hidden.untyped_storage()), WideSweep(hidden)
        for old in [old for old, (their_memory, _) in _WIDE.items() if their_memory.expired()]:
            del _WIDE[old]
        _WIDE[key] = memory, wide
    return functools.partial(wide.sweep, hidden)


_WIDE: dict[Any, tuple[StorageWeakRef, WideSweep]] = {}


def forward(
    kind: Kind, gates: Tensor, hidden: Tensor, bias: Tensor | None, state: Sequence[Tensor],
    outputs: Tensor,
) -> None:  # fmt: skip
    """Do the same as :func:`retrograde.kernels.launched.forward`, for float32 and up to 128 units,
    in one launch."""
    length, samples, size = outputs.shape
    arrays = gates, hidden, gates if bias is None else bias, outputs, state[0], state[-1]
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in arrays)
    count = len(hidden) // size
    form = launch("sweep", count, size, _limit(hidden))
    assert form is not None
    with _device_of(hidden):
        forward_kernels.forward[(samples,)](
            *arrays, samples, length, 1, K=count, S=1 if count == 1 else 4,
            RELU=kind == "RNN_RELU", **_constants(form, size),
        )  # fmt: skip


def scan(slopes: Slopes, hidden: Tensor, dy: Tensor | None, g: Tensor, chunk: int) -> Tensor:
    """Do the same as :func:`retrograde.kernels.sweep.scan`, for float32, in three launches."""
    length, samples, gates, size = slopes.gates.shape
    assert size <= LARGEST_SIZE
    form = launch("products", gates, size, _limit(g), _tf32())
    carry = launch("carry", gates, size, _limit(g))
    if length // chunk < 2 or form is None or carry is None:
        return sweep(slopes, hidden, dy, g)
    chunks, n = -(-length // chunk), g.shape[-1]
    maps = g.new_empty(chunks, samples, n + 1, n)
    after, sizes = g.new_empty(chunks, samples, n), g.new_empty(2, samples)
    arguments = *_arrays(slopes, hidden, dy), maps, samples, length, chunks, chunk
    carried = maps, g.contiguous(), after, sizes, samples, chunks
    with _device_of(g):
        sweep_kernels.products[(chunks * samples, -(-(n + 1) // form.rows))](
            *arguments, K=gates, ROWS=form.rows, LOSSES=dy is not None, TF32=form.tf32,
            **_constants(form, size),
        )  # fmt: skip
        sweep_kernels.carry[(samples,)](*carried, LSTM=gates == 4, **_constants(carry, size))
    del maps  # before more is allocated
    distrusted = torch.zeros(1, dtype=torch.int32, device=g.device)
    before = _sweep_chunks(slopes, hidden, dy, after, chunks, chunk, (sizes, distrusted))
    _verdicts().add(distrusted)
    return before


@functools.cache
def _verdicts() -> Verdicts:
    return Verdicts(reference.warn_of_sweep)


def gru_slopes(inputs: Tensor, hidden: Tensor, before: Tensor) -> Slopes:
    """Do the same as :func:`retrograde.kernels.cells.gru_slopes`, for float32, in one launch."""
    assert hidden.is_contiguous()
    size, numbers = before.shape[-1], before.numel()
    keep, inner = hidden.new_empty(before.shape), hidden.new_empty(before.shape)
    arrays = inputs.contiguous(), hidden, before.contiguous(), keep, inner
    with _device_of(hidden):
        slope_kernels.gru_slopes[(-(-numbers // _BLOCK),)](
            *arrays, numbers, H=size, BLOCK=_BLOCK, num_warps=4
        )
    return Slopes(hidden.view(*before.shape[:-1], 3, size), keep, inner)


def lstm_slopes(gates: Tensor, after: Tensor, c: Tensor, activated: bool = False) -> Slopes:
    """Do the same as :func:`retrograde.kernels.cells.lstm_slopes`, for float32, in one launch.
    ``after`` is unused. ``activated`` must be false: no forward pass on a GPU keeps the gates."""
    assert gates.is_contiguous()
    assert not activated
    length, samples, size = *gates.shape[:2], c.shape[-1]
    keep, inner = (gates.new_empty(length, samples, size) for _ in range(2))
    arguments = gates, keep, inner, c.contiguous(), length, c.numel()
    with _device_of(gates):
        slope_kernels.lstm_slopes[(-(-c.numel() // _LANES),)](
            *arguments, H=size, TIME=_TIME, LANES=_LANES, num_warps=8
        )
    return Slopes(gates.view(length, samples, 4, size), keep, inner)


def _sweep_chunks(
    slopes: Slopes, hidden: Tensor, dy: Tensor | None, after: Tensor, chunks: int, chunk: int,
    check: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Sweep each chunk from the gradient after it; return the gradient before the first. ``check``
    has the sizes that the carry measured, and a number that becomes 1 if a sample is distrusted."""
    length, samples, gates, size = slopes.gates.shape
    before = after.new_empty(samples, after.shape[-1])
    form = launch("sweep", gates, size, _limit(after))
    assert form is not None  # a sweep fits every card
    sizes, distrusted = check or (before, before)
    arguments = *_arrays(slopes, hidden, dy), after, before, sizes, distrusted
    counts = samples, length, chunks, chunk, 1
    with _device_of(after):
        sweep_kernels.sweep[(chunks * samples,)](
            *arguments, *counts, K=gates, S=1 if gates == 1 else 4, LOSSES=dy is not None,
            CHECKED=check is not None, **_constants(form, size),
        )  # fmt: skip
    return before


def _device_of(t: Tensor) -> AbstractContextManager[object]:
    """Return a context in which a tensor's card is the current device, where launches go."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def _limit(t: Tensor) -> int:
    """Return the bytes of shared memory that a program may have on a tensor's card."""
    if not t.is_cuda:
        return _INTERPRETED
    return _shared_memory(t.device.index)


@functools.cache
def _shared_memory(card: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(card)["max_shared_mem"])


def _tf32() -> bool:
    """Return whether torch allows its own recurrent kernels to round to TF32."""
    cudnn: Any = torch.backends.cudnn
    return bool(cudnn.rnn.fp32_precision == "tf32")


def _constants(form: Launch, size: int) -> dict[str, int]:
    constants = {"H": size, "P": form.padded, "STAGES": form.stages, "num_warps": form.warps}
    # Without this limit, ptxas uses 64 registers a thread for 16 warps, and spills twice as much.
    return constants | ({"maxnreg": 128} if form.warps == 16 else {})


def _arrays(slopes: Slopes, hidden: Tensor, dy: Tensor | None) -> tuple[Tensor, ...]:
    """Return gates, keep, inner, weights and losses; the gates stand in for absent ones."""
    gates, keep, inner = slopes.gates, slopes.keep, slopes.inner
    assert gates.dtype == torch.float32
    for overwritten in (gates, inner):
        assert overwritten is None or overwritten.is_contiguous()
    return (
        gates,
        gates if keep is None else keep.contiguous(),
        gates if inner is None else inner,
        hidden.contiguous(),
        gates if dy is None else dy.contiguous(),
    )
