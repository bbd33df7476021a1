"""The compiled forms of a layer's passes, each loaded when it is first used."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from retrograde.scan import recurrent, sweep
from retrograde.scan.recurrent import Block, GateSlopes, Kept, Slopes, Weights

__all__ = ["LARGEST_SIZE", "Kernels", "Pass", "Run", "kernels"]

#: The most hidden units that the CUDA kernels hold on the chip.
LARGEST_SIZE = 128

Sweep = Callable[[Slopes, Tensor, Tensor | None, Tensor], Tensor]
Scan = Callable[[Slopes, Tensor, Tensor | None, Tensor, int], Tensor]
State = tuple[Tensor, ...]


class Run(Protocol):
    """A layer run forward, as :func:`retrograde.scan.kernels.cpu.run`."""

    def __call__(
        self, weights: Weights, x: Tensor, state: State, kept: Kept | None = None
    ) -> tuple[Tensor, State]:
        """The outputs, and the state after the last step."""
        ...


class Pass(Protocol):
    """The backward pass of a block, as :func:`retrograde.scan.kernels.cpu.backward`."""

    def __call__(
        self,
        weights: Weights,
        block: Block,
        dy: Tensor | None,
        g: Tensor,
        dx: Tensor | None,
        totals: dict[str, Tensor],
    ) -> Tensor:
        """The gradient of the state before the block; those of the weights are added to totals."""
        ...


@dataclass(frozen=True)
class Kernels:
    """One implementation of the recurrence, by steps and by a scan.

    Attributes:
        name: "numba", "triton" or "torch".
        sweep: as :func:`retrograde.scan.sweep.sweep`.
        scan: as :func:`retrograde.scan.sweep.scan`.
        gates: as :func:`retrograde.scan.recurrent.gru_slopes` and ``lstm_slopes``.
        run: the forward pass, where there is one that is faster than torch's own.
        backward: slopes, sweep and sums in one, where there is such a thing.
    """

    name: str
    sweep: Sweep
    scan: Scan
    gates: GateSlopes
    run: Run | None = None
    backward: Pass | None = None


@functools.cache
def kernels(device: str, dtype: torch.dtype, size: int) -> Kernels:
    """The fastest implementation for a device.

    Args:
        device: its type, such as "cpu" or "cuda".
        dtype: of the slopes.
        size: hidden units.

    Returns:
        Compiled kernels where there are some, and else the plain ones.

    Example:
        >>> kernels("cpu", torch.float32, 20).name
        'numba'
    """
    if device == "cpu" and dtype in (torch.float32, torch.float64):
        from retrograde.scan.kernels import cpu

        return Kernels(
            "numba", cpu.sweep, cpu.scan, (cpu.gru_slopes, cpu.lstm_slopes), cpu.run, cpu.backward
        )
    fits = dtype == torch.float32 and size <= LARGEST_SIZE
    if device == "cuda" and fits and importlib.util.find_spec("triton"):
        from retrograde.scan.kernels import cuda

        return Kernels("triton", cuda.sweep, cuda.scan, (cuda.gru_slopes, cuda.lstm_slopes))
    return Kernels("torch", sweep.sweep, sweep.scan, (recurrent.gru_slopes, recurrent.lstm_slopes))
