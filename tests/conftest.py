"""Two workers share the machine's cores, so each computes with one thread (spinning threads of
several workers would wait for one another)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

from oracles.cuda_kernels import COMPILED, Fences
from retrograde.sizes import nominal


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's interpreter, to which an array of one number is no index since numpy 2.4."""
    if COMPILED:
        yield
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def ours_however_short(monkeypatch):
    """Sequences of tests are short: with memory for all, torch's own pass would run most."""
    monkeypatch.setattr(nominal, "FEW_STEPS", dict.fromkeys(nominal.FEW_STEPS, 0))


@pytest.fixture(autouse=True)
def no_tf32(request):
    """On a GPU torch's kernels and ours are compared in float32; cuDNN's default would be TF32."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("gpu"):
            patch.setattr(torch.backends.cudnn, "allow_tf32", False)
            patch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        yield


@pytest.fixture
def fences(request, monkeypatch):
    """Fences, also around all that the kernels' host code allocates."""
    fences, original = Fences(getattr(request, "param", torch.nan)), torch.Tensor.new_empty

    def new_empty(self, *shape, **options):
        if options:  # not ours
            return original(self, *shape, **options)
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return fences.empty(shape, self.dtype, self.device)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield fences
    assert fences.hold()
