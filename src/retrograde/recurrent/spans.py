"""Spans: neighbouring steps that run in one go, all with the same number of sequences.

A packed batch stores its steps one after the other. Each step has as many rows as there are
sequences that still continue. Where that number does not change, steps are a plain tensor (L, n,
…), so nothing is padded.

The lengths of spans follow from the shapes alone. No clock is read, so the same shapes give the
same sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import torch

from retrograde.kernels.cells import AnyKind, form_of

# The bytes of a block's working arrays. On a CPU they are a part of the last-level cache that cores
# share; on a GPU, launches are the cost and memory is plentiful.
_BLOCK_BYTES = {"cpu": 4 * 2**20, "cuda": 2**28}
# Gradients of weights are read and written once a block; a block of so many rows is worth that.
_ROWS = 1024
# The same for the scan, which also holds products and needs many chunks at a time.
_SCAN_BYTES = {"cpu": 24 * 2**20, "cuda": 2**30}


@dataclass(frozen=True)
class Span:
    """Steps ``start`` … ``stop − 1`` of the first ``samples`` sequences."""

    start: int
    stop: int
    samples: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> int:
        """The number of rows; one row is one step of one sample."""
        return len(self) * self.samples


def cut(
    start: int, stop: int, block: int, samples: int, sizes: Sequence[int] | None = None
) -> list[Span]:
    """Return the spans of steps ``start`` … ``stop − 1``, in order. A span has at most ``block``
    rows, or one step where even that has more. ``sizes`` gives the number of sequences at each step
    of a packed batch."""
    bounds = [start, stop]
    if sizes is not None:
        changes = (t for t in range(start + 1, stop) if sizes[t] != sizes[t - 1])
        bounds = [start, *changes, stop]
    spans = []
    for begin, end in pairwise(bounds):
        count = samples if sizes is None else sizes[begin]
        steps = max(1, block // max(1, count))
        spans += [Span(a, min(a + steps, end), count) for a in range(begin, end, steps)]
    return spans


@dataclass(frozen=True)
class Sequences:
    """The lengths of a batch: T, B and, if packed, ``offsets``. These give the first row of every
    step, and at the end the number of rows."""

    length: int
    batch: int
    offsets: Sequence[int] | None = None

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of neighbouring steps with equally many sequences, as (steps, sequences)."""
        if self.offsets is None:
            return [(self.length, self.batch)]
        sizes = (b - a for a, b in pairwise(self.offsets))
        return [(len(list(group)), size) for size, group in groupby(sizes)]

    @property
    def rows(self) -> int:
        """The rows of all steps; one row is one step of one sequence."""
        return self.length * self.batch if self.offsets is None else self.offsets[-1]

    def spans(self, block: int) -> int:
        """Return the number of sequences summed over all spans, in units of the batch, rounded up.
        Each span has at most ``block`` rows."""
        total = sum(n * -(-steps // max(1, block // n)) for steps, n in self.runs)
        return -(-total // self.batch)

    def largest(self, block: int) -> int:
        """Return the most rows of a span."""
        return max(n * min(steps, max(1, block // n)) for steps, n in self.runs)

    def last(self, steps: int, both: bool) -> int:
        """Return the rows of the last steps; with two directions, the average over both."""
        if self.offsets is None:
            return steps * self.batch
        late = self.offsets[-1] - self.offsets[self.length - steps]
        return -(-(late + self.offsets[steps]) // 2) if both else late


def step_numbers(kind: AnyKind, inputs: int, size: int) -> int:
    """Return how many numbers one step of one sample has: slopes, states, inputs."""
    return (2 * form_of(kind).gates + 4) * size + 2 * inputs


def sequential_block(
    kind: AnyKind, samples: int, inputs: int, size: int, dtype: torch.dtype, device: str
) -> int:
    """Return the steps of a block that fits the cache, of B samples, inputs I, states H."""
    step = step_numbers(kind, inputs, size) * samples * max(4, dtype.itemsize)
    block = max(1, _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"]) // step)
    return max(block, _ROWS // max(1, samples))


def chunk_of(steps: int) -> int:
    """Return the steps of a chunk of the least latency, 2 L + T / L, in a scan over T steps."""
    return max(1, round(math.sqrt(steps / 2)))


def scan_lengths(
    kind: AnyKind, length: int, samples: int, inputs: int, size: int, dtype: torch.dtype,
    device: str,
) -> tuple[int, int]:  # fmt: skip
    """Return the steps of a block of a scan over T steps, and those of a chunk."""
    chunk = chunk_of(length)
    state = size * (2 if kind == "LSTM" else 1)
    wide = form_of(kind).gates * size + 2 * state  # a row, and its products with all slopes
    per_step = step_numbers(kind, inputs, size) + (state + 1) * wide / chunk
    bytes_ = per_step * samples * max(4, dtype.itemsize)
    room = _SCAN_BYTES.get(device, _SCAN_BYTES["cuda"])
    steps = max(int(room / bytes_), chunk)
    return steps - steps % chunk, chunk
