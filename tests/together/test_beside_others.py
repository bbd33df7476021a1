"""Beside threads, profilers, checkpointing, compiled and traced code: as the plain loop does."""

import itertools
import random
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from oracles.loops import assert_bitwise, loop

STEPS, SAMPLES, SIZE = 40, 4, 6
OTHERWISE = "something else when it|another gradient when it runs again"


def data(samples=SAMPLES):
    return torch.randn(STEPS, samples, SIZE), torch.zeros(samples, SIZE)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.GRUCell(SIZE, SIZE)

    def forward(self, x, h):
        h = self.net(x, h)
        return h, h


def layers():
    return [nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(10)]


def stream(cell, x, h, memory):
    rg.bptt(cell, x, h, loss=lambda t, y: y.sum(), memory=memory)


def unroll(cell, x, h, memory):
    rg.unroll(cell, x, h, memory=memory)[0].sum().backward()


@contextmanager
def drawing(*draws):
    """Another thread that draws random numbers, as a loader that prefetches does."""
    stop = threading.Event()

    def draw():
        while not stop.wait(1e-4):
            for one in draws or [lambda: torch.rand(3)]:
                one()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def draws_between(draw):
    """A function: each call of it has another thread draw, one number more than the call before."""
    counts = itertools.count(1)

    def draw_more():
        for _ in range(next(counts)):
            draw()

    def between():
        thread = threading.Thread(target=draw_more)
        thread.start()
        thread.join()

    return between


@pytest.mark.quick(1)
@pytest.mark.parametrize("memory", ["30%", "100%"])
def test_another_thread_may_draw_random_numbers(memory):
    x, h = data()
    net = rg.Sequential(*layers(), memory="70%")
    plain = nn.Sequential(*net)
    cell = Cell()
    y, last = loop(cell, x, h)
    expected = torch.autograd.grad(y.sum() + last.sum(), list(cell.parameters()))
    with drawing():
        for _ in range(3):
            y, last = rg.unroll(cell, x, h, memory=memory)
            found = torch.autograd.grad(y.sum() + last.sum(), list(cell.parameters()))
            torch.testing.assert_close(found, expected)
            stream(cell, x, h, memory)
            y = net(x[:30].flatten(1)[:, :SIZE])
            grads = torch.autograd.grad(y.sum(), list(net.parameters()))
            y = plain(x[:30].flatten(1)[:, :SIZE])
            assert_bitwise(grads, torch.autograd.grad(y.sum(), list(net.parameters())))


@pytest.mark.parametrize("run", [unroll, stream])
@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand])
def test_a_draw_at_a_later_step_is_noticed_though_other_threads_draw_too(run, draw):
    net, between = nn.Linear(SIZE, SIZE), draws_between(draw)
    x, h = data(samples=400)  # a state of torch's generator is small beside such a step

    def cell(x, s):
        h, t = s
        between()
        h = torch.tanh(net(x + h)) * (draw() if t > 3 else 1.0)
        return h, (h, t + 1)

    with pytest.raises(rg.RetrogradeError, match=OTHERWISE):
        run(cell, x, (h, torch.tensor(0)), "70%")


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_other_threads_may_draw_where_a_cell_does_not(draw):
    cell, (x, h) = Cell(), data()

    def run():
        for _ in range(50):
            unroll(cell, x, h, "40%")

    expected = torch.autograd.grad(loop(cell, x, h)[0].sum(), cell.net.weight_hh)
    with drawing(draw):
        run()
    torch.testing.assert_close(cell.net.weight_hh.grad / 50, *expected)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand])
def test_two_threads_that_draw_from_one_generator_are_noticed(streamed, draw):
    net, (x, h), schedule = nn.Linear(SIZE, SIZE), data(), rg.plan(STEPS, 3)
    between = draws_between(draw)

    def cell(x, h):
        between()
        h = torch.tanh(net(x + h)) * float(draw())
        return h, h

    def run():
        if streamed:
            rg.bptt(cell, x, h, loss=lambda t, y: y.sum(), schedule=schedule)
        rg.unroll(cell, x, h, schedule=schedule)[0].sum().backward()

    with pytest.raises(rg.RetrogradeError, match=OTHERWISE):
        run()


