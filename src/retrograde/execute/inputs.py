"""The inputs of a recurrence, as the executor reads them: a step or a range of steps at a time.

Tensors that are held are sliced (:class:`Held`); what is read from elsewhere as it is needed is in
:mod:`retrograde.execute.sources`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

__all__ = ["Held", "Inputs"]

Tensors = list[Tensor]


class Inputs(Protocol):
    """The inputs of all steps; what is read twice is twice the same."""

    @property
    def differentiable(self) -> Sequence[bool]:
        """For each leaf, whether it is to receive a gradient."""
        ...

    def __len__(self) -> int:
        """The number of steps."""
        ...

    def __getitem__(self, index: int | slice) -> Tensors:
        """The leaves of one step, or of a range, with time first."""
        ...


@dataclass(frozen=True)
class Held:
    """Tensors that are there already, each with time as its first dimension.

    Args:
        tensors: of one length, at least one.

    Example:
        >>> import torch
        >>> inputs = Held([torch.zeros(5, 2), torch.ones(5, 3)])
        >>> len(inputs), [tuple(t.shape) for t in inputs[1:4]], inputs[4][1].tolist()
        (5, [(3, 2), (3, 3)], [1.0, 1.0, 1.0])
    """

    tensors: Tensors
    differentiable: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "differentiable", tuple(t.requires_grad for t in self.tensors))

    def __len__(self) -> int:
        return self.tensors[0].shape[0]

    def __getitem__(self, index: int | slice) -> Tensors:
        return [t[index] for t in self.tensors]
