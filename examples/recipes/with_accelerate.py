"""With Accelerate: a budget beside gradient accumulation.

Accumulation makes the batch of a step smaller; a budget makes the memory of a step smaller, at any
length. Both together: ``rg.budget`` divides the bytes among the recurrent modules of a model, and
comes before ``prepare``, which may wrap the model.

    python examples/recipes/with_accelerate.py
"""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import retrograde as rg


class Tagger(nn.Module):
    """Two GRUs and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.GRU(n, 48, batch_first=True) for n in (8, 48))
        self.head = nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(x)[0])[0])


def ways(steps: int = 600, batches: int = 4) -> dict[str, Callable[[], list[Tensor]]]:
    """Training for some batches, and the weights that come of it."""
    x = torch.randn(4 * batches, steps, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.roll(3, 1)), batch_size=4)  # to repeat after 3 steps

    def weights(memory: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Tagger()
        if memory is not None:
            rg.budget(model, memory, sample=x[:4])
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        model, optimizer, batched = accelerator.prepare(model, optimizer, loader)
        for inputs, wanted in batched:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), wanted))
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    return {"nn.GRU": lambda: weights(None), "10%": lambda: weights("10%")}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
