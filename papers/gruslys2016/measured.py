"""Measuring figure 2(b) of Gruslys et al. (2016): seconds of one gradient step under HSM.

All ways take turns in one process, so that a slow spell of the machine meets them all, and the
median of the rounds is kept. Memories of which a length makes the same schedule share a
measurement: HSM has nothing to gain from more hidden states than the length less one.

Known limit: a schedule of single steps is one kernel call a step, as the paper's was, not the
ranges of steps into which ``memory=`` would divide the same budget.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from gruslys2016.timed import Seconds
from retrograde.machine import machine_of, now
from retrograde.plan import cost, plan
from retrograde.recurrent.modules import LSTM

__all__ = ["LENGTHS", "MEMORIES", "expected_seconds", "measure_seconds"]

LENGTHS = (10, 20, 50, 100, 200, 500, 1000)
MEMORIES = (10, 50, 100, 500, 1000)

_ORDINARY = 0  # the key of torch.nn.LSTM among the memories
_SAMPLE = 50  # steps of the sequence that the forecast is made from
_BACKWARD = 2  # forward steps that a backward step takes

Call = Callable[[], None]


def measure_seconds(
    lengths: Sequence[int] = LENGTHS,
    memories: Sequence[int] = MEMORIES,
    *,
    rounds: int = 3,
    device: str = "cpu",
    size: int = 256,
    batch: int = 64,
) -> Seconds:
    """Medians of forward and backward of an LSTM at every length and memory, and without a limit.

    Memories are hidden states, the initial one included. Each is measured ``rounds`` times, after
    one time that does not count.

    Example:
        >>> seconds = measure_seconds([3], [2, 10], rounds=1, size=4, batch=2)
        >>> list(seconds.budgeted), seconds.budgeted[2] == seconds.budgeted[10]
        ([2, 10], True)
    """
    columns: dict[int, list[float]] = {m: [] for m in (_ORDINARY, *memories)}
    for length in lengths:
        slots = {m: _needed(m, length) for m in memories}
        taken = _measure_length(length, sorted(set(slots.values())), rounds, device, size, batch)
        columns[_ORDINARY].append(taken[_ORDINARY])
        for m in memories:
            columns[m].append(taken[slots[m]])
    return Seconds(
        machine=machine_of(device),
        inputs=size,
        hidden=size,
        batch=batch,
        rounds=rounds,
        lengths=tuple(lengths),
        ordinary=tuple(columns.pop(_ORDINARY)),
        budgeted={m: tuple(column) for m, column in columns.items()},
    )


def expected_seconds(
    lengths: Sequence[int] = LENGTHS,
    memories: Sequence[int] = MEMORIES,
    *,
    rounds: int = 3,
    device: str = "cpu",
    size: int = 256,
    batch: int = 64,
) -> float:
    """Seconds that :func:`measure_seconds` will take, roughly, judged by a short sequence.

    Example:
        >>> expected_seconds([3], [2], rounds=1, size=4, batch=2) > 0
        True
    """
    slots = min(memories)
    seconds = _measure_length(_SAMPLE, [slots], 1, device, size, batch)[slots]
    each = seconds / (cost(_SAMPLE, slots) + _BACKWARD * _SAMPLE)
    units = 0
    for t in lengths:
        ways = [t, *(cost(t, m) for m in {_needed(m, t) for m in memories})]
        units += sum(ways) + _BACKWARD * t * len(ways)
    return each * units * (rounds + 1)


def _needed(memory: int, length: int) -> int:
    """The hidden states that HSM makes use of."""
    return min(memory, max(1, length - 1))


def _measure_length(
    length: int, memories: Sequence[int], rounds: int, device: str, size: int, batch: int
) -> dict[int, float]:
    torch.manual_seed(0)
    shape = (length, batch, size)
    x = torch.randn(shape, device=device, requires_grad=True)
    seed = torch.randn(shape, device=device)
    ordinary = torch.nn.LSTM(size, size, device=device)
    lstms: dict[int, torch.nn.LSTM] = {_ORDINARY: ordinary}
    for m in memories:
        lstms[m] = LSTM(size, size, schedule=plan(length, m, "hsm"), device=device)
        lstms[m].load_state_dict(ordinary.state_dict())
    taken: dict[int, list[float]] = {m: [] for m in lstms}
    for turn in range(rounds + 1):
        for m, lstm in lstms.items():
            seconds = _time(lstm, x, seed)
            if turn:  # in the first, kernels are chosen and memory is fetched
                taken[m].append(seconds)
    return {m: median(column) for m, column in taken.items()}


def _time(lstm: torch.nn.LSTM, x: torch.Tensor, seed: torch.Tensor) -> float:
    """Seconds of one gradient step."""
    lstm.zero_grad()
    x.grad = None
    start = now(x.device)
    lstm(x)[0].backward(seed)
    return now(x.device) - start
