"""Cheapest schedules by the paper's rule for ties, and rotor's recurrence in plain Python."""

from functools import cache

import numpy as np

import retrograde as rg
from retrograde.plan.steps.unfold import Segment, Segments

__all__ = ["first_best", "rotor"]


def first_best(length: int, memory: int, policy: str, alpha: int | None) -> rg.Schedule:
    """A cheapest schedule by the paper's rule."""
    sizes = {} if alpha is None else {"alpha": alpha}
    lengths, memories = np.arange(1, length + 1)[:, None], np.arange(1, memory + 1)
    costs = np.full((length + 1, memory + 1), 2**40)
    costs[0], costs[1:, 1:] = 0, rg.cost(lengths, memories, policy, **sizes)
    costs[1, 0] = 1  # a last step in the working core needs no slot
    parts = Segments()

    def divide(part: tuple[int, int]) -> Segment:
        t, m = part
        if t == 1:
            return Segment(0, 1)
        y = np.arange(1, t)
        if policy != "ism":
            best = np.flatnonzero(y + costs[y, m] + costs[t - y, m - 1] == costs[t, m])
            if best.size:
                at = int(y[best[0]])
                if t - at == 1:
                    return Segment(at, 1, None, (at, m))
                return Segment(at, 0, (t - at, m - 1), (at, m))
        y = np.arange(1, t + 1)
        room = m - (1 if policy == "ism" else np.where(y == 1, alpha - 1, alpha))
        right = np.where(room > 0, costs[t - y, np.maximum(room, 0)], 2**40)
        right[-1] = 0
        at = int(y[np.flatnonzero(y + costs[y - 1, m] + right == costs[t, m])[0]])
        after = m - (1 if policy == "ism" else alpha - (at == 1))
        behind, before = (t - at, after) if at < t else None, (at - 1, m) if at > 1 else None
        return Segment(at - 1, 1, behind, before)

    root = parts.gather((length, memory), divide)
    units = rg.plan(2, 2, policy, **sizes).units
    return parts.schedule(root, length=length, policy=policy, memory=memory, units=units)


def rotor(length: int, levels: int) -> float:
    """Rotor's recurrence for a random chain of integers; no tape is smaller than its output."""
    draw = np.random.default_rng(length)
    seconds = draw.integers(1, 10, length).tolist()
    sizes = draw.integers(1, 5, length + 1).tolist()
    tapes = [size + int(draw.integers(0, 5)) for size in sizes[1:]]
    before = np.concatenate(([0], np.cumsum(seconds))).tolist()

    @cache
    def best(x: int, e: int, m: int) -> float:
        if m < tapes[x]:
            return np.inf
        if e == x + 1:
            return seconds[x]
        splits = (
            before[j] - before[x] + best(j, e, m - sizes[j]) + best(x, j, m)
            for j in range(x + 1, e)
            if m >= sizes[j]
        )
        return min(seconds[x] + best(x + 1, e, m - tapes[x]), min(splits, default=np.inf))

    for e in range(1, length + 1):  # so that the recursion stays shallow
        for x in range(e - 1, -1, -1):
            for m in range(levels):
                best(x, e, m)
    return best(0, length, levels - 1)
