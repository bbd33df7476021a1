"""Dropout between layers, where a step's mask is the same in whatever range it runs (rule 2).

Only one number is drawn, the key of a call. Whether element k of sample b is dropped at step t
before layer l is a hash of (key, l, t, b, k). So a step can be recomputed in another range. A
backward pass recomputes the mask instead of keeping it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Odd constants with well-spread bits: splitmix64's, and those of a 32-bit hash of low bias.
_GAMMA, _MIX_1, _MIX_2 = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SPREAD, _SHORT_1, _SHORT_2 = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32
# How many elements are processed at a time: as many as fit a CPU's cache, or occupy a GPU.
_ELEMENTS = {"cpu": 2**15, "cuda": 2**22}


class Place(NamedTuple):
    """The ``key`` of a call, a random number below 2⁶². A call that runs a part of a sequence or of
    a batch has the numbers of its first step and sample too."""

    key: Tensor
    step: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Dropout:
    """Dropout that zeroes elements with probability p and divides the others by 1 − p. ``layer`` is
    the number of the core's first layer in the module. ``first`` says whether the core's own inputs
    are dropped too."""

    p: float
    place: Place
    layer: int
    first: bool

    def __call__(
        self, x: Tensor, number: int, steps: Tensor, sizes: Tensor | None = None
    ) -> Tensor:
        """Drop elements of the input of layer ``number`` of the core at consecutive ``steps`` (L,).
        x is (L, B, H). If packed it is (rows, H), and ``sizes`` (L,) gives the sequences at each
        step."""
        if number == 0 and not self.first:
            return x
        real = x.dtype in (torch.float32, torch.float64) and not x.requires_grad
        if real and x.device.type == "cpu" and sizes is None and x.is_contiguous() and self.p < 1:
            from retrograde.kernels.cpu.masks import drop

            start = int(steps[0]) + self.place.step
            return drop(x, int(self._seed(number)), self.p, start, self.place.sample)
        if sizes is None:
            step = steps.repeat_interleave(x.shape[1])
            sample = torch.arange(x.shape[1], device=x.device).repeat(len(steps))
        else:
            sizes = sizes.to(x.device)
            step = steps.repeat_interleave(sizes)
            first_rows = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
            sample = torch.arange(len(first_rows), device=x.device) - first_rows
        seeds = _mixed(self._seed(number) + _GAMMA * (step + self.place.step))
        seeds = _mixed(seeds + _GAMMA * (sample + self.place.sample))
        return _Drop.apply(x, seeds, self.p)  # type: ignore[no-any-return, no-untyped-call]

    def _seed(self, number: int) -> Tensor:
        """Return 64 bits that depend on the call and the layer."""
        return _mixed(self.place.key + (self.layer + number + 1))


def _mixed(z: Tensor) -> Tensor:
    """Return 64 bits, each of which depends on all bits of ``z``."""
    z = (z ^ _shifted(z, 30, 64)) * _MIX_1
    z = (z ^ _shifted(z, 27, 64)) * _MIX_2
    return z ^ _shifted(z, 31, 64)


def _shifted(z: Tensor, bits: int, width: int) -> Tensor:
    """Shift to the right, and fill with zeros."""
    return (z >> bits).bitwise_and_((1 << (width - bits)) - 1)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seeds: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(seeds)
        ctx.p = p
        return _dropped(x, seeds, p)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (seeds,) = ctx.saved_tensors
        return _Drop.apply(dy, seeds, ctx.p), None, None  # type: ignore[no-untyped-call]


def _dropped(x: Tensor, seeds: Tensor, p: float) -> Tensor:
    """Apply to each row the mask of its seed, a few rows at a time."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if p == 1:
        return out
    width = x.shape[-1]
    columns = torch.arange(width, dtype=torch.int32, device=x.device) * _SPREAD
    words = seeds.view(torch.int32).view(-1, 2, 1)
    few = max(1, _ELEMENTS.get(x.device.type, _ELEMENTS["cuda"]) // width)
    chunks = (t.split(few) for t in (words, x.reshape(-1, width), out.view(-1, width)))
    for word, values, kept in zip(*chunks, strict=True):
        v = word[:, 0] + columns
        v = v.bitwise_xor_(_shifted(v, 16, 32)).mul_(_SHORT_1).add_(word[:, 1])
        v = v.bitwise_xor_(_shifted(v, 15, 32)).mul_(_SHORT_2)
        v = v.bitwise_xor_(_shifted(v, 16, 32))
        keep = v >= round(p * 2**32) - 2**31
        torch.mul(values, keep, out=kept).div_(1 - p)
    return out
