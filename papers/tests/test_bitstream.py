"""Bitstreams: equation 4.1, and the same bits for the same sample wherever it is read."""

import itertools

import numpy as np
import pytest
import torch

from wang2020.bitstream import Bitstreams
from wang2020.task import training_batches


def test_the_share_of_ones_is_that_of_equation_4_1():
    task = Bitstreams(30_000)
    for sample in range(10):
        assert task.bits(sample).mean() == pytest.approx(0.05 + 0.1 * sample, abs=0.01)
    bits = np.concatenate([task.bits(5 + 10 * k) for k in range(10)])
    assert bits.mean() == pytest.approx(0.55, abs=0.003)
    assert np.corrcoef(bits[1:], bits[:-1])[0, 1] == pytest.approx(0, abs=0.01)
    assert set(np.unique(bits)) == {0.0, 1.0}


def test_a_sample_has_the_same_bits_in_every_batch_and_length():
    long, short = Bitstreams(200), Bitstreams(63)
    inputs, classes = long.training_samples(np.array([7, 31_999, 7]))
    assert inputs.shape == (200, 3, 1)
    assert inputs.dtype == torch.float32
    assert classes.tolist() == [7, 9, 7]
    assert torch.equal(inputs[:, 0], inputs[:, 2])
    assert np.array_equal(short.bits(31_999), long.bits(31_999)[:63])
    assert "".join(f"{bit:.0f}" for bit in Bitstreams(20).bits(4)) == "01001011011101001000"


def test_seeds_and_samples_differ_and_test_samples_are_new():
    task = Bitstreams(100)
    assert not np.array_equal(task.bits(4), task.bits(14))
    assert not np.array_equal(task.bits(4), Bitstreams(100, seed=1).bits(4))
    held, classes = task.test_samples(np.arange(20))
    assert classes.tolist() == [*range(10), *range(10)]
    assert np.array_equal(held[:, 3, 0], task.bits(32_003))


def test_an_epoch_has_every_sample_once_and_the_next_is_shuffled_anew():
    task = Bitstreams(4, training=50)
    sizes, seen = [], []
    original = Bitstreams.training_samples

    class Spy:
        training = 50

        def training_samples(self, places):
            seen.append(places)
            return original(task, places)

    for inputs, _ in training_batches(Spy(), 16, 6, seed=3):
        sizes.append(inputs.shape[1])
    assert sizes == [16] * 6
    first, second = np.concatenate(seen[:3]), np.concatenate(seen[3:])
    assert len(set(first.tolist())) == len(set(second.tolist())) == 48
    assert first.tolist() != second.tolist()
    again = itertools.islice(training_batches(task, 16, 6, seed=3), 1)
    assert torch.equal(next(again)[0], task.training_samples(seen[0])[0])
