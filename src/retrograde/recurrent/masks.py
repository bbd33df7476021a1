"""Dropout before a layer. A step's mask is the same in whatever piece the step runs (rule 2).

Under a budget a mask is a hash (``dropout.py``), which is recomputed instead of
kept. Without a budget torch draws the mask, so the same seed drops the same units as torch's own
module. That mask is kept, at one byte per unit and step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from retrograde.recurrent.dropout import Dropout
from retrograde.recurrent.pieces import Piece

__all__ = ["Drawn", "Hashed", "Masks"]


@dataclass(frozen=True)
class Hashed:
    """Masks that are computed from the number of the step."""

    dropout: Dropout

    @property
    def first(self) -> bool:
        """Whether the inputs of the lowest layer are dropped too."""
        return self.dropout.first

    def __call__(self, x: Tensor, number: int, piece: Piece, row: int) -> Tensor:
        """Apply dropout to one piece of a layer's input (L, n, H), or of that input's gradient.

        The piece is in the order of the steps, and begins at row ``row`` of all rows.
        """
        if number == 0 and not self.first:
            return x
        steps = torch.arange(piece.start, piece.stop, device=x.device)
        return self.dropout(x.contiguous(), number, steps)

    def of_all_steps(self) -> Dropout:
        """Return the same masks for a call that autograd records."""
        return self.dropout


@dataclass(frozen=True)
class Drawn:
    """Masks (rows, H) that are kept, keyed by the number of the layer that each precedes."""

    masks: dict[int, Tensor]
    p: float

    @classmethod
    def like(cls, layers: list[int], x: Tensor, p: float) -> "Drawn":
        """Draw a mask of the form of ``x`` (rows, H) for each layer, as torch draws it."""
        ones = torch.ones_like(x)
        return cls({k: functional.dropout(ones, p) > 0 for k in layers}, p)

    @property
    def first(self) -> bool:
        return 0 in self.masks

    def __call__(self, x: Tensor, number: int, piece: Piece, row: int) -> Tensor:
        mask = self.masks.get(number)
        if mask is None:
            return x
        return self._apply(x, mask[row : row + piece.rows])

    def of_all_steps(self) -> "_DrawnOfAll":
        """Return the same masks for a call that autograd records."""
        return _DrawnOfAll(self)

    def _apply(self, x: Tensor, mask: Tensor) -> Tensor:
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return x * mask.view(x.shape) * scale


@dataclass(frozen=True)
class _DrawnOfAll:
    """Masks of all steps, with the call signature of a ``Dropout``."""

    drawn: Drawn

    @property
    def first(self) -> bool:
        return self.drawn.first

    def __call__(
        self, x: Tensor, number: int, steps: Tensor, sizes: Tensor | None = None
    ) -> Tensor:
        mask = self.drawn.masks.get(number)
        return x if mask is None else self.drawn._apply(x, mask)


Masks = Hashed | Drawn
