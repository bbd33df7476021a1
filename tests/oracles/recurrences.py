"""The recurrences of Gruslys et al. (2016) as tables, filled cell by cell as they are printed.

Every table is indexed ``[t, m]``; memory that is too short costs ``inf``.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrograde.plan.steps.closed_form import repetitions, split_of

__all__ = [
    "fewest_actions",
    "fewest_actions_hsm",
    "fewest_actions_ism",
    "hsm_split",
    "hsm_table",
    "ism_table",
    "msm_table",
    "plain_tables",
]

Table = NDArray[np.float64]


def hsm_split(length, memory):
    """The library's position of the next stored state."""
    return split_of(length, memory, repetitions(length, memory))


def hsm_table(length: int, memory: int) -> Table:
    """Eqs. 1 and 2, with C(t, 1) = t(t+1)/2 and C(1, m) = 1."""
    c = np.full((length + 1, memory + 1), np.inf)
    c[1, 1:] = 1
    for t in range(2, length + 1):
        c[t, 1] = t * (t + 1) // 2
        for m in range(2, memory + 1):
            y = np.arange(1, t)
            c[t, m] = np.min(y + c[t - y, m - 1] + c[y, m])
    return c


def ism_table(length: int, memory: int) -> Table:
    """Eqs. 4 and 5, with C(0, m) = 0."""
    c = np.full((length + 1, memory + 1), np.inf)
    c[0, :] = 0
    for t in range(1, length + 1):
        for m in range(1, memory + 1):
            y = np.arange(1, t + 1)
            c[t, m] = np.min(y + c[y - 1, m] + c[t - y, m - 1])
    return c


def msm_table(length: int, memory: int, alpha: int, beta: int, state: int = 1) -> Table:
    """Eqs. 6 to 10, with C(0, m) = 0 and C(t, m) = t(t+1)/2 where there is room for one state."""
    c = np.full((length + 1, memory + 1), np.inf)
    c[0, :] = 0
    for m in range(state, memory + 1):
        for t in range(1, length + 1):
            candidates = [t * (t + 1) / 2 if m < 2 * state else np.inf, 1.0 if t == 1 else np.inf]
            y = np.arange(1, t)
            if t > 1 and m >= state:
                candidates.append(np.min(y + c[y, m] + c[t - y, m - state]))
            # A last part of one step is in the working core: its start needs no room.
            candidates.append(t + c[t - 1, m])
            if m >= beta:
                candidates.append(1 + c[t - 1, m - beta])
            if t > 1 and m >= alpha:
                y = np.arange(2, t + 1)
                candidates.append(np.min(y + c[y - 1, m] + c[t - y, m - alpha]))
            c[t, m] = min(candidates)
    return c


def fewest_actions(length: int, memory: int, alpha: int, beta: int) -> dict[tuple[int, int], int]:
    """The fewest merged actions of all cheapest mixed schedules, by trying every one of them.

    An internal state is recorded after the first step only where that takes less room than storing
    the hidden state before it. A segment is described by (cost, actions, whether it begins with a
    Record); of each cell all cheapest ones are kept. Store(0) and Free(0) are not counted.
    """
    cells: dict[tuple[int, int], set[tuple[int, int, bool]]] = {}
    for m in range(1, memory + 1):
        cells[0, m] = {(0, 0, False)}
        for t in range(1, length + 1):
            found = {(1, 2, True)} if t == 1 else set()
            for cost, actions, _ in cells[t - 1, m] if t > 1 else ():
                found.add((t + cost, 4 + actions, False))
            for y in range(1, t if m > 1 else 1):
                pause = 2 if t - y == 1 else 4
                for right in cells[t - y, m - 1]:
                    for left in cells[y, m]:
                        total = y + right[0] + left[0]
                        found.add((total, pause + right[1] + left[1], False))
            for y in range(1, t if alpha < beta + 1 else min(t, 2)):
                less = m - (beta if y == 1 else alpha)
                for right in cells.get((t - y, less), ()):
                    for left in cells[y - 1, m]:
                        total = y + right[0] + left[0]
                        actions = right[1] + left[1] + (not right[2]) + (0 if y == 1 else 2)
                        found.add((total, actions, y == 1))
            cheapest = min(cost for cost, _, _ in found)
            cells[t, m] = {item for item in found if item[0] == cheapest}
    return {cell: min(actions for _, actions, _ in items) for cell, items in cells.items()}


