"""What earlier calls of the same cell have shown, and what was planned for its steps (rule 12).

A step's size is the number of operations that it records for its backward pass: it takes no time to
count. A pass whose steps are larger than those that were measured records shorter ranges. The next
call plans for the largest step that was seen.

Known limit: a step of larger tensors, but of as many operations, is not noticed.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from retrograde.torch_private import next_node

_UNLIKE = 1.1
_MOST_PIECES = 16  # that a range is recorded in; its steps run again for each
_MOST_NODES = 2**13  # of one graph; each that Python has seen is released within the one after it
_USUAL_NODES = 2**4  # of a step, before one was recorded

#: Returns the number of operations that this thread has recorded.
operations = next_node


class LargerSteps(Exception):  # noqa: N818
    """Raised with the step at which a range records more than was planned for all of it."""


@dataclass
class Settled:
    """What earlier calls of the same cell have shown."""

    walked: bool = False  # in a whole call no step used a tensor that was not known before
    graphless: bool = False  # steps without a graph give the same bits
    linked: bool = True  # all results of the first pass's steps required a gradient
    passes: int = 0  # calls that were backpropagated
    planned: int = 0  # the most operations of a step that was measured
    seen: int = 0  # the most operations of any step
    step: int = 0  # which step that was
    larger: int = 0  # the most of steps that were not planned for, or 0
    left: float = math.inf  # how many more the range that is being recorded may have
    counts: dict[int, int] = field(default_factory=dict)  # of steps that were run to count them

    @property
    def growth(self) -> float:
        """The factor by which the largest step exceeds those that were measured, or 1."""
        factor = self.seen / self.planned if self.planned else 1.0
        return factor if factor > _UNLIKE else 1.0

    @property
    def most_steps(self) -> int:
        """The most steps of one graph, since the release of a longer one may overflow the stack."""
        return max(1, _MOST_NODES // (self.seen or _USUAL_NODES))

    @property
    def sweeps_without_graph(self) -> bool:
        """Whether a step that is not recorded runs without a graph, which takes less time."""
        return self.graphless and self.linked and self.passes > 0

    def level(self) -> int:
        """Return the operations of a step to plan for: from now on the most that were seen."""
        if self.growth > 1.0:
            self.planned = self.larger = self.seen
        return self.planned

    @contextmanager
    def within(self, steps: int) -> Iterator[None]:
        """Raise LargerSteps in a block that has more operations than planned for so many steps."""
        self.left = _UNLIKE * self.planned * steps
        try:
            yield
        finally:
            self.left = math.inf

    def at_once(self, steps: int) -> int:
        """Return how many steps to record where so many were planned."""
        return max(1, math.ceil(steps / _MOST_PIECES), int(steps / self.growth))

    def note(self, step: int, count: int) -> None:
        """Note the operations of a step. Raises LargerSteps if the range has no room for them."""
        if count > self.seen:
            self.seen, self.step = count, step
        self.left -= count
        if self.left < 0:
            raise LargerSteps(step)

    def complete(self) -> None:
        """Note that a call was backpropagated, and tell of larger steps once."""
        self.passes += 1
        if self.growth > 1.0 and self.seen > self.larger:
            self.larger = self.seen
            warnings.warn(
                f"step {self.step} of the cell records {self.seen} operations, where the steps "
                f"that its memory was measured by record {self.planned}: ranges were made shorter, "
                "but this pass may have exceeded its budget; the next call plans for such steps. "
                "To avoid this, let the first call have the largest steps",
                stacklevel=2,
            )
