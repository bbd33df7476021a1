"""Steps planned in blocks: each block is one step of the mixed policy.

Complexity: that of the closed form (:mod:`retrograde.plan.steps.mixed`), and the actions.
"""

from dataclasses import dataclass

import numpy as np

from retrograde.plan.steps.best import best_schedule
from retrograde.plan.steps.mixed import Mixed
from retrograde.schedule import Schedule, Units, Verb

__all__ = ["Blocks"]


@dataclass(frozen=True)
class Blocks:
    """A sequence in blocks of ``steps``, of which the first may be shorter, as steps of MSM.

    A recorded block takes ``held`` of the ``memory`` units; one unit is a hidden state or more. A
    call advances at most ``chunk`` steps.
    """

    length: int
    steps: int
    memory: int
    held: int
    chunk: int

    @property
    def count(self) -> int:
        return -(-self.length // self.steps)

    def least_repeated(self) -> int:
        """Return a lower bound of the forward steps beyond the first run, of every schedule. It
        leaves out the first block, which is shorter."""
        others = self.count - 1
        return (Mixed(self.memory - 1, self.held).cost(others) - others) * self.steps

    def schedule(self, units: Units) -> Schedule:
        """Return the cheapest schedule of blocks as one of steps. An advance is divided into chunks
        and a record or a backward into blocks, for each is a call."""
        sizes = Units(alpha=self.held + 1, beta=self.held, core=0, initial=1)
        plan = best_schedule(self.count, self.memory, sizes, "best")
        bounds = self.length - self.steps * np.arange(self.count, -1, -1)
        bounds[0] = 0
        advances, backward = plan.kind == Verb.ADVANCE, plan.kind == Verb.BACKWARD
        runs = bounds[plan.stop] - bounds[plan.start]
        calls = np.where(advances, -(-runs // self.chunk), plan.stop - plan.start)
        calls = np.maximum(calls, 1)  # a store, a load and a free have no steps
        of = np.repeat(np.arange(len(plan)), calls)
        nth = np.arange(len(of)) - (np.cumsum(calls) - calls)[of]
        nth = np.where(backward[of], calls[of] - 1 - nth, nth)
        start, stop = plan.start[of], plan.stop[of]
        first = bounds[np.minimum(start + nth, self.count)]
        last = bounds[np.minimum(start + nth + 1, stop)]
        chunked = bounds[start] + nth * self.chunk
        start = np.where(advances[of], chunked, first)
        stop = np.where(advances[of], np.minimum(chunked + self.chunk, bounds[stop]), last)
        return Schedule(self.length, plan.policy, None, units, plan.kind[of], start, stop)
