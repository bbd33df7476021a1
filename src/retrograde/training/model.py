"""The character model: embedding, an LSTM with a memory budget, a linear layer."""

from torch import Tensor, nn

from retrograde.nn import LSTM
from retrograde.units import Memory

__all__ = ["CharacterModel"]


class CharacterModel(nn.Module):
    """Predicts each next character from all that came before it.

    The budget is the LSTM's: embedding, logits and their gradients are outside it.

    Args:
        characters: size of the vocabulary.
        hidden: width of embedding and LSTM.
        memory: the LSTM's budget; None is ordinary BPTT.

    Example:
        >>> import torch
        >>> model = CharacterModel(5, hidden=8, memory=None)
        >>> logits, (h, c) = model(torch.zeros(3, 2, dtype=torch.long))
        >>> logits.shape
        torch.Size([3, 2, 5])
    """

    def __init__(self, characters: int, hidden: int, memory: Memory | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.lstm = LSTM(hidden, hidden, memory=memory)
        self.linear = nn.Linear(hidden, characters)

    def forward(
        self, codes: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Logits for each next character.

        Args:
            codes: shape ``(length, batch)``.
            state: ``(h, c)`` before the first step, each ``(1, batch, hidden)``; zeros if None.

        Returns:
            Logits ``(length, batch, characters)``, and the state after the last step.
        """
        outputs, after = self.lstm(self.embedding(codes), state)
        return self.linear(outputs), after
