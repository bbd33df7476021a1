"""The text that a character model learns: a ring of characters, read by many streams at once.

A batch of B streams starts at B equal distances around the ring, and every stream reads on, one
sequence after another, for as long as training lasts. So any text longer than one sequence will do.
"""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from retrograde.training.options import TrainingError

__all__ = ["Text", "embedded_text", "read_text"]

_EMBEDDED = "Python's own documentation"


@dataclass(frozen=True)
class Text:
    """A text and its characters as numbers.

    Attributes:
        characters: the whole of it.
        source: where it came from, for messages.
    """

    characters: str
    source: str

    @cached_property
    def vocabulary(self) -> str:
        """Every character of the text, once, in order of code point."""
        return "".join(sorted(set(self.characters)))

    @cached_property
    def codes(self) -> Tensor:
        """The text as places in the vocabulary, shape ``(characters,)``."""
        place = {character: index for index, character in enumerate(self.vocabulary)}
        return torch.tensor([place[character] for character in self.characters])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the text, to tell whether a run is taken up with the same one."""
        return hashlib.sha256(self.characters.encode()).hexdigest()

    @cached_property
    def entropy_bits(self) -> float:
        """Bits per character that guessing by the frequencies of characters costs."""
        total = len(self.characters)
        shares = [count / total for count in Counter(self.characters).values()]
        return -sum(share * math.log2(share) for share in shares)

    def check_length(self, length: int) -> None:
        """See to it that one sequence fits, its last character having one that follows.

        Args:
            length: characters in a sequence.

        Raises:
            TrainingError: the text is shorter than ``length + 1``.
        """
        size = len(self.characters)
        if size > length:
            return
        remedy = f"--length {size - 1} or less" if size > 1 else "another --text"
        raise TrainingError(
            f"{self.source} has {size:,} characters: a sequence of {length:,} needs at least "
            f"{length + 1:,}; use {remedy}" + (", or a longer text" if size > 1 else "")
        )

    def sequences(self, position: int, length: int, batch: int) -> tuple[Tensor, Tensor]:
        """What every stream reads next, and what it should predict.

        Args:
            position: characters that every stream has read already.
            length: characters to read.
            batch: streams.

        Returns:
            Codes read and codes that follow them, each of shape ``(length, batch)``.

        Example:
            >>> inputs, targets = Text("abcdef", "example").sequences(0, length=2, batch=2)
            >>> inputs.tolist(), targets.tolist()
            ([[0, 3], [1, 4]], [[1, 4], [2, 5]])
        """
        size = len(self.characters)
        starts = torch.arange(batch) * size // batch
        places = position + torch.arange(length + 1)[:, None] + starts
        codes = self.codes[places % size]
        return codes[:-1], codes[1:]


def embedded_text() -> Text:
    """The text at hand on every machine: the English of Python's own documentation.

    Returns:
        About 465,000 characters, depending on the version of Python.

    Example:
        >>> len(embedded_text().characters) > 100_000
        True
    """
    return Text("\n".join(topics[name] for name in sorted(topics)), _EMBEDDED)


def read_text(path: str | Path) -> Text:
    """A text from a file.

    Args:
        path: of a file in UTF-8.

    Returns:
        Its text.

    Raises:
        TrainingError: the file cannot be read, or is not UTF-8.

    Example:
        >>> read_text("missing.txt")
        Traceback (most recent call last):
        retrograde.training.options.TrainingError: cannot read the text missing.txt: ...
    """
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
