"""Bitstreams in float64, at the learning rate of Wang, *BPPSA* (2020), section 5.1.

Rounding that training magnifies parts any two runs in the end. In float64 and at 3·10⁻⁵ it does not
within a thousand iterations. So there it shows whether the scan is the backward pass of torch: one
RNN is trained by torch and another by the scan, from the same weights and on the same batches.

    python -m wang2020.bitstream_float64        # JSON into wang2020/data; some minutes, one thread
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.machine import machine_of
from wang2020.bitstream import Bitstreams
from wang2020.task import training_batches

__all__ = ["SHIPPED", "race"]

SHIPPED = Path(__file__).parent / "data" / "bitstream_float64.json"
EVERY = 50  # iterations between the losses that are written down


class Runner:
    """A network of one of both ways, with its optimizer."""

    def __init__(self, rnn: nn.RNN, learning_rate: float) -> None:
        self.rnn, self.head = rnn, nn.Linear(20, 10, dtype=torch.float64)
        parameters = [*self.rnn.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=learning_rate)

    def train(self, x: Tensor, classes: Tensor) -> float:
        """Make one iteration, and return its loss."""
        loss = nn.functional.cross_entropy(self.head(self.rnn(x)[0][-1]), classes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def race(
    iterations: int, learning_rate: float = 3e-5, length: int = 1000, batch: int = 16
) -> dict[str, object]:
    """Train both, and return losses of torch's and how far those of the scan ever were from them.

    ``losses`` and ``distances`` have an entry every :data:`EVERY` iterations. A distance is the
    greatest of any single loss so far, in nats.
    """
    torch.manual_seed(0)
    usual = Runner(nn.RNN(1, 20, dtype=torch.float64), learning_rate)
    ours = Runner(rg.RNN(1, 20, backward="scan", dtype=torch.float64), learning_rate)
    ours.rnn.load_state_dict(usual.rnn.state_dict())
    ours.head.load_state_dict(usual.head.state_dict())
    losses, distances, far = [], [], 0.0
    batches = training_batches(Bitstreams(length), batch, iterations, 0)
    for number, (x, classes) in enumerate(batches, 1):
        loss, other = (runner.train(x.double(), classes) for runner in (usual, ours))
        far = max(far, abs(loss - other))
        if number % EVERY == 0 or number == iterations:
            losses.append(round(loss, 6))
            distances.append(far)
            print(f"{number} iterations: loss {loss:.4f}, at most {far:.1e} apart", flush=True)
    return {
        "iterations": iterations, "learning_rate": learning_rate, "length": length, "batch": batch,
        "every": EVERY, "losses": losses, "distances": distances,
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    document = {"machine": machine_of("cpu"), **race(1000)}
    SHIPPED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {SHIPPED}")


if __name__ == "__main__":
    main()
