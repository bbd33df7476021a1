"""What is requested, allocated and reserved on CUDA, by a model of torch's caching allocator."""

import random
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.caching_allocator import MIB, CachingAllocator
from retrograde.sizes import allocations

CPU = torch.device("cpu")
HISTORIES = 60


def test_the_model_by_hand():
    """Rounding, segments, splitting, slack, best fit, merging, emptying."""
    pool = CachingAllocator()
    one, two = pool.allocate(1), pool.allocate(513)
    assert (one.size, two.size, two.address) == (512, 1024, 512)
    assert (pool.requested, pool.allocated, pool.reserved) == (514, 1536, 2 * MIB)
    large = pool.allocate(MIB + 1)
    assert (large.size, pool.reserved) == (MIB + 512, 22 * MIB)
    rest = pool.allocate(18 * MIB)  # 19 MiB − 512 are left, and too little of them to split off
    assert (rest.size, pool.reserved) == (19 * MIB - 512, 22 * MIB)
    own = pool.allocate(10 * MIB + 1)
    assert (own.size, pool.reserved) == (10 * MIB + 512, 34 * MIB)
    pool.release(large)
    pool.release(rest)
    assert pool.allocate(20 * MIB).address == large.address  # merged
    pool.release(two)
    pool.release(one)
    pool.release(own)
    assert pool.requested == 20 * MIB
    assert pool.allocate(11 * MIB).address == own.address  # best fit
    pool.empty()
    assert (pool.reserved, pool.peaks[2]) == (32 * MIB, 34 * MIB)


class Cards:
    """Two cards whose allocator keeps the history that a test writes."""

    def __init__(self, patch, kept):
        self.calls, self.traces, self.most = [], [[], []], 10**6
        memory = torch.cuda.memory
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: kept, raising=False)
        patch.setattr(memory, "_record_memory_history", lambda on, **_: self.calls.append(on))
        patch.setattr(memory, "_snapshot", lambda: {"device_traces": [*self.traces]})
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        patch.setattr(allocations, "_synchronize", lambda device: None)

    def note(self, card, size, action="alloc", address=512):
        entry = {"action": action, "addr": address, "size": size, "time_us": time.time_ns() // 1000}
        self.traces[card] = [*self.traces[card], entry][-self.most :]
        time.sleep(2e-6)  # no two entries are equal


@pytest.mark.parametrize("kept", [False, True])
def test_the_allocators_history_is_kept_as_long_as_it_is_wanted(monkeypatch, kept):
    """Only what the call asks for is counted, in bytes that it asks for, on the card that is asked
    about. The user's own history goes on."""
    cards = Cards(monkeypatch, kept)
    cards.note(1, 7)

    def call():
        assert cards.calls[-1:] == ([] if kept else ["all"])
        cards.note(1, 1000)
        cards.note(0, 64)
        cards.note(1, 2 * MIB, "segment_alloc", 4096)
        cards.note(1, 3, address=4096)
        cards.note(1, 1000, "free_requested")
        cards.note(1, 1000, "free_completed")

    found = rg.measure(call)
    assert cards.calls[-2:] == ([] if kept else ["all", None])
    assert found.held.tolist() == [1000, 1003, 3]
    assert (found.peak_bytes, found.retained_bytes, found.working_bytes) == (1003, 3, 1000)
    assert rg.measure(call, device="cuda:0").peak_bytes == 64
    with pytest.raises(ZeroDivisionError):
        rg.measure(lambda: 1 / 0)
    assert cards.calls[-1:] == ([] if kept else [None])


def test_a_history_shorter_than_the_call_is_no_measurement(monkeypatch):
    """As soon as the entry is pushed out that was the last before the call."""
    cards = Cards(monkeypatch, True)
    cards.most = 3
    cards.note(1, 7)
    assert rg.measure(lambda: [cards.note(1, 8) for _ in range(2)]).peak_bytes == 16
    with pytest.raises(RuntimeError, match="raise its max_entries"):
        rg.measure(lambda: cards.note(1, 8))


def test_a_call_that_is_the_first_to_use_cuda_is_no_measurement(monkeypatch):
    def call():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    with pytest.raises(RuntimeError, match="first to use CUDA"):
        rg.measure(call)


def layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(12)]


