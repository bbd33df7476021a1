"""The schedule of HSM: hidden states only, each step recorded when it is backpropagated.

The closed form of :mod:`retrograde.plan.steps.closed_form` gives each split, so no table is needed.
Among optimal splits, the one with the fewest actions is taken. A part of one step takes two
actions, ``Record`` and ``Backward``; a longer one with k parts inside takes 4k. So t steps take
4(t−1) actions, and 2 for every part of one step. The docstring of
:func:`retrograde.plan.steps.closed_form.hsm_split` derives the least number of those parts.

Time and memory: the distinct parts (a few for each slot and repetition), and the actions.
"""

from collections.abc import Callable

from retrograde.plan.steps.closed_form import hsm_cost, repetitions, split_of
from retrograde.plan.steps.unfold import NOTHING, Parts, check_size, recall
from retrograde.schedule import Schedule

__all__ = ["hsm_schedule"]

_Part = tuple[int, int, int]  # steps, slots, the most repetitions of a step after its first run


def hsm_schedule(length: int, memory: int) -> Schedule:
    """The schedule of HSM with the fewest actions, in single recorded steps.

    >>> print(hsm_schedule(2, 1))
    store 0, advance 0→1, record 1→2, backward 2→1, load 0, record 0→1, backward 1→0, free 0
    """
    check_size(length, 4 * length)
    parts = Parts()

    def describe(part: _Part, number: Callable[[_Part], int]) -> int:
        steps, slots, r = part
        if steps == 1:
            return parts.record(0, 1)
        y = split_of(steps, slots, r)
        left = number((y, slots, r - 1))
        if steps - y == 1:  # state y is current when the last step runs, so it needs no slot
            return parts.record(y, 1, NOTHING, left)
        return parts.store(y, number((steps - y, slots - 1, r)), left)

    root = recall((length, memory, repetitions(length, memory)), describe)
    bound = hsm_cost(length, memory)
    return parts.unfold(root, length=length, policy="hsm", memory=memory, bound=bound)
