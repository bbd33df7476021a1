"""The lengths of blocks and chunks: a backward pass in blocks that fit the cache.

Sizes follow from the shapes alone. No clock is read, so the same shapes give the same sums.
"""

import math
from dataclasses import dataclass

import torch

from retrograde.kernels.cells import GATES, Kind

__all__ = ["BackwardPlan", "scan_plan", "sequential_plan", "step_numbers"]


@dataclass(frozen=True)
class BackwardPlan:
    """How layers are backpropagated.

    Attributes:
        block: the steps whose slopes are held at a time.
        chunk: steps in a chunk of a scan; None for no scan.
    """

    block: int
    chunk: int | None = None


# The bytes of a block's working arrays. On a CPU they are a part of the last-level cache that cores
# share; on a GPU, launches are the cost and memory is plentiful.
_BLOCK_BYTES = {"cpu": 4 * 2**20, "cuda": 2**28}
# Gradients of weights are read and written once a block; a block of so many rows is worth that.
_ROWS = 1024
# The same for the scan, which also holds products and needs many chunks at a time.
_SCAN_BYTES = {"cpu": 24 * 2**20, "cuda": 2**30}


def step_numbers(kind: Kind, inputs: int, size: int) -> int:
    """Return how many numbers one step of one sample has: slopes, states, inputs."""
    return (2 * GATES[kind] + 4) * size + 2 * inputs


def sequential_plan(
    kind: Kind, samples: int, inputs: int, size: int, dtype: torch.dtype, device: str
) -> BackwardPlan:
    """Return the sequential sweep of B samples, inputs I, states H, in blocks that fit the cache.

    Example:
        >>> sequential_plan("GRU", 16, 24, 20, torch.float32, "cpu").block
        264
    """
    step = step_numbers(kind, inputs, size) * samples * max(4, dtype.itemsize)
    block = max(1, _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"]) // step)
    return BackwardPlan(max(block, _ROWS // max(1, samples)))


def scan_plan(
    kind: Kind, length: int, samples: int, inputs: int, size: int, dtype: torch.dtype, device: str
) -> BackwardPlan:
    """Return the scan over T steps, with the chunk L of the least latency, 2 L + T / L.

    Example:
        >>> scan_plan("RNN_TANH", 1000, 16, 24, 20, torch.float32, "cpu").chunk
        22
    """
    chunk = max(1, min(round(math.sqrt(length / 2)), length))
    state = size * (2 if kind == "LSTM" else 1)
    wide = GATES[kind] * size + 2 * state  # a row, and its products with all slopes
    per_step = step_numbers(kind, inputs, size) + (state + 1) * wide / chunk
    bytes_ = per_step * samples * max(4, dtype.itemsize)
    room = _SCAN_BYTES.get(device, _SCAN_BYTES["cuda"])
    steps = max(int(room / bytes_), chunk)
    return BackwardPlan(steps - steps % chunk, chunk)