def test_a_layer_that_draws_while_another_thread_does_is_noticed():
    between = draws_between(lambda: torch.rand(3))

    class Layer(nn.Sequential):
        def forward(self, x):
            if net.memory > 1:
                between()
            return super().forward(x)

    net = rg.Sequential(*(Layer(layer, nn.Dropout()) for layer in layers()), memory=1)
    x = torch.randn(2000, SIZE)
    with pytest.raises(rg.BudgetError) as caught:
        net(x)
    net.memory = caught.value.minimum_bytes
    with pytest.raises(rg.RetrogradeError, match=OTHERWISE):
        net(x).sum().backward()


def test_a_refusal_within_an_operator_stays_what_it_is():
    """Python's operators take a TypeError, as CellError is, for their own."""

    class Layer(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            if self is net[2] and torch._C._current_graph_task_id() >= 0:
                x = x + 1
            return x * x

    net, x = rg.Sequential(*(Layer(SIZE, SIZE) for _ in range(4)), memory=1), torch.ones(2000, SIZE)
    with pytest.raises(rg.BudgetError) as caught:
        net(x)
    net.memory = caught.value.minimum_bytes
    with pytest.raises(rg.RetrogradeError, match=r"layer [23] computed something else when it ran"):
        net(x).sum().backward()


def test_a_cell_with_a_generator_of_its_own_is_run_again_as_it_was():
    net, (x, h), own = nn.Linear(SIZE, SIZE), data(), torch.Generator()

    def cell(x, h):
        h = torch.tanh(net(x + h)) * torch.rand((), generator=own)
        return h, h

    found = []
    for run in (loop, lambda *a: rg.unroll(*a, schedule=rg.plan(STEPS, 3))):
        own.manual_seed(1)
        with drawing():
            found.append(torch.autograd.grad(run(cell, x, h)[0].sum(), net.weight))
    torch.testing.assert_close(found[1], found[0])


def test_threads_may_make_first_calls_at_once():
    failures = []

    def work(seed):
        try:
            torch.manual_seed(seed)
            x, h = data()
            cell = Cell()
            for memory in ("30%", "50%"):
                y, _ = rg.unroll(cell, x, h, memory=memory)
                found = torch.autograd.grad(y.sum(), cell.net.weight_hh)
                y, _ = loop(cell, x, h)
                torch.testing.assert_close(found, torch.autograd.grad(y.sum(), cell.net.weight_hh))
            lstm = rg.LSTM(SIZE, SIZE, memory="50%")
            lstm(x)[0].sum().backward()
            net = rg.Sequential(*layers(), memory="70%")
            net(torch.randn(30, SIZE)).sum().backward()
            stream(cell, x, h, "30%")
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_one_module_may_be_called_by_several_threads():
    lstm, x = rg.LSTM(SIZE, SIZE, memory="50%"), torch.randn(STEPS, SAMPLES, SIZE)
    found = []

    def work():
        y, _ = lstm(x)
        found.append(torch.autograd.grad(y.sum(), lstm.weight_hh_l0)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for other in found:
        torch.testing.assert_close(other, found[0])


def outputs_of(net):
    return lambda x: net(x)[0]


def unrolled(cell):
    return lambda x: rg.unroll(cell, x, data()[1], memory="40%")[0]


CALLS = {
    "unroll": lambda: unrolled(Cell()),
    "LSTM": lambda: outputs_of(rg.LSTM(SIZE, SIZE, memory="50%")),
    "GRU": lambda: outputs_of(rg.GRU(SIZE, SIZE, memory="50%", backward="scan")),
    "Sequential": lambda: rg.Sequential(*layers(), memory="70%"),
}


def gradient(call, x):
    (found,) = torch.autograd.grad(call(x).square().sum(), x)
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", CALLS)
def test_a_first_call_may_be_checkpointed(what):
    call, x = CALLS[what](), torch.randn(STEPS, SAMPLES, SIZE, requires_grad=True)
    for _ in range(2):
        x.grad = None
        checkpoint(lambda x: call(x).tanh(), x, use_reentrant=False).sum().backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(call(x).tanh().sum(), x)[0])


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", CALLS)
def test_a_first_call_may_be_under_a_profiler(what):
    x = torch.randn(STEPS, SAMPLES, SIZE, requires_grad=True)
    torch.manual_seed(0)
    call = CALLS[what]()
    with torch.profiler.profile(profile_memory=True) as running:
        found = gradient(call, x)
    torch.testing.assert_close(found, gradient(call, x))
    assert running.key_averages()


def test_what_is_measured_beside_a_profiler_is_not_kept(monkeypatch):
    from retrograde.cells import unroll as module

    fits = module.CellFits()
    monkeypatch.setattr(module, "_FITS", fits)
    cell, (x, h) = Cell(), data()
    with torch.profiler.profile():
        unroll(cell, x, h, "40%")
    assert not any(one.exact for one in fits._found.values())  # it serves measurements only
    unroll(cell, x, h, "40%")
    unroll(cell, x, h, "40%")
    assert len(fits) == 1


def test_hooks_on_saved_tensors_see_nothing_of_a_trial():
    cell, (x, h) = Cell(), data()
    seen = [[], []]
    for packed in seen:
        with saved_tensors_hooks(lambda t, packed=packed: packed.append(1) or t, lambda t: t):
            rg.unroll(cell, x, h, memory="40%")
    assert len(seen[0]) == len(seen[1])


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "made",
    [
        torch.jit.script,
        lambda cell: torch.jit.trace(cell, (torch.ones(SAMPLES, SIZE), torch.ones(SAMPLES, SIZE))),
        lambda cell: torch.compile(cell, backend="eager"),
    ],
    ids=["scripted", "traced", "compiled"],
)
def test_cells_of_other_making(made):
    cell, (x, h) = Cell(), data()
    other = made(cell)
    y, last = loop(cell, x, h)
    expected = torch.autograd.grad(y.sum() + last.sum(), list(cell.parameters()))
    for memory in ("40%", "100%"):
        y, last = rg.unroll(other, x, h, memory=memory)
        found = torch.autograd.grad(y.sum() + last.sum(), list(cell.parameters()))
        torch.testing.assert_close(found, expected)
    cell.zero_grad()
    rg.bptt(other, x, h, loss=lambda t, y: y.sum(), memory="40%")
    assert all(p.grad is not None for p in cell.parameters())


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "made",
    [
        torch.jit.script,
        lambda layer: torch.jit.trace(layer, torch.ones(30, SIZE)),
        lambda layer: torch.compile(layer, backend="eager"),
    ],
    ids=["scripted", "traced", "compiled"],
)
def test_layers_of_other_making(made):
    plain, x = nn.Sequential(*layers()), torch.randn(30, SIZE)
    net = rg.Sequential(*map(made, plain), memory="90%")
    found = torch.autograd.grad(net(x).square().sum(), list(plain.parameters()))
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_layer_is_run_again_in_the_mode_that_it_was_in():
    found = []
    for ours in (False, True):
        torch.manual_seed(1)
        made = [
            torch.jit.script(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5)))
            for _ in range(8)
        ]
        net = rg.Sequential(*made, memory="90%") if ours else nn.Sequential(*made)
        torch.manual_seed(2)
        x = torch.randn(400, SIZE)
        y = net(x).square().sum()
        net.eval()
        found.append(torch.autograd.grad(y, list(net.parameters())))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.quick(0)
def test_nothing_is_kept_from_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    net, cell = rg.Sequential(*layers(), memory="70%"), Cell()
    x, h = data()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert net(mode.from_tensor(x)).shape == x.shape
        y, _ = rg.unroll(cell, mode.from_tensor(x), mode.from_tensor(h), memory="40%")
        assert y.shape == x.shape
    exported = torch.export.export(net, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), net(x))
    net(x).sum().backward()
    unroll(cell, x, h, "40%")
    meta = rg.Sequential(*layers(), memory="70%").to("meta")
    assert meta(x.to("meta")).device.type == "meta"
