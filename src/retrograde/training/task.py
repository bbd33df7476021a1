"""The task of a training run: a text, and the character model that learns it.

The text is a ring. A batch of B streams starts at B equal distances around it, and every stream
reads on, one sequence after another. So any text longer than one sequence will do.
"""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from retrograde.recurrent.modules import LSTM
from retrograde.training.options import TrainingError
from retrograde.units import Memory

__all__ = ["CharacterModel", "Text", "embedded_text", "read_text"]

_EMBEDDED = "Python's own documentation"


@dataclass(frozen=True)
class Text:
    """A text and its characters as numbers; ``source`` is its origin, for messages."""

    characters: str
    source: str

    @cached_property
    def vocabulary(self) -> str:
        """Every character of the text, once, in order of code point."""
        return "".join(sorted(set(self.characters)))

    @cached_property
    def codes(self) -> Tensor:
        """The text as indices into the vocabulary, shape ``(characters,)``."""
        place = {character: index for index, character in enumerate(self.vocabulary)}
        return torch.tensor([place[character] for character in self.characters], device="cpu")

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the text, by which a resumed run checks its text."""
        return hashlib.sha256(self.characters.encode()).hexdigest()

    @cached_property
    def entropy_bits(self) -> float:
        """Bits per character of a guess by the frequencies of characters."""
        total = len(self.characters)
        shares = [count / total for count in Counter(self.characters).values()]
        return -sum(share * math.log2(share) for share in shares)

    def check_length(self, length: int) -> None:
        """Raise TrainingError if the text is shorter than a sequence and one character more."""
        size = len(self.characters)
        if size > length:
            return
        remedy = f"--length {size - 1} or less" if size > 1 else "another --text"
        raise TrainingError(
            f"{self.source} has {size:,} characters: a sequence of {length:,} needs at least "
            f"{length + 1:,}; use {remedy}" + (", or a longer text" if size > 1 else "")
        )

    def sequences(self, position: int, length: int, batch: int) -> tuple[Tensor, Tensor]:
        """Return every stream's next inputs and targets, each (length, batch).

        ``position`` is how many characters every stream has read already.

        Example:
            >>> inputs, targets = Text("abcdef", "example").sequences(0, length=2, batch=2)
            >>> inputs.tolist(), targets.tolist()
            ([[0, 3], [1, 4]], [[1, 4], [2, 5]])
        """
        size = len(self.characters)
        starts = torch.arange(batch, device="cpu") * size // batch
        places = position + torch.arange(length + 1, device="cpu")[:, None] + starts
        codes = self.codes[places % size]
        return codes[:-1], codes[1:]


def embedded_text() -> Text:
    """Return Python's own documentation: about 465,000 characters, by Python's version."""
    return Text("\n".join(topics[name] for name in sorted(topics)), _EMBEDDED)


def read_text(path: str | Path) -> Text:
    """Return the text of a file in UTF-8; TrainingError if it cannot be read."""
    try:
        return Text(Path(path).read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise TrainingError(
            f"cannot read the text {path}: {error.strerror or error}; give --text a readable file, "
            f"or leave it out for {_EMBEDDED}"
        ) from error
    except UnicodeDecodeError as error:
        raise TrainingError(
            f"the text {path} is not UTF-8: byte {error.start:,} is "
            f"{error.object[error.start]:#04x}; convert it to UTF-8, with iconv for instance"
        ) from error


class CharacterModel(nn.Module):
    """Embedding, LSTM and linear layer: predicts each next character from all before it. Only the
    LSTM has a budget; ``memory`` None is ordinary BPTT."""

    def __init__(self, characters: int, hidden: int, memory: Memory | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, hidden)
        self.lstm = LSTM(hidden, hidden, memory=memory)
        self.linear = nn.Linear(hidden, characters)

    def forward(
        self, codes: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the logits (length, batch, characters) of the characters that follow ``codes``.
        ``codes`` is (length, batch). The last state (h, c), each (1, batch, hidden), is returned
        too. ``state`` None is zeros."""
        outputs, after = self.lstm(self.embedding(codes), state)
        return self.linear(outputs), after
