"""Whether torch itself can run a network under autocast on this processor."""

import pytest
import torch


def run_or_skip(net, x):
    """Run torch's own network in bfloat16; where it cannot be, there is nothing to compare with.

    oneDNN has no LSTM in bfloat16 for some processors, and torch then fails.
    """
    try:
        with torch.autocast("cpu", torch.bfloat16):
            net(x)
    except RuntimeError as error:
        if "primitive" not in str(error):
            raise
        pytest.skip(f"torch's own {type(net).__name__} does not run in bfloat16 here: {error}")
