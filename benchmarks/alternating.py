"""Timing for these scripts: all contenders take turns in one process."""

import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from retrograde.machine import now

__all__ = ["medians", "seconds"]

K = TypeVar("K")


def seconds(call: Callable[[], object]) -> float:
    """What one call takes on the CPU."""
    start = now(torch.device("cpu"))
    call()
    return now(torch.device("cpu")) - start


def medians(calls: Mapping[K, Callable[[], object]], rounds: int) -> dict[K, float]:
    """The median seconds of each call over rounds, in every one of which each is called once."""
    times: dict[K, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(seconds(call))
    return {key: statistics.median(taken) for key, taken in times.items()}
