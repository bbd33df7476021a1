"""Steps planned in blocks: each block is one step of the mixed policy.

Complexity: that of the closed form (:mod:`retrograde.plan.steps.mixed`), and the actions.
"""

from dataclasses import dataclass

import numpy as np

from retrograde.plan.steps.mixed import Mixed
from retrograde.plan.steps.unfold import Segments
from retrograde.schedule import Schedule, Units, Verb


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

    def plan(self, segments: Segments) -> tuple[int, int, int]:
        """Add the segments of the cheapest schedule of blocks. Returns the number of the whole, the
        forward steps, and the calls that advance."""
        form, missing = Mixed(self.memory - 1, self.held), self.count * self.steps - self.length
        root = form.schedule(self.count, segments)
        lengths = segments.first_advances(root)  # all that run the first block but do not record it
        forward_steps = form.cost(self.count) * self.steps - missing * (len(lengths) + 1)

        def calls(blocks: int, missing: int = 0) -> int:
            return -(-(blocks * self.steps - missing) // self.chunk)

        advances = segments.total(root, lambda row: calls(row[0]))
        return root, forward_steps, advances + sum(calls(a, missing) - calls(a) for a in lengths)

    def schedule(self, segments: Segments, root: int, units: Units) -> Schedule:
        """Return a schedule of blocks as one of steps. An advance is divided into chunks and a
        record or a backward into blocks, for each is a call."""
        verbs, starts, stops = segments.actions(segments.add(0, 0, root), self.count)
        bounds = self.length - self.steps * np.arange(self.count, -1, -1)
        bounds[0] = 0
        advances, backward = verbs == Verb.ADVANCE, verbs == Verb.BACKWARD
        runs = bounds[stops] - bounds[starts]
        calls = np.where(advances, -(-runs // self.chunk), stops - starts)
        calls = np.maximum(calls, 1)  # a store, a load and a free have no steps
        of = np.repeat(np.arange(len(verbs)), calls)
        nth = np.arange(len(of)) - (np.cumsum(calls) - calls)[of]
        nth = np.where(backward[of], calls[of] - 1 - nth, nth)
        start, stop = starts[of], stops[of]
        first = bounds[np.minimum(start + nth, self.count)]
        last = bounds[np.minimum(start + nth + 1, stop)]
        chunked = bounds[start] + nth * self.chunk
        start = np.where(advances[of], chunked, first)
        stop = np.where(advances[of], np.minimum(chunked + self.chunk, bounds[stop]), last)
        return Schedule(self.length, "best", None, units, verbs[of], start, stop)
