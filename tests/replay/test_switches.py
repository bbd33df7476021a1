"""Torch's switches in a block are those of another moment, and afterwards what they were."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrograde.replay.switches import Switches


def now():
    return (
        torch.get_default_dtype(), torch.backends.cuda.math_sdp_enabled(),
        torch.is_autocast_enabled("cpu"),
    )  # fmt: skip


def test_switches_are_set_in_a_block_and_set_back():
    before, then = now(), Switches(torch.device("cpu"))
    try:
        torch.set_default_dtype(torch.float64)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cpu", torch.bfloat16):
            inside = now()
            assert all(a != b for a, b in zip(before, inside, strict=True))
            with then.as_then():
                assert now() == before
            assert now() == inside
    finally:
        torch.set_default_dtype(before[0])
