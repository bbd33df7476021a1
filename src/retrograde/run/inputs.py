"""The inputs of a recurrence, as the executor reads them: a step or a range of steps at a time.

:mod:`retrograde.run.layout` cuts tensors in memory. :mod:`retrograde.run.sources` reads other
inputs as they are needed.
"""

from collections.abc import Sequence
from typing import Protocol

from retrograde.errors import CellError
from retrograde.replay.trees import Tensors


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
