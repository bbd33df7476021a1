"""Blocks and chunks have lengths that make sense for every shape."""

import pytest
import torch

from oracles.networks import CELLS
from retrograde.recurrent.spans import scan_lengths, sequential_block, step_numbers

pytestmark = pytest.mark.usefixtures("ours_however_short")


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("length", [1, 2, 63, 5000])
@pytest.mark.parametrize("size", [1, 20, 500])
@pytest.mark.parametrize("samples", [1, 64])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_of_blocks_and_chunks_make_sense(kind, length, size, samples, device):
    assert sequential_block(kind, samples, 24, size, torch.float32, device) >= 1
    block, chunk = scan_lengths(kind, length, samples, 24, size, torch.float32, device)
    assert 1 <= chunk <= length
    assert block >= chunk
    assert block % chunk == 0


def test_a_wider_batch_has_shorter_blocks():
    assert step_numbers("GRU", 24, 20) == 10 * 20 + 48
    narrow, wide = (sequential_block("GRU", b, 24, 20, torch.float32, "cpu") for b in (16, 32))
    assert wide == narrow // 2
    double = sequential_block("GRU", 16, 24, 20, torch.float64, "cpu")
    assert double == narrow // 2