def fewest_actions_hsm(length: int, memory: int) -> list[int]:
    """The fewest actions of all cheapest schedules of HSM, by trying every split of the table.

    By length; ``Store(0)`` and ``Free(0)`` are not counted.
    """
    costs = hsm_table(length, memory)
    actions = np.full((length + 1, memory + 1), 2)  # a part of one step: Record, Backward
    for t in range(2, length + 1):
        for m in range(1, memory + 1):
            # The last step is current: Advance, Record, Backward, Load.
            found = [4 + actions[t - 1, m]] if t + costs[t - 1, m] == costs[t, m] else []
            for y in range(1, t - 1 if m > 1 else 1):
                if y + costs[t - y, m - 1] + costs[y, m] == costs[t, m]:
                    found.append(4 + actions[t - y, m - 1] + actions[y, m])
            actions[t, m] = min(found)
    return actions[:, memory].tolist()


def fewest_actions_ism(length: int, memory: int) -> list[int]:
    """As :func:`fewest_actions_hsm`, for ISM and merged ranges.

    Adjacent ``Record``s merge, and a part's last ``Backward`` merges with that of the recorded step
    before the part. So each cell is kept twice: in all, and where it begins with a ``Record``.
    """
    costs = ism_table(length, memory)
    actions = np.full((length + 1, memory + 1), np.inf)
    begins = np.full((length + 1, memory + 1), np.inf)
    for t in range(1, length + 1):
        for m in range(1, memory + 1):
            for y in range(1, t + 1):
                if y + costs[y - 1, m] + costs[t - y, m - 1] != costs[t, m]:
                    continue
                right = 2  # Record, Backward
                if t > y:
                    right = min(actions[t - y, m - 1] + 1, begins[t - y, m - 1])
                total = right + (2 + actions[y - 1, m] if y > 1 else 0)  # Advance, Load
                actions[t, m] = min(actions[t, m], total)
                if y == 1:
                    begins[t, m] = min(begins[t, m], total)
    return [0, *actions[1:, memory].astype(int).tolist()]


@njit(cache=True)
def plain_tables(length: int, memory: int, alpha: int, beta: int, state: int):
    """HSM, ISM and MSM by three plain loops over every cell and every split, ``[t, m]`` each.

    As the tables above, for sizes where numpy's cell by cell takes too long.
    """
    never = 1 << 40
    hsm = np.full((length + 1, memory + 1), never)
    ism = np.full((length + 1, memory + 1), never)
    msm = np.full((length + 1, memory + 1), never)
    ism[0], msm[0, state:] = 0, 0
    for t in range(1, length + 1):
        for m in range(1, memory + 1):
            hsm[t, m] = 1 if t == 1 else t * (t + 1) // 2 if m == 1 else never
            for y in range(1, t if m > 1 else 1):
                hsm[t, m] = min(hsm[t, m], y + hsm[t - y, m - 1] + hsm[y, m])
            for y in range(1, t + 1):
                ism[t, m] = min(ism[t, m], y + ism[y - 1, m] + ism[t - y, m - 1])
            if m < state:
                continue
            best = t + msm[t - 1, m]  # y = t in eq. 7: the last step in the working core
            if m >= beta:
                best = min(best, 1 + msm[t - 1, m - beta])
            for y in range(1, t if m >= state else 1):
                best = min(best, y + msm[y, m] + msm[t - y, m - state])
            for y in range(2, t if m >= alpha else 2):
                best = min(best, y + msm[y - 1, m] + msm[t - y, m - alpha])
            msm[t, m] = best
    return hsm, ism, msm
