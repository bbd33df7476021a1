"""The lengths of blocks and chunks: a backward pass in blocks that fit the cache.

Sizes follow from the shapes alone. No clock is read, so the same shapes give the same sums.
"""

import math

import torch

from retrograde.kernels.cells import GATES, Kind

__all__ = ["scan_lengths", "sequential_block", "step_numbers"]


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


def sequential_block(
    kind: Kind, samples: int, inputs: int, size: int, dtype: torch.dtype, device: str
) -> int:
    """Return the steps of a block that fits the cache, of B samples, inputs I, states H.

    Example:
        >>> sequential_block("GRU", 16, 24, 20, torch.float32, "cpu")
        264
    """
    step = step_numbers(kind, inputs, size) * samples * max(4, dtype.itemsize)
    block = max(1, _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"]) // step)
    return max(block, _ROWS // max(1, samples))


def scan_lengths(
    kind: Kind, length: int, samples: int, inputs: int, size: int, dtype: torch.dtype, device: str
) -> tuple[int, int]:
    """Return the steps of a block of a scan over T steps, and those of a chunk.

    The chunk L has the least latency, 2 L + T / L.

    Example:
        >>> scan_lengths("RNN_TANH", 1000, 16, 24, 20, torch.float32, "cpu")
        (1000, 22)
    """
    chunk = max(1, min(round(math.sqrt(length / 2)), length))
    state = size * (2 if kind == "LSTM" else 1)
    wide = GATES[kind] * size + 2 * state  # a row, and its products with all slopes
    per_step = step_numbers(kind, inputs, size) + (state + 1) * wide / chunk
    bytes_ = per_step * samples * max(4, dtype.itemsize)
    room = _SCAN_BYTES.get(device, _SCAN_BYTES["cuda"])
    steps = max(int(room / bytes_), chunk)
    return steps - steps % chunk, chunk
