"""The recurrences of Gruslys et al. (2016) as tables, filled cell by cell as they are printed.

Every table is indexed ``[t, m]``; memory that is too short costs ``inf``.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["fewest_actions", "hsm_table", "ism_table", "msm_table"]

Table = NDArray[np.float64]


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
