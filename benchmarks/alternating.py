"""Timing for these scripts: all contenders take turns in one process."""

import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from retrograde.machine import now

__all__ = ["medians", "seconds"]

K = TypeVar("K")


CPU = torch.device("cpu")


def seconds(call: Callable[[], object], device: torch.device = CPU) -> float:
    """What one call takes, with all that it began on the device."""
    start = now(device)
    call()
    return now(device) - start


def medians(
    calls: Mapping[K, Callable[[], object]], rounds: int, device: torch.device = CPU
) -> dict[K, float]:
    """The median seconds of each call over rounds, in every one of which each is called once."""
    times: dict[K, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(seconds(call, device))
    return {key: statistics.median(taken) for key, taken in times.items()}
