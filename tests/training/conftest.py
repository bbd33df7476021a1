"""A training run small enough to be repeated, and torch left as it was."""

import pytest
import torch

from retrograde.training import TrainingOptions


@pytest.fixture(autouse=True)
def _torch_left_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture
def options() -> TrainingOptions:
    return TrainingOptions(memory="60%", length=40, batch=4, hidden=16, iterations=6)
