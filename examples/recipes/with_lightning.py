"""With Lightning: a budget inside a ``LightningModule``.

``rg.LSTM`` is a module like any other, so ``Trainer`` needs no setting. The budget limits what
every training step holds. This file is not called ``lightning.py``: that would hide the library.

    python examples/recipes/with_lightning.py
"""

import logging
import warnings
from collections.abc import Callable

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import retrograde as rg


class Tagger(lightning.LightningModule):
    """An LSTM that tells a running sum's sign; ``memory=None`` is ordinary backpropagation."""

    def __init__(self, memory: str | None) -> None:
        super().__init__()
        self.lstm = rg.LSTM(8, 64, batch_first=True, memory=memory)
        self.head = nn.Linear(64, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self.head(self.lstm(x)[0])[..., 0], y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def ways(steps: int = 800, batches: int = 4) -> dict[str, Callable[[], list[Tensor]]]:
    """Training for some batches, and the weights that come of it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    x = torch.randn(8 * batches, steps, 8, generator=torch.Generator().manual_seed(0))
    y = (x[..., 0].cumsum(1) > 0).float()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)

    def weights(memory: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, quiet = Tagger(memory), {"enable_progress_bar": False, "enable_model_summary": False}
        asked = {"accelerator": "cpu", "max_epochs": 1, "logger": False, **quiet}
        lightning.Trainer(enable_checkpointing=False, **asked).fit(model, loader)
        return [p.detach() for p in model.parameters()]

    return {"memory=None": lambda: weights(None), "5%": lambda: weights("5%")}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