CALLS = {
    "LSTM": (lambda memory: rg.LSTM(128, 128, memory=memory), (500, 32, 128)),
    "GRU, 2 layers": (lambda memory: rg.GRU(64, 64, 2, memory=memory), (1000, 16, 64)),
    "scan": (lambda memory: rg.LSTM(32, 32, backward="scan", memory=memory), (500, 32, 32)),
    "chain": (lambda memory: rg.Sequential(*layers(), memory=memory), (2048, 256)),
}


def after_a_history(seed):
    """An allocator that has served other calls, and may have given back what it could."""
    pool, draw, held = CachingAllocator(), random.Random(seed), []
    for _ in range(draw.randrange(300)):
        if held and draw.random() < 0.5:
            pool.release(held.pop(draw.randrange(len(held))))
        else:
            held.append(pool.allocate(int(2 ** draw.uniform(4, 25))))
    share = draw.random()
    for block in held:
        if draw.random() < share:
            pool.release(block)
    if draw.random() < 0.3:
        pool.empty()
    pool.forget_peaks()
    return pool


@pytest.mark.quick(1)
@pytest.mark.parametrize("memory", ["20%", "60%"])
@pytest.mark.parametrize("name", CALLS)
def test_a_budget_on_cuda_is_one_of_requested_bytes(name, memory):
    """A budgeted call's allocations, replayed after random histories. What is requested does not
    depend on them, and keeps the budget. Blocks are larger by at most 511 bytes each and 1 MiB for
    each large one: the allocator's own rule. Reserved bytes grow by at most 1.25 times the peak and
    22 MiB, one segment of each pool: what docs/budgets.md says."""
    make, shape = CALLS[name]
    net, x = make(memory), torch.randn(shape, requires_grad=True)
    seed = torch.ones(shape)

    def call():
        found = net(x)
        (found[0] if isinstance(found, tuple) else found).backward(seed)
        return found

    budget = net.fit(x).budget_bytes
    call()
    net.zero_grad(set_to_none=True)
    x.grad = None
    value, *_, events = allocations._observe(call, CPU, oldest=False)
    ended = torch.utils._pytree.tree_leaves(value)
    handed = sum(t.nbytes for t in (*ended, x.grad, *(p.grad for p in net.parameters())))
    large = most_large = count = most = 0
    for event in events:
        sign = 1 if event.size > 0 else -1
        count, large = count + sign, large + sign * (abs(event.size) > MIB)
        most, most_large = max(most, count), max(most_large, large)
    seen = set()
    for number in range(HISTORIES):
        pool = after_a_history(number)
        before, live = list(pool.peaks), {}
        for event in events:
            if event.size > 0:
                live[event.address] = pool.allocate(event.size)
            elif event.address in live:
                pool.release(live.pop(event.address))
        grown = [peak - first for peak, first in zip(pool.peaks, before, strict=True)]
        seen.add(grown[0])
        assert grown[0] <= budget + handed
        assert grown[1] <= grown[0] + 511 * most + MIB * most_large
        assert grown[2] <= 1.25 * grown[0] + 22 * MIB
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.quick(0, every=2)
@pytest.mark.parametrize("profile", [nullcontext, torch.profiler.profile])
def test_requested_bytes_are_counted_on_a_gpu(profile):
    draw, held = random.Random(0), []
    for _ in range(100):  # a cache with a history
        held.append(torch.empty(int(2 ** draw.uniform(4, 25)), dtype=torch.uint8, device="cuda"))
        if draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
    held.clear()

    def call():
        return [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (1, 5 * MIB + 1, 513)]

    with profile():
        first = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        found = rg.measure(call)
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - first
        assert found.peak_bytes == found.retained_bytes == peak == 5 * MIB + 515
        assert found.working_bytes == 0
        held.clear()
        phases = [lambda: held.append(call()), held.clear, lambda: call() and None]
        phases = allocations.measure_phases(phases, device="cuda")
        asked = 5 * MIB + 515
        growths = [(phase.peak(), phase.growth()) for phase in phases]
        assert growths == [(asked, asked), (0, -asked), (asked, 0)]
