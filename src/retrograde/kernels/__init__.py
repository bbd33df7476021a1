"""Choose the compiled kernels of a layer's passes, and import them when they are first used."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from retrograde.kernels import cells, launched, sweep
from retrograde.kernels.cells import GateSlopes, Kept, Slopes, Weights
from retrograde.kernels.cuda.limits import LARGEST_SIZE
from retrograde.kernels.fallback import Fallback
from retrograde.kernels.launched import LaunchedForward

if TYPE_CHECKING:
    from retrograde.kernels.cpu.layer import Backward, Forward

__all__ = ["LARGEST_SIZE", "BlockSweep", "Kernels", "kernels"]

Sweep = Callable[..., Tensor]
Scan = Callable[..., Tensor]
Recall = Callable[..., Kept]
BlockSweep = Callable[..., Tensor]
Products = Callable[[Slopes, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Kernels:
    """One implementation of the recurrence, with the signatures of ``sweep``, ``cells``, ``cpu``.

    ``backward`` does slopes, sweep and weight gradients in one loop. ``forward`` and ``backward``
    are None where torch's own are as fast. ``prepare`` returns the hidden weights in the form that
    sweeps read fastest. ``wide`` makes the sweep of a layer that is too wide for the scan's
    kernels; then ``scan`` is torch's operations. ``onward`` runs others forward in little memory.
    """

    name: str
    sweep: Sweep
    scan: Scan
    gates: GateSlopes
    products: Products
    forward: "Callable[[Weights, int], Forward] | None" = None
    backward: "type[Backward] | None" = None
    recall: Recall | None = None
    prepare: Callable[[Tensor, int], Tensor] = lambda hidden, samples: hidden
    wide: Callable[[Tensor], BlockSweep] | None = None
    onward: Callable[[Weights, int], LaunchedForward] | None = None

    def sweep_with(self, hidden: Tensor, samples: int) -> BlockSweep:
        """Return the sweep with these hidden weights, for many blocks of so many samples."""
        if self.wide is not None:
            return self.wide(hidden)
        prepared = self.prepare(hidden, samples)
        return lambda slopes, dy, g, *resets: self.sweep(slopes, prepared, dy, g, *resets)

    @property
    def resetting(self) -> "Kernels":
        """The implementation for samples that begin anew: torch's operations on a GPU."""
        return self if self.name == "numba" else _plain()

    @property
    def in_place(self) -> "Kernels":
        """Those of a CPU that take least memory: they make no copy of the weights."""
        from retrograde.kernels.cpu import layer, sweep

        forward = functools.partial(layer.Forward, in_panels=False)
        return replace(self, forward=forward, prepare=sweep.as_they_lie)


@functools.cache
def kernels(device: str, dtype: torch.dtype, size: int) -> Kernels:
    """Return the fastest implementation for a device type, a dtype and H hidden units."""
    if device == "cpu" and dtype in (torch.float32, torch.float64):
        from retrograde.kernels.cpu import layer as cpu_layer
        from retrograde.kernels.cpu import sweep as cpu

        slopes = cpu.gru_slopes, cpu.lstm_slopes
        layer = cpu_layer.Forward, cpu_layer.Backward, cpu_layer.recall, cpu.in_parts
        return Kernels("numba", cpu.sweep, cpu.scan, slopes, cpu.products, *layer)
    if device == "cuda" and dtype == torch.float32 and importlib.util.find_spec("triton"):
        from retrograde.kernels.cuda import launch as cuda

        either = Fallback()
        gates = (
            either.join(cuda.gru_slopes, cells.gru_slopes),
            either.join(cuda.lstm_slopes, cells.lstm_slopes),
        )
        swept = either.join(cuda.sweep, sweep.sweep)
        if size > LARGEST_SIZE:

            def wide(hidden: Tensor) -> BlockSweep:
                def plain(slopes: Slopes, dy: Tensor | None, g: Tensor) -> Tensor:
                    return sweep.sweep(slopes, hidden, dy, g)

                return either.join(cuda.wide_sweep(hidden), plain)

            return Kernels("triton", swept, sweep.scan, gates, sweep.products, wide=wide)
        scan = either.join(cuda.scan, sweep.scan)
        run = either.join(cuda.forward, launched.forward)
        onward = functools.partial(LaunchedForward, run)
        return Kernels("triton", swept, scan, gates, sweep.products, onward=onward)
    return _plain()


def _plain() -> Kernels:
    slopes = cells.gru_slopes, cells.lstm_slopes
    return Kernels("torch", sweep.sweep, sweep.scan, slopes, sweep.products)
