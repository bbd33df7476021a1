"""With skorch: the budget is a parameter of the estimator.

``memory`` is an argument of the module, so ``module__memory`` sets it, a pipeline passes it on, and
a grid search may try several. No other line knows about it.

    python examples/recipes/with_skorch.py
"""

from collections.abc import Callable

import torch
from skorch import NeuralNetClassifier
from torch import Tensor, nn

import retrograde as rg


class Classifier(nn.Module):
    """An LSTM over (batch, time, features); classes are told from its last output."""

    def __init__(self, memory: str | None = None) -> None:
        super().__init__()
        self.lstm = rg.LSTM(4, 64, batch_first=True, memory=memory)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def ways(steps: int = 600, batches: int = 4) -> dict[str, Callable[[], list[Tensor]]]:
    """Fits with and without a budget, and the weights that come of them."""
    torch.manual_seed(0)
    x = torch.randn(8 * batches, steps, 4)
    y = (x[:, -5:, 0].sum(1) > 0).long()  # whether the last five numbers are positive in sum
    net = NeuralNetClassifier(
        Classifier, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, lr=1e-3,
        batch_size=8, max_epochs=1, train_split=None, verbose=0,
    )  # fmt: skip

    def weights(memory: str | None) -> list[Tensor]:
        net.set_params(module__memory=memory)
        torch.manual_seed(0)
        net.fit(x.numpy(), y.numpy())
        return [p.detach().clone() for p in net.module_.parameters()]

    return {
        "module__memory=None": lambda: weights(None),
        "module__memory='5%'": lambda: weights("5%"),
    }


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
