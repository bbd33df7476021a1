"""The network of both experiments: a recurrent core, and a linear layer on its last hidden state.

Wang, *BPPSA* (2020), sections 4.1 and 4.2: a tanh RNN, or a GRU, of 20 hidden units.
"""

from typing import Any

import torch
from torch import Tensor, nn

from retrograde.recurrent.modules import GRU, RNN

__all__ = ["Classifier", "classifiers"]


class Classifier(nn.Module):
    """Scores the classes of a sequence.

    Args:
        core: from inputs ``(T, B, features)`` to outputs and the last hidden state.
        hidden: size of the hidden state.
        classes: how many there are.

    Example:
        >>> Classifier(nn.GRU(3, 8), 8, classes=5)(torch.zeros(7, 2, 3)).shape
        torch.Size([2, 5])
    """

    def __init__(self, core: nn.RNNBase, hidden: int, classes: int) -> None:
        super().__init__()
        self.core = core
        self.linear = nn.Linear(hidden, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of inputs ``(T, B, features)``."""
        _, state = self.core(inputs)
        scores: Tensor = self.linear(state[-1])
        return scores


def classifiers(
    cell: str, ways: tuple[str, ...], features: int, hidden: int, classes: int, seed: int
) -> list[Classifier]:
    """One classifier a way, all of the same weights.

    Way ``"torch"`` is torch's own module, any other the ``backward=`` of retrograde's.

    Example:
        >>> one, two = classifiers("rnn", ("torch", "torch"), 1, 20, 10, seed=0)
        >>> torch.equal(one.linear.weight, two.linear.weight)
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = Classifier(core_of(cell, "torch", features, hidden), hidden, classes)
        made = [Classifier(core_of(cell, way, features, hidden), hidden, classes) for way in ways]
    for each in made:
        each.load_state_dict(first.state_dict())
    return made


def core_of(cell: str, way: str, features: int, hidden: int) -> nn.RNNBase:
    """The recurrent core, ``"rnn"`` or ``"gru"``, for a way of computing its gradient."""
    if way == "torch":
        plain: nn.RNNBase = {"rnn": nn.RNN, "gru": nn.GRU}[cell](features, hidden)
        return plain
    asked: dict[str, Any] = {"memory": "100%"} if way == "sequential" else {"backward": way}
    made: nn.RNNBase = {"rnn": RNN, "gru": GRU}[cell](features, hidden, **asked)
    return made
