"""How long a block and a chunk should be: sizes that keep a backward pass in cache, and short.

Nominal sizes, read off the shapes alone: no clock is asked, so the same shapes give the same sums.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from retrograde.kernels.cells import GATES, Kind

__all__ = ["BackwardPlan", "scan_plan", "sequential_plan", "step_numbers"]


@dataclass(frozen=True)
class BackwardPlan:
    """How a layer is to be backpropagated.

    Attributes:
        name: by steps, or by a scan over chunks of them.
        block: steps whose slopes are held at a time.
        chunk: steps to a chunk of the scan.
    """

    name: Literal["sequential", "scan"]
    block: int
    chunk: int = 1


# What a block's working arrays may take. On a CPU, a part of the last cache that cores share; on a
# GPU, launches count and memory is plentiful.
_BLOCK_BYTES = {"cpu": 4 * 2**20, "cuda": 2**28}
# Gradients of weights are read and written once a block: rows that are worth it.
_ROWS = 1024
# The same for the scan, whose products come on top and which wants many chunks at a time.
_SCAN_BYTES = {"cpu": 24 * 2**20, "cuda": 2**30}


def step_numbers(kind: Kind, inputs: int, size: int) -> int:
    """Numbers that backpropagating a step of a sample works on: slopes, states, inputs."""
    return (2 * GATES[kind] + 4) * size + 2 * inputs


def sequential_plan(
    kind: Kind, samples: int, inputs: int, size: int, dtype: torch.dtype, device: str
) -> BackwardPlan:
    """The sequential sweep of B samples, inputs I and states H wide, in blocks that fit the cache.

    Example:
        >>> sequential_plan("GRU", 16, 24, 20, torch.float32, "cpu").block
        264
    """
    step = step_numbers(kind, inputs, size) * samples * max(4, dtype.itemsize)
    block = max(1, _BLOCK_BYTES.get(device, _BLOCK_BYTES["cuda"]) // step)
    return BackwardPlan("sequential", max(block, _ROWS // max(1, samples)))


def scan_plan(
    kind: Kind, length: int, samples: int, inputs: int, size: int, dtype: torch.dtype, device: str
) -> BackwardPlan:
    """The scan over T steps, with the chunk L that makes its latency 2 L + T / L least.

    Example:
        >>> scan_plan("RNN_TANH", 1000, 16, 24, 20, torch.float32, "cpu").chunk
        22
    """
    chunk = max(1, min(round(math.sqrt(length / 2)), length))
    state = size * (2 if kind == "LSTM" else 1)
    wide = GATES[kind] * size + 2 * state  # a row, and its products with every gate's slopes
    per_step = step_numbers(kind, inputs, size) + (state + 1) * wide / chunk
    bytes_ = per_step * samples * max(4, dtype.itemsize)
    room = _SCAN_BYTES.get(device, _SCAN_BYTES["cuda"])
    steps = max(int(room / bytes_), chunk)
    return BackwardPlan("scan", steps - steps % chunk, chunk)
