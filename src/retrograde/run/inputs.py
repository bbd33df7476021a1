"""The inputs of a recurrence, as the executor reads them: a step or a range of steps at a time.

:class:`Held` slices tensors in memory. :mod:`retrograde.run.sources` reads other inputs as they are
needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from retrograde.errors import CellError

__all__ = ["Held", "Inputs", "check_length"]

Tensors = list[Tensor]


class Inputs(Protocol):
    """The inputs of all steps; every read gives the same values."""

    @property
    def differentiable(self) -> Sequence[bool]:
        """For each leaf, whether it receives a gradient."""
        ...

    def __len__(self) -> int:
        """Return the number of steps."""
        ...

    def __getitem__(self, index: int | slice) -> Tensors:
        """Return the leaves of one step, or of a range, with time first."""
        ...


@dataclass(frozen=True)
class Held:
    """Tensors in memory, each with time as its first dimension.

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


def check_length(leaves: Tensors) -> int:
    """Return the number of steps of flat inputs, each with time first.

    Raises:
        CellError: there are no inputs, the numbers of steps differ, or there are no steps.
    """
    if not leaves:
        raise CellError("the inputs hold no tensor: expected at least one, with time first (T, …)")
    lengths = {x.shape[0] if len(x.shape) else None for x in leaves}
    if len(lengths) > 1 or None in lengths:
        shapes = ", ".join(str(tuple(x.shape)) for x in leaves)
        raise CellError(
            f"the inputs have the shapes {shapes}: expected the same number of steps as the first "
            "dimension of each"
        )
    length = int(lengths.pop() or 0)
    if length < 1:
        raise CellError("the inputs have 0 steps: expected at least one")
    return length
