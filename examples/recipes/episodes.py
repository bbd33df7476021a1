"""A recurrent policy over episodes that begin inside a sequence, as TorchRL collects them.

TorchRL's ``LSTMModule`` splits a batch at ``is_init``, pads the pieces and joins them again.
``rg.LSTM`` takes the same flags as ``reset``: there each sample begins anew, and nothing is padded.

    python examples/recipes/episodes.py
"""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.modules import LSTMModule

import retrograde as rg


def ways(steps: int = 500) -> dict[str, Callable[[], list[Tensor]]]:
    """TorchRL's module, and ``rg.LSTM``, on episodes of a tenth of the steps."""
    torch.manual_seed(0)
    observations = torch.randn(16, steps, 24)  # (batch, time, features)
    starts = torch.rand(16, steps) < 10 / steps
    starts[:, 0] = True
    batch = TensorDict(
        {"observation": observations, "is_init": starts.unsqueeze(-1)}, batch_size=[16, steps]
    )
    names = {"in_key": "observation", "out_key": "features", "default_recurrent_mode": True}
    theirs = LSTMModule(input_size=24, hidden_size=64, **names)
    ours = rg.LSTM(24, 64, batch_first=True, memory="20%")
    ours.load_state_dict(theirs.lstm.state_dict())

    def before() -> list[Tensor]:
        loss = theirs(batch.clone())["features"].square().mean()
        return [*torch.autograd.grad(loss, [*theirs.lstm.parameters()])]

    def after() -> list[Tensor]:
        features, _ = ours(observations, reset=starts)
        return [*torch.autograd.grad(features.square().mean(), [*ours.parameters()])]

    return {"LSTMModule": before, "rg.LSTM within 20%": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
