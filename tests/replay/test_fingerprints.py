"""Fingerprints tell tensors of other bits apart, whatever their type and their place in memory."""

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from retrograde.replay.fingerprints import fingerprint, verify
from retrograde.replay.referents import find_referents

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64]


@pytest.mark.quick(6)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (63, 65), (257, 129, 3)])
@pytest.mark.parametrize("dtype", TYPES)
def test_equal_bits_have_one_fingerprint_and_others_another(dtype, shape):
    torch.manual_seed(0)
    t = (30 * torch.randn(shape)).to(dtype) if dtype is not torch.bool else torch.rand(shape) > 0.5
    assert fingerprint(t) == fingerprint(t.clone())
    if t.dim() > 1:
        turned = t.transpose(0, 1)
        assert fingerprint(turned) == fingerprint(turned.clone())
        assert fingerprint(t[1:]) == fingerprint(t[1:].clone())
        assert len({fingerprint(t), fingerprint(t.flip(0)), fingerprint(t.roll(1, 0))}) == 3
    wide = t[..., :1].expand(4, *t.shape) if t.dim() else t.expand(4)
    if wide.nbytes < 2**18:
        assert fingerprint(wide) == fingerprint(wide.contiguous())
    for at in range(0, t.numel(), max(1, t.numel() // 5)):
        other = t.clone()
        flat = other.view(-1)
        flat[at] = ~flat[at] if dtype is torch.bool else flat[at] + 1
        assert fingerprint(other) != fingerprint(t)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [5, 9_000, 70_001, 1_000_000])
def test_eighths_in_turn_see_nearly_all_bits(dtype, size):
    t = (30 * torch.randn(size)).to(dtype) if dtype is not torch.bool else torch.rand(size) > 0.5
    turns = range(1, 9)
    before = [fingerprint(t, turn) for turn in turns]
    assert before == [fingerprint(t.clone(), turn) for turn in turns]
    with BaseTorchFunctionMode():  # as a lean tape is
        assert before == [fingerprint(t, turn) for turn in turns]
        assert fingerprint(t) == fingerprint(t.clone())
    with BaseTorchFunctionMode():
        whole = fingerprint(t)
    assert whole == fingerprint(t)
    assert len(t) == 5 or len({*before}) == len(before) or t.nbytes <= 32 * 1024
    for at in (0, size // 2, size - size % 64 - 1 if size > 64 else size - 1):
        other = t.clone()
        other[at] = ~other[at] if dtype is torch.bool else other[at] + 1
        assert before != [fingerprint(other, turn) for turn in turns]


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_numbers_in_order_have_none():
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert [fingerprint(t) for t in (sparse, sparse.to_sparse_csr(), nested)] == [None] * 3


def test_a_difference_raises_the_error_that_is_made():
    t = torch.randn(100, 100)
    verify(fingerprint(t), t.clone(), lambda: ValueError("differs"))
    verify(None, t, lambda: ValueError("differs"))
    with pytest.raises(ValueError, match="differs"):
        verify(fingerprint(t), t + 1, lambda: ValueError("differs"))


def test_plain_values_that_changed_are_named():
    class Holder:
        scale = 1.0

        def __init__(self):
            self.value = 1

        def __call__(self, x, h):
            return x * self.value * self.scale, h

    holder = Holder()
    found = find_referents([holder])
    assert found.changed() == []
    holder.value = 2
    assert found.changed() == ["Holder.value"]
