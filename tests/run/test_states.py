"""States between steps: their own memory only, and laid out as the cell laid them out."""

import pytest
import torch

from retrograde.run.states import apart, each_once

VIEWS = {
    "itself": lambda t: t,
    "last of a stack": lambda t: torch.stack([t, t, t])[-1],
    "column of a stack": lambda t: torch.stack([t, t, t], -1)[..., -1],
    "chunk": lambda t: torch.cat([t, t], -1).chunk(2, -1)[1],
    "padded": lambda t: torch.nn.functional.pad(t, (3, 9))[:, 3:-9],
    "transposed": lambda t: torch.stack([t, t])[1].T,
    "expanded": lambda t: torch.stack([t, t])[1, :, :1].expand(7, 65),
    "a number": lambda t: t[3, 5],
    "nothing": lambda t: t[:0],
    "every third": lambda t: t[::3, 1::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_a_view_is_kept_without_what_lies_around_it(view, dtype):
    t = VIEWS[view](torch.randn(7, 65).to(dtype))
    kept = apart(t)
    assert torch.equal(kept, t)
    assert kept.stride() == t.stride()
    assert kept.data_ptr() % 64 == t.data_ptr() % 64 or not t.numel()
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    assert kept.untyped_storage().nbytes() <= max(t.nbytes, span * t.itemsize + 64)


def test_one_tensor_stays_one():
    gaps = torch.randn(4, 6)[:, :3]
    first, other, again = each_once(apart, [gaps, torch.randn(2), gaps])
    assert first is again
    assert first is not other


def test_equal_tensors_stay_two():
    a = torch.zeros(3)
    first, second = each_once(torch.Tensor.detach, [a, a.view(3)])
    assert first is not second
