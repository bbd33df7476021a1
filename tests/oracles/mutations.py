"""Every way to spoil a schedule by one edit."""

from collections.abc import Iterator
from itertools import combinations

from retrograde.schedule import Action, Schedule

__all__ = ["mutants", "with_actions"]


def with_actions(schedule: Schedule, actions: list[Action]) -> Schedule:
    """The same schedule, but for its actions."""
    return Schedule.from_actions(
        actions,
        length=schedule.length,
        policy=schedule.policy,
        memory=schedule.memory,
        units=schedule.units,
    )


def mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Each action left out, each doubled, each two different ones exchanged."""
    actions = list(schedule)
    for i in range(len(actions)):
        yield f"without {i}", with_actions(schedule, actions[:i] + actions[i + 1 :])
        yield f"{i} doubled", with_actions(schedule, actions[: i + 1] + actions[i:])
    for i, j in combinations(range(len(actions)), 2):
        if actions[i] != actions[j]:
            swapped = list(actions)
            swapped[i], swapped[j] = actions[j], actions[i]
            yield f"{i} and {j} exchanged", with_actions(schedule, swapped)
