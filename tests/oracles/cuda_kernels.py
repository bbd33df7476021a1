"""The CUDA kernels, compiled on a GPU and else interpreted, and memory that shows what they do."""

import functools
import importlib
import importlib.util
import re
import sys

import pytest
import torch

from retrograde import kernels
from retrograde.scan import sparse

COMPILED = torch.cuda.is_available()
DEVICE = "cuda" if COMPILED else "cpu"


def load(name):
    """A module of kernels, interpreted where there is no GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton", allow_module_level=True)
    with pytest.MonkeyPatch.context() as patch:
        if not COMPILED:
            patch.setenv("TRITON_INTERPRET", "1")
            forget()
        return importlib.import_module(f"retrograde.{name}")


@functools.cache
def forget():
    """What was perhaps imported before, to compile; triton decides that when it is imported."""
    for name in list(sys.modules):
        if re.match(r"triton(?!\._C)|retrograde\.(kernels|scan\.sparse)\.cuda", name):
            del sys.modules[name]
    for room in (kernels, sparse):
        for name in [name for name in vars(room) if name.startswith("cuda")]:
            delattr(room, name)


class Fences:
    """Tensors in the middle of buffers that are otherwise poisoned, and must stay so."""

    def __init__(self, poison):
        self.poison, self.buffers = poison, []

    def empty(self, shape, dtype, device):
        size, margin = torch.Size(shape).numel(), 1000
        buffer = torch.full((size + 2 * margin,), self.poison, dtype=dtype, device=device)
        self.buffers.append(buffer)
        return buffer[margin : margin + size].view(shape)

    def around(self, t, dtype=torch.float32):
        if t is None:
            return None
        return self.empty(t.shape, dtype, DEVICE).copy_(t)

    def hold(self):
        return all(self.holds(margin) for b in self.buffers for margin in (b[:1000], b[-1000:]))

    def holds(self, margin):
        poison = torch.full_like(margin, self.poison)
        return torch.equal(margin.nan_to_num(-1), poison.nan_to_num(-1))
