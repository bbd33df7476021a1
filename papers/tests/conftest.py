"""Small data for the experiments, and torch left as it was."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("RETROGRADE_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(autouse=True)
def _torch_left_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture(scope="session")
def sounds(tmp_path_factory) -> Path:
    """A folder of two tiny sets: three classes, told apart by the mean of a coefficient."""
    folder = tmp_path_factory.mktemp("sounds")
    random = np.random.default_rng(0)
    for name, frames in (("s", 9), ("m", 13)):
        labels = np.arange(40) % 3
        inputs = random.standard_normal((40, frames, 2)) + 2 * labels[:, None, None]
        np.savez(
            folder / f"instruments_{name}.npz",
            train_x=inputs[:31].astype(np.float16), train_y=labels[:31].astype(np.uint8),
            test_x=inputs[31:].astype(np.float16), test_y=labels[31:].astype(np.uint8),
            class_names=np.array(["oboe", "cello", "horn"]),
        )  # fmt: skip
    return folder


@pytest.fixture
def recordings() -> Path:
    """The folder of real recordings."""
    if not (DATA / "instruments_s.npz").exists():
        pytest.skip(f"no recordings of instruments in {DATA}")
    return DATA


@pytest.fixture
def cifar() -> Path:
    """The folder of CIFAR-10, where it is at hand."""
    if not (DATA / "cifar10.npz").exists():
        pytest.skip(f"no cifar10.npz in {DATA}")
    return DATA
