"""The fewest forward steps of any legal schedule, by Dijkstra's search over all of them.

A state of the search is what is current, what is stored, what is recorded, and how far
backpropagation has come. It knows no segments and no recursion, only single moves:

- run one step from the current state, and keep nothing (1);
- run it and keep its internal state (1);
- run the next step to be backpropagated in the working core, and backpropagate it (1);
- backpropagate the next step, which is recorded (0);
- store the current state, load a kept one, free a stored one, at any time (0).

What is held is priced anew in every state, so that states may be freed whenever that helps; it must
be within the memory after every move.
"""

import heapq
from collections.abc import Iterator

__all__ = ["cheapest"]

State = tuple[int, int, int, int]  # current or −1, stored (bits), recorded (bits), frontier


def cheapest(
    length: int,
    memory: int,
    *,
    alpha: int,
    beta: int,
    core: int = 0,
    initial: int = 1,
    state: int = 1,
    held: tuple[int, ...] = (),
) -> int:
    """The least cost of all legal schedules whose peak is within ``memory``. If states are ``held``
    already, that of what is left to do."""

    def taken(stored: int, recorded: int) -> int:
        total = initial * (stored & 1) + state * (stored >> 1).bit_count()
        inputs = stored | recorded << 1
        return total + sum(
            beta if inputs >> k & 1 else alpha for k in range(length) if recorded >> k & 1
        )

    def moves(here: State) -> Iterator[tuple[int, State, int]]:
        """Cost, where to, and what is held for a moment on the way."""
        current, stored, recorded, frontier = here
        if 0 <= current < frontier and not recorded >> current & 1:
            yield 1, (current + 1, stored, recorded, frontier), 0
            yield 1, (current + 1, stored, recorded | 1 << current, frontier), 0
            if current == frontier - 1:
                yield 1, (-1, stored, recorded, current), core
        if frontier and recorded >> (frontier - 1) & 1:
            yield 0, (-1, stored, recorded & ~(1 << (frontier - 1)), frontier - 1), 0
        if current >= 0:
            yield 0, (current, stored | 1 << current, recorded, frontier), 0
        for k in range(length):
            if (stored | recorded << 1) >> k & 1:
                yield 0, (k, stored, recorded, frontier), 0
            if stored >> k & 1:
                yield 0, (current, stored & ~(1 << k), recorded, frontier), 0

    start = (-1 if held else 0, sum(1 << k for k in held), 0, length)
    reached = {start: 0}
    queue = [(0, start)]
    while queue:
        cost, here = heapq.heappop(queue)
        if here[3] == 0:
            return cost
        if cost > reached[here]:
            continue
        for step, (current, stored, recorded, frontier), moment in moves(here):
            kept = stored & ((1 << frontier) - 1)  # later states are of no use any more
            if taken(kept, recorded) + moment > memory:
                continue
            after = (current, kept, recorded, frontier)
            if cost + step < reached.get(after, 1 << 60):
                reached[after] = cost + step
                heapq.heappush(queue, (cost + step, after))
    raise AssertionError("no legal schedule")
