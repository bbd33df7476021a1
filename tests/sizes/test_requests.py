"""What is requested, allocated and reserved on CUDA, by a model of torch's caching allocator."""

import random

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.caching_allocator import MIB, CachingAllocator
from retrograde.sizes import allocations
from retrograde.sizes.requests import Event, requested, requests

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


@pytest.mark.parametrize("history", ["no history", "with a history", "a history that is full"])
def test_block_sizes_are_replaced_by_requests(history):
    pool, draw, live, events, entries, asked = CachingAllocator(), random.Random(0), [], [], [], []
    if history == "with a history":  # the same addresses, before the call
        for k in range(0, 40 * MIB, 512):
            entries.append({"action": "alloc", "addr": k, "size": 7})
            entries.append({"action": "free_requested", "addr": k, "size": 7})
    for time in range(400):
        released = bool(live) and draw.random() < 0.5
        block = live.pop(draw.randrange(len(live))) if released else None
        block = block or pool.allocate(int(2 ** draw.uniform(0, 24)))
        sign, action = (-1, "free_requested") if released else (1, "alloc")
        entries.append({"action": action, "addr": block.address, "size": block.requested})
        entries.append({"action": "segment_alloc", "addr": block.address, "size": 20 * MIB})
        asked.append(sign * block.requested)
        events.append(Event(sign * block.size, block.address, time, "cuda", 0))
        pool.release(block) if released else live.append(block)
    events.append(Event(100, entries[0]["addr"], 400, "cpu", None))
    kept = len(entries) // 2 if history == "a history that is full" else len(entries)
    found = requested(events, entries[-kept:])
    assert found[-1] == events[-1]
    sizes = [event.size for event in found[:-1]]
    if history == "a history that is full":
        assert sizes[200:] == asked[200:]
        assert sizes[:200] == [event.size for event in events[:200]]
    else:
        assert sizes == asked
    assert [event[1:] for event in found] == [event[1:] for event in events]


@pytest.mark.parametrize("kept", [False, True])
def test_the_allocators_history_is_kept_as_long_as_it_is_wanted(monkeypatch, kept):
    calls = []
    history = torch.cuda.memory
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: kept, raising=False)
    monkeypatch.setattr(history, "_record_memory_history", lambda on, **_: calls.append(on))
    traces = [[], [{"action": "alloc", "addr": 512, "size": 3}]]
    monkeypatch.setattr(history, "_snapshot", lambda: {"device_traces": traces})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def fails():
        with requests(torch.device("cuda", 1)) as as_requested:
            assert as_requested([Event(512, 512, 0, "cuda", 1)]) == [Event(3, 512, 0, "cuda", 1)]
            assert calls == ([] if kept else ["all"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert calls == ([] if kept else ["all", None])
    with requests(CPU) as as_requested:
        assert as_requested([Event(512, 0, 0, "cpu", None)])[0].size == 512


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
def test_requested_bytes_are_counted_on_a_gpu():
    draw, held = random.Random(0), []
    for _ in range(100):  # a cache with a history
        held.append(torch.empty(int(2 ** draw.uniform(4, 25)), dtype=torch.uint8, device="cuda"))
        if draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
    held.clear()

    def call():
        return [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (1, 5 * MIB + 1, 513)]

    first = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    found = rg.measure(call)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - first
    assert found.peak_bytes == found.retained_bytes == peak == 5 * MIB + 515
    assert found.working_bytes == 0
